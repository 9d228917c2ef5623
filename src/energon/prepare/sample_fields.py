"""What the shards of a folder contain, and which part of a sample each field may come from.

Samples are shown as tables of their parts and fields.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, EnergonError, FieldAccessError
from energon.formats.tar.headers import split_name
from energon.formats.tar.scan import iter_members
from energon.io.epath import AnyPath, open_file
from energon.prepare.files import reporting
from energon.samples.crude import find_part
from energon.samples.field_map import FieldMap

MAX_INSPECTED_BYTES = 64 << 20
"""Larger parts are mentioned, but not read."""
SPREAD_SHARDS = 4


@dataclass(frozen=True)
class SeenSample:
    """A sample to show.

    Args:
        shard: Path of the shard below the dataset.
        key: Its key.
        sizes: Bytes of its parts.
        raw: Contents of parts that are not too large.
    """

    shard: str
    key: str
    sizes: Mapping[str, int]
    raw: Mapping[str, bytes]

    @cached_property
    def parts(self) -> dict[str, Any]:
        """The parts that could be decoded."""
        return {
            part: value
            for part, value in self.decoded.items()
            if not isinstance(value, EnergonError)
        }

    @cached_property
    def decoded(self) -> dict[str, Any]:
        """The decoded parts; errors stand for those that could not be decoded."""
        decoder = SampleDecoder(image_decode="rgb8")
        values: dict[str, Any] = {}
        for part, data in self.raw.items():
            try:
                values[part] = decoder.decode(f"{self.key}.{part}", data)
            except EnergonError as error:
                values[part] = error
        return values


def first_samples(dataset: AnyPath, shards: Sequence[str], count: int) -> list[SeenSample]:
    """Return the first samples of the first shard that has any, and one each of a few others.

    Raises:
        FormatError: If a shard is damaged.
    """
    samples: list[SeenSample] = []
    rest = list(shards)
    while rest and not samples:
        samples = list(islice(_samples(dataset, rest.pop(0)), count))
    chosen = np.unique(np.linspace(0, len(rest) - 1, min(SPREAD_SHARDS, len(rest))).astype(int))
    for number in chosen.tolist():
        samples += islice(_samples(dataset, rest[number]), 1)
    return samples


def part_names(samples: Sequence[SeenSample]) -> list[str]:
    """Return the names of all parts, in the order of their first occurrence."""
    parts: dict[str, str] = {}
    for sample in samples:
        for part in sample.sizes:
            parts.setdefault(part.lower(), part)
    return list(parts.values())


def _samples(dataset: AnyPath, shard: str) -> Iterator[SeenSample]:
    """Yield the samples of a shard, reading no more of it than requested."""
    with reporting(str(dataset / shard)), open_file(dataset / shard) as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return bytes(file.read(size))

        size = file.seek(0, os.SEEK_END)
        key: str | None = None
        sizes: dict[str, int] = {}
        raw: dict[str, bytes] = {}
        for member in iter_members(read, size, origin=str(dataset / shard), strict=False):
            name = split_name(member.name)
            if name is None:
                continue
            if name[0] != key:
                if key is not None:
                    yield SeenSample(shard, key, sizes, raw)
                key, sizes, raw = name[0], {}, {}
            sizes[name[1]] = member.size
            if member.size <= MAX_INSPECTED_BYTES:
                raw[name[1]] = read(member.offset, member.size)
        if key is not None:
            yield SeenSample(shard, key, sizes, raw)


MAX_FIELD_DEPTH = 3
_TEXT_FIELDS = ("text", "caption", "context", "label_name")


def own_fields(sample_type: type) -> list[Field[Any]]:
    """Return the fields of a sample type that parts are mapped to."""
    return [field for field in fields(sample_type) if not field.name.startswith("__")]


def is_required(field: Field[Any]) -> bool:
    """Return whether a field has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def known_ways(samples: Sequence[SeenSample]) -> dict[str, Any]:
    """Return all accesses to values in samples, such as `jpg` or `json[boxes][0]`, and a value."""
    ways: dict[str, Any] = dict.fromkeys(part_names(samples))
    for sample in samples:
        for part, value in sample.parts.items():
            for way, content in _ways(part, value, MAX_FIELD_DEPTH):
                if ways.get(way) is None:
                    ways[way] = content
    return ways


def suggest(field: str, samples: Sequence[SeenSample]) -> str | None:
    """Return the access for a field that its name and the samples suggest; None if there is none.

    If only some samples have a part, as with images in several formats, all of them are named.
    """
    ways = known_ways(samples)
    named = [way for way in ways if way == field or way.endswith(f"[{field}]")]
    kinds = {
        "image": lambda way, value: "[" not in way and _is_image(value),
        "video": lambda way, value: hasattr(value, "get_metadata"),
        "audio": lambda way, value: hasattr(value, "get_metadata"),
        "label": lambda way, value: isinstance(value, int) and not isinstance(value, bool),
        **dict.fromkeys(_TEXT_FIELDS, lambda way, value: isinstance(value, str)),
    }
    fits = kinds.get(field)
    likely = [way for way, value in ways.items() if fits is not None and fits(way, value)]
    chosen: list[str] = []
    for way in (*named, *likely):
        missing = [sample for sample in samples if not _leads(chosen, sample)]
        if any(_leads([way], sample) for sample in missing):
            chosen.append(way)
    return ",".join(chosen) or None


def check_field(field: str, text: str, samples: Sequence[SeenSample]) -> list[Any]:
    """Return the value of a field in each sample.

    Raises:
        ConfigError: If the text is invalid, or refers to nothing in a sample.
    """
    field_map = FieldMap.parse({field: text})
    names = part_names(samples)
    unknown = [part for part in sorted(field_map.parts) if find_part(names, part) is None]
    if unknown:
        raise ConfigError(f"no sample has a part {unknown[0]!r}; there are {', '.join(names)}")
    checked = []
    for sample in samples:
        broken = [part for part in field_map.parts if find_part(sample.sizes, part)]
        if broken and not any(find_part(sample.parts, part) for part in broken):
            continue  # a part that cannot be decoded is not a mistake in the map
        try:
            values = field_map.apply({"__key__": sample.key, **sample.parts})
        except FieldAccessError as error:
            raise ConfigError(str(error)) from error
        checked.append(values[field])
    return checked


def check_field_map(
    sample_type: type, mapping: Mapping[str, str], samples: Sequence[SeenSample]
) -> None:
    """Check that a field map fits a sample type and real samples.

    Raises:
        ConfigError: If it does not.
    """
    FieldMap.parse(mapping).check(sample_type)
    for field, text in mapping.items():
        check_field(field, text, samples)


def _ways(way: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    yield way, value
    if not depth:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str) and key and not set(key) & set("[],"):
                yield from _ways(f"{way}[{key}]", item, depth - 1)
    elif isinstance(value, list) and value:
        yield from _ways(f"{way}[0]", value[0], depth - 1)


def _leads(ways: Sequence[str], sample: SeenSample) -> bool:
    if not ways:
        return False
    try:
        FieldMap.parse({"field": ",".join(ways)}).apply({"__key__": sample.key, **sample.parts})
    except FieldAccessError:
        return False
    return True


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3


_TEMPLATE = '''"""Makes a {type} from the parts of a sample.

Runs only if the program allows code of datasets: allow=("code",), or ENERGON_ALLOW=code.
"""


def sample_loader(raw: dict) -> dict:
    """Return the fields of the sample. `raw` has its parts, decoded: {parts}."""
    return {{
        "__key__": raw["__key__"],
{fields}
    }}


def part_filter(part: str) -> bool:
    """Return whether to read a part."""
    return part in {needed!r}
'''


def loader_template(sample_type: type, samples: Sequence[SeenSample]) -> str:
    """Return code to start from: the most likely value of each field, or None if it is unclear."""
    lines = []
    needed: set[str] = set()
    for field in own_fields(sample_type):
        way = suggest(field.name, samples)
        if way is not None:
            access = FieldMap.parse({field.name: way}).accesses[field.name][0]
            needed.add(access.part)
            value = "raw" + "".join(f"[{_step(step)}]" for step in (access.part, *access.steps))
            lines.append(f"        {field.name!r}: {value},")
        elif is_required(field):
            lines.append(f"        {field.name!r}: None,  # fill in")
    names = part_names(samples)
    return _TEMPLATE.format(
        type=sample_type.__name__,
        parts=", ".join(ascii(name) for name in names),
        fields="\n".join(lines).replace("'", '"'),
        needed=tuple(name for name in names if name in needed or not needed),
    )


def _step(step: str) -> str:
    return step if step.lstrip("-").isdigit() else repr(step)
