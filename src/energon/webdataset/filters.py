"""The stages of pipelines, under the names by which programs use them.

Each function returns a stage. Stages are used in pipelines, or called with an iterable:
`shuffle(100)(samples)`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce, wraps
from typing import Any, TextIO

from energon.errors import ConfigError
from energon.webdataset import security
from energon.webdataset.autodecode import UNPICKLING, Decoder
from energon.webdataset.cache import Cached as Cached
from energon.webdataset.cache import LMDBCached as LMDBCached
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.pipeline import FilterFunction as FilterFunction
from energon.webdataset.pipeline import RestCurried as RestCurried
from energon.webdataset.pipeline import pipelinefilter as pipelinefilter
from energon.webdataset.running.worker_info import WorkerInfo
from energon.webdataset.stages.base import Context, Positioned, Stage, State
from energon.webdataset.stages.batching import (
    Batched,
    Collation,
    FlatMap,
    default_collation_fn,
    unbatch,
    unlist,
)
from energon.webdataset.stages.batching import combine_values as combine_values
from energon.webdataset.stages.mapping import (
    Apply,
    Associate,
    ExtractKeys,
    Map,
    MapDict,
    MapTuple,
    RandomSample,
    Rename,
    RenameKeys,
    Select,
    Slice,
    ToTuple,
    XDecode,
    alternatives,
    last_match,
)
from energon.webdataset.stages.mapping import getfirst as getfirst
from energon.webdataset.stages.shuffling import Shuffle
from energon.webdataset.stages.shuffling import detshuffle as detshuffle
from energon.webdataset.utils import identity
from energon.webdataset.utils import transform_with as transform_with


def decode(
    *args: Any,
    handler: Handler = reraise_exception,
    pre: Any = None,
    post: Any = None,
    only: Any = None,
    partial: bool = False,
    allow: Collection[str] = (),
) -> Stage:
    """Decode the fields of samples, see `Decoder`.

    Example:
        >>> next(iter(decode()([{"__key__": "a", "json": b"[1]", "cls": b"7"}])))
        {'__key__': 'a', 'json': [1], 'cls': 7}
    """
    decoder = Decoder(list(args), pre=pre, post=post, only=only, partial=partial, allow=allow)
    return Apply(decoder, handler)


def xdecode(*args: Any, must_decode: bool = True, defaults: Any = None, **kw: Any) -> Stage:
    """Decode fields by patterns for their names, with functions that read from a file.

    Args:
        args: Pairs of a pattern and a function, or False to leave such fields as they are.
        must_decode: Whether a field that matches no pattern is an error.
        defaults: Pairs that come before these; None for `default_decoders`.
        kw: `png=f` is short for `("*.png", f)`.

    Example:
        >>> read_upper = lambda stream: stream.read().decode().upper()
        >>> list(xdecode(("*.name", read_upper))([{"__key__": "a", "b.name": b"c"}]))
        [{'__key__': 'a', 'b.name': 'C'}]
    """
    first = default_decoders if defaults is None else defaults
    named = [(f"*.{name}", function) for name, function in kw.items()]
    return Apply(XDecode([*first, *args, *named], must_decode))


def map_dict(handler: Handler = reraise_exception, **kw: Callable[[Any], Any]) -> Stage:
    """Change fields, each by its own function.

    Example:
        >>> list(map_dict(cls=lambda cls: cls + 1)([{"__key__": "a", "cls": 1}]))
        [{'__key__': 'a', 'cls': 2}]
    """
    if not kw:
        raise ConfigError("map_dict needs a function for at least one field: map_dict(cls=f)")
    return Apply(MapDict(kw), handler)


def to_tuple(
    *args: Any,
    handler: Handler = reraise_exception,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
) -> Stage:
    """Make tuples of fields: `to_tuple("jpg;png", "json")` or `to_tuple("jpg;png json")`.

    Args:
        args: For each item of the tuple a name, or several separated by semicolons, the first of
            which that the sample has is used.
        handler: Called for errors.
        missing_is_error: Whether a missing field is an error; otherwise it becomes None.
        none_is_error: Whether a field that is None is an error; defaults to `missing_is_error`.

    Example:
        >>> list(to_tuple("jpg;png", "cls")([{"__key__": "a", "png": b"...", "cls": 1}]))
        [(b'...', 1)]
    """
    specs = args[0].split() if len(args) == 1 and isinstance(args[0], str) else args
    if not specs:
        raise ConfigError('to_tuple needs names of fields: to_tuple("jpg;png", "json")')
    groups = tuple(alternatives(each) for each in specs)
    strict = missing_is_error if none_is_error is None else none_is_error
    return Apply(ToTuple(groups, missing_is_error, strict), handler)


def map_tuple(*args: Any, handler: Handler = reraise_exception) -> Stage:
    """Change the items of tuples, each by its own function; None leaves one as it is.

    Example:
        >>> list(map_tuple(str, None)([(1, 2)]))
        [('1', 2)]
    """
    return Apply(MapTuple(args), handler)


def rename(handler: Handler = reraise_exception, keep: bool = True, **kw: str) -> Stage:
    """Rename fields: `rename(image="jpg;png")`.

    Args:
        handler: Called for errors.
        keep: Whether to keep fields that are not named, including `__key__`.
        kw: New names, each with the old ones, the first of which that exists is renamed.

    Example:
        >>> list(rename(image="jpg;png")([{"__key__": "a", "png": b"..."}]))
        [{'__key__': 'a', 'image': b'...'}]
    """
    return Apply(Rename({new: alternatives(old) for new, old in kw.items()}, keep), handler)


def rename_keys(
    *args: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    **kw: str,
) -> Stage:
    """Rename fields by patterns: `rename_keys(("image", "*.png"))`.

    Args:
        args: Pairs of a new name and a pattern for old ones; the last match wins.
        keep_unselected: Whether to keep fields that match no pattern.
        must_match: Whether a pattern that matches no field is an error.
        duplicate_is_error: Whether two fields with the same new name are an error; otherwise the
            last one wins.
        kw: `image="*.png"` is another way to write a pair.

    Example:
        >>> list(rename_keys(image="*.png")([{"__key__": "a", "left.png": b"..."}]))
        [{'image': b'...'}]
    """
    rules = (*args, *kw.items())
    return Apply(RenameKeys(tuple(rules), keep_unselected, must_match, duplicate_is_error))


def extract_keys(
    *args: str, duplicate_is_error: bool = True, ignore_missing: bool = False
) -> Stage:
    """Make tuples of the fields that match patterns: `extract_keys("*.png;*.jpg", "*.json")`.

    Args:
        args: For each item of the tuple a pattern, or several separated by semicolons.
        duplicate_is_error: Whether several matching fields are an error; otherwise the first is
            used.
        ignore_missing: Whether an item without a matching field is omitted from the tuple.

    Example:
        >>> list(extract_keys("*.png;*.jpg", "*.cls")([{"a.jpg": b"...", "a.cls": 1}]))
        [(b'...', 1)]
    """
    patterns = tuple(alternatives(each) for each in args)
    return Apply(ExtractKeys(patterns, duplicate_is_error, ignore_missing))


def associate(associator: Any, **kw: Any) -> Stage:
    """Add to each sample the fields that a dict has for its key, or a function returns for it.

    Example:
        >>> list(associate({"a": {"split": "train"}})([{"__key__": "a"}]))
        [{'__key__': 'a', 'split': 'train'}]
    """
    return Apply(Associate(associator))


@dataclass(frozen=True)
class Watch(Stage):
    """Passes on all items, and calls a function with the number of each, the item, and the worker.

    Args:
        name: Name of the stage in saved states.
        look: The function.
    """

    name: str
    look: Callable[[int, Any, WorkerInfo], None]

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return Positioned(partial(self._watched, context.worker), source, number=0)

    def _watched(self, worker: WorkerInfo, source: Iterator[Any], at: State) -> Iterator[Any]:
        for item in source:
            self.look(at["number"], item, worker)
            at["number"] += 1
            yield item

    def describe(self) -> dict[str, Any]:
        return {"stage": self.name}


@dataclass(frozen=True)
class _Show:
    """Writes some items to a text stream, see `info`."""

    n: int
    every: int
    width: int
    stream: TextIO | None
    name: str

    def __call__(self, number: int, item: Any, worker: WorkerInfo) -> None:
        if number >= self.n and (self.every < 1 or number % self.every):
            return
        fields = item.items() if isinstance(item, dict) else enumerate(_listed(item))
        lines = [f"{self.name} {number} {key}: {_brief(v, self.width)}" for key, v in fields]
        (self.stream or sys.stderr).write("".join(f"{line.strip()}\n" for line in lines))


def _log_key(logfile: str | None, number: int, item: Any, worker: WorkerInfo) -> None:
    path = logfile or os.environ.get("LOGKEYS")
    if not path:
        return
    line = f"{number}\t{worker.number}\t{worker.rank}\t{item.get('__key__')}\n"
    # One write to a file opened for appending, so that lines of several workers do not mix.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    with contextlib.closing(os.fdopen(descriptor, "ab", buffering=0)) as file:
        file.write(line.encode())


def _listed(item: Any) -> Any:
    return item if isinstance(item, tuple | list) else [item]


def _brief(value: Any, width: int) -> str:
    shape = getattr(value, "shape", None)
    text = repr(value) if shape is None else f"{type(value).__name__} {tuple(shape)} {value.dtype}"
    return text if len(text) <= width else f"{text[: width - 3]}..."


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
    parameters = inspect.signature(make_stage).parameters.values()
    data = inspect.Parameter(source, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"Yield the items of `{make_stage.__name__}` for any iterable."
    run.__signature__ = inspect.Signature([data, *parameters])  # type: ignore[attr-defined]
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
    chosen = rng.randint(0, len(buf) - 1)
    buf[chosen], buf[-1] = buf[-1], buf[chosen]
    return buf.pop()


def tuple2dict(l: Any) -> Any:  # noqa: E741
    """Return a sequence as a dict by number; a dict as it is."""
    return l if isinstance(l, dict) else dict(enumerate(l))


def dict2tuple(d: Mapping[int, Any]) -> tuple[Any, ...]:
    """Return a dict by number as a tuple."""
    return tuple(d[number] for number in range(max(d) + 1))


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
    security.require("pickle", security.resolve(), UNPICKLING)
    return pickle.load(stream)


default_decoders: list[tuple[str, Callable[[Any], Any]]] = [
    ("*.bin", decode_bin),
    ("*.txt", decode_text),
    ("*.pyd", decode_pickle),
]
"""The default decoders of `xdecode`: pairs of a pattern and a function."""


def find_decoder(decoders: Sequence[tuple[str, Any]], path: str) -> Any:
    """Return the function that decodes a field, that of the last matching pattern, or None."""
    if path.rpartition("/")[2].startswith("__"):
        return identity
    rule = last_match(decoders, path)
    return None if rule is None else rule[1]


def shuffle(
    bufsize: int = 1000,
    initial: int = 100,
    rng: Any = None,
    seed: int | None = None,
    handler: Handler | None = None,
) -> Stage:
    """Shuffle items through a buffer: each is yielded once, drawn at random from it.

    Args:
        bufsize: Capacity of the buffer. It fills while items are yielded: two are read for each
            one.
        initial: Number of items read before the first is yielded.
        rng: Generator to draw from, which continues from epoch to epoch; None makes the order a
            function of seed, epoch and worker.
        seed: Replaces the seed of the pipeline.
        handler: Accepted for compatibility.

    Raises:
        ConfigError: If a length is negative.

    Example:
        >>> sorted(shuffle(10)(range(5)))
        [0, 1, 2, 3, 4]
    """
    return Shuffle(bufsize, initial, rng, seed)


def map(f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Stage:
    """Apply a function to each item.

    If both the item and the result are dicts, the result keeps the `__key__` of the item.

    Args:
        f: Takes an item. If it returns None, the item is dropped.
        handler: Called for errors of the function.

    Example:
        >>> list(map(str)([1, 2]))
        ['1', '2']
    """
    return Map(f, handler)


def flatmap(f: Callable[[Any], Iterable[Any]]) -> Stage:
    """Yield all items that a function returns for each item.

    Args:
        f: Takes an item, and returns or yields any number of items. If a state is saved between
            two of these, it must return the same ones again.

    Example:
        >>> list(flatmap(range)([1, 3]))
        [0, 0, 1, 2]
    """
    return FlatMap(f)


def select(predicate: Callable[[Any], Any], handler: Handler = reraise_exception) -> Stage:
    """Keep the items for which a function returns True.

    Example:
        >>> list(select(str.isupper)(["a", "B"]))
        ['B']
    """
    return Select(predicate, handler)


def rsample(p: float = 0.5) -> Stage:
    """Keep each item with probability `p`.

    Example:
        >>> len(list(rsample(0.5)(range(1000)))) in range(400, 600)
        True
    """
    return RandomSample(p)


def slice(*args: int | None) -> Stage:
    """Take the items that `itertools.islice` would.

    Example:
        >>> list(slice(1, 3)("abcd"))
        ['b', 'c']
    """
    return Slice(*args)


def batched(
    batchsize: int = 20,
    collation_fn: Collation | None = default_collation_fn,
    partial: bool = True,
) -> Stage:
    """Make batches.

    Args:
        batchsize: Number of items in a batch.
        collation_fn: Combines a list of items; None leaves it a list.
        partial: Whether to yield a smaller batch at the end; otherwise it is dropped.

    Raises:
        ConfigError: If `batchsize` is not positive.

    Example:
        >>> list(batched(2, collation_fn=list)([1, 2, 3]))
        [[1, 2], [3]]
    """
    return Batched(batchsize, collation_fn, partial)


def unbatched() -> Stage:
    """Split batches of columns into samples: dicts for a dict of columns, tuples for a tuple.

    A batch that has columns of different lengths, or is neither a dict nor a tuple, is an error.

    Example:
        >>> list(unbatched()([([1, 2], ["a", "b"])]))
        [(1, 'a'), (2, 'b')]
    """
    return FlatMap(unbatch)


def listed(batchsize: int = 20, partial: bool = True) -> Stage:
    """Make lists of items.

    Example:
        >>> list(listed(2)([1, 2, 3]))
        [[1, 2], [3]]
    """
    return Batched(batchsize, None, partial)


def unlisted() -> Stage:
    """Yield the items of lists.

    Example:
        >>> list(unlisted()([[1, 2], [3]]))
        [1, 2, 3]
    """
    return FlatMap(unlist)


def info(
    fmt: str | None = None,
    n: int = 3,
    every: int = -1,
    width: int = 50,
    stream: Any = None,
    name: str = "",
) -> Stage:
    """Show some of the items as they pass.

    Args:
        fmt: Accepted for compatibility: fields are shown one per line.
        n: Number of items to show at the beginning.
        every: After these, every how many items to show one; -1 for none.
        width: Maximum length of a field's text.
        stream: The text stream; None for standard error.
        name: Prefix of every line.

    Example:
        >>> list(info("seen", n=1)([1, 2]))
        [1, 2]
    """
    return Watch("Info", _Show(n, every, width, stream, name))


def log_keys(logfile: Any = None) -> Stage:
    """Append number, worker, rank and key of each sample to a file.

    Args:
        logfile: Path of the file; None for LOGKEYS in the environment, or else no log.

    Example:
        >>> import tempfile
        >>> file = tempfile.NamedTemporaryFile()
        >>> samples = list(log_keys(file.name)([{"__key__": "a"}]))
    """
    return Watch("LogKeys", partial(_log_key, None if logfile is None else str(logfile)))


for _make in (
    *(associate, batched, decode, extract_keys, info, log_keys, map, map_dict, map_tuple, rename),
    *(rename_keys, rsample, select, shuffle, to_tuple, unbatched, unlisted, xdecode),
):
    _source = "source" if _make in (extract_keys, rename_keys, xdecode) else "data"
    globals()[f"_{_make.__name__}"] = generator(_make, _source)
