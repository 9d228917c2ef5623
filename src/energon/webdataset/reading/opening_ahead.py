"""Open the next shard while the present one is read, where that takes time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from energon.errors import EnergonError
from energon.webdataset.reading.opening import Opening
from energon.webdataset.reading.shard_stream import ShardStream
from energon.webdataset.reading.urls import is_local

END_SECONDS = 1.0
"""How long to wait for a command that was told to end, so that nothing of it is left."""

_END = object()


class OpeningAhead(Iterator[Any]):
    """Some shards, of which the next is opened early: a server or a command needs time to begin.

    Local files are not, and lists of them are not looked into: whoever lists them may take a
    file away as soon as the next is asked for.

    Args:
        shards: What `Opening.open` takes.
        opening: How they are opened.
    """

    def __init__(self, shards: Iterator[Any], opening: Opening) -> None:
        self._shards = shards
        self._opening = opening
        self._next: Any = None
        self._failure: Exception | None = None
        self._begun: _Begun | None = None

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure
        shard, self._next = self._next, None
        shard = next(self._shards) if shard is None else shard
        if shard is _END:
            raise StopIteration
        return shard

    def open(self, shard: Any, *, position: int = 0) -> ShardStream:
        """Open the shard that was given last, or wait until it is, and begin with the next.

        Args:
            shard: The shard.
            position: Where to begin, in unpacked bytes.
        """
        begun, self._begun = self._begun, None
        opened = self._opening.open(shard, position=position) if begun is None else begun.result()
        if not _is_local(shard):
            self._look_ahead()
        return opened

    def close(self) -> None:
        """Close what was opened early."""
        if self._begun is not None:
            self._begun.leave()
            self._begun = None

    def _look_ahead(self) -> None:
        try:
            self._next = next(self._shards, _END)
        except Exception as error:
            # It is the next one's, and the present one has to be given out before.
            self._failure = error
            return
        if self._next is not _END and not _is_local(self._next):
            self._begun = _Begun(self._opening, self._next)


class _Begun:
    """A shard that a thread opens.

    Args:
        opening: How.
        shard: The shard.
    """

    def __init__(self, opening: Opening, shard: Any) -> None:
        self._opened: Future[ShardStream] = Future()
        self._stream: Any = None
        self._is_left = False
        # One that waits for a server that never answers keeps no program from ending.
        self._thread = threading.Thread(target=self._open, args=(opening, shard), daemon=True)
        self._thread.start()

    def result(self) -> ShardStream:
        """Return the shard, as soon as it is open."""
        return self._opened.result()

    def leave(self) -> None:
        """Close it, or see to it that it is closed."""
        self._is_left = True
        if hasattr(self._stream, "terminate"):
            self._stream.terminate()
            self._thread.join(END_SECONDS)
        self._opened.add_done_callback(_close)

    def _open(self, opening: Opening, shard: Any) -> None:
        try:
            opened = opening.open_packed(shard)
            self._stream = opened.stream
            if not self._is_left:
                opening.unpack(opened)
            self._opened.set_result(opened)
        except BaseException as error:
            if self._stream is not None:
                with contextlib.suppress(EnergonError, OSError):
                    self._stream.close()
            self._opened.set_exception(error)


def _is_local(shard: Any) -> bool:
    url = shard.get("url") if isinstance(shard, dict) else shard
    if isinstance(shard, dict) and "stream" in shard:
        return True
    return not isinstance(url, str) or is_local(url) or url == "-"


def _close(opened: Future[ShardStream]) -> None:
    if opened.exception() is None:
        opened.result().stream.close()
