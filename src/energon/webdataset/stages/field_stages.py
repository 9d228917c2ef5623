"""The stages that decode, choose, rename and change the fields of samples, each made by a function.

`energon.webdataset.filters` has them under the same names, with all other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.autodecode import Decoder
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.stages.base import Stage
from energon.webdataset.stages.fields import (
    Associate,
    ExtractKeys,
    MapDict,
    MapTuple,
    Rename,
    RenameKeys,
    ToTuple,
    XDecode,
    alternatives,
)
from energon.webdataset.stages.functional import default_decoders
from energon.webdataset.stages.mapping import Apply


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
    return Apply(ToTuple.of(args, missing_is_error, none_is_error), handler)


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
