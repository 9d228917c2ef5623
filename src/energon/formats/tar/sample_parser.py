"""Group the members of a tar archive into samples, window by window. No I/O in here.

The parser takes whole members off the front of a window of bytes, groups those with equal keys,
and says where the next window has to begin. Where a window has many headers, plain ones are
parsed all at once; elsewhere one regular expression matches each, and their checksums are compared
together. Everything else (PAX, GNU, links, folders, the end marker) is given to `TarParser` block
by block.

The key of a member is its path up to the first dot of the base name; the rest, in lower case, is
the field. Consecutive members with equal keys are a sample. Members that are not regular files,
that have no dot, or that are below a folder like `__this__`, belong to no sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import copy
from itertools import repeat
from typing import Any

from energon.errors import DuplicateSampleKeyError, FormatError
from energon.formats.tar.headers import BLOCK, first_damaged, padded_size, verify_checksum
from energon.formats.tar.names import split_name
from energon.formats.tar.parser import Member, TarParser
from energon.formats.tar.window_parts import WindowParts, find_parts
from energon.limits import TAR_PART_BYTES, Limit

LARGE_MEMBER_BYTES = 1 << 20
"""Content from here on is read straight into its own bytes instead of through a window."""

StreamSample = dict[str, Any]
SampleRow = tuple[Any, ...]
"""A sample as a tuple of the names of all fields, which are a tuple, and the values. It is made and
taken apart in a third of the time of a dict."""

_ALL = slice(None)

# Name with a key and a field, octal size, a regular file, the magic, no prefix of the name.
_PLAIN = re.compile(
    rb"(?!__)(?=((?:[^\0]*/)?+[^\0./]++)\.([^\0/]*+)\0)"
    rb".{99}\0.{24}([0-7]{11}).{21}[0\0].{100}ustar.{83}\0",
    re.DOTALL,
)


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
        sizes: Whether fields are the sizes of contents, which are jumped over.
        gives_rows: Whether some samples may be rows instead of dicts.
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
        gives_rows: bool = False,
        part_limit: Limit = TAR_PART_BYTES,
    ) -> None:
        self.origin = origin
        self.samples: list[Any] = []
        """Complete samples; the caller takes them away."""
        self.position = position
        """Where the next window has to begin; content that nobody wants is jumped over."""
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
        self._gives_rows = gives_rows
        self._part_limit = part_limit
        self._names_are_plain = select is None and rename is None and split is None
        self._takes_runs = self._names_are_plain and not sizes
        self._key: bytes | None = None
        self._sample: StreamSample = {}
        self._fields: dict[bytes, str] = {}
        self._pending: tuple[Member, str, str] | None = None
        self._large_field = ""

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
        headers: list[int] = []
        base, complete, before = self.position, len(self.samples), self._copy()
        failure: FormatError | None = None
        try:
            self._take_members(window, self._take_run(window), headers)
        except FormatError as error:
            failure = error
        damaged = first_damaged(window, headers)
        if damaged is not None:
            # That is what is wrong, and samples after it may be anything.
            before.feed(window[:damaged])
            del self.samples[complete + len(before.samples) :]
            verify_checksum(window[damaged : damaged + BLOCK], self.origin, base + damaged)
        if failure is not None:
            raise failure

    def _copy(self) -> SampleParser:
        """Return a parser that continues the same way, but yields nothing of this one."""
        copied = copy(self)
        copied.samples, copied._sample = [], self._sample.copy()
        copied._parser = copy(self._parser)
        # What this one tolerates is reported by it.
        copied._tolerates = lambda _: True
        return copied

    def _take_run(self, window: bytes) -> int:
        """Consume the plain members at the start of `window` at once; return where they end."""
        if not self._takes_runs or self._pending is not None or self._parser.is_within:
            return 0
        parts = find_parts(window)
        if parts is None:
            return 0
        # Where rare headers are frequent, trying again would cost more than it saves.
        self._takes_runs = 2 * parts.end > len(window)
        names = [self._field(suffix) for suffix in parts.suffixes]
        alike = self._alike(parts, names) if self._gives_rows else None
        if alike is None:
            self._take_parts(window, parts, names)
        else:
            # The first sample may have begun in the window before, the last one may not end here.
            second, last = parts.first_parts[[1, -1]].tolist()
            self._take_parts(window, parts, names, slice(second), slice(1))
            self._end_sample()
            self.samples += self._rows(window, parts, alike, slice(second, last))
            self._take_parts(window, parts, names, slice(last, None), slice(-1, None))
        self._parser.ended = False
        self.position += parts.end
        return parts.end

    def _alike(self, parts: WindowParts, names: list[str]) -> list[str] | None:
        """Return the fields of all samples but the first and the last, or None if they differ."""
        alike = parts.alike()
        if alike is None:
            return None
        fields = [names[number] for number in alike.tolist()]
        taken = {*self._begun, *fields}
        return fields if len(taken) == len(self._begun) + len(fields) else None

    def _rows(
        self, window: bytes, parts: WindowParts, fields: list[str], chosen: slice
    ) -> Iterable[SampleRow]:
        """Return the samples of the chosen parts, all of which have these fields."""
        names, (_, *about) = (*self._begun, *fields), self._begun.values()
        contents = parts.contents(window, chosen, len(fields))
        same = map(repeat, about)  # for all samples
        return zip(repeat(names), parts.keys[1:-1], *same, *contents, strict=False)

    def _take_parts(
        self,
        window: bytes,
        parts: WindowParts,
        names: list[str],
        chosen: slice = _ALL,
        samples: slice = _ALL,
    ) -> None:
        """Consume the chosen parts, with which the chosen samples begin."""
        base, sample, begun = self.position, self._sample, self._begun
        found = [] if self._key is None else [sample]
        keys, headers = parts.keys[samples], parts.headers[samples].tolist()
        beginning = zip(keys, headers, strict=True)
        continues = bool(found) and keys[:1] == [sample["__key__"]]
        columns = parts.begins[chosen].tolist(), parts.suffix[chosen].tolist()
        places = parts.start[chosen], parts.stop[chosen]
        for begins, number, start, stop in zip(*columns, *places, strict=True):
            if begins:
                key, header = next(beginning)
                if not continues:
                    self.sample_position = base + header
                    sample = begun.copy()
                    sample["__key__"] = key
                    found.append(sample)
                continues = False
            field = names[number]
            if field in sample:
                self.samples += found[:-1]
                del found[:-1]
                self._refuse_duplicate(sample["__key__"], field, base + start - BLOCK)
            else:
                sample[field] = window[start:stop]
        self.samples += found[:-1]
        if sample is not self._sample:
            self._sample, self._key = sample, sample["__key__"].encode("utf-8", "surrogateescape")

    def _take_members(self, window: bytes, at: int, headers: list[int]) -> None:
        """Consume members from `at` onward, and record where plain headers begin."""
        last = len(window) - BLOCK
        self.needed_bytes = BLOCK
        while True:
            if not (self._sizes or self._pending is not None or self._parser.is_within):
                at = self._take_plain(window, at, headers)
                if at > last or self.needed_bytes > BLOCK or self.content_bytes:
                    return
            taken = self._take(window, at)
            at += taken
            self.position += taken
            if not taken or self._pending is not None or self.content_bytes:
                return

    def _take_plain(self, window: bytes, at: int, headers: list[int]) -> int:
        """Consume members with plain headers from `at` onward, and return where they end."""
        match, fields, seen = _PLAIN.match, self._fields, headers.append
        names_are_plain, begun = self._names_are_plain, self._begun
        key, sample, sample_position = self._key, self._sample, self.sample_position
        base, end = self.position - at, len(window)
        last = end - BLOCK
        while at <= last and (plain := match(window, at)):
            seen(at)
            found, suffix, octal = plain.groups()
            size = int(octal, 8)
            start = at + 512
            stop = start + size
            if names_are_plain:
                try:
                    field = fields[suffix]
                except KeyError:
                    field = self._field(suffix)
            else:
                parts = self._parts((found + b"." + suffix).decode("utf-8", "surrogateescape"))
                if parts is None:
                    self._parser.ended = False
                    at = (stop + 511) & -512
                    continue
                found, field = parts[0].encode("utf-8", "surrogateescape"), parts[1]
            if stop > end and size < LARGE_MEMBER_BYTES:
                self.needed_bytes = BLOCK + size
                break
            if found != key:
                if key is None:
                    self._parser.ended = False
                else:
                    self.samples.append(sample)
                key, sample, sample_position = found, begun.copy(), base + at
                try:
                    sample["__key__"] = found.decode()
                except UnicodeDecodeError:
                    sample["__key__"] = found.decode("utf-8", "surrogateescape")
            if field in sample:
                self.sample_position = sample_position
                self._refuse_duplicate(sample["__key__"], field, base + at)
            elif stop > end:
                self._ask_for_content(sample["__key__"], field, size, base + at)
                at = start
                break
            else:
                sample[field] = window[start:stop]
            at = (stop + 511) & -512
        self.position, self.sample_position = base + at, sample_position
        self._key, self._sample = key, sample
        return at

    def put_content(self, content: bytes) -> None:
        """Accept the content that `content_bytes` requested."""
        self._sample[self._large_field] = content
        self.position += padded_size(len(content))
        self.content_bytes = 0

    def finish(self, end: int) -> None:
        """Check that the archive is complete if it ends at byte `end`.

        Raises:
            TruncatedError: If that is not where an archive can end. The last sample is not
                complete then, and not yielded.
        """
        self._parser.position = self.position
        self._parser.finish(end)
        self._parser.check_end(end)

    def _take(self, window: bytes, at: int) -> int:
        """Feed the parser; return how many bytes it consumed, 0 if it needs more.

        They may be beyond the window: content that nobody wants is jumped over.
        """
        parser = self._parser
        if self._pending is not None:
            member, key, field = self._pending
            self._pending = None
            return self._take_content(member, key, field, window, at)
        parser.position = self.position
        stop = at + parser.needed_bytes
        if stop > len(window):
            self.needed_bytes = parser.needed_bytes
            return 0
        member_found = parser.take(window[at:stop])
        if member_found is None:
            if parser.ended:
                self._end_sample()
            return parser.position - self.position
        headers = member_found.offset - self.position
        parts = self._selected_parts(member_found.name)
        if parts is None:
            return headers + padded_size(member_found.size)
        return headers + self._take_content(member_found, *parts, window, at + headers)

    def _take_content(self, member: Member, key: str, field: str, window: bytes, at: int) -> int:
        """Consume the content of a file, which begins at `at`; return how many bytes that were."""
        size, header_position = member.size, member.offset - BLOCK
        is_whole = at + size <= len(window) or self._sizes
        if not is_whole and size < LARGE_MEMBER_BYTES:
            self._pending, self.needed_bytes = (member, key, field), size
            return 0
        self._begin_sample(key, member.header_offset)
        if field in self._sample:
            self._refuse_duplicate(key, field, header_position)
        elif not is_whole:
            self._ask_for_content(key, field, size, header_position)
            return 0
        else:
            self._sample[field] = size if self._sizes else window[at : at + size]
        return padded_size(size)

    def _selected_parts(self, name: str) -> tuple[str, str] | None:
        """Return key and field of a member with any name, or None if it is not selected."""
        is_hidden = self._split is None and name[:2] == "__" and split_name(name) is None
        return None if is_hidden or not name else self._parts(name)

    def _ask_for_content(self, key: str, field: str, size: int, position: int) -> None:
        """Request content on its own; raise FormatError if it is too large for memory."""
        limit = self._part_limit
        if size > limit.value:
            raise FormatError(
                f"{self.origin}: {key!r} has a field {field!r} of {size} bytes at byte {position}, "
                f"expected at most {limit.value}; {limit.hint}"
            )
        self.content_bytes, self._large_field = size, field

    def _parts(self, name: str) -> tuple[str, str] | None:
        """Return key and field of a member that is not hidden, or None if it is not selected."""
        if self._rename is not None:
            name = self._rename(name)
        if self._select is not None and not self._select(name):
            return None
        if self._split is not None:
            return self._split(name)
        parts = split_name(name)
        if parts is None:
            return None
        return parts[0], parts[1].lower() if self._lowercase else parts[1]

    def _begin_sample(self, key: str, position: int) -> None:
        """Begin a sample with the headers at `position`, unless the current one has this key."""
        encoded = key.encode("utf-8", "surrogateescape")
        if encoded != self._key:
            self._end_sample()
            self._key = encoded
            self._sample = {**self._begun, "__key__": key}
            self.sample_position = position

    def _end_sample(self) -> None:
        if self._key is not None:
            self.samples.append(self._sample)
            self._key = None

    def _field(self, suffix: bytes) -> str:
        field = suffix.decode("utf-8", "surrogateescape")
        field = field.lower() if self._lowercase else field
        self._fields[suffix] = field
        return field

    def _refuse_duplicate(self, key: str, field: str, position: int) -> None:
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
