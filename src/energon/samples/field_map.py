"""Map the parts of a sample to the fields of a sample type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from energon.errors import ConfigError, FieldAccessError

_ACCESS = re.compile(r"(?P<part>[^\[\],]+)(?P<steps>(?:\[[^\[\]]+\])*)")
_STEP = re.compile(r"\[([^\[\]]+)\]")


@dataclass(frozen=True)
class Access:
    """A way to a value: a part, and keys or indices below it. Written `json[boxes][0]`."""

    part: str
    steps: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.part + "".join(f"[{step}]" for step in self.steps)

    def of(self, parts: Mapping[str, Any]) -> Any:
        """Return the value.

        Raises:
            LookupError: If the way leads nowhere.
        """
        value = parts[self.part]
        for step in self.steps:
            if isinstance(value, list | tuple):
                value = value[int(step) if step.lstrip("-").isdigit() else _no_index(step)]
            elif isinstance(value, dict):
                value = value[step]
            else:
                raise LookupError(f"[{step}] of a {type(value).__name__}")
        return value


@dataclass(frozen=True)
class FieldMap:
    """For each field, ways to its value; the first that leads somewhere counts."""

    accesses: Mapping[str, tuple[Access, ...]]

    @classmethod
    def parse(cls, mapping: Mapping[str, str]) -> FieldMap:
        """Return the map that is written as in `{"image": "jpg,png", "caption": "json[text]"}`.

        Raises:
            ConfigError: If it is malformed.
        """
        return cls({name: _parse(name, text) for name, text in mapping.items()})

    @property
    def parts(self) -> frozenset[str]:
        """All parts that any field may need."""
        return frozenset(access.part for ways in self.accesses.values() for access in ways)

    def check(self, sample_type: type) -> None:
        """Make sure that the fields are those of `sample_type`.

        Raises:
            ConfigError: If it has no such field, or a field that has no default is missing.
        """
        if not is_dataclass(sample_type):
            return
        own = [field for field in fields(sample_type) if not field.name.startswith("__")]
        names = [field.name for field in own]
        for name in self.accesses:
            if name not in names:
                near = get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(
                    f"field_map: {sample_type.__name__} has no field {name!r}; {hint}its fields "
                    f"are {', '.join(names)}"
                )
        for field in own:
            required = field.default is MISSING and field.default_factory is MISSING
            if required and field.name not in self.accesses:
                raise ConfigError(
                    f"field_map: {sample_type.__name__} needs the field {field.name!r}, which is "
                    f"not mapped; mapped are {', '.join(self.accesses) or 'none'}"
                )

    def apply(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all fields.

        Raises:
            FieldAccessError: If no way leads to one of them.
        """
        return {name: _resolve(name, ways, parts) for name, ways in self.accesses.items()}


def _resolve(name: str, ways: tuple[Access, ...], parts: Mapping[str, Any]) -> Any:
    for access in ways:
        try:
            return access.of(parts)
        except LookupError:
            continue
    there = [part for part in parts if not part.startswith("__")]
    raise FieldAccessError(
        f"sample {parts.get('__key__')!r}: field {name!r} is mapped to "
        f"{', '.join(map(str, ways))}, but the sample has only {', '.join(there) or 'no parts'} "
        "(parts that are not mapped are not read); correct the field_map, or exclude the sample"
    )


def _parse(name: str, text: str) -> tuple[Access, ...]:
    if not isinstance(text, str):
        raise ConfigError(f"field_map: {name!r} is mapped to {text!r}, wanted is a text")
    ways = []
    for way in text.split(","):
        match = _ACCESS.fullmatch(way.strip())
        if match is None:
            raise ConfigError(
                f"field_map: {name!r} is mapped to {text!r}; wanted are a part like `jpg`, or "
                "`json[key][0]`, or several separated by commas"
            )
        ways.append(Access(match["part"], tuple(_STEP.findall(match["steps"]))))
    return tuple(ways)


def _no_index(step: str) -> int:
    raise LookupError(f"[{step}] of a list")
