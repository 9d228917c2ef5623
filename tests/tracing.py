"""Count which functions of energon run, and how deep they call each other."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import energon

ROOT = str(Path(energon.__file__).parent)


class Trace:
    """What of energon runs inside a block: calls of each function, the deepest stack."""

    def __init__(self):
        self.calls = Counter()
        self.depth = self.deepest = 0

    @property
    def files(self):
        return {file for file, _ in self.calls}

    def __enter__(self):
        gc.collect()  # what other tests have left would run in between
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _profile(self, frame, event, argument):
        file = frame.f_code.co_filename
        if not file.startswith(ROOT):
            return
        if event == "call":
            self.calls[file.removeprefix(ROOT), frame.f_code.co_qualname] += 1
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
        elif event == "return":
            self.depth -= 1

    def report(self):
        lines = [f"{self.calls.total()} calls, {len(self.files)} files, {self.deepest} frames"]
        lines += [f"{count:5} {file} {name}" for (file, name), count in self.calls.most_common()]
        return "\n".join(lines)


def measure_no_hooks(monkeypatch):
    """Let hosts time no hooks: tracing makes batches slow, so more than usual would be timed."""
    monkeypatch.setattr("energon.loader.monitoring.accounts.FIRST_CALLS", 0)
    monkeypatch.setattr("energon.loader.monitoring.accounts.SHARE", 1e-12)
    # Progress is recorded by time, too.
    monkeypatch.setattr("energon.loader.monitoring.monitor.MARK_SECONDS", 1e9)
