"""Turn the bytes of a tar archive, as they arrive, into samples. No I/O in here.

The reader hands over windows of bytes; the parser takes whole members off their front, groups
those with equal keys, and says where the next window has to begin. Plain headers, nearly all
there are, are matched by one regular expression; everything else (PAX, GNU, links, folders, the
end marker) goes a slower way.

The key of a member is its path up to the first dot of the base name, the rest, in lower case,
is the field. Consecutive members with equal keys are a sample. Members that are no regular
files, that have no dot, or that lie below a folder like `__this__`, belong to no sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from energon.errors import DuplicateSampleKeyError, FormatError, TruncatedError
from energon.formats.tar import (
    BLOCK,
    check_extension,
    long_name,
    member_name,
    member_size,
    pax_overrides,
    split_name,
    verify_checksums,
)
from energon.limits import TAR_PART_BYTES
from energon.webdataset.tar_extensions import sparse_bytes

LARGE_BYTES = 1 << 20
"""Content from here on is read straight into its own bytes instead of through a window."""

Sample = dict[str, Any]

# Name with a key and a field, octal size, a regular file, the magic, no prefix of the name.
_PLAIN = re.compile(
    rb"(?!__)(?=((?:[^\0]*/)?+[^\0./]++)\.([^\0/]*+)\0)"
    rb".{99}\0.{24}([0-7]{11}).{21}[0\0].{100}ustar.{83}\0",
    re.DOTALL,
)
_ZEROS = bytes(BLOCK)
_NO_CONTENT = b"123456"


class TarParser:
    """The samples of one archive, or of several that were joined with `cat`.

    Args:
        origin: What messages call the archive.
        about: What every sample has after its `__key__`, like `__url__`.
        select: Says by name, after renaming, which members are wanted; None wants all.
        rename: Gives members other names; None keeps them.
        split: Gives key and field of a name, or None; None means the rule above.
        lowercase: Whether fields are in lower case.
        position: Where in the archive the first window begins.
        tolerates: Says of a field that a sample has twice whether to go on with the first one;
            None means that it is an error.
        sizes: Whether fields are the sizes of contents, which are jumped over.
    """

    def __init__(
        self,
        origin: str,
        *,
        about: Sample | None = None,
        select: Callable[[str], Any] | None = None,
        rename: Callable[[str], str] | None = None,
        split: Callable[[str], tuple[str, str] | None] | None = None,
        lowercase: bool = True,
        position: int = 0,
        tolerates: Callable[[Exception], Any] | None = None,
        sizes: bool = False,
    ) -> None:
        self.origin = origin
        self.samples: list[Sample] = []
        """Complete samples; the caller takes them away."""
        self.position = position
        """Where the next window has to begin; content that nobody wants is jumped over."""
        self.sample_position = position
        """Where the sample begins that is not complete yet."""
        self.wanted_bytes = BLOCK
        """Length that the next window needs for anything to be taken from it."""
        self.content_bytes = 0
        """If not 0, give that many bytes to `put_content` instead of a window."""
        self.ended = False
        """Whether the end marker has come, and nothing after it."""
        self.num_passed_over = 0
        """How many links, devices and sparse files were left out."""
        self._about = about or {}
        self._select = select
        self._rename = rename
        self._split = split
        self._lowercase = lowercase
        self._tolerates = tolerates
        self._sizes = sizes
        self._slowly = sizes or any(each is not None for each in (select, rename, split))
        self._key: bytes | None = None
        self._sample: Sample = {}
        self._fields: dict[bytes, str] = {}
        self._path: str | None = None
        self._size: int | None = None
        self._header_position = -1
        self._large_field = ""

    def feed(self, window: bytes) -> None:
        """Take all whole members off the front of `window`.

        Raises:
            FormatError: If there is something else where a header should be.
        """
        headers: list[int] = []
        base = self.position
        try:
            self._take_members(window, headers)
        except FormatError:
            # A damaged header may have led here: then that is what is wrong.
            verify_checksums(window, headers, self.origin, base)
            raise
        verify_checksums(window, headers, self.origin, base)

    def _take_members(self, window: bytes, headers: list[int]) -> None:
        """Take members off the front of `window`, and note where their headers begin."""
        match, fields, seen = _PLAIN.match, self._fields, headers.append
        end, last = len(window), len(window) - BLOCK
        key, sample, sample_position = self._key, self._sample, self.sample_position
        slowly = self._slowly or self._is_extended
        begun = {"__key__": "", **self._about}
        at, base = 0, self.position
        self.wanted_bytes = BLOCK
        while at <= last:
            plain = None if slowly else match(window, at)
            if plain is None:
                self.position, self.sample_position = base + at, sample_position
                self._key, self._sample = key, sample
                header = window[at : at + BLOCK]
                if header != _ZEROS:
                    seen(at)
                taken = self._take(header, window, at)
                key, sample, sample_position = self._key, self._sample, self.sample_position
                slowly = self._slowly or self._is_extended
                at += taken
                if not taken or self.content_bytes:
                    break
                continue
            seen(at)
            found, suffix, octal = plain.groups()
            size = int(octal, 8)
            start = at + 512
            stop = start + size
            if stop > end:
                if size < LARGE_BYTES:
                    self.wanted_bytes = BLOCK + size
                    break
                slowly = True
                continue
            if found != key:
                if key is not None:
                    self.samples.append(sample)
                key, sample, sample_position = found, begun.copy(), base + at
                try:
                    sample["__key__"] = found.decode()
                except UnicodeDecodeError:
                    sample["__key__"] = found.decode("utf-8", "surrogateescape")
            try:
                field = fields[suffix]
            except KeyError:
                field = self._field(suffix)
            if field in sample:
                self.sample_position = sample_position
                self._refuse_duplicate(sample["__key__"], field, base + at)
            else:
                sample[field] = window[start:stop]
            at = (stop + 511) & -512
        self.position, self.sample_position = base + at, sample_position
        self._key, self._sample = key, sample
        self.ended = self.ended and key is None

    def put_content(self, content: bytes) -> None:
        """Take the content that was asked for by `content_bytes`."""
        self._sample[self._large_field] = content
        self.position += len(content) + -len(content) % BLOCK
        self.content_bytes = 0

    def finish(self, end: int) -> None:
        """Complete the last sample: the archive ends at byte `end`.

        Raises:
            TruncatedError: If that is not where an archive can end. The last sample is not
                complete then, and not given out.
        """
        again = "the archive is cut off, restore or write it again"
        if end < self.position:
            raise TruncatedError(
                f"{self.origin}: ends at byte {end}, {self.position - end} bytes too early; {again}"
            )
        if end > self.position or self._is_extended:
            raise TruncatedError(f"{self.origin}: ends at byte {end} within a member; {again}")
        if not self.ended:
            raise TruncatedError(
                f"{self.origin}: ends at byte {end} without the end marker of a tar archive, so "
                f"members may be missing; {again}"
            )

    @property
    def _is_extended(self) -> bool:
        """Whether extended headers have come of which the member is still to come."""
        return self._path is not None or self._size is not None

    def _take(self, header: bytes, window: bytes, at: int) -> int:
        """Take a member of any kind off `window`; return its bytes, or 0 if it is incomplete."""
        if header == _ZEROS:
            self._end_sample()
            self.ended = True
            return BLOCK
        self.ended = False
        size = member_size(header, self.origin, self.position)
        kind = header[156:157]
        if kind in b"xXLgK":
            return self._take_extension(window, at, kind, size)
        if kind in b"0\x007":
            return self._take_regular(window, at, header, size)
        taken = BLOCK + (0 if kind in _NO_CONTENT else size + -size % BLOCK)
        if kind == b"S":
            taken, headers = sparse_bytes(window, at, header, size)
            if at + headers > len(window):
                self.wanted_bytes = headers
                return 0
        self._forget_extension()
        self.num_passed_over += kind != b"5"
        return taken

    def _take_extension(self, window: bytes, at: int, kind: bytes, size: int) -> int:
        """Note what an extended header says of the member after it."""
        check_extension(size, self.origin, self.position + BLOCK)
        stop = at + BLOCK + size
        if stop > len(window):
            self.wanted_bytes = BLOCK + size
            return 0
        payload = window[at + BLOCK : stop]
        if self._header_position < 0:
            self._header_position = self.position
        if kind == b"L":
            self._path = long_name(payload, self.origin, self.position + stop - at)
        elif kind in b"xX":
            overrides = pax_overrides(payload, self.origin, self.position + stop - at)
            self._path = self._path if overrides.path is None else overrides.path
            self._size = self._size if overrides.size is None else overrides.size
            if overrides.is_sparse:
                # A sparse file has no name that is wanted: the next header is passed over.
                self._path = ""
                self.num_passed_over += 1
        return BLOCK + size + -size % BLOCK

    def _take_regular(self, window: bytes, at: int, header: bytes, size: int) -> int:
        name = member_name(header) if self._path is None else self._path
        size = size if self._size is None else self._size
        parts = self._parts(name)
        if parts is None:
            self._forget_extension()
            return BLOCK + size + -size % BLOCK
        stop = at + BLOCK + size
        if stop > len(window) and size < LARGE_BYTES and not self._sizes:
            self.wanted_bytes = BLOCK + size
            return 0
        key, field = parts
        self._begin_sample(key)
        self._forget_extension()
        if field in self._sample:
            self._refuse_duplicate(key, field, self.position)
            return BLOCK + size + -size % BLOCK
        if self._sizes:
            self._sample[field] = size
            return BLOCK + size + -size % BLOCK
        if stop > len(window):
            self._check_size(key, field, size)
            self.content_bytes, self._large_field = size, field
            return BLOCK
        self._sample[field] = window[at + BLOCK : stop]
        return BLOCK + size + -size % BLOCK

    def _check_size(self, key: str, field: str, size: int) -> None:
        """Raise FormatError if a content is larger than any that is read into memory."""
        if size > TAR_PART_BYTES.value:
            raise FormatError(
                f"{self.origin}: {key!r} has a field {field!r} of {size} bytes at byte "
                f"{self.position}, expected at most {TAR_PART_BYTES.value}; {TAR_PART_BYTES.hint}"
            )

    def _parts(self, name: str) -> tuple[str, str] | None:
        """Return key and field of a member, or None if it is not wanted."""
        if not name or (not self._split and name[:2] == "__" and split_name(name) is None):
            return None
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

    def _begin_sample(self, key: str) -> None:
        """Begin a sample, unless the present one has this key."""
        encoded = key.encode("utf-8", "surrogateescape")
        if encoded != self._key:
            self._end_sample()
            self._key = encoded
            self._sample = {"__key__": key, **self._about}
            extended = self._header_position >= 0
            self.sample_position = self._header_position if extended else self.position

    def _forget_extension(self) -> None:
        self._path = self._size = None
        self._header_position = -1

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
        error = DuplicateSampleKeyError(
            f"{self.origin}: sample {key!r}, which begins at byte {self.sample_position}, has the "
            f"field {field!r} twice, the second time at byte {position}; if these are two samples, "
            "give them different keys, as `energon prepare --fix-duplicates` does; fields are "
            "compared in lower case, so rename files that only differ in that, or leave one out "
            "with select_files"
        )
        if self._tolerates is None or not self._tolerates(error):
            raise error
