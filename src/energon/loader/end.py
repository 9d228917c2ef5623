"""How the processes of a loader come to their end."""

from __future__ import annotations

import signal

GRACE_SECONDS = 0.5
"""How long workers get to leave by themselves, once the training process is gone."""


def leave_signals_to_parent() -> None:
    """Let only the training process react to ^C and to SIGTERM for the whole process group.

    It may want some more batches, to save a checkpoint. Handlers are used, because programs
    started from here would inherit that a signal is ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
