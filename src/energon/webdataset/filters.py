"""The stages of pipelines, under the names by which programs use them.

Each function returns a stage. Stages are used in pipelines, or called with an iterable:
`shuffle(100)(samples)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.stages.base import Stage
from energon.webdataset.stages.batching import (
    Batched,
    Collation,
    FlatMap,
    default_collation_fn,
    unbatch,
    unlist,
)
from energon.webdataset.stages.field_stages import (
    associate,
    decode,
    extract_keys,
    map_dict,
    map_tuple,
    rename,
    rename_keys,
    to_tuple,
    xdecode,
)
from energon.webdataset.stages.fields import getfirst
from energon.webdataset.stages.functional import (
    combine_values,
    compose,
    compose2,
    decode_bin,
    decode_pickle,
    decode_text,
    default_decoders,
    dict2tuple,
    find_decoder,
    generator,
    parse_field_spec,
    pick,
    pipeline,
    tuple2dict,
)
from energon.webdataset.stages.inspect_stages import Info, LogKeys
from energon.webdataset.stages.item_cache import Cached, LMDBCached
from energon.webdataset.stages.make import pipelinefilter
from energon.webdataset.stages.mapping import Map, RandomSample, Select, Slice
from energon.webdataset.stages.shuffling import Shuffle, detshuffle
from energon.webdataset.utils import reexport, transform_with

__all__ = [
    "Cached",
    "LMDBCached",
    "associate",
    "batched",
    "combine_values",
    "compose",
    "compose2",
    "decode",
    "decode_bin",
    "decode_pickle",
    "decode_text",
    "default_collation_fn",
    "default_decoders",
    "detshuffle",
    "dict2tuple",
    "extract_keys",
    "find_decoder",
    "flatmap",
    "getfirst",
    "info",
    "listed",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "parse_field_spec",
    "pick",
    "pipeline",
    "pipelinefilter",
    "rename",
    "rename_keys",
    "reraise_exception",
    "rsample",
    "select",
    "shuffle",
    "slice",
    "to_tuple",
    "transform_with",
    "tuple2dict",
    "unbatched",
    "unlisted",
    "xdecode",
]


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
    return Info(fmt, n, every, width, stream, name)


def log_keys(logfile: Any = None) -> Stage:
    """Append number, worker, rank and key of each sample to a file.

    Args:
        logfile: Path of the file; None for LOGKEYS in the environment, or else no log.

    Example:
        >>> import tempfile
        >>> file = tempfile.NamedTemporaryFile()
        >>> samples = list(log_keys(file.name)([{"__key__": "a"}]))
    """
    return LogKeys(None if logfile is None else str(logfile))


_associate = generator(associate)
_batched = generator(batched)
_decode = generator(decode)
_extract_keys = generator(extract_keys, "source")
_info = generator(info)
_log_keys = generator(log_keys)
_map = generator(map)
_map_dict = generator(map_dict)
_map_tuple = generator(map_tuple)
_rename = generator(rename)
_rename_keys = generator(rename_keys, "source")
_rsample = generator(rsample)
_select = generator(select)
_shuffle = generator(shuffle)
_to_tuple = generator(to_tuple)
_unbatched = generator(unbatched)
_unlisted = generator(unlisted)
_xdecode = generator(xdecode, "source")


__getattr__ = reexport(
    __name__,
    {
        "FilterFunction": "stages.make",
        "PipelineStage": "stages.make",
        "RestCurried": "stages.make",
        "autodecode": "autodecode:",
        "identity": "utils",
        "utils": "utils:",
    },
)
