"""JSONL datasets: a JSON object in each line, an index of where lines begin, and splits.

| file | content |
|---|---|
| `x.jsonl` | the samples; blank lines do not count |
| `x.jsonl.idx` | N + 1 little-endian 64-bit numbers: where each sample begins, and the end |
| `x.jsonl.split.yaml` | optional: which samples make up train, val and test |

`x.jsonl.gz` and `x.jsonl.zst` are the same, packed: the numbers in `x.jsonl.gz.idx` count bytes
of the content, and `x.jsonl.gz.points` says where it can be entered, see `formats/compressed.py`.
A file that is a single member or frame has a copy in short ones, `x.jsonl.gz.frames`.

The key of a sample is its number, and its only part is `json`. Without a file of splits, each
split is the whole file. With one:

    split_parts:
      train: [0, 9000]          # bounds as in `subset`; "90%" and "end" will do, too
      val: [9000, end]
    exclude: ["17", "4711"]     # keys of samples that are skipped

Without `split_parts`, each split is the whole file but for what is excluded.
"""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError, FormatError, ShardChangedError, TruncatedError
from energon.formats.compressed import unpacked_blocks
from energon.formats.meta import yaml
from energon.formats.meta.info import find_split, numbers_in
from energon.formats.meta.yaml import dump_yaml
from energon.limits import check_document
from energon.local_file import open_binary
from energon.messages import nearest, shell_word

PACKED = (".gz", ".zst")
"""Endings of compressed files whose lines can be read one by one."""
PART = "json"
SCAN_BYTES = 16 << 20
_NEWLINE, _OPEN, _CLOSE = b"\n{}"

LineBound = int | str


def jsonl_index_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the index of a JSONL file, beside it."""
    return f"{os.fspath(path)}.idx"


def jsonl_split_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the splits of a JSONL file, beside it."""
    return f"{os.fspath(path)}.split.yaml"


def jsonl_points_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the table of points of a compressed JSONL file, beside it."""
    return f"{os.fspath(path)}.points"


def jsonl_copy_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the copy of a compressed file in short frames, beside it."""
    return f"{os.fspath(path)}.frames"


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Return whether a JSONL file is compressed, judging by its name."""
    return os.fspath(path).endswith(PACKED)


def scan_jsonl(
    path: str | os.PathLike[str],
    *,
    unpack: Callable[..., Iterator[bytes]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[NDArray[np.uint64]]:
    """Yield the content of the index of a JSONL file, in runs of numbers.

    Args:
        path: The file.
        unpack: Yields the content of the file, if it is compressed; None for `unpacked_blocks`.
        progress: Called with the number of bytes that were read, and the size of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        FormatError: If a line is not a JSON object, or there are none, or it cannot be unpacked.
    """
    origin = os.fspath(path)
    first, size = True, 0
    with open_binary(path) as file:
        total = os.fstat(file.fileno()).st_size
        if unpack is None and not is_packed(path):
            blocks = iter(partial(file.read, SCAN_BYTES), b"")
        else:
            blocks = (unpack or unpacked_blocks)(file, origin=origin)
        for starts, stop in _samples(blocks, origin):
            if first and len(starts):
                starts[0] = 0  # blank lines at the beginning belong to the first sample
                first = False
            size = stop
            yield starts.astype(np.uint64)
            progress(file.tell(), total)
    if first:
        raise FormatError(f"{origin}: has no samples; expected a JSON object in each line")
    yield np.array([size], np.uint64)


def load_jsonl_index(data: Any, *, size: int, origin: str) -> NDArray[np.uint64]:
    """Return the numbers of an index.

    Args:
        data: Its content.
        size: Bytes of the JSONL file now, or of what is in it.
        origin: The JSONL file, for messages.

    Raises:
        TruncatedError: If the index does not hold whole numbers.
        ShardChangedError: If it belongs to another version of the file.
        FormatError: If its numbers do not ascend.
    """
    again = f"run `energon prepare {shell_word(origin)}` again"
    if len(data) % 8 or len(data) < 16:
        raise TruncatedError(f"{origin}.idx: has {len(data)} bytes, not a complete index; {again}")
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
        exclude: Keys of excluded samples.
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
        """Return in words which excluded keys do not occur in a file with `num_samples` samples."""
        return describe_unmatched_lines(self.exclude, file, num_samples)

    def to_yaml(self) -> str:
        """Return the content of the file of splits."""
        if self.split_parts is None:
            return dump_yaml({"exclude": list(self.exclude)})
        parts = {name: list(bounds) for name, bounds in self.split_parts.items()}
        return dump_yaml({"split_parts": parts, "exclude": list(self.exclude)})


def describe_unmatched_lines(keys: Sequence[str], file: str, num_samples: int) -> list[str]:
    """Return in words which keys no sample of a file has; keys may stand behind its name."""
    return [
        f"{key!r} is excluded, but there are only the samples 0 to {num_samples - 1}"
        for key in keys
        if not any(number < num_samples for number in numbers_in(key.removeprefix(f"{file}/")))
    ]


def parse_jsonl_split(text: str | None, *, origin: str) -> JsonlSplit:
    """Return the splits that a file holds; None stands for no file.

    Raises:
        ConfigError: If it is invalid.
        FormatError: If it is not YAML.
    """
    if text is None:
        return JsonlSplit(origin=origin)
    document = yaml.load(text, origin=origin)
    keys = {"split_parts", "exclude"}
    if not isinstance(document, dict) or not document or set(document) - keys:
        raise ConfigError(f"{origin}: expected `split_parts`, and optionally `exclude`")
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


def _samples(blocks: Iterable[bytes], origin: str) -> Iterator[tuple[Ints, int]]:
    """Yield the starts of samples, checking that each is an object, and how far this got."""
    held: list[bytes] = []
    start = line = 0
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        held.append(block[:cut] if cut else block)
        if cut:
            data = b"".join(held)
            held = [block[cut:]]
            view = np.frombuffer(data, np.uint8)
            ends = np.flatnonzero(view == _NEWLINE)
            begins = np.concatenate(([0], ends[:-1] + 1))
            yield _checked(data, view, begins, ends, line, origin) + start, start + len(data)
            start, line = start + len(data), line + len(ends)
        check_document(sum(map(len, held)), f"{origin}:{line + 1}")
    if data := b"".join(held):
        rest = np.array([0]), np.array([len(data)])
        view = np.frombuffer(data, np.uint8)
        yield _checked(data, view, *rest, line, origin) + start, start + len(data)


def _checked(
    data: bytes, view: NDArray[np.uint8], starts: Ints, ends: Ints, line: int, origin: str
) -> Ints:
    """Return the starts of lines that are not blank."""
    plain = (view[starts] == _OPEN) & (view[np.maximum(ends, 1) - 1] == _CLOSE) & (ends > starts)
    if plain.all():
        return starts
    kept: NDArray[np.bool_] = plain.copy()
    for number in np.flatnonzero(~plain).tolist():
        text = data[starts[number] : ends[number]].strip()
        if line + number == 0:
            text = text.removeprefix(BOM_UTF8)
        if text and not (text.startswith(b"{") and text.endswith(b"}")):
            raise FormatError(
                f"{origin}:{line + number + 1}: expected a JSON object in one line, found "
                f"{text[:40]!r}; correct or remove the line"
            )
        kept[number] = bool(text)
    return np.asarray(starts[kept])
