"""The stages of pipelines, under the names they are used by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from energon.webdataset.autodecode import Decoder
from energon.webdataset.batching import (
    Batched,
    Collation,
    FlatMap,
    default_collation_fn,
    unbatch,
    unlist,
)
from energon.webdataset.fields import (
    Associate,
    ExtractKeys,
    MapDict,
    MapTuple,
    Rename,
    RenameKeys,
    ToTuple,
    alternatives,
    getfirst,
)
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.mapping import Apply, Map, RandomSample, Select, Slice
from energon.webdataset.shuffling import Shuffle
from energon.webdataset.stage import Stage


def shuffle(
    bufsize: int = 1000,
    initial: int = 100,
    rng: Any = None,
    seed: int | None = None,
    handler: Handler | None = None,
) -> Stage:
    """Shuffle items through a buffer, see `Shuffle`."""
    return Shuffle(bufsize, initial, rng, seed)


def map(f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Stage:
    """Apply a function to each item, see `Map`."""
    return Map(f, handler)


def flatmap(f: Callable[[Any], Iterable[Any]]) -> Stage:
    """Yield all items that a function makes of each item, see `FlatMap`."""
    return FlatMap(f)


def select(predicate: Callable[[Any], Any], handler: Handler = reraise_exception) -> Stage:
    """Keep the items of which a function says that they are wanted."""
    return Select(predicate, handler)


def decode(
    *args: Any,
    handler: Handler = reraise_exception,
    pre: Any = None,
    post: Any = None,
    only: Any = None,
    partial: bool = False,
    allow: Collection[str] = (),
) -> Stage:
    """Decode the fields of samples, see `Decoder`."""
    decoder = Decoder(*args, pre=pre, post=post, only=only, partial=partial, allow=allow)
    return Apply(decoder.decode, handler)


def to_tuple(
    *args: Any,
    handler: Handler = reraise_exception,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
) -> Stage:
    """Make tuples of fields: `to_tuple("jpg;png", "json")` or `to_tuple("jpg;png json")`."""
    return Apply(ToTuple.of(args, missing_is_error, none_is_error), handler)


def map_tuple(*args: Any, handler: Handler = reraise_exception) -> Stage:
    """Change the items of tuples, each by its own function; None leaves one as it is."""
    return Apply(MapTuple(args), handler)


def batched(
    batchsize: int = 20,
    collation_fn: Collation | None = default_collation_fn,
    partial: bool = True,
) -> Stage:
    """Make batches, see `Batched`."""
    return Batched(batchsize, collation_fn, partial)


def unbatched() -> Stage:
    """Take batches of columns apart, see `unbatch`."""
    return FlatMap(unbatch)


def listed(batchsize: int = 20, partial: bool = True) -> Stage:
    """Make lists of items."""
    return Batched(batchsize, None, partial)


def unlisted() -> Stage:
    """Take lists apart."""
    return FlatMap(unlist)
