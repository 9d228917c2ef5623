"""Packages that only some features need: the extras of the distribution."""

from __future__ import annotations

from types import TracebackType

from energon.errors import MissingExtraError


class needs_extra:
    """Raise MissingExtraError for imports in the block that fail: it says what to install.

        with needs_extra("formats", "CBOR needs cbor2"):
            import cbor2

    Args:
        extra: The extra that brings the package.
        reason: What needs which package.
    """

    def __init__(self, extra: str, reason: str) -> None:
        self._extra = extra
        self._reason = reason

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ImportError):
            raise MissingExtraError(
                f"{self._reason}; pip install 'energon-loader[{self._extra}]'"
            ) from error
