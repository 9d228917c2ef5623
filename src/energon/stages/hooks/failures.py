"""Judge and report failures of hooks: what is tolerated, reasons in statistics, logs, exits.

A `Quarantine` records the samples that fail, so that later runs can exclude them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from energon.errors import ConfigError, FatalSampleError, SampleError
from energon.io.address import local_path, shown_address
from energon.messages import Lines, by_one_worker, counted, cut_text, describe_error
from energon.stages.hooks.random_state import is_worker_process

logger = logging.getLogger("energon")

ErrorHandler = Callable[[Exception, Any, Any], None]

DEFAULT_TOLERANCE = 100
UNTRIED_TOLERANCE = 10
"""After this many failures, a hook that has never succeeded is considered broken."""
RATED_CALLS = 1000
"""The failure rate is not judged before this many calls."""


@dataclass(eq=False)
class Tally:
    """Counts of successes and failures of a hook in a lane.

    Args:
        succeeded: Number of successful calls.
        failed: Number of failed calls.
        failed_in_a_row: Number of failures up to the last one, with no success in between.
        succeeded_before: Value of `succeeded` at the last failure.
    """

    succeeded: int = 0
    failed: int = 0
    failed_in_a_row: int = 0
    succeeded_before: int = 0

    def count_failure(self) -> None:
        """Record that the hook has failed."""
        self.failed += 1
        if self.succeeded != self.succeeded_before:
            self.succeeded_before, self.failed_in_a_row = self.succeeded, 0
        self.failed_in_a_row += 1


@dataclass(frozen=True)
class Tolerance:
    """How many failures of a hook a run tolerates.

    Args:
        in_a_row: Number of consecutive failures that ends the run; 0 for no limit.
        untried: The same as long as the hook has never succeeded.
        rate: Maximum share of failing calls, judged from 1,000 calls on; None for no limit.
    """

    in_a_row: int = DEFAULT_TOLERANCE
    untried: int = UNTRIED_TOLERANCE
    rate: float | None = None

    def exceeded_by(
        self, in_a_row: int, *, failed: int, succeeded: int, is_untried: bool
    ) -> str | None:
        """Return why a failure ends the run, and what to do; None if it is tolerated.

        Args:
            in_a_row: Number of consecutive failures, including this one.
            failed: Number of failures.
            succeeded: Number of successful calls.
            is_untried: Whether the hook has never succeeded.
        """
        if is_untried and self.untried <= in_a_row < self.in_a_row:
            return (
                f"that makes {counted(in_a_row, 'failure')}, and it has not succeeded "
                "once. Correct the hook or the data; @stateless(failure_tolerance=...) sets how "
                "many failures are tolerated"
            )
        if self.in_a_row and in_a_row >= self.in_a_row:
            return (
                f"that makes {in_a_row} failures in a row, which is the limit. Correct the "
                "data or the hook, or raise the tolerance with @stateless(failure_tolerance=...); "
                "0 tolerates any number"
            )
        calls = failed + succeeded
        if self.rate is not None and calls >= RATED_CALLS and failed > self.rate * calls:
            return (
                f"that makes {failed} failures in {calls} calls, more than the tolerated "
                f"share of {self.rate:g}. Correct the data or the hook, or raise the share with "
                "@stateless(failure_rate=...)"
            )
        return None


ALIKE_SECONDS = 60.0
"""For this long, identical failures are merged across workers."""
SHOWN_REPEATS = 10
"""This many failures with one cause are logged one by one; after that, only their number."""
LOGGED_SAMPLES = 3
"""How many samples are named for each reason for skipping some."""


def split_reasons(
    counts: Mapping[str, int],
) -> tuple[dict[str, int], list[dict[str, Any]], list[dict[str, Any]]]:
    """Split statistics of lanes into counts, reasons for failures, and reasons for skips."""
    others: dict[str, int] = {}
    reasons: dict[str, dict[str, dict[str, Any]]] = {"failure": {}, "skip": {}}
    for name, number in counts.items():
        what, *parts = name.split(_BETWEEN)
        if not parts or what not in reasons:
            others[name] = number
            continue
        reason = reasons[what].setdefault(
            reason_name(*parts[:3]),
            {"hook": parts[0], "dataset": parts[1], "reason": parts[2], "count": 0, "samples": []},
        )
        if len(parts) == 3:
            reason["count"] += number
        elif len(reason["samples"]) < LOGGED_SAMPLES:
            reason["samples"].append({"source": parts[3], "message": parts[4]})
    failures, skips = (
        sorted(each.values(), key=lambda reason: -int(reason["count"])) for each in reasons.values()
    )
    return others, failures, skips


_BETWEEN = "\t"
_MAX_TEXT = 300


def reason_name(*parts: str) -> str:
    """Return the name of a reason in statistics: short texts separated by tabs."""
    first, *rest = parts
    return _BETWEEN.join([first, *(part.replace(_BETWEEN, " ")[:_MAX_TEXT] for part in rest)])


def cause_in_words(error: Exception) -> str:
    """Return the cause of a failure in words: the exception type and the line that raised it."""
    _, *frame = raised_at(error)
    where = f" at {os.path.basename(frame[0])}:{frame[1]}" if frame else ""
    return type(error).__name__ + where


def is_of_program(error: BaseException) -> bool:
    """Return whether a `BaseException` comes from the program rather than from user code.

    That is ^C, and whatever a signal handler raises, in the main thread of the program.
    """
    if is_worker_process() or threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt) or _comes_from_signal(error)


def describe_exit(error: BaseException) -> str:
    """Describe an exception outside `Exception`, such as `SystemExit`, as code would raise it."""
    arguments = ", ".join(map(repr, error.args))
    return f"{type(error).__name__}({arguments})"


def _comes_from_signal(error: BaseException) -> bool:
    handlers = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    handler_codes = {code for code in handlers if code is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handler_codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> Any:
    """Return the code of a signal handler; None if it is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if not isinstance(handler, FunctionType | MethodType):
        handler = vars(type(handler)).get("__call__")
    return getattr(handler, "__code__", None)


def log_exception(
    e: Exception,
    sample: Any,
    sources: Any = None,
    *,
    brief: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Log that a sample, or those of a batch, failed and are skipped, with origin and traceback.

    For damaged data, whose messages are sufficient, and with `brief`, the traceback is logged at
    level DEBUG. `extra` is passed to the record.

    Example:
        >>> from energon import WorkerConfig
        >>> config = WorkerConfig(
        ...     rank=0, world_size=1, num_workers=4, global_error_handler=log_exception
        ... )
    """
    brief = (brief or isinstance(e, SampleError)) and not logger.isEnabledFor(logging.DEBUG)
    logger.warning(
        "skipped %s: %s (%s)%s",
        _lost(sample),
        describe_error(e),
        describe_sources(sources),
        ""
        if brief
        else Lines("\n" + "".join(map(cut_text, traceback.format_exception(e))).rstrip()),
        extra=extra,
    )


def log_failure(
    error: Exception, argument: Any, sources: Any, *, hook: str, origin: str, count: int
) -> None:
    """Log the first failure of a cause in full, a few more in one line, then only counts.

    A bug in a hook fails for sample after sample, in all workers, and one traceback is enough.

    Args:
        error: What the hook raised.
        argument: Its argument.
        sources: Where that comes from.
        hook: The name of the hook.
        origin: Identifies the datasets of the hook and the cause, equally in all workers.
        count: How many failures had this cause in this worker, with this one.
    """
    extra = by_one_worker(f"failure {count} in {hook} of {origin}", ALIKE_SECONDS)
    if logger.isEnabledFor(logging.DEBUG):
        log_exception(error, argument, sources, brief=count > 1)
    elif count <= SHOWN_REPEATS:
        log_exception(error, argument, sources, brief=count > 1, extra=extra)
    elif is_power_of_ten(count):
        logger.warning(
            "%s failed %s with this error; the samples were skipped: %s (last: %s)",
            hook,
            counted(count, "time", grouped=True),
            describe_error(error),
            describe_sources(sources),
            extra=extra,
        )


def is_power_of_ten(count: int) -> bool:
    """Return whether a number is 1, 10, 100 and so on: when repeated events are logged."""
    return str(count).strip("0") == "1"


def _lost(argument: Any) -> str:
    """Return in words how many samples are lost if a hook fails on `argument`."""
    keys = argument if isinstance(argument, list) else getattr(argument, "__key__", None)
    if isinstance(argument, Mapping):
        keys = argument.get("__key__")
    number = len(keys) if isinstance(keys, list) else 1
    return "a sample" if number == 1 else counted(number, "sample")


def reraise_exception(e: Exception, sample: Any, sources: Any = None) -> None:
    """End the run at the first sample that fails: a strict error handler.

    Example:
        >>> from energon import WorkerConfig
        >>> config = WorkerConfig(
        ...     rank=0, world_size=1, num_workers=4, global_error_handler=reraise_exception
        ... )
        >>> reraise_exception(ValueError("no caption"), {"__key__": "17"})
        Traceback (most recent call last):
            ...
        energon.errors.FatalSampleError: a sample of unknown origin: no caption
    """
    raise FatalSampleError(f"{describe_sources(sources)}: {e}") from e


def describe_sources(sources: Any) -> str:
    """Return the origin of a sample in words."""
    if not sources:
        return "a sample of unknown origin"
    return ", ".join(str(source) for source in sources[:4]) + (", …" if len(sources) > 4 else "")


def raised_at(error: Exception) -> tuple[Any, ...]:
    """Return the identity of a cause: the exception type and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return (type(error),)
    return type(error), trace.tb_frame.f_code.co_filename, trace.tb_lineno


class Quarantine:
    """An error handler that records failing samples in a folder, one file per dataset.

    Give it to `WorkerConfig(global_error_handler=...)` or `@stateless(error_handler=...)`. Files
    are named after the folder of the dataset, with ".jsonl"; each line has the address of the
    dataset, the shard and key of a sample, and the reason. `energon prepare --exclude-from FILE`
    and `exclude_from=FOLDER` of the dataset getters exclude these samples of this dataset.

    All workers and ranks may write into one folder. A batch or pack that fails is not recorded,
    since it is unknown which of its samples was the cause.

    Args:
        folder: The folder of the files; created if it does not exist.
        handler: Also called for each failure.

    Raises:
        ConfigError: If the folder is not on this machine, or cannot be made.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from energon import DefaultTaskEncoder, WorkerConfig, get_val_dataset
        >>> class Strict(DefaultTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         if "8" in sample.caption:
        ...             raise ValueError("an eight")
        ...         return sample.caption
        >>> config = WorkerConfig(
        ...     rank=0,
        ...     world_size=1,
        ...     num_workers=0,
        ...     global_error_handler=Quarantine("failed", handler=lambda *_: None),
        ... )
        >>> dataset = get_val_dataset(
        ...     "photos", worker_config=config, batch_size=1, task_encoder=Strict()
        ... )
        >>> list(dataset)
        [['grey number 9']]
        >>> entry = json.loads(Path("failed/photos.jsonl").read_text())
        >>> entry["shard"], entry["key"], entry["reason"]
        ('shard-0.tar', '8', 'ValueError: an eight')
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, handler: ErrorHandler = log_exception
    ) -> None:
        self.folder = Path(local_path(folder))
        self.handler = handler
        self._noted: set[tuple[str, str | None, str]] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot write quarantine files here: {error}") from error

    def __call__(self, error: Exception, sample: Any, sources: Any = None) -> None:
        """Record the source of a failing sample if it has only one, and call the other handler."""
        if sources and len(sources) == 1 and hasattr(sources[0], "key"):
            self._note(sources[0], error)
        self.handler(error, sample, sources)

    def _note(self, source: Any, error: Exception) -> None:
        entry = (str(source.dataset_path), source.shard_name, source.key)
        if entry in self._noted:
            return
        self._noted.add(entry)
        line = quarantine_line(*entry, describe_error(error))
        path = quarantine_file(self.folder, source.dataset_path)
        # One write at the end of the file: lines of other processes stay whole.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)


def quarantine_line(
    dataset_path: str, shard: str | None, key: str | None, reason: str | None = None
) -> str:
    """Return the line of a quarantine file that excludes a sample, or a shard if `key` is None."""
    dataset = shown_address(dataset_path) if dataset_path else None
    entry = {"dataset": dataset, "shard": shard, "key": key, "reason": reason}
    return json.dumps({name: value for name, value in entry.items() if value is not None})


def quarantine_name(dataset_path: Any) -> str:
    """Return the name of the file for a dataset: that of its folder."""
    return f"{os.path.basename(os.path.normpath(str(dataset_path)))}.jsonl"


def quarantine_file(folder: str | os.PathLike[str], dataset_path: Any) -> Path:
    """Return the path of the file for a dataset in a folder."""
    return Path(folder) / quarantine_name(dataset_path)
