"""Helper functions with which programs build their own stages."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce, wraps
from typing import Any

from energon.webdataset import security
from energon.webdataset.stages.batching import collate_column
from energon.webdataset.stages.fields import alternatives


def generator(make_stage: Callable[..., Any], source: str = "data") -> Callable[..., Iterator[Any]]:
    """Return a generator function that runs a stage on any iterable.

    Args:
        make_stage: Creates the stage.
        source: Name of the parameter for the iterable.

    Example:
        >>> from energon.webdataset.filters import _batched
        >>> list(_batched([1, 2, 3], 2, collation_fn=None))
        [[1, 2], [3]]
    """
    import inspect

    @wraps(make_stage)
    def run(*args: Any, **kw: Any) -> Iterator[Any]:
        data, *rest = args if args else (kw.pop(source),)
        yield from make_stage(*rest, **kw)(data)

    name = f"_{make_stage.__name__}"
    given = inspect.signature(make_stage).parameters.values()
    data = inspect.Parameter(source, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"Yield what `{make_stage.__name__}` makes of any iterable."
    run.__signature__ = inspect.Signature([data, *given])  # type: ignore[attr-defined]
    del run.__wrapped__
    return run


def compose2(f: Callable[[Any], Any], g: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that applies `f`, and then `g`."""
    return lambda x: g(f(x))


def compose(*args: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that applies all functions, the first one first."""
    return reduce(compose2, args)


def pipeline(source: Any, *args: Callable[[Any], Any]) -> Any:
    """Return a source with filters applied, the first one first."""
    return compose(*args)(source) if args else source


def parse_field_spec(fields: str | Iterable[str]) -> list[list[str]]:
    """Return the alternatives of each field: "jpg;png cls" are two fields."""
    names = fields.split() if isinstance(fields, str) else fields
    return [list(alternatives(name)) for name in names]


def pick(buf: list[Any], rng: random.Random) -> Any:
    """Remove a random item from a list; the last one fills the gap."""
    place = rng.randint(0, len(buf) - 1)
    buf[place], buf[-1] = buf[-1], buf[place]
    return buf.pop()


def tuple2dict(l: Any) -> Any:  # noqa: E741
    """Return a sequence as a dict by number; a dict as it is."""
    return l if isinstance(l, dict) else dict(enumerate(l))


def dict2tuple(d: Mapping[int, Any]) -> tuple[Any, ...]:
    """Return a dict by number as a tuple."""
    return tuple(d[number] for number in range(max(d) + 1))


def combine_values(
    b: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True
) -> Any:
    """Return a column of a batch: numbers as an array, arrays and tensors stacked, or a list.

    Raises:
        SampleError: If arrays or tensors differ in their shapes.
    """
    return collate_column(list(b), combine_tensors, combine_scalars)


def decode_bin(stream: Any) -> bytes:
    """Return the bytes of a stream."""
    data: bytes = stream.read()
    return data


def decode_text(stream: Any) -> str:
    """Return the text of a stream."""
    return str(stream.read(), "utf-8")


def decode_pickle(stream: Any) -> Any:
    """Return the object that is pickled in a stream, if that is allowed.

    Raises:
        SecurityError: If it is not.
    """
    security.require(
        "pickle",
        security.resolve(),
        "the field is pickled, and unpickling runs any code that it contains",
    )
    return pickle.load(stream)


default_decoders: list[tuple[str, Callable[[Any], Any]]] = [
    ("*.bin", decode_bin),
    ("*.txt", decode_text),
    ("*.pyd", decode_pickle),
]
"""The default decoders of `xdecode`: pairs of a pattern and a function."""


def find_decoder(decoders: Sequence[tuple[str, Any]], path: str) -> Any:
    """Return the function that decodes a field, that of the last matching pattern, or None."""
    name = path.rpartition("/")[2]
    if name.startswith("__"):
        return lambda value: value
    lowered = name.lower()
    for pattern, function in reversed(decoders):
        if fnmatchcase(lowered, pattern) or fnmatchcase("." + lowered, pattern):
            return function
    return None
