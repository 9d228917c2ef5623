"""Writers whose work counts only if no exception ends it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class ClosesOrAborts(ABC):
    """At the end of a `with` block, `close` is called; after an exception, `abort`."""

    @abstractmethod
    def close(self) -> None:
        """Complete what was written."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing of what is not complete."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
