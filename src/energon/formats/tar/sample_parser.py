"""Group the members of a tar archive into samples, window by window. No I/O in here.

The parser takes whole members off the front of a window of bytes, groups those with equal keys,
and says where the next window has to begin. Like a scan of a shard, it takes runs of plain members
at once, and gives everything else (long names, links, the end marker) to `TarParser` one by one.

The key of a member is its path up to the first dot of the base name; the rest, in lower case, is
the field. Consecutive members with equal keys are a sample. Members that are not regular files,
that have no dot, or that are below a folder like `__this__`, belong to no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from energon.errors import DuplicateSampleKeyError, FormatError
from energon.formats.tar.headers import BLOCK, padded_size
from energon.formats.tar.names import split_name, split_name_fields
from energon.formats.tar.parser import Run, TarParser
from energon.limits import TAR_PART_BYTES, Limit

LARGE_MEMBER_BYTES = 1 << 20
"""Content from here on is read straight into its own bytes instead of through a window."""

StreamSample = dict[str, Any]
_Selected = tuple[str, str, int, int, int]
"""Key, field, where the first header begins, where the content begins, and its size. The content
may end beyond the window."""


class SampleParser:
    """The samples of one archive, or of several concatenated ones.

    Args:
        origin: Name of the archive in messages.
        about: What every sample has after its `__key__`, like `__url__`.
        select: Says by name, after renaming, which members are needed; None wants all.
        rename: Renames members; None keeps their names.
        split: Returns key and field of a name, or None; None means the rule above.
        lowercase: Whether fields are in lower case.
        position: Where in the archive the first window begins.
        tolerates: Says of the error about a field that a sample already has whether to continue
            with the first one; None raises it.
        sizes: Whether fields are the sizes of contents, which are skipped.
        part_limit: How large the content of a field may be.
    """

    def __init__(
        self,
        origin: str,
        *,
        about: StreamSample | None = None,
        select: Callable[[str], Any] | None = None,
        rename: Callable[[str], str] | None = None,
        split: Callable[[str], tuple[str, str] | None] | None = None,
        lowercase: bool = True,
        position: int = 0,
        tolerates: Callable[[Exception], Any] | None = None,
        sizes: bool = False,
        part_limit: Limit = TAR_PART_BYTES,
    ) -> None:
        self.origin = origin
        self.samples: list[StreamSample] = []
        """Complete samples; the caller takes them away."""
        self.position = position
        """Where the next window has to begin; unselected content is skipped."""
        self.sample_position = position
        """Where the sample begins that is not complete yet."""
        self.needed_bytes = BLOCK
        """Length that the next window needs for anything to be taken from it."""
        self.content_bytes = 0
        """If not 0, give that many bytes to `put_content` instead of a window."""
        self._parser = TarParser(origin, position=position)
        self._begun: StreamSample = {"__key__": "", **(about or {})}
        self._select = select
        self._rename = rename
        self._split = split
        self._lowercase = lowercase
        self._tolerates = tolerates
        self._sizes = sizes
        self._part_limit = part_limit
        self._names_are_plain = select is None and rename is None and split is None
        self._key: str | None = None
        self._sample: StreamSample = {}
        self._pending: tuple[str, int] | None = None
        """Field and size of the content that the next window begins with."""

    @property
    def is_within_sample(self) -> bool:
        """Whether a sample is incomplete so far."""
        return self._key is not None

    @property
    def warnings(self) -> list[str]:
        """What may be missing, after `finish`; see `TarParser.warnings`."""
        return self._parser.warnings

    def feed(self, window: bytes) -> None:
        """Consume all complete members at the start of `window`.

        Raises:
            FormatError: If there is something else where a header should be.
        """
        base, end, sizes = self.position, len(window), self._sizes
        self.needed_bytes = BLOCK
        for key, field, header, start, size in self._members(window):
            if key != self._key:
                if self._key is not None:
                    self.samples.append(self._sample)
                self._key, self.sample_position = key, base + header
                self._sample = {**self._begun, "__key__": key}
            sample, stop = self._sample, start + size
            if field in sample:
                self._refuse_duplicate(field, base + start - BLOCK)
            elif sizes:
                sample[field] = size
            elif stop <= end:
                sample[field] = window[start:stop]
            else:
                if size < LARGE_MEMBER_BYTES:
                    self.needed_bytes = size
                else:
                    self._ask_for_content(field, size, base + start - BLOCK)
                self.position, self._pending = base + start, (field, size)
                return

    def _members(self, window: bytes) -> Iterator[_Selected]:
        """Yield the selected members of a window, and move the position behind each."""
        parser, base, at = self._parser, self.position, 0
        if self._pending is not None:
            at = padded_size(self._pending[1])
            self._put(window[: self._pending[1]])
        while True:
            parser.position = base + at
            if parser.wants_run:
                blocks = max(0, len(window) - at) // BLOCK
                run = parser.take_run(
                    np.frombuffer(window, np.uint8, blocks * BLOCK, min(at, len(window))),
                    len(window) - at,
                )
                self.position = parser.position
                if run is not None and len(run.size):
                    yield from self._in_run(run, at)
                at = parser.position - base
            stop = at + parser.needed_bytes
            if stop > len(window):
                self.needed_bytes = parser.needed_bytes
                return
            member = parser.take(window[at:stop])
            self.position = parser.position
            at = parser.position - base
            if member is not None:
                parts = self._parts(member.name)
                if parts is not None:
                    header, start = member.header_offset - base, member.offset - base
                    yield *parts, header, start, member.size
            elif parser.ended:
                self._end_sample()

    def _in_run(self, run: Run, begin: int) -> Iterator[_Selected]:
        """Return the selected members of a run that begins somewhere in a window."""
        if not self._names_are_plain:
            return self._selected_in_run(run, begin)
        split = split_name_fields(run.names)
        places = np.stack([run.header_offset + begin, run.offset + begin, run.size])
        if not split.valid.all():
            places, split = places[:, split.valid], split.take(split.valid)
        if not len(split.length):
            return iter(())
        begins = np.append(True, ~split.same_key_as_before())
        keys = split.key_texts(np.flatnonzero(begins))
        suffixes, numbers = split.parts()
        fields = [self._field(suffix.decode("utf-8", "surrogateescape")) for suffix in suffixes]
        return zip(
            map(keys.__getitem__, (np.cumsum(begins) - 1).tolist()),
            map(fields.__getitem__, numbers.tolist()),
            *places.tolist(),
            strict=True,
        )

    def _selected_in_run(self, run: Run, begin: int) -> Iterator[_Selected]:
        names = np.ascontiguousarray(run.names).view(f"S{run.names.shape[1]}")[:, 0].tolist()
        columns = (run.header_offset + begin, run.offset + begin, run.size)
        for name, *place in zip(names, *(column.tolist() for column in columns), strict=True):
            parts = self._parts(name.partition(b"\0")[0].decode("utf-8", "surrogateescape"))
            if parts is not None:
                yield *parts, *place

    def put_content(self, content: bytes) -> None:
        """Accept the content that `content_bytes` requested."""
        self.content_bytes = 0
        self._put(content)

    def _put(self, content: bytes) -> None:
        """Accept the content of the member whose header was the last."""
        if self._pending is not None:
            self._sample[self._pending[0]] = content
            self.position += padded_size(len(content))
            self._pending = None

    def finish(self, end: int, rest: bytes) -> None:
        """Check that the archive is complete if it ends at byte `end`, see `TarParser.finish`.

        Raises:
            TruncatedError: If that is not where an archive can end. The last sample is not
                complete then, and not yielded.
        """
        missing = padded_size(self._pending[1]) if self._pending is not None else 0
        self._parser.position = self.position + missing
        self._parser.finish(end, rest)
        self._parser.check_end(end)

    def _ask_for_content(self, field: str, size: int, position: int) -> None:
        """Request content on its own; raise FormatError if it is too large for memory."""
        limit = self._part_limit
        if size > limit.value:
            raise FormatError(
                f"{self.origin}: {self._sample['__key__']!r} has a field {field!r} of {size} bytes "
                f"at byte {position}, expected at most {limit.value}; {limit.hint}"
            )
        self.content_bytes = size

    def _parts(self, name: str) -> tuple[str, str] | None:
        """Return key and field of a member, or None if it is not selected."""
        if not name or (self._split is None and name[:2] == "__" and split_name(name) is None):
            return None
        if self._rename is not None:
            name = self._rename(name)
        if self._select is not None and not self._select(name):
            return None
        parts = split_name(name) if self._split is None else self._split(name)
        if parts is None or self._split is not None:
            return parts
        return parts[0], self._field(parts[1])

    def _end_sample(self) -> None:
        if self._key is not None:
            self.samples.append(self._sample)
            self._key = None

    def _field(self, suffix: str) -> str:
        return suffix.lower() if self._lowercase else suffix

    def _refuse_duplicate(self, field: str, position: int) -> None:
        key = self._sample["__key__"]
        sample = f"{self.origin}: sample {key!r}, which begins at byte {self.sample_position}"
        error: FormatError
        if field in self._begun:
            error = FormatError(
                f"{sample}, has a field named {field!r} at byte {position}, a name that every "
                "sample has; rename the file, or leave it out with select_files"
            )
        else:
            error = DuplicateSampleKeyError(
                f"{sample}, has the field {field!r} twice, the second time at byte {position}; if "
                "these are two samples, give them different keys, as `energon prepare "
                "--fix-duplicates` does; fields are compared in lower case, so rename files that "
                "only differ in that, or leave one out with select_files"
            )
        if self._tolerates is None or not self._tolerates(error):
            raise error
