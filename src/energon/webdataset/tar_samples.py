"""Read the samples of shards: the stage between addresses of tar files and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Any

from energon.errors import StateError
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.shard_stream import open_shard
from energon.webdataset.stage import Context, Stage, StageIterator, State, unpack
from energon.webdataset.tar_parser import Sample, TarParser
from energon.webdataset.tar_reader import TarReader


@dataclass(frozen=True)
class TarSamples(Stage):
    """Yields the samples of tar files, one file after the other.

    Args:
        handler: Decides about files that cannot be opened, or turn out to be damaged: true goes
            on with the next file, false ends the stage.
        select_files: Says by name which members are wanted, after renaming; None wants all.
        rename_files: Gives members other names; None keeps them.
        local_path: Whether samples of local files say so in `__local_path__`.
    """

    handler: Handler = reraise_exception
    select_files: Callable[[str], Any] | None = None
    rename_files: Callable[[str], str] | None = None
    local_path: bool = False

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _TarSamplesIterator(self, source)


class _TarSamplesIterator(StageIterator):
    """Its position is how many shards are done, a place in the next one, and a number there.

    So lists of shards need no state of their own: they are gone through again, which costs
    nothing beside opening one shard.
    """

    def __init__(self, stage: TarSamples, source: Iterator[Any]) -> None:
        self._stage = stage
        self._num_shards = 0
        self._position = 0
        self._num_before = 0
        self._block_length = 0
        self._rest: Iterator[Sample] = iter(())
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        shards = iter(self._source)
        if sum(1 for _ in islice(shards, self._num_shards)) < self._num_shards:
            raise StateError(
                f"the saved position is in shard {self._num_shards}, but there are fewer; has the "
                "list of shards changed?"
            )
        for shard in shards:
            try:
                yield from self._shard_samples(shard)
            except Exception as error:
                if not self._stage.handler(error):
                    return
            self._num_shards += 1
            self._position = self._num_before = self._block_length = 0

    def _shard_samples(self, shard: Any) -> Iterator[Sample]:
        stage = self._stage
        opened = open_shard(shard, position=self._position)
        about = {"__url__": opened.url}
        if stage.local_path and opened.local_path:
            about["__local_path__"] = opened.local_path
        parser = TarParser(
            opened.url,
            about=about,
            select=stage.select_files,
            rename=stage.rename_files,
            position=self._position,
        )
        reader = TarReader(opened.stream, parser, head=opened.head)
        done = self._num_before
        try:
            while (block := reader.next_block()) is not None:
                self._position, self._num_before = reader.block_position, 0
                self._block_length, self._rest = len(block), iter(block)
                # The samples are only held by who uses them: so their memory is used again.
                del block
                if done:
                    done = self._pass_over(done)
                yield from self._rest
        finally:
            reader.close()

    def _pass_over(self, count: int) -> int:
        """Leave out samples that were given out before the state was saved."""
        return count - sum(1 for _ in islice(self._rest, count))

    def state_dict(self) -> State:
        taken = self._num_before + self._block_length - length_hint(self._rest)
        return {"shards": self._num_shards, "position": self._position, "taken": taken}

    def load_state_dict(self, state: State) -> None:
        self._num_shards, self._position, self._num_before = unpack(
            state, "shards", "position", "taken"
        )
