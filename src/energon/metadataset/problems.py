"""Word the problems of a document: all at once, with file, line and column.

Validation reports the path of a problem in the document (`("splits", "train", "<blend>", "blend",
0)`) and the rule it breaks; the marks of the loaded YAML locate it in the file. Steps in angle
brackets name the kind of a node and are not part of the document.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from energon.formats.meta.yaml import where
from energon.messages import nearest
from energon.metadataset.grammar import NODE_KINDS, Misfit
from energon.metadataset.variables import Unresolved

Model = type[BaseModel]
DocumentPath = tuple[int | str, ...]

MAX_WORDED = 1000
"""Problems in words."""

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_type": "a whole number",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a mapping",
    "string_type": "text (in quotes, if it looks like something else)",
    "union_tag_not_found": f"a mapping with one of {', '.join(NODE_KINDS)}",
}


_BELONGS = {
    **dict.fromkeys(
        ("schedule_unit", "stopping_strategy", "temperature", "unit"),
        "belongs next to `blend`, for all of its entries",
    ),
    "joiner": "belongs next to `join`",
    "max_epochs": "is for entries of a `blend`",
    "nonmatch": "is for members of a `join`",
    "repetitions": "is for entries of a `blend_epochized`; those of a `blend` have a weight",
    "tokens": "is for entries of a `blend`",
    "vars": "belongs next to `splits`, at the top of the document",
    "weight": "is for entries of a `blend`; those of a `blend_epochized` have repetitions",
}
"""Where keys belong that are often misplaced."""

_EXAMPLES = {
    "joiner": "{__module__: my_package, __class__: MySample}",
    "sample_type": "{__module__: megatron.energon, __class__: CaptioningSample}",
}
"""Values of keys that are rarely guessed right."""


def explain(
    exc: ValidationError | None, model: Model, raw: Any, besides: Collection[str] = ()
) -> str:
    """Return one line for each problem of the document `raw`, in the order of the file.

    Args:
        exc: The violations of the grammar, if any.
        model: The grammar.
        raw: The document.
        besides: Its other problems, each with its place.
    """
    problems = [*besides, *([] if exc is None else _problems(exc, model, raw))]
    return "\n".join(sorted(problems, key=_position))


def _problems(exc: ValidationError, model: Model, raw: Any) -> Iterator[str]:
    errors: list[Any] = [*exc.errors(include_url=False)][:MAX_WORDED]
    unknown = {error["loc"] for error in errors if error["type"] == "extra_forbidden"}
    # A misspelled key is also reported as missing; one message is enough.
    respelled = {
        (*address[:-1], close)
        for address in unknown
        if (close := nearest(address[-1], _keys(_model_at(model, address[:-1]))))
    }
    for error in errors:
        if isinstance(misfit := error.get("ctx", {}).get("error"), Misfit):
            yield from misfit.problems
        elif _is_news(error, respelled):
            yield f"{_place(error['loc'], raw)}: {_describe(error, model, raw)}"
    if exc.error_count() > MAX_WORDED:
        yield f"{where(raw)}: has {exc.error_count()} problems, of which these are the first"


def _is_news(error: Any, respelled: Collection[DocumentPath]) -> bool:
    """Return whether no other problem explains an error."""
    if error["type"] == "missing":
        return error["loc"] not in respelled
    value = error["input"]
    inside = value.values() if isinstance(value, Mapping) else value
    unresolved = isinstance(value, Unresolved) or (
        isinstance(value, Mapping | list) and any(isinstance(each, Unresolved) for each in inside)
    )
    return not unresolved or error["type"] == "extra_forbidden"


def _describe(error: Any, model: Model, raw: Any) -> str:
    address, kind = error["loc"], error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(address, model, raw)
    if kind == "missing":
        return _missing_key(address, raw)
    subject = f"{_path(address)} is {_described(error['input'])}"
    if kind == "value_error":
        return f"{subject}: {error['ctx']['error']}"
    expected = _EXPECTED.get(kind, error["msg"]).format(**error.get("ctx", {}))
    choices = re.findall("'([^']*)'", expected) if kind == "literal_error" else []
    if len(choices) > 1:
        expected += _proposal(str(error["input"]), choices)
    if address and address[-1] in _EXAMPLES:
        expected += f" like {_EXAMPLES[address[-1]]}"
    return f"{subject}, expected {expected}"


def _proposal(name: str, names: Collection[str]) -> str:
    close = nearest(name, names)
    return f"; did you mean {close!r}?" if close else ""


def _unknown_key(address: DocumentPath, model: Model, raw: Any) -> str:
    key, keys = str(address[-1]), _keys(_model_at(model, address[:-1]))
    own = [kind for kind in NODE_KINDS if kind in keys]
    if key in NODE_KINDS and own:
        kinds = ", ".join(NODE_KINDS)
        return f"{_path(address[:-1])} has both {own[0]!r} and {key!r}; expected one of {kinds}"
    if key in NODE_KINDS and "datasets" in keys:
        return f"{key!r} is not part of version 1; set `__class__: MetadatasetV2`"
    if key in _BELONGS:
        return f"unknown key {key!r} in {_path(address[:-1])}; it {_BELONGS[key]}"
    close = nearest(key, keys)
    proposal = f", did you mean {close!r}?" if close else "."
    return f"unknown key {key!r} in {_path(address[:-1])}{proposal} Known are {', '.join(keys)}"


def _missing_key(address: DocumentPath, raw: Any) -> str:
    key, parent = address[-1], _at(address[:-1], raw)
    if key == "path" and "<path>" in address[-2:-1]:
        return f"{_path(address[:-1])} has none of {', '.join(NODE_KINDS)}"
    example = f", like `{key}: {_EXAMPLES[key]}`" if key in _EXAMPLES else ""
    return f"{_path(address[:-1])} has no {key!r}{example}" + ("" if parent else "; it is empty")


def _described(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    if len(text) <= 60:
        return text
    return "a list" if isinstance(value, list) else f"{text[:57]}..."


def _steps(address: DocumentPath) -> Iterator[int | str]:
    """Yield the steps that lead through the document itself."""
    for step in address:
        if not (isinstance(step, str) and step.startswith("<")) and step != "[key]":
            yield step


def _path(address: DocumentPath) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in _steps(address))
    return path.removeprefix(".") or "the document"


def _at(address: DocumentPath, raw: Any) -> Any:
    for step in _steps(address):
        raw = raw[_key(raw, step)]
    return raw


def _key(parent: Any, step: int | str) -> Any:
    """Return the key that a step stands for; keys that are not text appear as their `str`."""
    if not isinstance(parent, Mapping) or step in parent:
        return step
    return next((key for key in parent if str(key) == step), step)


def _place(address: DocumentPath, raw: Any) -> str:
    """Return the place of the key or item at `address`, or else of its parent."""
    steps = [*_steps(address)]
    if not steps:
        return where(raw)
    parent = _at(tuple(steps[:-1]), raw)
    key = _key(parent, steps[-1])
    present = not isinstance(parent, Mapping) or key in parent
    return where(parent, key) if present else where(parent)


def _position(problem: str) -> tuple[int, ...]:
    numbers = problem.partition(": ")[0].split(":")[-2:]
    return tuple(int(number) for number in numbers if number.isdigit())


def _model_at(model: Model, address: DocumentPath) -> Model:
    """Return the model of the mapping at `address`."""
    models = [model]
    for step in address:
        if isinstance(step, str) and step.strip("<>") in NODE_KINDS and step.startswith("<"):
            models = [model for model in models if step.strip("<>") in model.model_fields]
        elif field := _field(models[0], step):
            models = [*_models_in(field)]
    return models[0]


def _field(model: Model, key: int | str) -> Any:
    for name, field in model.model_fields.items():
        if key == (field.alias or name):
            return field.annotation
    return None


def _models_in(annotation: Any) -> Iterator[Model]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _keys(model: Model) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
