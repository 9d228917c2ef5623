"""The template of `sample_loader.py`, code beside a dataset that makes its samples."""

from __future__ import annotations

from collections.abc import Sequence

from energon.prepare.assistant.fields import is_required, own_fields, suggest
from energon.prepare.assistant.samples import SeenSample, part_names
from energon.samples.field_map import FieldMap

_TEMPLATE = '''"""Makes a {type} of the parts of a sample.

Runs only where the program allows code of datasets: allow=("code",), or ENERGON_ALLOW=code.
"""


def sample_loader(raw: dict) -> dict:
    """Return the fields of the sample. `raw` has its parts, decoded: {parts}."""
    return {{
        "__key__": raw["__key__"],
{fields}
    }}


def part_filter(part: str) -> bool:
    """Return whether a part is read at all."""
    return part in {wanted!r}
'''


def loader_template(sample_type: type, samples: Sequence[SeenSample]) -> str:
    """Return code to start from: what each field most likely is, and None where that is unclear."""
    lines = []
    wanted: set[str] = set()
    for field in own_fields(sample_type):
        way = suggest(field.name, samples)
        if way is not None:
            access = FieldMap.parse({field.name: way}).accesses[field.name][0]
            wanted.add(access.part)
            value = "raw" + "".join(f"[{_step(step)}]" for step in (access.part, *access.steps))
            lines.append(f"        {field.name!r}: {value},")
        elif is_required(field):
            lines.append(f"        {field.name!r}: None,  # say here what it is")
    names = part_names(samples)
    return _TEMPLATE.format(
        type=sample_type.__name__,
        parts=", ".join(ascii(name) for name in names),
        fields="\n".join(lines).replace("'", '"'),
        wanted=tuple(name for name in names if name in wanted or not wanted),
    )


def _step(step: str) -> str:
    return step if step.lstrip("-").isdigit() else repr(step)
