"""Put findings together that say the same of different samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from energon.inspect.lint_batch import Finding
from energon.messages import counted

MAX_PLACES = 3
"""How many samples of a group are named."""

_BYTES = re.compile(r"""b'(?:[^'\\]|\\.)*'|b"(?:[^"\\]|\\.)*\"""")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Group:
    """Findings of one dataset that say the same.

    Args:
        dataset: The dataset.
        reason: What is wrong, without what differs between samples.
        count: How many findings there are.
        places: Where the first are, as `SHARD/KEY`.
    """

    dataset: str
    reason: str
    count: int
    places: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "dataset": self.dataset,
            "reason": self.reason,
            "count": self.count,
            "first": list(self.places),
        }

    def line(self, noun: str = "sample") -> str:
        """Return it as a line of text; `noun` says what findings are about."""
        if self.count == 1:
            return f"{'/'.join([self.dataset, *self.places])}: {self.reason}"
        shown = ", ".join(self.places)
        return f"{self.dataset}: {counted(self.count, noun)}: {self.reason} (first: {shown})"


def group_findings(findings: Sequence[Finding]) -> list[Group]:
    """Return findings in groups, in the order of the first of each.

    Splits of a dataset share samples, so a sample counts once, however many splits have it.
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in dict.fromkeys(finding._replace(split="") for finding in findings):
        # What is not about a sample stands alone.
        kind = _kind(each) if each.key is not None else f"{each.shard}: {each.reason}"
        groups.setdefault((each.dataset, kind), []).append(each)
    return [
        Group(
            dataset,
            found[0].reason if len(found) == 1 else _common_reason(found[0]),
            len(found),
            tuple(
                "/".join(step for step in (each.shard, each.key) if step)
                for each in found[:MAX_PLACES]
                if each.shard or each.key
            ),
        )
        for (dataset, _), found in groups.items()
    ]


def _kind(finding: Finding) -> str:
    """Return what findings have in common that say the same of different samples."""
    reason = _BYTES.sub("…", _common_reason(finding))
    return f"{finding.part}: {_NUMBER.sub('0', reason)}"


def _common_reason(finding: Finding) -> str:
    """Return a reason without the key of the sample."""
    key = finding.key or ""
    reason = finding.reason.removeprefix(f"sample {key!r}: ")
    if finding.part is not None:
        reason = reason.replace(f"{key}.{finding.part}", finding.part)
    return reason
