"""Map the parts of a sample to the fields of a sample type."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import Any

from energon.errors import ConfigError, FieldAccessError
from energon.messages import nearest, type_in_words
from energon.samples.crude import find_part

_ACCESS = re.compile(r"(?P<part>[^\[\],]+)(?P<steps>(?:\[[^\[\]]+\])*)")
MAX_NAMED_KEYS = 12
"""How many keys messages list."""
_STEP = re.compile(r"\[([^\[\]]+)\]")


@dataclass(frozen=True)
class Access:
    """A path to a value: a part, and keys or indices within it. Written `json[boxes][0]`."""

    part: str
    steps: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.part + "".join(f"[{step}]" for step in self.steps)

    def part_in(self, parts: Mapping[str, Any]) -> str:
        """Return the name of its part in a sample, which may differ in case.

        Raises:
            KeyError: If the sample has no such part.
        """
        part = self.part if self.part in parts else find_part(parts, self.part)
        if part is None:
            raise KeyError(self.part)
        return part

    def of(self, parts: Mapping[str, Any]) -> Any:
        """Return the value.

        Raises:
            LookupError: If there is no such value.
        """
        value = parts[self.part_in(parts)]
        for step in self.steps:
            value = _follow(value, step)
        return value

    def end(self, parts: Mapping[str, Any]) -> str:
        """Return in words where the path ends within an existing part."""
        part = self.part_in(parts)
        value, way = parts[part], part
        for step in self.steps:
            try:
                value = _follow(value, step)
            except LookupError:
                return f"{way} {_holds(value)}, no [{step}]"
            way += f"[{step}]"
        return f"{way} is there"


@dataclass(frozen=True)
class FieldMap:
    """For each field, paths to its value; the first one that exists counts."""

    accesses: Mapping[str, tuple[Access, ...]]

    @classmethod
    def parse(cls, mapping: Mapping[str, str]) -> FieldMap:
        """Parse a map such as `{"image": "jpg,png", "caption": "json[text]"}`.

        Raises:
            ConfigError: If it is malformed.
        """
        return cls({name: _parse(name, text) for name, text in mapping.items()})

    @property
    def parts(self) -> frozenset[str]:
        """All parts that any field may need."""
        return frozenset(access.part for ways in self.accesses.values() for access in ways)

    def check(self, sample_type: type) -> None:
        """Check the fields against those of `sample_type`.

        Raises:
            ConfigError: If it lacks a field, or a field without a default is not mapped.
        """
        if not is_dataclass(sample_type):
            return
        own = [field for field in fields(sample_type) if not field.name.startswith("__")]
        names = [field.name for field in own]
        for name in self.accesses:
            if name not in names:
                near = nearest(name, names)
                hint = f"did you mean {near!r}? " if near else ""
                raise ConfigError(
                    f"field_map: {sample_type.__name__} has no field {name!r}; {hint}its fields "
                    f"are {', '.join(names)}"
                )
        for field in own:
            required = field.default is MISSING and field.default_factory is MISSING
            if required and field.name not in self.accesses:
                raise ConfigError(
                    f"field_map: {sample_type.__name__} needs the field {field.name!r}, which is "
                    f'not mapped; add it, as in {{"{field.name}": "PART"}}'
                )

    def unmapped(self, names: Collection[str]) -> list[str]:
        """Return the fields that are mapped to none of these parts."""
        lowered = {name.lower() for name in names}
        return [
            field
            for field, ways in self.accesses.items()
            if not any(access.part.lower() in lowered for access in ways)
        ]

    def check_parts(self, names: Collection[str], *, origin: str) -> None:
        """Check that each field is mapped to a part that some sample has.

        Args:
            names: The names of the parts of all samples.
            origin: The name of the dataset in messages.

        Raises:
            ConfigError: If no sample has a part for a field; the message lists the parts.
        """
        unmapped = self.unmapped(names)
        if not unmapped:
            return
        field, ways = unmapped[0], self.accesses[unmapped[0]]
        parts = sorted({name.lower(): name for name in names}.values())
        near = [
            close
            for access in ways
            if (close := nearest(access.part.lower(), map(str.lower, parts)))
        ]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if not near and any(name.lower().endswith("json") for name in parts):
            hint = "; a value in a JSON part is written json[KEY]"
        expected = ", ".join(dict.fromkeys(access.part for access in ways))
        raise ConfigError(
            f"{origin}: the field_map maps {field!r} to {', '.join(map(str, ways))}, but no sample "
            f"has a part {expected}; there are {', '.join(parts) or 'none'}{hint}"
        )

    def apply(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all fields.

        Raises:
            FieldAccessError: If a field has no value.
        """
        return {name: _resolve(name, ways, parts) for name, ways in self.accesses.items()}

    def maker(
        self, sample_type: Callable[..., Any], decoder: Callable[[Any], Any] | None = None
    ) -> SampleMaker:
        """Return a function that makes a `sample_type` from the parts of a sample.

        It raises FieldAccessError if a field has no value.

        Args:
            sample_type: The type.
            decoder: Decodes the parts of a sample first; None leaves them as they are.
        """
        make = maker_of(self.apply, sample_type)
        names = self._whole_parts()
        if names is not None:
            make = _compile_maker(names)(sample_type, make)
        return decoding_first(make, decoder)

    def decoding_maker(
        self,
        sample_type: Callable[..., Any],
        decoder_of: DecoderOf,
        *,
        entries: int,
        make: SampleMaker,
    ) -> SampleMaker:
        """Return a function that does the same as a maker with a decoder, part by part if possible.

        Args:
            sample_type: The type.
            decoder_of: Returns what the decoder does to parts of some name.
            entries: How many entries a sample has besides its parts.
            make: The maker.
        """
        names = self._whole_parts()
        if names is None:
            return make
        decoders = [decoder_of(part) for part in dict.fromkeys(part for _, part in names)]
        if None in decoders:
            return make
        return _compile_maker(names, entries + len(decoders))(sample_type, make, *decoders)

    def _whole_parts(self) -> tuple[tuple[str, str], ...] | None:
        """Return the fields, and the part that is the first choice for each.

        None if some field is only a piece of a part, or cannot be an argument.
        """
        ways = tuple((name, ways[0]) for name, ways in self.accesses.items())
        if any(way.steps or iskeyword(name) or not name.isidentifier() for name, way in ways):
            return None
        return tuple((name, way.part) for name, way in ways)


DecoderOf = Callable[[str], Callable[[bytes], Any] | None]
"""Returns the decoder of the bytes of a part by its name; None if it needs more than these."""
SampleMaker = Callable[..., Any]
"""`make(parts, raw)` makes a sample of parts, and of the entries of `KNOWN_NAMES` in `raw`; without
`raw`, these are in `parts`, too."""
KNOWN_NAMES = ("__key__", "__restore_key__", "__subflavors__", "__sources__")
"""What a sample takes over from the crude one."""


def maker_of(fields_of: Callable[[Any], dict[str, Any]], sample_type: Any) -> SampleMaker:
    """Return a maker of `sample_type` whose fields are what a function returns for the parts."""

    def make(parts: Any, raw: Any = None) -> Any:
        entries = parts if raw is None else raw
        return sample_type(**{name: entries[name] for name in KNOWN_NAMES} | fields_of(parts))

    return make


def decoding_first(make: SampleMaker, decoder: Callable[[Any], Any] | None) -> SampleMaker:
    """Return a maker that passes decoded parts to another one; None decodes nothing."""
    return make if decoder is None else lambda raw: make(decoder(raw), raw)


@lru_cache(maxsize=1024)
def _compile_maker(
    names: tuple[tuple[str, str], ...], entries: int | None = None
) -> Callable[..., SampleMaker]:
    """Compile a maker of samples whose fields are whole parts.

    Names of parts come from data, so they appear in the source as string literals only.

    Args:
        names: The fields, and the part of each.
        entries: How many entries a sample has if all of its parts are fields, which are then
            decoded. None leaves them as they are.

    Returns:
        A function of the sample type; of the maker to use for samples of other parts, or of parts
        that cannot be decoded; and of what decodes the bytes of each part.
    """
    numbers = {part: number for number, part in enumerate(dict.fromkeys(part for _, part in names))}
    entry_values = [f"{name}=raw[{name!r}]" for name in KNOWN_NAMES]
    values = ", ".join([*entry_values, *(f"{name}=p{numbers[part]}" for name, part in names)])
    lines = [f"            p{number} = parts[{part!r}]" for part, number in numbers.items()]
    failures, decoders, arguments = "LookupError", "", "parts, raw"
    if entries is not None:
        arguments = "parts"  # nothing is decoded yet
        failures, decoders = "Exception", "".join(f", d{n}" for n in numbers.values())
        lines += [
            f"            if len(parts) != {entries}:",
            "                return otherwise(parts)",
        ]
        for n in numbers.values():
            lines += [
                f"            if isinstance(p{n}, bytes):",
                f"                p{n} = d{n}(p{n})",
            ]
    source = "\n".join(
        [
            f"def bind(kind, otherwise{decoders}):",
            "    def make(parts, raw=None):",
            "        raw = raw or parts",
            "        try:",
            *lines,
            f"        except {failures}:",
            f"            return otherwise({arguments})",
            f"        return kind({values})",
            "    return make",
        ]
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["bind"]  # type: ignore[no-any-return]


def _resolve(name: str, ways: tuple[Access, ...], parts: Mapping[str, Any]) -> Any:
    for access in ways:
        try:
            return access.of(parts)
        except LookupError:
            continue
    ends = [access.end(parts) for access in ways if find_part(parts, access.part) is not None]
    if ends:
        problem = (
            f"field {name!r} is mapped to {', '.join(map(str, ways))}, but {' and '.join(ends)}"
        )
    else:
        expected = " or ".join(dict.fromkeys(repr(access.part) for access in ways))
        there = ", ".join(part for part in parts if not part.startswith("__"))
        problem = (
            f"no part {expected} for the field {name!r}: of the mapped parts the sample has "
            f"{f'only {there}' if there else 'none'}"
        )
    raise FieldAccessError(
        f"sample {parts.get('__key__')!r}: {problem}; correct the field_map, or exclude the sample"
    )


def _follow(value: Any, step: str) -> Any:
    if isinstance(value, list | tuple):
        if not step.lstrip("-").isdigit():
            raise LookupError(f"[{step}] of a list")
        return value[int(step)]
    if isinstance(value, dict):
        return value[step]
    raise LookupError(f"[{step}] of {type_in_words(value)}")


def _holds(value: Any) -> str:
    """Return in words what can be found in a value."""
    if isinstance(value, dict):
        keys = ", ".join(map(str, list(value)[:MAX_NAMED_KEYS]))
        more = ", …" if len(value) > MAX_NAMED_KEYS else ""
        return f"has only the keys {keys}{more}" if keys else "has no keys"
    if isinstance(value, list | tuple):
        return f"is a list of {len(value)}"
    return f"is of type {type(value).__name__}"


def _parse(name: str, text: str) -> tuple[Access, ...]:
    if not isinstance(text, str):
        raise ConfigError(f"field_map: {name!r} is mapped to {text!r}, expected a string")
    ways = []
    for way in text.split(","):
        match = _ACCESS.fullmatch(way.strip())
        if match is None:
            raise ConfigError(
                f"field_map: {name!r} is mapped to {text!r}; expected a part like `jpg`, or "
                "`json[key][0]`, or several separated by commas"
            )
        ways.append(Access(match["part"], tuple(_STEP.findall(match["steps"]))))
    return tuple(ways)
