"""Run a function of the user: seeds, skips, tolerance and error reports, in one place."""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import FunctionType, GeneratorType, MethodType
from typing import Any, Final

from energon.errors import (
    SYSTEM_EXCEPTIONS,
    EnergonError,
    FatalSampleError,
    SampleError,
    SkipSample,
)
from energon.messages import Lines, counted
from energon.plan.seeds import derive_seed
from energon.samples.crude import RestoreKey, flat
from energon.stages.lane import Lane, RowAddress, Tally, active
from energon.stages.random_state import is_worker_process, seeded

logger = logging.getLogger("energon")

DEFAULT_TOLERANCE = 100

UNTRIED_TOLERANCE = 10
"""After this many failures, a hook that has never succeeded is blamed rather than the data."""

SHOWN_REPEATS = 10
"""This many failures of one cause are logged one by one; after that, only their number."""

SHOWN_SAMPLES = 3
"""How many samples are named for each reason for skipping some."""

MAX_REASONS = 64
"""How many reasons are distinguished, per worker and hook."""

RATED_CALLS = 1000
"""Before this many calls, a share of failures means little."""

ErrorHandler = Callable[[Exception, Any, Any], None]


class _Skipped:
    """The type of `SKIPPED`."""


SKIPPED: Final = _Skipped()
"""What a hook that skipped or failed returns, instead of an output."""


class Compiled:
    """A function that is compiled where it runs, to look up invariant values once."""

    def compile(self) -> Callable[[Any], Any]:
        """Return the function."""
        raise NotImplementedError

    def of_columns(self) -> Callable[[Any], Any] | None:
        """Return the equivalent on columns of this function on rows and collating; None if none.

        With it, batches are made without making samples, if nothing else is done to these.
        """
        return None

    def __call__(self, argument: Any) -> Any:
        """Call the function."""
        return self.compile()(argument)


def compiled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the compiled function."""
    return function.compile() if isinstance(function, Compiled) else function


@dataclass(eq=False)
class HookRecord:
    """The history of a hook in a worker, over all of its lanes.

    Args:
        succeeded: Whether it has ever given an output.
        failures: How often it failed, by cause.
        reasons: Why samples were skipped, as statistics have it, and how often.
    """

    succeeded: bool = False
    failures: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Hook:
    """A function of the user, and how to run it.

    Args:
        name: How messages and statistics call it.
        function: Takes a sample (or a list of them) and returns one, or yields some.
        tolerance: How many failures in a row end the run; 0 never ends it.
        untried_tolerance: The same until the hook has succeeded once.
        rate: Which share of the calls in a lane may fail, judged from 1,000 calls on; None is
            any share.
        restore_seeds: Whether `random`, numpy and torch are seeded for each call, from the
            address of the sample.
        may_yield: Whether the function may return a generator. To resume between its outputs
            means to run it again, and all hooks of the sample before it, so these have to be
            seeded for each call.
        locate: Tells the source of an argument for messages, and for the handler.
        dataset: Names the dataset of an argument, for statistics.
        handler: Called with (exception, argument, sources) for each tolerated failure; None
            logs it.
        title: The class and the method, where the hook has to return something.
        record: Shared by all lanes of a worker.
    """

    name: str
    function: Callable[[Any], Any]
    tolerance: int = DEFAULT_TOLERANCE
    untried_tolerance: int = UNTRIED_TOLERANCE
    rate: float | None = None
    restore_seeds: bool = False
    may_yield: bool = True
    locate: Callable[[Any], tuple[Any, ...]] | None = None
    dataset: Callable[[Any], str] | None = None
    handler: ErrorHandler | None = None
    title: str | None = None
    record: HookRecord = field(default_factory=HookRecord, compare=False, repr=False)


class HookRunner:
    """A hook in one lane: knows how often it failed in a row, and in the worker at all.

    Whoever walks over many arguments calls `function` itself, adds to `tally` and `record`
    afterwards how often it succeeded, and passes on what did not: to `settle`, `fail` and `exit`.
    """

    def __init__(self, hook: Hook, lane: Lane) -> None:
        self.hook = hook
        self.lane = lane
        self.name = hook.name
        self.function = compiled(hook.function)
        self.seeds_calls = hook.restore_seeds
        self.returns_something = hook.title is not None
        self.record = hook.record
        self.tally = Tally()
        # Hooks are known by identity: they hold functions of the user, equal to who knows what.
        self._tallies = lane.host.tallies[id(hook)]
        self._tallies.append(self.tally)

    def __call__(self, argument: Any, address: RestoreKey) -> Any:
        """Return the output, an iterator of outputs, or SKIPPED.

        Raises:
            FatalSampleError: If the failure is one that ends the run.
        """
        before, active.lane = active.lane, self.lane
        self.lane.present.known_call = (self.name, address)
        try:
            if self.seeds_calls and self.lane.host.seeds_calls:
                output = self.call(argument, address)
            else:
                output = self.function(argument)
        except Exception as error:
            return self.fail(error, argument)
        except BaseException as error:
            self.exit(error, argument)
            raise
        finally:
            active.lane = before
        if output is None or type(output) is GeneratorType:
            return self.settle(output, argument, address)
        self.tally.succeeded += 1
        self.record.succeeded = True
        return output

    def call(self, argument: Any, address: RestoreKey) -> Any:
        """Return what the function returns, seeded unless nothing is known to draw."""
        host = self.lane.host
        if not host.seeds_calls:
            return self.function(argument)
        with seeded(self._seed(flat(address)), host.watch):
            return self.function(argument)

    def call_here(self, argument: Any) -> Any:
        """Do the same for what the lane works on, if calls of this hook are to be seeded."""
        if not self.seeds_calls:
            return self.function(argument)
        return self.call(argument, self.lane.present.address)

    def settle(self, output: Any, argument: Any, address: RestoreKey) -> Any:
        """Return None or the outputs of a generator, whatever the function returned.

        Raises:
            FatalSampleError: If it may not return that.
        """
        if output is None:
            if self.hook.title is not None:
                raise self._nothing("returned", argument)
            self.succeed()
            return None
        if not self.hook.may_yield:
            raise FatalSampleError(
                f"{self.name} returns a generator, but is not a generator function; write "
                "`yield from` instead of `return` there"
            )
        return self._outputs(output, argument, flat(address))

    def succeed(self, count: int = 1) -> None:
        """Count outputs."""
        self.tally.succeeded += count
        self.record.succeeded = True

    def _nothing(self, what: str, argument: Any) -> FatalSampleError:
        return FatalSampleError(
            f"{self.hook.title} {what} None for {describe_sources(self._sources(argument))}; is "
            "there a `return` missing? Return what the next hook gets, or raise SkipSample to "
            "skip the sample"
        )

    def _outputs(self, outputs: Iterator[Any], argument: Any, address: RowAddress) -> Iterator[Any]:
        # Always seeded: a batch may begin between two outputs, and to resume there means to
        # run the generator up to that point, outside of the batches that have its first ones.
        for sub in count():
            before, active.lane = active.lane, self.lane
            self.lane.present.known_call = (self.name, (*address, sub))
            try:
                output = self._next(outputs, (*address, sub))
            except Exception as error:
                self.fail(error, argument)
                return
            except BaseException as error:
                self.exit(error, argument)
                raise
            finally:
                active.lane = before
            if output is SKIPPED:
                return
            if output is None and self.hook.title is not None:
                raise self._nothing("yielded", argument)
            self.succeed()
            yield output

    def _next(self, outputs: Iterator[Any], address: RowAddress) -> Any:
        host = self.lane.host
        if not host.seeds_calls:
            return next(outputs, SKIPPED)
        with seeded(self._seed(address), host.watch):
            return next(outputs, SKIPPED)

    def _seed(self, address: RowAddress) -> int:
        return derive_seed(self.lane.seed, self.hook.name, *address)

    def fail(self, error: Exception, argument: Any) -> _Skipped:
        """Handle a failure. Does not return if it ends the run."""
        hook = self.hook
        if isinstance(error, SkipSample):
            self._count("skipped", argument)
            if error.args:
                self._give_reason("skip", str(error), error, argument)
            return SKIPPED
        if self.lane.host.watch is not None:
            # Before what must not be done twice.
            self.lane.host.watch.begin_seeding()
        sources = self._sources(argument)
        where = f"{hook.name} failed on {describe_sources(sources)}"
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, SYSTEM_EXCEPTIONS) or _is_ours_and_fatal(error):
            raise FatalSampleError(
                f"{where}: {cause}; an error of this kind ends the run"
            ) from error
        self._count("failed", argument)
        self._give_reason("failure", _cause_in_words(error), error, argument)
        intolerable = self._intolerable()
        if intolerable:
            raise FatalSampleError(f"{where}: {cause}; {intolerable}") from error
        error.add_note(f"in the hook {hook.name}")
        if hook.handler not in (None, log_exception):
            hook.handler(error, argument, sources)
        else:
            self._log(error, argument, sources)
        return SKIPPED

    def _log(self, error: Exception, argument: Any, sources: Any) -> None:
        """Log the first failure of a cause in full, some more in a line, then how many there are.

        A bug in a hook fails for sample after sample, and one traceback is enough.
        """
        cause, failures = _raised_at(error), self.hook.record.failures
        failures[cause] += 1
        count = failures[cause]
        if count <= SHOWN_REPEATS or logger.isEnabledFor(logging.DEBUG):
            log_exception(error, argument, sources, brief=count > 1)
        elif _is_power_of_ten(count):
            logger.warning(
                "skipped %s because %s failed in this way: %s: %s (last: %s)",
                counted(count, "sample", grouped=True),
                self.hook.name,
                type(error).__name__,
                error,
                describe_sources(sources),
            )

    def exit(self, error: BaseException, argument: Any) -> None:
        """Raise an error instead of what would end the program without saying why."""
        if not is_of_program(error):
            raise FatalSampleError(
                f"{self.hook.name} raised {describe_exit(error)} on "
                f"{describe_sources(self._sources(argument))}; a hook cannot end the program. "
                "Raise SkipSample to skip the sample, or raise your own error"
            ) from error

    def _sources(self, argument: Any) -> tuple[Any, ...]:
        return self.hook.locate(argument) if self.hook.locate is not None else ()

    def _count(self, what: str, argument: Any) -> None:
        hook, counts = self.hook, self.lane.counts
        counts[what] += 1
        if hook.dataset is not None:
            counts[f"{what}: {hook.name}: {hook.dataset(argument)}"] += 1

    def _give_reason(self, what: str, reason: str, error: Exception, argument: Any) -> None:
        """Count the reason for skipping a sample, and record the first samples."""
        hook, counts, known = self.hook, self.lane.counts, self.hook.record.reasons
        dataset = "" if hook.dataset is None else hook.dataset(argument)
        name = _joined(what, hook.name, dataset, reason)
        if name not in known and len(known) >= MAX_REASONS:
            name = _joined(what, hook.name, dataset, "other reasons")
        known[name] += 1
        counts[name] += 1
        if known[name] <= SHOWN_SAMPLES:
            counts[_joined(name, describe_sources(self._sources(argument)), str(error))] = 1

    def _intolerable(self) -> str | None:
        """Count a failure, and return why it is one too many; None if it is not."""
        hook, lane = self.hook, self.lane
        self.tally.count_failure()
        in_a_row = self.tally.failed_in_a_row
        succeeded = sum(tally.succeeded for tally in self._tallies)
        # Behind the beginning of a run it has succeeded, if only before a restore.
        untried = not (
            succeeded or hook.record.succeeded or lane.present.batch or lane.host.has_begun
        )
        if untried and hook.untried_tolerance <= in_a_row < hook.tolerance:
            return (
                f"that makes {counted(in_a_row, 'failure')}, and it has not succeeded "
                "once. Correct the hook or the data; @stateless(failure_tolerance=...) sets how "
                "many failures are tolerated"
            )
        if hook.tolerance and in_a_row >= hook.tolerance:
            return (
                f"that makes {in_a_row} failures in a row, the tolerance. Correct the "
                "data or the hook, or raise the tolerance with @stateless(failure_tolerance=...); "
                "0 tolerates any number"
            )
        failed = sum(tally.failed for tally in self._tallies)
        calls = failed + succeeded
        if hook.rate is not None and calls >= RATED_CALLS and failed > hook.rate * calls:
            return (
                f"that makes {failed} failures in {calls} calls, more than the tolerated "
                f"share of {hook.rate:g}. Correct the data or the hook, or raise the share with "
                "@stateless(failure_rate=...)"
            )
        return None


def split_reasons(
    counts: Mapping[str, int],
) -> tuple[dict[str, int], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return statistics of lanes without the reasons for failures and skips, and these."""
    others: dict[str, int] = {}
    found: dict[str, dict[str, dict[str, Any]]] = {"failure": {}, "skip": {}}
    for name, number in counts.items():
        what, *parts = name.split(_BETWEEN)
        if not parts or what not in found:
            others[name] = number
            continue
        about = found[what].setdefault(
            _joined(*parts[:3]),
            {"hook": parts[0], "dataset": parts[1], "reason": parts[2], "count": 0, "samples": []},
        )
        if len(parts) == 3:
            about["count"] += number
        elif len(about["samples"]) < SHOWN_SAMPLES:
            about["samples"].append({"source": parts[3], "message": parts[4]})
    failures, skips = (
        sorted(each.values(), key=lambda about: -int(about["count"])) for each in found.values()
    )
    return others, failures, skips


_BETWEEN = "\t"
_MAX_TEXT = 300


def _joined(*parts: str) -> str:
    """Return the name of a reason in statistics: short texts separated by tabs."""
    first, *rest = parts
    return _BETWEEN.join([first, *(part.replace(_BETWEEN, " ")[:_MAX_TEXT] for part in rest)])


def _cause_in_words(error: Exception) -> str:
    """Return what failures of one cause share: the exception type, and the line that raised."""
    _, *place = _raised_at(error)
    where = f" at {os.path.basename(place[0])}:{place[1]}" if place else ""
    return type(error).__name__ + where


def is_of_program(error: BaseException) -> bool:
    """Return whether a `BaseException` comes from the program rather than from user code.

    That is ^C, and whatever a signal handler raises, in the main thread of the program.
    """
    if is_worker_process() or threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt) or _comes_from_signal(error)


def describe_exit(error: BaseException) -> str:
    """Return an exception that is no `Exception` as the user may have written it."""
    arguments = ", ".join(map(repr, error.args))
    return f"{type(error).__name__}({arguments})"


def _comes_from_signal(error: BaseException) -> bool:
    handlers = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    known = {code for code in handlers if code is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in known:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> Any:
    """Return the code of a handler of signals; None if that is not Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if not isinstance(handler, FunctionType | MethodType):
        handler = vars(type(handler)).get("__call__")
    return getattr(handler, "__code__", None)


def log_exception(e: Exception, sample: Any, sources: Any = None, *, brief: bool = False) -> None:
    """Log that a sample failed and is skipped, with its origin and the traceback.

    For damaged data, whose messages are sufficient, and with `brief`, the traceback is logged at
    level DEBUG.

    Example:
        >>> from energon import WorkerConfig
        >>> config = WorkerConfig(
        ...     rank=0, world_size=1, num_workers=4, global_error_handler=log_exception
        ... )
    """
    brief = (brief or isinstance(e, SampleError)) and not logger.isEnabledFor(logging.DEBUG)
    logger.warning(
        "skipped a sample: %s: %s (%s)%s",
        type(e).__name__,
        e,
        describe_sources(sources),
        "" if brief else Lines("\n" + "".join(traceback.format_exception(e)).rstrip()),
    )


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


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"


def describe_sources(sources: Any) -> str:
    """Return the origin of a sample in words."""
    if not sources:
        return "a sample of unknown origin"
    return ", ".join(str(source) for source in sources[:4]) + (", …" if len(sources) > 4 else "")


def _raised_at(error: Exception) -> tuple[Any, ...]:
    """Return what identifies a cause of failures: the exception type and the line that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return (type(error),)
    return type(error), trace.tb_frame.f_code.co_filename, trace.tb_lineno


def _is_ours_and_fatal(error: Exception) -> bool:
    # A truncated shard or a wrong setting is not a fault of one sample.
    return isinstance(error, EnergonError) and not isinstance(error, SampleError)
