"""Field maps: what could be meant, what can be completed, and whether it fits real samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import numpy as np

from energon.errors import ConfigError, FieldAccessError
from energon.prepare.assistant.samples import SeenSample, part_names
from energon.samples.crude import find_part
from energon.samples.field_map import FieldMap

MAX_DEPTH = 3
_TEXT_FIELDS = ("text", "caption", "context", "label_name")


def own_fields(sample_type: type) -> list[Field[Any]]:
    """Return the fields of a sample type that parts are mapped to."""
    return [field for field in fields(sample_type) if not field.name.startswith("__")]


def is_required(field: Field[Any]) -> bool:
    """Return whether a field has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def known_ways(samples: Sequence[SeenSample]) -> dict[str, Any]:
    """Return all ways to values in some samples, as `jpg` and `json[boxes][0]`, with a value."""
    ways: dict[str, Any] = dict.fromkeys(part_names(samples))
    for sample in samples:
        for part, value in sample.parts.items():
            for way, found in _ways(part, value, MAX_DEPTH):
                if ways.get(way) is None:
                    ways[way] = found
    return ways


def suggest(field: str, samples: Sequence[SeenSample]) -> str | None:
    """Return the way to a field that its name and the samples make likely; None for no idea.

    Of parts that not all samples have, as images of several formats, all are named.
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
    """Return what a field becomes in each sample.

    Raises:
        ConfigError: If the text makes no sense, or leads nowhere in a sample.
    """
    field_map = FieldMap.parse({field: text})
    names = part_names(samples)
    unknown = [part for part in sorted(field_map.parts) if find_part(names, part) is None]
    if unknown:
        raise ConfigError(f"no sample has a part {unknown[0]!r}; there are {', '.join(names)}")
    found = []
    for sample in samples:
        broken = [part for part in field_map.parts if find_part(sample.sizes, part)]
        if broken and not any(find_part(sample.parts, part) for part in broken):
            continue  # that it cannot be decoded is no fault of the map
        try:
            values = field_map.apply({"__key__": sample.key, **sample.parts})
        except FieldAccessError as error:
            raise ConfigError(str(error)) from error
        found.append(values[field])
    return found


def check_field_map(
    sample_type: type, mapping: Mapping[str, str], samples: Sequence[SeenSample]
) -> None:
    """Make sure that a field map fits a sample type and real samples.

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
