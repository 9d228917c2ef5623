"""Objects that a fork of this process inherits and must not use."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgets(Protocol):
    """Something that belongs to one process."""

    def forget(self) -> None:
        """Give up what a fork has inherited."""


def forget_in_forks(owned: Forgets) -> None:
    """Call `forget` of an object in every fork of this process, while the object exists."""
    _owned.add(owned)


_owned: weakref.WeakSet[Forgets] = weakref.WeakSet()


def _forget() -> None:
    for each in list(_owned):
        each.forget()


os.register_at_fork(after_in_child=_forget)
