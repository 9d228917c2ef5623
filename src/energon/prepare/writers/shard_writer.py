"""Write samples to as many shards as they need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from energon.counting import counted
from energon.errors import ConfigError
from energon.io.address import is_remote, local_path, redact
from energon.io.atomic import ClosesOrAborts
from energon.prepare.index.index import index_files, index_shard
from energon.prepare.lock import remove_leftovers
from energon.prepare.writers.encode import encode_part
from energon.prepare.writers.tar_writer import Encode, TarWriter, encode_sample

MAX_COUNT = 100_000
MAX_SIZE = 3_000_000_000


class ShardWriter(ClosesOrAborts):
    """Writes samples to numbered shards, each with its index, see `TarWriter`.

    What is written depends on the samples only. A run that was interrupted, by kill -9 too,
    leaves complete shards; with `resume` the next run goes on behind them, and the result is
    the same as without the interruption:

        with ShardWriter("coco/shards/%05d.tar", maxcount=10_000, resume=True) as writer:
            for sample in itertools.islice(samples, writer.num_samples, None):
                writer.write(sample)

    Args:
        pattern: Paths of the shards, with the number as in `%05d`. Folders are made.
        maxcount: Most samples of a shard.
        maxsize: Most bytes of a shard, headers included; only a sample that is larger alone is
            in a larger one.
        start_shard: Number of the first shard.
        resume: Whether to go on behind the shards that are there.
        overwrite: Whether to delete the shards that are there.
        post: Called with the path of each shard that is complete.
        encode: Turns values into contents, see `energon.prepare.writers.encode.encode_part`.
        checksum: Whether to keep a checksum of each part, for `energon verify`.

    Raises:
        ConfigError: If the arguments make no sense, or there are such shards and neither
            `resume` nor `overwrite` says what to do.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        maxcount: int = MAX_COUNT,
        maxsize: float = MAX_SIZE,
        *,
        start_shard: int = 0,
        resume: bool = False,
        overwrite: bool = False,
        post: Callable[[str], object] | None = None,
        encode: Encode = encode_part,
        checksum: bool = True,
    ) -> None:
        self.pattern = os.fspath(pattern) if is_remote(pattern) else local_path(pattern)
        self.num_samples = 0
        """Samples of all shards so far, those of earlier runs included when resuming."""
        self.shards: list[str] = []
        """Complete shards."""
        self.last_key: str | None = None
        """Key of the last sample, that of an earlier run when resuming."""
        self._max_count = maxcount
        self._max_size = maxsize
        self._number = start_shard
        self._post = post
        self._encode = encode
        self._checksum = checksum
        self._shard: TarWriter | None = None
        if maxcount < 1 or maxsize < 1 or start_shard < 0:
            raise ConfigError(
                f"expected a maxcount and maxsize of at least 1 and a start_shard of at least 0, "
                f"found {maxcount=}, {maxsize=}, {start_shard=}"
            )
        if resume and overwrite:
            raise ConfigError("resume keeps what is there, overwrite deletes it: choose one")
        if is_remote(pattern):
            raise ConfigError(
                f"{redact(pattern)}: shards are written on this machine; upload each when it is "
                "complete, as with post=lambda path: EPath(path).copy(folder / EPath(path).name)"
            )
        Path(self._path(start_shard)).parent.mkdir(parents=True, exist_ok=True)
        self._look_around(resume=resume, overwrite=overwrite)

    def write(self, sample: Mapping[str, Any]) -> int:
        """Write a sample: its `__key__` and a value for each part.

        Returns:
            How many bytes it takes.

        Raises:
            ConfigError: If it cannot be written.
            DuplicateSampleKeyError: If the shard has a sample with this key.
        """
        encoded = encode_sample(sample, self._encode)
        shard = self._shard
        if shard is not None and (
            shard.num_samples >= self._max_count
            or shard.num_bytes + encoded.num_bytes > self._max_size
        ):
            self._finish(shard)
            shard = None
        if shard is None:
            path = self._path(self._number)
            shard = TarWriter(path, encode=self._encode, checksum=self._checksum)
            self._shard = shard
        num_bytes = shard.write_encoded(encoded)
        self.num_samples += 1
        self.last_key = encoded.key
        return num_bytes

    def close(self) -> None:
        """Complete the last shard."""
        if self._shard is not None:
            self._finish(self._shard)

    def abort(self) -> None:
        """Leave the shards that are complete, and nothing of the one that is not."""
        if self._shard is not None:
            self._shard.abort()
            self._shard = None

    def _finish(self, shard: TarWriter) -> None:
        self._shard = None
        if shard.path.exists():
            shard.abort()
            raise ConfigError(
                f"{shard.path} was not there when this writer began: another process writes to "
                "the same names; give each writer its own pattern"
            )
        try:
            shard.close()
        except FileNotFoundError as error:
            raise ConfigError(
                f"{error.filename} was deleted while it was written: another process that writes "
                "to the same names takes it for a leftover of a killed run; give each writer its "
                "own pattern"
            ) from error
        self.shards.append(str(shard.path))
        self._number += 1
        if self._post is not None:
            self._post(str(shard.path))

    def _look_around(self, *, resume: bool, overwrite: bool) -> None:
        """Count, delete or refuse the shards that are there."""
        while os.path.exists(path := self._path(self._number + len(self.shards))):
            self.shards.append(path)
        if self.shards and not (resume or overwrite):
            raise ConfigError(
                f"{self.shards[0]} is there already ({counted(len(self.shards), 'such shard')}); "
                "pass resume=True to go on behind them, overwrite=True to delete them, or choose "
                "another start_shard"
            )
        if resume or overwrite:
            names = {os.path.basename(shard) for shard in (*self.shards, path)}
            remove_leftovers(
                Path(path).parent,
                lambda name: name.removesuffix(".idx").removesuffix(".parts") in names,
            )
        if overwrite:
            for path in reversed(self.shards):
                for index in index_files(Path(path)):
                    index.unlink(missing_ok=True)
                os.unlink(path)
            self.shards = []
        for path in self.shards:
            table = index_shard(path, checksum=self._checksum)
            self.num_samples += table.num_samples
            self.last_key = table.key_of(table.num_samples - 1)
        self._number += len(self.shards)

    def _path(self, number: int) -> str:
        try:
            path = self.pattern % number
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.pattern!r} has no place for the number of a shard ({error}); expected "
                "one like shards/%05d.tar"
            ) from error
        if path == self.pattern % (number + 1):
            raise ConfigError(f"{self.pattern!r} gives all shards the same name")
        return path
