"""Interpret a sequence of tar headers, and group the members into samples. No I/O in here.

The parser is given blocks and says where the next ones begin: a header, the content of an
extended header, or the rest of the map of a sparse file. Whatever comes before the header of a
regular file belongs to that file. Links, folders, devices and sparse files are not parts of
samples and are passed over. Archives that were joined with `cat` are read through to the end of
the last.

    parser = TarParser("000.tar")
    member = parser.take(data[parser.position : parser.position + parser.needed_bytes])

`energon.formats.tar.scan` and `SampleParser` drive it. Both take most plain headers past it, of
which a whole window can be understood at once: in a run of blocks the headers are those that the
chain of sizes leads to, as each has the offset of the next. Blocks that look like headers are
looked for first, all at once; the chain then tells which of them are headers and which are
content, and their checksums are compared. A run ends where something rare comes: a long name, a
link, the end of the archive. That is left to the parser.

The key of a member is its path up to the first dot of the base name; the rest, in lower case, is
the field. Consecutive members with equal keys are a sample. Members that are not regular files,
that have no dot, or that are below a folder like `__this__`, belong to no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Bytes, Ints
from energon.errors import DuplicateSampleKeyError, FormatError, TruncatedError
from energon.formats.tar.headers import (
    BLOCK,
    END_MARKER_BYTES,
    RECORD_BYTES,
    check_extension,
    decode_name,
    have_checksums,
    member_name,
    member_size,
    nonzero_bytes,
    padded_size,
    pax_overrides,
    split_name,
    split_name_fields,
    verify_checksum,
)
from energon.limits import TAR_PART_BYTES, Limit
from energon.messages import counted

MIN_RUN_BLOCKS = 64
"""Fewer blocks are parsed one by one."""
MIN_RUN_MEMBERS = 16
"""Runs of fewer members do not pay off."""
MAX_SINGLE_MEMBERS = 4096
_ZEROS = bytes(BLOCK)
_REGULAR = b"0\x007"
_NO_CONTENT = b"123456"
_CUT_OFF = "the archive is truncated, restore or write it again"


class Member(NamedTuple):
    """A regular file in a tar archive."""

    name: str
    header_offset: int
    """Where its first header begins, extended ones included."""
    offset: int
    """Where its content begins."""
    size: int
    """Bytes of content."""

    @property
    def end(self) -> int:
        """The end of its last block."""
        return self.offset + padded_size(self.size)


class TarParser:
    """A position in an archive that moves from header to header.

    Args:
        origin: Name of the archive in messages.
        position: Where the first header begins.
    """

    def __init__(self, origin: str, *, position: int = 0) -> None:
        self.origin = origin
        self.position = position
        """Where the next bytes begin. May be moved to any other header after a member."""
        self.needed_bytes = BLOCK
        """How many bytes are needed there."""
        self.ended = False
        """Whether the end marker has come, and nothing after it."""
        self._zeros_at = 0
        self._num_zeros = 0
        self._num_passed_over = 0
        self._first_passed_over = ""
        self._first = -1
        self._extension = b""
        self._map_before = -1
        self._num_singles = 0
        self._singles_after_short_run = MIN_RUN_MEMBERS
        self._begin()

    @property
    def wants_run(self) -> bool:
        """Whether `take_run` pays off at this position."""
        return not (self._num_singles or self.is_within)

    @property
    def is_within(self) -> bool:
        """Whether extended headers were read whose file has not been."""
        return self._extended >= 0 or bool(self._extension) or self._map_before >= 0

    @property
    def warnings(self) -> list[str]:
        """Warnings about members that are missing, after `finish`."""
        warnings = []
        if self._num_passed_over:
            members = counted(self._num_passed_over, "member")
            warnings.append(
                f"{self.origin}: skipped {members}, the first of them "
                f"{self._first_passed_over!r}: links, devices and sparse files are not parts of "
                "samples; write the archive again from the files themselves, as "
                "`tar --dereference --hard-dereference` does"
            )
        if self._num_zeros > RECORD_BYTES:
            warnings.append(
                f"{self.origin}: {self._num_zeros:,} bytes of zeros follow the end marker at byte "
                f"{self._zeros_at}, expected {RECORD_BYTES:,} at most: members may be missing, as "
                "from a download into preallocated space that was interrupted; compare the shard "
                "with its source, or restore it"
            )
        elif self.ended and not self._zeros_at:
            warnings.append(
                f"{self.origin}: an archive without members, so it has no samples; remove it, or "
                "write it again"
            )
        return warnings

    def take_run(self, data: Any, limit: int) -> Run | None:
        """Take the plain members at the beginning of some whole blocks; None if these are few.

        What stops a run is taken alone. Where runs are short again and again, as with a long name
        before each member, they are tried less and less often.

        Args:
            data: The blocks.
            limit: Where the archive ends, counted from the first block. Members that go beyond are
                not taken.
        """
        blocks = np.frombuffer(data, np.uint8).reshape(-1, BLOCK)
        if len(blocks) < MIN_RUN_BLOCKS:
            return None
        run = parse_run(blocks, limit)
        if run.stop:
            self.position += run.stop
            self.ended = False
        if len(run.size) >= MIN_RUN_MEMBERS:
            self._num_singles, self._singles_after_short_run = 1, MIN_RUN_MEMBERS
        else:
            self._num_singles = self._singles_after_short_run
            self._singles_after_short_run = min(2 * self._num_singles, MAX_SINGLE_MEMBERS)
        return run

    def take(self, data: bytes) -> Member | None:
        """Take the next `needed_bytes` bytes; return the file if they complete its headers.

        The position is behind the content of the file then.

        Raises:
            FormatError: If this is not what an archive continues with.
        """
        if self._extension:
            self._take_extension(data)
        elif self._map_before >= 0:
            self._take_map(data)
        elif data[0] or data != _ZEROS:
            return self._take_header(data)
        else:
            self._take_end_marker()
        return None

    def finish(self, end: int, rest: bytes) -> None:
        """Check that an archive may end at byte `end`, with or without an end marker.

        Args:
            end: Its size.
            rest: The bytes from the position on, fewer than are needed there.

        Raises:
            TruncatedError: If it may not, or consists of more zeros than an empty archive.
        """
        missing = self.position - end
        if missing > 0:
            raise TruncatedError(
                f"{self.origin}: ends at byte {end}, {missing} bytes too early; {_CUT_OFF}"
            )
        has_only_zeros = self.ended and not any(rest)
        if (missing < 0 and not has_only_zeros) or self.is_within:
            raise TruncatedError(f"{self.origin}: ends at byte {end} within a member; {_CUT_OFF}")
        if self.ended:
            self._num_zeros = end - self._zeros_at - END_MARKER_BYTES
            if self._zeros_at == 0 and self._num_zeros > RECORD_BYTES:
                raise TruncatedError(
                    f"{self.origin}: has {end} bytes, all of them zeros, expected a tar archive; "
                    "restore or write it again"
                )

    def check_end(self, end: int) -> None:
        """Check that the end marker was the last thing before byte `end`.

        Raises:
            TruncatedError: If it was not.
        """
        if not self.ended:
            raise TruncatedError(
                f"{self.origin}: ends at byte {end} without the end marker of a tar archive, so "
                f"members may be missing; {_CUT_OFF}"
            )

    def _begin(self) -> None:
        """Discard the values of extended headers."""
        self._name: str | None = None
        self._size: int | None = None
        self._is_sparse = False
        self._extended = -1
        self._first = -1

    def _take_header(self, header: bytes) -> Member | None:
        at = self.position
        verify_checksum(header, self.origin, at)
        size = member_size(header, self.origin, at)
        self.ended = False
        self.position = at + BLOCK
        kind = header[156:157]
        if kind in b"xXLgK":
            self._first = at if self._first < 0 else self._first
            if kind in b"gK":
                # Of no meaning for names and sizes. The second is about the next member, though.
                self._extended = max(self._extended, at if kind == b"K" else -1)
                self.position += padded_size(size)
                return None
            check_extension(size, self.origin, self.position)
            self._extended = max(self._extended, at)
            self._extension, self.needed_bytes = kind, size
            if not size:
                self._take_extension(b"")
            return None
        size = size if self._size is None else self._size
        if kind in _REGULAR and not self._is_sparse:
            name = member_name(header) if self._name is None else self._name
            first = at if self._first < 0 else self._first
            self._begin()
            self._num_singles = max(0, self._num_singles - 1)
            member = Member(name, first, self.position, size)
            self.position = member.end
            return member
        if kind != b"5":
            self._num_passed_over += 1
            name = member_name(header) if self._name is None else self._name
            self._first_passed_over = self._first_passed_over or name
        if kind == b"S" and header[482]:
            self._map_before = size
            return None
        self._begin()
        self.position += 0 if kind in _NO_CONTENT else padded_size(size)
        return None

    def _take_extension(self, payload: bytes) -> None:
        """Record the values of an extended header for the file after it."""
        end = self.position + len(payload)
        if self._extension == b"L":
            self._name = decode_name(payload.partition(b"\0")[0], self.origin, end)
        else:
            overrides = pax_overrides(payload, self.origin, end)
            self._name = self._name if overrides.path is None else overrides.path
            self._size = self._size if overrides.size is None else overrides.size
            self._is_sparse |= overrides.is_sparse
        self.position += padded_size(len(payload))
        self._extension, self.needed_bytes = b"", BLOCK

    def _take_map(self, block: bytes) -> None:
        """Skip a block of the map of a sparse file, which states whether another one follows."""
        self.position += BLOCK
        if not block[504]:
            self.position += padded_size(self._map_before)
            self._map_before = -1
            self._begin()

    def _take_end_marker(self) -> None:
        if self._extended >= 0:
            raise TruncatedError(
                f"{self.origin}: the extended header at byte {self._extended} is followed by the "
                f"end marker, expected the member that it describes; {_CUT_OFF}"
            )
        self._begin()
        self._zeros_at = self._zeros_at if self.ended else self.position
        self.ended = True
        self.position += BLOCK


_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_MAGIC = b"ustar"
_MTIME = np.frombuffer(b" mtime=", np.uint8)
_IS_REGULAR = np.isin(np.arange(256), list(b"0\x007"))
"""By type: that of plain files, its old form, and contiguous files."""
_FOLDER_BYTE, _EXTENDED_BYTE = b"5x"


class Run(NamedTuple):
    """Consecutive regular files. M members."""

    names: Bytes
    """(M, W) names, W being the length of the longest one. After the end of a shorter one there
    is a zero, and most likely nothing but zeros."""
    header_offset: Ints
    """(M,) where the first header of each begins, relative to the run."""
    offset: Ints
    """(M,) where the content begins."""
    size: Ints
    """(M,) bytes of content."""
    stop: int
    """Where what follows the run begins."""


def parse_run(blocks: Bytes, limit: int) -> Run:
    """Return the plain members at the beginning of some blocks, possibly none.

    Args:
        blocks: (blocks, 512) of an archive, the first of which is a header.
        limit: Where the archive ends, counted from the first block. Members that go beyond are
            not taken.
    """
    candidates = np.flatnonzero(blocks[:, 257] == _MAGIC[0])
    # One in 256 blocks of content has this byte, too, and would break the chain of headers.
    candidates = candidates[blocks[candidates, 258] == _MAGIC[1]]
    headers = blocks[candidates]
    size, sized = _octal(headers[:, 124:135])
    plain = sized & (np.ascontiguousarray(headers[:, 257:262]).view("S5")[:, 0] == _MAGIC)
    # A prefix of the name is rare enough to be left to others.
    plain &= headers[:, 345] == 0
    kind = headers[:, 156]
    regular = _IS_REGULAR[kind]
    has_others = not regular.all()
    if has_others:
        plain &= regular | ((kind == _FOLDER_BYTE) & (size == 0)) | (kind == _EXTENDED_BYTE)
    following = candidates + 1 + (size + BLOCK - 1) // BLOCK
    chain = _follow(candidates, following, plain & (following * BLOCK <= limit))
    nonzero = nonzero_bytes(headers)
    chain = chain[: _length_of_true(have_checksums(_rows(headers, chain), nonzero))]
    if has_others:
        chain = chain[: _length_of_dates(blocks, candidates, kind, size, chain)]
    if len(chain) and kind[chain[-1]] == _EXTENDED_BYTE:
        chain = chain[:-1]  # the file that it belongs to is not in this run
    width = int(np.flatnonzero(nonzero[:100])[-1:].sum()) + 1
    indices = np.flatnonzero(regular[chain])
    files, before = chain[indices], chain[indices - 1]
    extended = (indices > 0) & (kind[before] == _EXTENDED_BYTE)
    return Run(
        names=np.ascontiguousarray(_rows(headers[:, :width], files)),
        header_offset=np.where(extended, candidates[before], candidates[files]) * BLOCK,
        offset=(candidates[files] + 1) * BLOCK,
        size=size[files],
        stop=int(following[chain[-1]]) * BLOCK if len(chain) else 0,
    )


def _octal(digits: Bytes) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the numbers in fields of 11 octal digits, and which fields are valid."""
    values = digits - np.uint8(48)
    valid = np.ones(len(values), np.bool_)
    if values.max(initial=0) >= 8:
        np.all(values < 8, axis=1, out=valid)
    return values @ _OCTAL, valid


def _follow(candidates: Ints, following: Ints, usable: NDArray[np.bool_]) -> Ints:
    """Return the indices of the candidates on the chain that starts at the first block."""
    if not len(candidates) or candidates[0] != 0:
        return np.empty(0, np.int64)
    linked = np.append(following[:-1] == candidates[1:], False) & usable
    if linked[:-1].all():
        return np.arange(len(candidates) if usable[-1] else len(candidates) - 1)
    breaks = np.flatnonzero(~linked)
    pieces: list[Ints] = []
    at, next_break = 0, 0
    while at < len(candidates):
        next_break = int(np.searchsorted(breaks, at))
        stop = int(breaks[next_break])
        pieces.append(np.arange(at, stop))
        if not usable[stop]:
            break
        pieces.append(np.array([stop]))
        # What looks like headers in between is content, as of an archive in an archive.
        at = int(np.searchsorted(candidates, following[stop]))
        if at == len(candidates) or candidates[at] != following[stop]:
            break
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _rows(headers: Bytes, chosen: Ints) -> Bytes:
    """Return some rows, in ascending order; nothing is copied if they are the first ones."""
    count = len(chosen)
    return headers[:count] if not count or chosen[-1] == count - 1 else headers[chosen]


def _length_of_dates(blocks: Bytes, candidates: Ints, kind: Bytes, size: Ints, chain: Ints) -> int:
    """Return how much of the chain precedes an extended header with more than a date.

    Python's tarfile writes such headers, only for fractions of a second, before each member.
    """
    indices = np.flatnonzero(kind[chain] == _EXTENDED_BYTE)
    if not len(indices):
        return len(chain)
    extended = chain[indices]
    is_date = (size[extended] >= 10) & (size[extended] < 100)
    is_date &= candidates[extended] + 1 < len(blocks)
    payload = blocks[np.where(is_date, candidates[extended] + 1, 0)]
    is_date &= (payload[:, 2:9] == _MTIME).all(axis=1)
    digits = payload[:, :2] - np.uint8(48)
    is_date &= digits @ np.array([10, 1]) == size[extended]
    # An extended header is followed by the header that it extends.
    after = np.minimum(indices + 1, len(chain) - 1)
    is_date &= (kind[chain[after]] != _EXTENDED_BYTE) | (after == indices)
    stop = _length_of_true(is_date)
    return len(chain) if stop == len(indices) else int(indices[stop])


def _length_of_true(values: NDArray[Any]) -> int:
    """Return how many values precede the first false one."""
    return len(values) if values.all() else int(values.argmin())


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
        common: What every sample has after its `__key__`, like `__url__`.
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
        common: StreamSample | None = None,
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
        self._begun: StreamSample = {"__key__": "", **(common or {})}
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
        positions = np.stack([run.header_offset + begin, run.offset + begin, run.size])
        if not split.valid.all():
            positions, split = positions[:, split.valid], split.take(split.valid)
        if not len(split.length):
            return iter(())
        begins = np.append(True, ~split.same_key_as_before())
        keys = split.key_texts(np.flatnonzero(begins))
        suffixes, numbers = split.parts()
        fields = [self._field(suffix.decode("utf-8", "surrogateescape")) for suffix in suffixes]
        return zip(
            map(keys.__getitem__, (np.cumsum(begins) - 1).tolist()),
            map(fields.__getitem__, numbers.tolist()),
            *positions.tolist(),
            strict=True,
        )

    def _selected_in_run(self, run: Run, begin: int) -> Iterator[_Selected]:
        names = np.ascontiguousarray(run.names).view(f"S{run.names.shape[1]}")[:, 0].tolist()
        columns = (run.header_offset + begin, run.offset + begin, run.size)
        for name, *position in zip(names, *(column.tolist() for column in columns), strict=True):
            parts = self._parts(name.partition(b"\0")[0].decode("utf-8", "surrogateescape"))
            if parts is not None:
                yield *parts, *position

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
