"""Switches and small helpers, and names that programs look for in other modules than their own."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from fnmatch import fnmatchcase
from glob import glob
from typing import Any, TypeVar

from energon.errors import ConfigError
from energon.formats.meta.braces import expand_braces
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.running.worker_info import current_worker_info

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

enforce_security: bool | None = None
"""None refuses unpickling and shell commands unless they are allowed by name; False allows them;
True is a lock, see `security`."""


class ObsoleteException(ConfigError):
    """What was called is of an earlier generation, and has no place in this one."""


def identity(x: T) -> T:
    """Return `x`."""
    return x


def transform_with(
    sample: Any, transformers: Iterable[Callable[[Any], Any] | None] | None
) -> list[Any]:
    """Return a list of values, each changed by its function; None leaves a value as it is.

    Values for which there are no functions left stay as they are, too.

    Example:
        >>> transform_with([1, 2, 3], [str, None])
        ['1', 2, 3]
    """
    functions = itertools.chain(transformers or (), itertools.repeat(None))
    return [
        value if function is None else function(value)
        for value, function in zip(sample, functions, strict=False)
    ]


def is_iterable(obj: Any) -> bool:
    """Return whether `obj` can be iterated over as a collection: text and bytes do not count."""
    return hasattr(obj, "__iter__") and not isinstance(obj, str | bytes)


def glob_with_braces(pattern: str) -> list[str]:
    """Return the files that fit a pattern, which may have braces."""
    return [path for each in expand_braces(pattern) for path in sorted(glob(each))]


def fnmatch_with_braces(filename: str, pattern: str) -> bool:
    """Return whether a name fits a pattern, which may have braces."""
    return any(fnmatchcase(filename, each) for each in expand_braces(pattern))


def lookup_sym(sym: str, modules: Iterable[str]) -> Any:
    """Return the attribute of the first of some modules that has it, or None."""
    values = (getattr(importlib.import_module(module), sym, None) for module in modules)
    return next((value for value in values if value is not None), None)


def make_seed(*args: Any) -> int:
    """Return a seed of 31 bits for anything that has a `repr`, the same in every process."""
    # It needs numpy, for which importing the package does not wait.
    from energon.plan.randomness import derive_seed

    return derive_seed(*map(repr, args)) & 0x7FFFFFFF


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Return rank, number of ranks, worker and number of workers of the calling code."""
    return astuple(current_worker_info(group))


def pytorch_worker_seed(group: Any = None) -> int:
    """Return a number that no other worker of the job has."""
    return current_worker_info(group).index


def guess_batchsize(batch: Any) -> int:
    """Return the length of the first column of a batch."""
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(first)


def repeatedly0(
    loader: Iterable[T], nepochs: int | None = None, nbatches: int | None = None
) -> Iterator[T]:
    """Yield the items of several loops over `loader`.

    Args:
        loader: What to loop over.
        nepochs: How often; None means without end.
        nbatches: How many items of each loop; None means all.
    """
    for _ in itertools.count() if nepochs is None else range(nepochs):
        yield from itertools.islice(loader, nbatches)


def repeatedly(
    source: Iterable[T],
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[[Any], int] = guess_batchsize,
) -> Iterator[T]:
    """Yield the items of loops over `source`, until one of the limits is reached.

    Args:
        source: What to loop over.
        nepochs: How many loops.
        nbatches: How many batches in total.
        nsamples: How many samples in total; the batch that reaches it is the last.
        batchsize: Counts the samples of a batch.

    Example:
        >>> list(repeatedly("ab", nbatches=5))
        ['a', 'b', 'a', 'b', 'a']
    """
    samples = 0
    for batches, batch in enumerate(repeatedly0(source, nepochs), 1):
        yield batch
        samples += 0 if nsamples is None else batchsize(batch)
        if batches == nbatches or (nsamples is not None and samples >= nsamples):
            return


def compute_sample_weights(n_w_pairs: Iterable[tuple[float, float]]) -> Any:
    """Return how often to draw from each of some datasets, as an array whose largest number is 1.

    Args:
        n_w_pairs: For each dataset its number of samples, and the weight of each sample.
    """
    import numpy as np

    shares = np.array([number * weight for number, weight in n_w_pairs])
    return shares / shares.max()


def safe_eval(s: str, expr: str = "{}") -> Any:
    """Return the value of a name or number in an expression of the program.

    Args:
        s: Letters, digits and underscores only.
        expr: The expression, with braces where `s` belongs.

    Raises:
        ConfigError: If there is anything else in `s`.
    """
    if not re.fullmatch("[A-Za-z0-9_]*", s):
        raise ConfigError(f"safe_eval: illegal characters in: {s!r}")
    return eval(expr.format(s))


def _decorated(arg: Any, before: Callable[[str, str], object]) -> Any:
    """Return a decorator, or a decorated function; it calls `before` with its name and a reason."""
    reason = f": {arg}" if isinstance(arg, str) else ""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kw: Any) -> Any:
            before(function.__qualname__, reason)
            return function(*args, **kw)

        return call  # type: ignore[return-value]

    return decorate(arg) if callable(arg) else decorate


def deprecated(arg: Any = None) -> Any:
    """Mark a function as deprecated: it warns when it is called."""

    def warn(name: str, reason: str) -> None:
        warnings.warn(f"{name} is deprecated{reason}", DeprecationWarning, stacklevel=3)

    return _decorated(arg, warn)


def obsolete(func: Any = None, *, reason: str | None = None) -> Any:
    """Mark a function as obsolete: it raises, unless ALLOW_OBSOLETE=1 is in the environment."""

    def refuse(name: str, why: str) -> None:
        if os.environ.get("ALLOW_OBSOLETE") != "1":
            why = f": {reason}" if reason else why
            raise ObsoleteException(
                f"{name} is obsolete{why}; set ALLOW_OBSOLETE=1 to use it anyway"
            )

    return _decorated(func, refuse)
