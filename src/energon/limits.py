"""What data may make this process do, and how much of it: capabilities, and a table of limits.

A document, an index or a media file of a few kilobytes can stand for terabytes. Whatever reads
data asks here how far it may go, and raises an error of ours beyond. Every limit is far above
what real data needs; `ENERGON_LIMIT_<NAME>=N` in the environment sets another, for this process
and for its workers.

    >>> BRACE_NAMES.default
    1000000
    >>> BRACE_NAMES.variable
    'ENERGON_LIMIT_BRACE_NAMES'

A module adds its rows here, and says `limit.hint` in the message of its error.
`check_limit` does so for parts of samples.

Data runs no code and reads nothing outside its dataset unless the user allows it by name: for a
call (`allow=("code",)`), for a command (`--allow code`), or for a process and its workers
(`ENERGON_ALLOW=code,pickle` in the environment).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from energon.errors import ConfigError, DecodeError, FormatError, SecurityError
from energon.local_file import open_binary
from energon.messages import nearest

LIMIT_PREFIX = "ENERGON_LIMIT_"
_PIECE_BYTES = 16 << 20

# Limits are asked for once per part of a sample. `os.environ` would encode and decode the name
# each time, which takes as long as parsing a short JSON text; this is the dict behind it.
_environment: Mapping[bytes, bytes] = getattr(os.environ, "_data", os.environb)


@dataclass(frozen=True)
class Limit:
    """A bound on what one piece of data may cost.

    Args:
        name: In capitals, as in the name of its environment variable.
        default: The largest number that is accepted.
        meaning: What is counted, for the table of the documentation.
    """

    name: str
    default: int
    meaning: str

    @property
    def variable(self) -> str:
        """The environment variable that sets another limit."""
        return LIMIT_PREFIX + self.name

    @cached_property
    def _encoded(self) -> bytes:
        return os.fsencode(self.variable)

    @property
    def value(self) -> int:
        """The largest number that is accepted here and now. Ask once per document or file.

        Raises:
            ConfigError: If the environment sets it to something else than a whole number.
        """
        raw = _environment.get(self._encoded)
        if raw is None:
            return self.default
        text = os.fsdecode(raw)
        try:
            value = int(text)
        except ValueError:
            value = -1
        if value < 0:
            raise ConfigError(
                f"{self.variable}={text!r} is not a whole number of 0 or more; expected a "
                f"number such as {self.default}, or an empty value"
            )
        return value

    @property
    def hint(self) -> str:
        """The end of a message: the way to raise the limit."""
        return f"if you trust the data, set {self.variable} to a larger number"

    def exceeded(self, what: str) -> DecodeError:
        """Return the error for more than that; `what` is the amount and its noun."""
        return DecodeError(f"{what}; expected at most {self.value} {self.meaning}; {self.hint}")


DOCUMENT_BYTES = Limit("DOCUMENT_BYTES", 256 << 20, "bytes of a YAML or JSON document")
DOCUMENT_DEPTH = Limit("DOCUMENT_DEPTH", 100, "levels of nesting in a YAML or JSON document")
ALIASED_VALUES = Limit(
    "ALIASED_VALUES", 200_000, "values that all YAML aliases of a document expand to"
)
LISTED_VALUES = Limit(
    "LISTED_VALUES", 200_000, "mappings and lists in all lists of a YAML document"
)
EXPANDED_CHARACTERS = Limit(
    "EXPANDED_CHARACTERS", 64 << 20, "characters that all `${…}` of a document expand to"
)
EXPANDED_VALUES = Limit(
    "EXPANDED_VALUES", 200_000, "values that all `${…}` of a document expand to"
)
LISTED_SHARDS = Limit(
    "LISTED_SHARDS", 1_000_000, "shards that a document of web datasets lists, or draws an epoch"
)
METADATASET_NODES = Limit(
    "METADATASET_NODES", 100_000, "datasets and blends that a split of a metadataset leads to"
)
SCHEDULE_POINTS = Limit(
    "SCHEDULE_POINTS", 10_000, "points of all schedules of weights in a split of a metadataset"
)
RESUMED_OUTPUTS = Limit(
    "RESUMED_OUTPUTS", 10_000_000, "outputs that a generator repeats to reach a saved state"
)
WALKED_ENTRIES = Limit(
    "WALKED_ENTRIES", 20_000_000, "files and folders that are listed for a folder or pattern"
)
WALKED_SECONDS = Limit("WALKED_SECONDS", 600, "seconds to list a folder or pattern")
BRACE_NAMES = Limit(
    "BRACE_NAMES", 1_000_000, "names that the brace patterns of a document expand to"
)

TAR_HEADER_BYTES = Limit(
    "TAR_HEADER_BYTES", 16 << 20, "bytes of an extended header (PAX or GNU) of a tar archive"
)
TAR_RECORDS = Limit("TAR_RECORDS", 100_000, "records of a PAX header of a tar archive")
TAR_NAME_BYTES = Limit("TAR_NAME_BYTES", 64 << 10, "bytes of the name of a file in a tar archive")
TAR_PART_BYTES = Limit("TAR_PART_BYTES", 64 << 30, "bytes of a part that is read from a shard")

PARQUET_FOOTER_BYTES = Limit("PARQUET_FOOTER_BYTES", 256 << 20, "bytes of a Parquet footer")

SQLITE_STEPS = Limit(
    "SQLITE_STEPS", 200, "steps that a query on index.sqlite may take for each byte of the file"
)
SQLITE_TABLES = Limit("SQLITE_TABLES", 100, "tables and indexes of an index.sqlite")
SQLITE_VALUE_BYTES = Limit("SQLITE_VALUE_BYTES", 16 << 20, "bytes of a value in index.sqlite")

PART_DEPTH = Limit("PART_DEPTH", 400, "levels of nesting in a JSON, msgpack or CBOR part")
UNPACKED_BYTES = Limit("UNPACKED_BYTES", 1 << 30, "bytes that a compressed part unpacks to")
DECODED_BYTES = Limit(
    "DECODED_BYTES", 4 << 30, "bytes of the frames, samples or tensors that a part is decoded to"
)
# Where Pillow draws the line, too.
IMAGE_PIXELS = Limit("IMAGE_PIXELS", 178_956_970, "pixels of an image, or of a frame of a video")
JPEG_SCANS = Limit("JPEG_SCANS", 100, "passes over the pixels that a progressive JPEG makes")
MEDIA_PACKETS = Limit(
    "MEDIA_PACKETS", 10_000_000, "packets that an MP4 file lists without a size for each"
)


def check_document(size: int, origin: str) -> None:
    """Raise FormatError if a document has more bytes than `DOCUMENT_BYTES`."""
    if size > DOCUMENT_BYTES.value:
        raise FormatError(
            f"{origin}: a document of {size:,} bytes or more is too large; {DOCUMENT_BYTES.hint}"
        )


_Line_co = TypeVar("_Line_co", bytes, str, covariant=True)


class _Lines(Protocol[_Line_co]):
    def readline(self, size: int, /) -> _Line_co: ...


def document_lines(file: _Lines[_Line_co], *, origin: str) -> Iterator[_Line_co]:
    """Yield the lines of a file, each of which is a document, such as a row of JSON Lines or CSV.

    Raises:
        FormatError: If a line has more than `DOCUMENT_BYTES`.
    """
    limit = DOCUMENT_BYTES.value
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            check_document(len(line), f"{origin}:{number}")
        yield line


def read_local_document(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a local file, of which no more is read than a document may have.

    Raises:
        FormatError: If it has more than `DOCUMENT_BYTES`.
    """
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_document(size, os.fspath(path))
        content = file.read(size + 1)
        if len(content) <= size:
            return content
        while more := file.read(_PIECE_BYTES):  # files that grow
            content += more
            check_document(len(content), os.fspath(path))
    return content


LIMITS: dict[str, Limit] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Limit)
}
"""All limits by name. Rows go above."""


def check_limit(amount: int, limit: Limit, what: str) -> None:
    """Raise DecodeError if there is more than a limit allows.

    Args:
        amount: How much there is, or is claimed to be.
        limit: How much may be.
        what: The beginning of the message: what there is so much of.
    """
    if amount > limit.value:
        raise limit.exceeded(what)


def check_depth(value: Any) -> None:
    """Raise DecodeError if lists and dicts are nested deeper than `PART_DEPTH`.

    No container may be part of two others.
    """
    limit = PART_DEPTH.value
    level, depth = [value], 0
    while level:
        if depth >= limit:
            raise too_deep()
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, list | tuple | dict)
        ]
        depth += 1


def too_deep() -> DecodeError:
    """Return the error for values that are nested too deep."""
    return DecodeError(
        f"values are nested more than {PART_DEPTH.value} levels deep; {PART_DEPTH.hint}"
    )


ALLOW_VARIABLE = "ENERGON_ALLOW"
CAPABILITIES = {
    "code": "import modules, call functions and run files that a document names",
    "pickle": "unpickle samples or their parts, which runs any code that they contain",
    "shell": "run addresses that are shell commands (pipe:…)",
    "env": "read environment variables into a document (${NAME})",
    "outside": "read shards and documents outside the folder of their dataset",
}
"""What can be allowed, and what it lets data do."""


def is_allowed(capability: str, allow: Collection[str] = ()) -> bool:
    """Return whether the user allows something.

    Args:
        capability: One of `CAPABILITIES`.
        allow: What the call allows; the environment may allow more.

    Raises:
        ConfigError: If `allow` has a name that means nothing.
    """
    named = {allow} if isinstance(allow, str) else set(allow)
    check_allow(named)
    return capability in named | allowed_by_environment()


def check_allow(allow: Collection[str]) -> None:
    """Raise ConfigError if something is to be allowed that does not exist."""
    if not isinstance(allow, Collection):
        raise ConfigError(
            f"allow={allow!r}: expected some of {', '.join(CAPABILITIES)}, in a tuple"
        )
    for name in sorted({allow} if isinstance(allow, str) else allow, key=str):
        if name not in CAPABILITIES:
            near = nearest(name, CAPABILITIES)
            hint = f"did you mean {near!r}?" if near else "expected one of them"
            raise ConfigError(f"allow={name!r} is not one of {', '.join(CAPABILITIES)}; {hint}")


def allowed_by_environment() -> set[str]:
    """Return the capabilities that `ENERGON_ALLOW` names."""
    return {name.strip() for name in os.environ.get(ALLOW_VARIABLE, "").split(",")} - {""}


def refusal(capability: str, problem: str) -> SecurityError:
    """Return the error that refuses a capability, and names the switch that allows it.

    Args:
        capability: Which one.
        problem: What is refused, and what to do instead.
    """
    return SecurityError(
        f'{problem}; if you trust it, allow it with allow=("{capability}",), with --allow '
        f"{capability} on the command line, or with {ALLOW_VARIABLE}={capability} in the "
        "environment"
    )
