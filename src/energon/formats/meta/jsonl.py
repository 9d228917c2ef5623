"""JSONL datasets: a JSON object in each line, an index of where lines begin, and splits.

| file | content |
|---|---|
| `x.jsonl` | the samples; blank lines do not count |
| `x.jsonl.idx` | N + 1 little-endian 64-bit numbers: where each sample begins, and the end |
| `x.jsonl.split.yaml` | optional: which samples make up train, val and test |

The key of a sample is its number, and its only part is `json`. Without a file of splits, each
split is the whole file. With one:

    split_parts:
      train: [0, 9000]          # bounds as in `subset`; "90%" and "end" will do, too
      val: [9000, end]
    exclude: ["17", "4711"]     # keys of samples that are left out

Without `split_parts`, each split is the whole file but for what is excluded.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError, FormatError, ShardChangedError, TruncatedError
from energon.formats.meta import yaml
from energon.formats.meta.split import find_split
from energon.messages import nearest

COMPRESSED = (".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz")
PART = "json"
WINDOW_BYTES = 64 << 20
_NEWLINE, _OPEN, _CLOSE = b"\n{}"

LineBound = int | str


def jsonl_index_path(path: str | os.PathLike[str]) -> str:
    """Return where the index of a JSONL file is: beside it."""
    return f"{os.fspath(path)}.idx"


def jsonl_split_path(path: str | os.PathLike[str]) -> str:
    """Return where the splits of a JSONL file are: beside it."""
    return f"{os.fspath(path)}.split.yaml"


def scan_jsonl(path: str | os.PathLike[str]) -> Iterator[NDArray[np.uint64]]:
    """Yield the content of the index of a JSONL file, in runs of numbers.

    Raises:
        FileNotFoundError: If there is no such file.
        FormatError: If a line is not a JSON object, or there are none.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    first = True
    for starts in _samples(data, os.fspath(path)):
        if first and len(starts):
            starts[0] = 0  # blank lines at the beginning belong to the first sample
            first = False
        yield starts.astype(np.uint64)
    if first:
        raise FormatError(f"{os.fspath(path)}: has no samples; expected a JSON object in each line")
    yield np.array([size], np.uint64)


def load_jsonl_index(data: Any, *, size: int, origin: str) -> NDArray[np.uint64]:
    """Return the numbers of an index.

    Args:
        data: Its content.
        size: Bytes of the JSONL file now.
        origin: The JSONL file, for messages.

    Raises:
        TruncatedError: If the index does not hold whole numbers.
        ShardChangedError: If it is of another version of the file.
        FormatError: If its numbers do not ascend.
    """
    again = f"run `energon prepare {origin}` again"
    if len(data) % 8 or len(data) < 16:
        raise TruncatedError(f"{origin}.idx: has {len(data)} bytes, not a whole index; {again}")
    offsets = np.frombuffer(data, "<u8")
    if offsets[-1] != size:
        raise ShardChangedError(
            f"{origin}: has {size} bytes, had {offsets[-1]} when it was indexed; {again}"
        )
    if (offsets[1:] <= offsets[:-1]).any():
        raise FormatError(f"{origin}.idx: its offsets do not ascend; {again}")
    return offsets


@dataclass(frozen=True)
class JsonlSplit:
    """The splits of a JSONL file.

    Args:
        split_parts: Bounds of each split, by name; None if every split is the whole file.
        exclude: Keys of samples that are left out.
        origin: The file of splits, for messages.
    """

    split_parts: Mapping[str, tuple[LineBound, LineBound]] | None = None
    exclude: Sequence[str] = ()
    origin: str = ""

    def bounds(self, split_part: str) -> tuple[LineBound, LineBound]:
        """Return the bounds of a split.

        Raises:
            ConfigError: If there is no such split.
        """
        if self.split_parts is None:
            return 0, "end"
        name = find_split(split_part, self.split_parts)
        if name is None:
            near = nearest(split_part, self.split_parts)
            hint = f"; did you mean {near!r}?" if near else ""
            names = ", ".join(map(repr, self.split_parts)) or "none at all"
            raise ConfigError(
                f"{self.origin}: there is no split {split_part!r}, only {names}{hint}"
            )
        return self.split_parts[name]

    def unmatched(self, file: str, num_samples: int) -> list[str]:
        """Return in words which excluded keys no sample of a file has, of so many in it."""
        return describe_unmatched_lines(self.exclude, file, num_samples)

    def to_yaml(self) -> str:
        """Return the content of the file of splits."""
        if self.split_parts is None:
            return yaml.dump({"exclude": list(self.exclude)})
        parts = {name: list(bounds) for name, bounds in self.split_parts.items()}
        return yaml.dump({"split_parts": parts, "exclude": list(self.exclude)})


def describe_unmatched_lines(keys: Sequence[str], file: str, num_samples: int) -> list[str]:
    """Return in words which keys no sample of a file has; keys may stand behind its name."""
    return [
        f"{key!r} is excluded, but there are only the samples 0 to {num_samples - 1}"
        for key in keys
        if not (number := key.removeprefix(f"{file}/")).isdecimal() or int(number) >= num_samples
    ]


def parse_jsonl_split(text: str | None, *, origin: str) -> JsonlSplit:
    """Return the splits that a file holds; None stands for no file.

    Raises:
        ConfigError: If it makes no sense.
        FormatError: If it is not YAML.
    """
    if text is None:
        return JsonlSplit(origin=origin)
    document = yaml.load(text, origin=origin)
    known = {"split_parts", "exclude"}
    if not isinstance(document, dict) or not document or set(document) - known:
        raise ConfigError(f"{origin}: expected `split_parts`, and `exclude` if need be")
    parts = document.get("split_parts", {})
    if not isinstance(parts, dict):
        raise ConfigError(f"{origin}: split_parts: expected bounds by split, found {parts!r}")
    for name, bounds in parts.items():
        if not isinstance(bounds, list) or [type(b) in (int, str) for b in bounds] != [True, True]:
            raise ConfigError(f"{origin}: split {name!r}: expected [start, stop], found {bounds!r}")
    exclude = document.get("exclude") or []
    if not isinstance(exclude, list) or not all(isinstance(key, str | int) for key in exclude):
        raise ConfigError(f"{origin}: exclude: expected keys of samples, found {exclude!r}")
    ranges = {name: (bounds[0], bounds[1]) for name, bounds in parts.items()}
    named = ranges if "split_parts" in document else None
    return JsonlSplit(named, [str(key) for key in exclude], origin)


def _samples(data: Any, origin: str) -> Iterator[Ints]:
    """Yield where samples begin, checking that each is an object."""
    view = np.frombuffer(data, np.uint8)
    start = line = 0
    for low in range(0, len(view), WINDOW_BYTES):
        ends = np.flatnonzero(view[low : low + WINDOW_BYTES] == _NEWLINE) + low
        if len(ends):
            starts = np.concatenate(([start], ends[:-1] + 1))
            yield _checked(data, view, starts, ends, line, origin)
            start, line = int(ends[-1]) + 1, line + len(ends)
    if start < len(view):
        rest = np.array([start]), np.array([len(view)])
        yield _checked(data, view, *rest, line, origin)


def _checked(
    data: Any, view: NDArray[np.uint8], starts: Ints, ends: Ints, line: int, origin: str
) -> Ints:
    """Return the beginnings of those lines that are not blank."""
    plain = (view[starts] == _OPEN) & (view[np.maximum(ends, 1) - 1] == _CLOSE) & (ends > starts)
    if plain.all():
        return starts
    kept: NDArray[np.bool_] = plain.copy()
    for number in np.flatnonzero(~plain).tolist():
        text = bytes(data[starts[number] : ends[number]]).strip()
        if text and not (text.startswith(b"{") and text.endswith(b"}")):
            raise FormatError(
                f"{origin}:{line + number + 1}: expected a JSON object in one line, found "
                f"{text[:40]!r}"
                + (" with a byte order mark" if text[:3] == b"\xef\xbb\xbf" else "")
            )
        kept[number] = bool(text)
    return np.asarray(starts[kept])
