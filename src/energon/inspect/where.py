"""Conditions on samples as users type them: which parts exist, their size, fields of JSON.

    has:jpg lacks:txt jpg.size>100kB jpg.width>=512 mp4.duration<10 json.meta.language=en text:cat

A sample matches if it satisfies all of them; terms with spaces are quoted. Text parts can be
compared as a whole: "cls.text=a cat"; so can JSON that is a single value: score.json.value>0.5.
Texts in JSON have a length, in characters: json.caption.length>100. "text:a cat" finds letters of
either case anywhere in the key, the text parts and the texts of JSON parts. Only parts named in a
condition are read, and for `text:` the texts; of media, only the headers.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from energon.decode.av_container import AUDIO_EXTENSIONS, AV_EXTENSIONS
from energon.decode.images import IMAGE_EXTENSIONS, image_metadata
from energon.decode.values import decode_json
from energon.errors import ConfigError, DecodeError, EnergonError
from energon.formats.media import SIGNATURE_BYTES, AVMetadata, guess_extension
from energon.samples.crude import find_part
from energon.sources.tree import BrowsedFile

MAX_MEASURED_TEXT = 4 << 20

TEXT = frozenset(
    {
        *("txt", "text", "transcript", "md", "csv", "tsv", "srt", "vtt", "yaml", "yml", "toml"),
        *("html", "htm", "xhtml", "xml", "svg", "py", "js", "css", "tex", "log", "caption"),
        *("cls", "cls2", "index", "inx", "id", "count"),
    }
)
VALUES = frozenset({"json", "jsn", "mp", "msg", "cbor"})
ARRAYS = frozenset({"npy", "npz", "ten", "tb"})

PartKind = Literal["image", "audio", "video", "text", "value", "arrays", "bytes"]

FACTS: dict[PartKind, tuple[str, ...]] = {
    "image": ("width", "height", "ratio"),
    "video": ("duration", "width", "height", "fps"),
    "audio": ("duration", "rate"),
    "text": ("length",),
    "arrays": ("length",),
}
"""What can be asked about each kind of part: pixels, seconds, characters, entries."""


def part_kind(extension: str) -> PartKind:
    """Return how a part is shown."""
    if extension in IMAGE_EXTENSIONS:
        return "image"
    if extension in AV_EXTENSIONS:
        return "audio" if extension in AUDIO_EXTENSIONS else "video"
    if extension in TEXT:
        return "text"
    if extension in VALUES:
        return "value"
    return "arrays" if extension in ARRAYS else "bytes"


def part_extension(name: str, file: BrowsedFile | None = None) -> str:
    """Return the extension of a part; if it is unknown, the type that its first bytes suggest."""
    extension = name.lower().removesuffix(".gz").rpartition(".")[2]
    if part_kind(extension) == "bytes" and file is not None and file.size:
        head = file.find().pread(file.offset, min(file.size, SIGNATURE_BYTES))
        return guess_extension(head) or extension
    return extension


def part_facts(name: str, file: BrowsedFile) -> dict[str, float]:
    """Return numbers about a part by their names in `FACTS`; {} if its kind has none.

    Reads headers of media and arrays, and whole texts.

    Raises:
        DecodeError: If the part is damaged.
        MissingExtraError: If it is audio or video, and PyAV is not installed.
    """
    kind = part_kind(part_extension(name, file))
    if name.lower().endswith(".gz"):
        return {}
    if kind == "image":
        with file.open() as stream:
            try:
                image = image_metadata(stream)
            except Exception as error:  # Pillow raises whatever the data make it
                reason = f"not a readable image: {error}".partition(" <")[0]
                raise DecodeError(reason) from error
        ratio = round(image.width / max(1, image.height), 4)
        return {"width": image.width, "height": image.height, "ratio": ratio}
    if kind in ("audio", "video"):
        metadata = av_metadata(file)
        facts: dict[str, Any] = {
            "duration": metadata.video_duration or metadata.audio_duration,
            "width": metadata.video_width,
            "height": metadata.video_height,
            "fps": metadata.video_fps,
            "rate": metadata.audio_sample_rate,
        }
        return {name: value for name, value in facts.items() if value is not None}
    if kind == "text" and file.size <= MAX_MEASURED_TEXT:
        return {"length": len(file.read().decode("utf-8", "replace"))}
    if name.lower().endswith("npy"):
        shape, _ = npy_header(file)
        return {"length": shape[0]} if shape else {}
    return {}


def npy_header(file: BrowsedFile) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of the array in an `npy` file, without reading its values.

    Raises:
        DecodeError: If the file is damaged.
    """
    with file.open() as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(stream)
        except (ValueError, KeyError, OSError, EOFError) as error:
            raise DecodeError(f"not a readable array: {error}") from error
    return shape, dtype


def av_metadata(file: BrowsedFile) -> AVMetadata:
    """Return size, rates and duration of a video or a sound, without counting frames."""
    from energon.decode.av import AVDecoder

    with file.open() as stream:
        return AVDecoder(stream, suppress_warnings=True).get_metadata(get_video_frame_count=False)


_HAS = re.compile(r"(has|lacks|text):(.+)", re.DOTALL)
_TEXT = "text:"
_COMPARISON = re.compile(r"([^\s<>=!.]+(?:\.[^\s<>=!.]+)+)(<=|>=|!=|==|<|>|=)([^<>=].*|)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?")
_UNITS = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3}
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_SYNTAX = (
    "has:PART, lacks:PART, text:WORDS, PART.size>100kB, PART.width, height, ratio, duration or "
    "length, or PART.FIELD=VALUE of JSON, with <, <=, >, >=, = or !="
)

LENGTH = "length"
MAX_LETTERS = 4000
MAX_COMPARED_BYTES = 4096

BrowsedFiles = Mapping[str, BrowsedFile]
_Condition = Callable[[BrowsedFiles, str], bool]


class Where:
    """Conditions, all of which a sample must satisfy.

    Args:
        text: The conditions as typed.

    Attributes:
        texts: The letters of all conditions `text:`.

    Raises:
        ConfigError: If they are invalid.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LETTERS:
            raise ConfigError(
                f"the conditions have {len(text)} characters; expected {MAX_LETTERS} at most"
            )
        try:
            terms = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{text!r}: a quotation mark is not closed") from error
        self.texts = [term.removeprefix(_TEXT) for term in terms if term.startswith(_TEXT)]
        self._conditions = [_parse(term) for term in terms]

    def __call__(self, files: BrowsedFiles, key: str = "") -> bool:
        """Return whether a sample with these parts and this key matches."""
        return all(condition(files, key) for condition in self._conditions)


def _parse(term: str) -> _Condition:
    has = _HAS.fullmatch(term)
    if has is not None and has[1] == "text":
        words = has[2].casefold()
        return lambda files, key: any(words in each.casefold() for each in texts_of(files, key))
    if has is not None:
        expected, part = has[1] == "has", has[2]
        return lambda files, _: (find_part(files, part) is not None) == expected
    match = _COMPARISON.fullmatch(term)
    if match is None:
        raise ConfigError(f"{term!r}: expected {_SYNTAX}")
    left, sign, expected = match.groups()
    if not expected and sign not in ("=", "==", "!="):
        raise ConfigError(f"{term!r}: expected a value after {sign}")
    steps = left.split(".")
    size = _size(expected) if steps[-1] == "size" else None
    return lambda files, _: _fulfils(files, steps, _OPERATORS[sign], expected, size)


def _fulfils(
    files: BrowsedFiles,
    steps: list[str],
    compare: Callable[[Any, Any], bool],
    expected: str,
    size: float | None,
) -> bool:
    """Compare what `steps` refer to: the longest matching part name, and a value in that part."""
    for end in range(len(steps) - 1, 0, -1):
        name = find_part(files, ".".join(steps[:end]))
        if name is None:
            continue
        if size is not None and end == len(steps) - 1:
            return compare(files[name].size, size)
        if part_kind(part_extension(name, files[name])) in FACTS:
            return _compare_fact(name, files[name], steps[end:], compare, expected)
        return _compare_field(files[name], steps[end:], compare, expected)
    return False


def _compare_fact(
    name: str,
    file: BrowsedFile,
    path: list[str],
    compare: Callable[[Any, Any], bool],
    expected: str,
) -> bool:
    kind, fact = part_kind(part_extension(name, file)), ".".join(path)
    if kind == "text" and fact == "text":
        text = file.read()[:MAX_COMPARED_BYTES].decode("utf-8", "replace").strip()
        return _compare(text, compare, expected)
    number = _number(name, kind, fact, expected)
    try:
        value = part_facts(name, file).get(fact)
    except DecodeError:
        return False  # damaged parts have no size
    return value is not None and compare(value, number)


def _number(name: str, kind: PartKind, fact: str, expected: str) -> float:
    """Return the number that a fact about a part is compared with.

    Raises:
        ConfigError: If parts of this kind have no such fact, or the value is not a number: nothing
            would match, and the reason would not be obvious.
    """
    if fact not in FACTS[kind]:
        names = ["size", *FACTS[kind], *(["text"] if kind == "text" else [])]
        raise ConfigError(f"{name}.{fact}: conditions on {name} can use {', '.join(names)}")
    try:
        return float(expected)
    except ValueError as error:
        raise ConfigError(f"{name}.{fact}: expected a number, not {expected!r}") from error


def texts_of(files: BrowsedFiles, key: str) -> Iterator[str]:
    """Yield the texts of a sample: its key, its text parts, the keys and texts in its JSON."""
    yield key
    for name, file in files.items():
        yield from _texts(name, file)


def _texts(name: str, file: BrowsedFile) -> Iterator[str]:
    """Yield the text of a part, or the keys and texts in a JSON part; none if it is too large."""
    kind = part_kind(part_extension(name))
    if kind not in ("text", "value") or name.endswith(".gz") or file.size > MAX_MEASURED_TEXT:
        return
    if kind == "text":
        yield file.read().decode("utf-8", "replace")
        return
    with suppress(EnergonError, ValueError):  # a part that is not JSON has no texts
        values = [decode_json(file.read())]
        while values:
            value = values.pop()
            if isinstance(value, dict):
                values += [*value, *value.values()]
            elif isinstance(value, list):
                values += value
            elif isinstance(value, str):
                yield value


def _size(text: str) -> float:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r}: expected a size such as 500, 20kB or 1.5MB")
    return float(match[1]) * _UNITS[match[2]]


def _compare_field(
    file: BrowsedFile, path: list[str], compare: Callable[[Any, Any], bool], expected: str
) -> bool:
    try:
        value = decode_json(file.read())
    except (EnergonError, ValueError):
        return False  # a part that is not JSON has no fields
    if path[0] == "value" and not isinstance(value, dict | list):
        path = path[1:]
    for number, step in enumerate(path):
        if step == LENGTH and number == len(path) - 1 and isinstance(value, str):
            value = len(value)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            return False
    return _compare(value, compare, expected)


def _compare(value: Any, compare: Callable[[Any, Any], bool], expected: str) -> bool:
    if isinstance(value, bool) or value is None:
        return compare({True: "true", False: "false", None: "null"}[value], expected)
    if isinstance(value, int | float):
        try:
            return compare(value, float(expected))
        except ValueError:
            return compare is operator.ne
    return compare(str(value), expected)
