"""Run a user function: seed it, and handle what it returns, yields, skips and fails on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from time import perf_counter
from types import GeneratorType
from typing import Any, ClassVar, Final

from energon.errors import (
    SYSTEM_EXCEPTIONS,
    EnergonError,
    FatalSampleError,
    SampleError,
    SkipSample,
    StateError,
)
from energon.limits import RESUMED_OUTPUTS
from energon.messages import counted, describe_error
from energon.plan.randomness import derive_seed
from energon.samples.crude import RestoreKey, flat, stamp
from energon.stages.base import DatasetIterator, ItemState, State, StateKind, unpack, unpack_some
from energon.stages.hooks.clock import HookClock, leaf_of
from energon.stages.hooks.failures import (
    LOGGED_SAMPLES,
    ErrorHandler,
    Tally,
    Tolerance,
    cause_in_words,
    describe_exit,
    describe_sources,
    is_of_program,
    is_power_of_ten,
    log_exception,
    log_failure,
    raised_at,
    reason_name,
    reraise_exception,
)
from energon.stages.hooks.random_state import seeded
from energon.stages.lane import Lane, SeedKey, active

logger = logging.getLogger("energon")

HOOK_NOTE = "in the hook "
"""Precedes the name of the hook in a note on each error that one raises."""
MAX_REASONS = 64
"""Maximum number of distinct reasons, per worker and hook."""


class _Skipped:
    """The type of `SKIPPED`."""


SKIPPED: Final = _Skipped()
"""Stands for the output of a call that skipped its sample or failed."""


class Compiled:
    """A function that is specialized once per process, so that invariants are looked up once."""

    def _compile(self) -> Callable[[Any], Any]:
        """Return the specialized function, which the lanes of a process share."""
        raise NotImplementedError

    def _of_columns(self) -> Callable[[Any], Any] | None:
        """Return the equivalent of this function on collated columns; None if there is none.

        It lets batches be assembled without building samples, if no other hook needs them.
        """
        return None

    @cached_property
    def compiled(self) -> Callable[[Any], Any]:
        """The specialized function."""
        return self._compile()

    @cached_property
    def of_columns(self) -> Callable[[Any], Any] | None:
        """Its equivalent on columns, if any."""
        return self._of_columns()

    def prepare(self) -> None:
        """Specialize it now, so that the first batch does not wait for it."""
        _ = self.compiled, self.of_columns

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("compiled", "of_columns")}

    def __call__(self, argument: Any) -> Any:
        """Call the function."""
        return self.compiled(argument)


def compiled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `function`, specialized if it is `Compiled`."""
    return function.compiled if isinstance(function, Compiled) else function


@dataclass(eq=False)
class HookRecord:
    """The history of a hook in a worker, over all of its lanes.

    Args:
        succeeded: Whether it has ever returned an output.
        failures: Number of failures, by cause.
        reasons: Number of skipped samples, by the name of the reason in statistics.
        skips: Number of samples that it has skipped on purpose.
    """

    succeeded: bool = False
    failures: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    skips: int = 0


@dataclass(frozen=True)
class Hook:
    """A user function, and how to run it.

    Args:
        name: Its name in messages and statistics.
        function: Takes a sample (or a list of them), and returns one or yields several.
        tolerance: How many failures the run tolerates.
        restore_seeds: Whether `random`, numpy and torch are seeded for each call, from the
            key of the sample.
        may_yield: Whether the function may return a generator. Resuming between two of its
            outputs means running it again, along with all earlier hooks of the sample, so these
            must be seeded for each call.
        locate: Returns the sources of an argument, for messages and for the handler.
        dataset: Returns the name of an argument's dataset, for statistics.
        handler: Called with (exception, argument, sources) for each tolerated failure; None
            logs it.
        title: Class and method, for hooks that must return something.
        record: Shared by all lanes of a worker.
    """

    name: str
    function: Callable[[Any], Any]
    tolerance: Tolerance = field(default_factory=Tolerance)
    restore_seeds: bool = False
    may_yield: bool = True
    locate: Callable[[Any], tuple[Any, ...]] | None = None
    dataset: Callable[[Any], str] | None = None
    handler: ErrorHandler | None = None
    title: str | None = None
    record: HookRecord = field(default_factory=HookRecord, compare=False, repr=False)


class HookRunner:
    """A hook in one lane, and its failures.

    A loop over many arguments may call `function` directly. It then adds the successes to `tally`
    and `record` afterwards, and passes everything else to `settle`, `fail` or `exit`.
    """

    def __init__(self, hook: Hook, lane: Lane) -> None:
        self.hook = hook
        self.lane = lane
        self.name = hook.name
        self.function = compiled(hook.function)
        self.seeds_calls = hook.restore_seeds
        self.returns_something = hook.title is not None
        self.record = hook.record
        self.untimed: HookRunner | None = None
        """The runner that this one is a copy of, if its calls are timed."""
        self.tally = Tally()
        # Keyed by identity: the equality of user functions is unpredictable.
        self._tallies = lane.host.tallies[id(hook)]
        self._tallies.append(self.tally)

    def __call__(self, argument: Any, seed_key: RestoreKey) -> Any:
        """Return the output, an iterator of outputs, or SKIPPED.

        Raises:
            FatalSampleError: If the failure ends the run.
        """
        before, active.lane = active.lane, self.lane
        self.lane.current.known_call = (self.name, seed_key)
        clock = self.lane.host.clock
        began = 0.0 if clock is None else perf_counter()
        try:
            if self.seeds_calls:
                output = self.call(argument, seed_key)
            else:
                output = self.function(argument)
        except Exception as error:
            return self.fail(error, argument)
        except BaseException as error:
            self.exit(error, argument)
            raise
        finally:
            active.lane = before
            if clock is not None:
                clock.add(self.name, seed_key, began)
        if output is None or type(output) is GeneratorType:
            return self.settle(output, argument, seed_key)
        self.tally.succeeded += 1
        self.record.succeeded = True
        return output

    def timed(self, clock: HookClock, leaf: int) -> HookRunner:
        """Return a copy whose calls are timed, for samples of one dataset."""
        runner = copy(self)
        runner.untimed = self
        runner.function = clock.timed(self.function, self.name, leaf)
        return runner

    def call(self, argument: Any, seed_key: RestoreKey) -> Any:
        """Call the function, seeded for this argument."""
        with seeded(self._seed(flat(seed_key))):
            return self.function(argument)

    def settle(self, output: Any, argument: Any, seed_key: RestoreKey) -> Any:
        """Validate a return value: None, or the outputs of a generator.

        Raises:
            FatalSampleError: If the hook must not return this.
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
        return self._outputs(output, argument, flat(seed_key))

    def succeed(self, count: int = 1) -> None:
        """Count outputs."""
        self.tally.succeeded += count
        self.record.succeeded = True

    def _nothing(self, what: str, argument: Any) -> FatalSampleError:
        return FatalSampleError(
            f"{self.hook.title} {what} None for {describe_sources(self._sources(argument))}; is "
            "there a `return` missing? Return what the next step receives, or raise SkipSample to "
            "skip it"
        )

    def _outputs(self, outputs: Iterator[Any], argument: Any, seed_key: SeedKey) -> Iterator[Any]:
        # Seeded per output: a batch may begin between two of them, and resuming there runs the
        # generator up to that point, outside of the batches that contained its first outputs.
        for sub in count():
            before, active.lane = active.lane, self.lane
            self.lane.current.known_call = (self.name, (*seed_key, sub))
            clock = self.lane.host.clock
            began = 0.0 if clock is None else perf_counter()
            try:
                output = self._next(outputs, (*seed_key, sub))
            except Exception as error:
                self.fail(error, argument)
                return
            except BaseException as error:
                self.exit(error, argument)
                raise
            finally:
                active.lane = before
                if clock is not None:
                    clock.add(self.name, seed_key, began)
            if output is SKIPPED:
                if not sub:
                    self._warn_of_skipping_all(argument)
                return
            if output is None and self.hook.title is not None:
                raise self._nothing("yielded", argument)
            self.succeed()
            yield output

    def _next(self, outputs: Iterator[Any], seed_key: SeedKey) -> Any:
        if not self.seeds_calls:
            return next(outputs, SKIPPED)
        with seeded(self._seed(seed_key)):
            return next(outputs, SKIPPED)

    def _seed(self, seed_key: SeedKey) -> int:
        return derive_seed(self.lane.seed, self.hook.name, *seed_key)

    def fail(self, error: Exception, argument: Any) -> _Skipped:
        """Handle a failure: raise if it ends the run, else count and report it."""
        hook = self.hook
        if isinstance(error, SkipSample):
            self._count("skipped", argument)
            if error.args:
                self._give_reason("skip", str(error), error, argument)
            self._warn_of_skipping_all(argument)
            return SKIPPED
        sources = self._sources(argument)
        where = f"{hook.name} failed on {describe_sources(sources)}"
        cause = describe_error(error)
        # A truncated shard or a wrong setting is not the fault of a single sample.
        is_ours = isinstance(error, EnergonError) and not isinstance(error, SampleError)
        if is_ours or isinstance(error, SYSTEM_EXCEPTIONS):
            raise FatalSampleError(
                f"{where}: {cause}; an error of this kind ends the run"
            ) from error
        self._count("failed", argument)
        self._give_reason("failure", cause_in_words(error), error, argument)
        intolerable = self._intolerable()
        if intolerable:
            raise FatalSampleError(f"{where}: {cause}; {intolerable}") from error
        error.add_note(f"{HOOK_NOTE}{hook.name}")
        if hook.handler not in (None, log_exception):
            hook.handler(error, argument, sources)
        else:
            self._log(error, argument, sources)
        return SKIPPED

    def _warn_of_skipping_all(self, argument: Any) -> None:
        """Log if no sample has passed: a loop over endless data would wait silently."""
        record = self.hook.record
        record.skips += 1
        if not record.succeeded and record.skips >= 1000 and is_power_of_ten(record.skips):
            logger.warning(
                "%s has returned no sample in %s, so no batch can be made; check when it raises "
                "SkipSample or yields nothing (last: %s)",
                self.hook.title or self.name,
                counted(record.skips, "call", grouped=True),
                describe_sources(self._sources(argument)),
            )

    def _log(self, error: Exception, argument: Any, sources: Any) -> None:
        hook, cause, failures = self.hook, raised_at(error), self.hook.record.failures
        failures[cause] += 1
        # The repr of `hook.dataset` is the same in all workers, whose failures are merged by it.
        origin = f"{hook.dataset} by {cause}"
        log_failure(error, argument, sources, hook=hook.name, origin=origin, count=failures[cause])

    def exit(self, error: BaseException, argument: Any) -> None:
        """Raise an error in place of an exit that would end the program without a reason."""
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
        hook, counts, reasons = self.hook, self.lane.counts, self.hook.record.reasons
        dataset = "" if hook.dataset is None else hook.dataset(argument)
        name = reason_name(what, hook.name, dataset, reason)
        if name not in reasons and len(reasons) >= MAX_REASONS:
            name = reason_name(what, hook.name, dataset, "other reasons")
        reasons[name] += 1
        counts[name] += 1
        if reasons[name] <= LOGGED_SAMPLES:
            counts[reason_name(name, describe_sources(self._sources(argument)), str(error))] = 1

    def _intolerable(self) -> str | None:
        """Count a failure; return why it exceeds the tolerance, or None."""
        record, lane = self.hook.record, self.lane
        self.tally.count_failure()
        succeeded = sum(tally.succeeded for tally in self._tallies)
        # Past the beginning of a run, it has succeeded before, if only before a restore.
        has_begun = lane.current.batch or lane.host.has_begun
        return self.hook.tolerance.exceeded_by(
            self.tally.failed_in_a_row,
            failed=sum(tally.failed for tally in self._tallies),
            succeeded=succeeded,
            is_untried=not (succeeded or record.succeeded or has_begun),
        )


_OUTPUTS = {"given": int, "batch": int | None}


class ApplyIterator(DatasetIterator[Any]):
    """Draws inputs from `inner`, runs hooks on them, yields the outputs. Subclasses draw."""

    saves: ClassVar[Mapping[str, StateKind]] = {"inner": dict}
    """What `_position` returns; the number of outputs already returned is added to it."""
    yields_batches = False
    """Whether each output is a batch, rather than an item of one."""

    def __init__(self, inner: DatasetIterator[Any], lane: Lane) -> None:
        self.inner = inner
        self.lane = lane
        self.outputs: Iterator[Any] | None = None
        self.before: State = {}
        # The position of the next input, right after it was loaded from a state.
        self.saved: State | None = None
        self.given = 0
        # The batches for which the current and the next input were drawn, if they differ from the
        # one that the lane is working on.
        self.batch: int | None = None
        self.entered: tuple[int | None, RestoreKey] = (None, ())
        self.next_batch: int | None = None

    def __next__(self) -> Any:
        while True:
            if self.outputs is not None:
                output = self._next_output()
                if output is not SKIPPED:
                    return output
                self.outputs = None
                self.given = 0
            self.before, self.saved = self.saved or self._position(), None
            if self.next_batch is None:
                self.batch = self.lane.current.batch
                output = self._produce()
            else:
                output = self._begin()
            if output is not SKIPPED:
                return output

    def _begin(self) -> Any:
        """Draw an input on behalf of the batch for which it was first drawn."""
        self.batch, self.next_batch = self.next_batch, None
        if self.batch is None:
            self.batch = self.lane.current.batch
            return self._produce()
        with self.lane.current.working_for(self.batch):
            return self._produce()

    def _next_output(self) -> Any:
        """Return the next of several outputs, or SKIPPED after the last one."""
        row, seed_key = self.entered
        if row is not None:
            self.lane.enter(row, seed_key, several=self.yields_batches)
        batch = None if self.yields_batches else self.batch
        with self.lane.current.working_for(batch):
            output = next(self.outputs or iter(()), SKIPPED)
        self.given += output is not SKIPPED
        return output

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def row_key(self) -> tuple[int, ...]:
        return (self.row, self.given) if self.outputs is not None else (self.row,)

    @property
    def item_state(self) -> ItemState:
        return {**self.before, "given": max(0, self.given - 1), "batch": self.batch}

    def state_dict(self) -> State:
        if self.outputs is not None:
            return {**self.before, "given": self.given, "batch": self.batch}
        self.saved = self._position()
        return {**self.saved, "given": 0, "batch": self.next_batch}

    def load_state_dict(self, state: State) -> None:
        (given, self.next_batch), position = unpack_some(state, _OUTPUTS)
        self.saved = None
        self._go_to(position)
        if given:
            self._repeat_outputs(given)

    def _repeat_outputs(self, given: int) -> None:
        """Reproduce the outputs of the next input that were already returned."""
        current, batch = self.lane.current, self.next_batch
        self.before = self._position()
        output = self._begin()
        if self.outputs is None and output is not SKIPPED:
            # The hook is no longer a generator: its single output was already returned.
            return
        for number in replay(iter(range(1, given)), given - 1):
            with current.working_for(None if batch is None else batch + number):
                self._next_output()

    def _position(self) -> State:
        """Return the position of the next input."""
        return {"inner": self.inner.state_dict()}

    def _go_to(self, position: State) -> None:
        """Return to the position of an input."""
        (inner,) = unpack(position, self.saves)
        self.inner.load_state_dict(inner)

    def _produce(self) -> Any:
        """Draw one input and return its first output, leaving the others in `outputs`."""
        raise NotImplementedError

    def _apply(
        self,
        argument: Any,
        runners: tuple[HookRunner, ...],
        seed_key: SeedKey,
        key: Callable[[], RestoreKey | None],
    ) -> Any:
        """Return the first output of the hooks for `argument`, or SKIPPED.

        Args:
            argument: Argument of the first hook.
            runners: The runners of the hooks, applied one after another.
            seed_key: Seeds their random numbers.
            key: Returns the restore key of `argument`. Called if a hook is a generator: its
                outputs carry that key with a number appended.
        """
        for done, runner in enumerate(runners, start=1):
            argument = runner(argument, seed_key)
            if argument is SKIPPED:
                return SKIPPED
            if type(argument) is GeneratorType:
                return self._begin_outputs(argument, runners[done:], seed_key, key())
        return argument

    def _begin_outputs(
        self,
        items: Iterator[Any],
        runners: tuple[HookRunner, ...],
        seed_key: SeedKey,
        key: RestoreKey | None,
    ) -> Any:
        """Return the first output of the remaining hooks for a generator's items, or SKIPPED.

        Args:
            items: The outputs of the generator.
            runners: The runners of the hooks after it.
            seed_key: The seed key of its argument.
            key: The restore key of its argument.
        """
        current = self.lane.current
        row, lane = current.row, self.lane
        self.entered = None if row is None else lane.inner_row(row), current.seed_key
        self.outputs = _expand(items, runners, seed_key, key)
        self.given = 1
        return next(self.outputs, SKIPPED)


def _expand(
    items: Iterator[Any],
    runners: tuple[HookRunner, ...],
    seed_key: SeedKey,
    key: RestoreKey | None,
) -> Iterator[Any]:
    for sub, item in enumerate(items):
        sub_key = None if key is None else (*key, sub)
        if sub_key is not None:
            stamp(item, sub_key)
        outputs: Iterator[Any] = iter((item,))
        for done, runner in enumerate(runners, start=1):
            item = runner(item, (*seed_key, sub))
            outputs = iter((item,))
            if type(item) is GeneratorType:
                outputs = _expand(item, runners[done:], (*seed_key, sub), sub_key)
                break
            if item is SKIPPED:
                break
        yield from (output for output in outputs if output is not SKIPPED)


def replay(outputs: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield the outputs that were returned before a state was saved; fewer if it ends early.

    Raises:
        StateError: If this many cannot have been waiting.
    """
    if count > RESUMED_OUTPUTS.value:
        raise StateError(
            f"the state says that {count:,} outputs of a generator were given, all of which would "
            f"have to be made again; expected at most {RESUMED_OUTPUTS.value:,}. It is damaged or "
            f"was edited; {RESUMED_OUTPUTS.hint}"
        )
    return islice(outputs, max(0, count))


def runners_of(hooks: Sequence[Hook], lane: Lane) -> tuple[HookRunner, ...]:
    """Return the runners of `hooks` in a lane."""
    return tuple(HookRunner(hook, lane) for hook in hooks)


class LeafRunners(dict[int, tuple[HookRunner, ...]]):
    """The hook runners of each leaf in a lane, created with its first item."""

    def __init__(self, hooks: tuple[tuple[Hook, ...], ...], lane: Lane) -> None:
        super().__init__()
        self._hooks = hooks
        self._lane = lane
        # Leaves that share a hook share its failures. Keyed by identity: the equality of user
        # functions is unpredictable.
        self._known: dict[int, HookRunner] = {}
        self._timed: dict[tuple[int, int], tuple[HookRunner, ...]] = {}

    def timed(self, leaf: int, key: RestoreKey | None, clock: HookClock) -> tuple[HookRunner, ...]:
        """Return the runners of a leaf, whose calls are timed, for the sample with this key."""
        number = leaf_of(key)
        runners = self._timed.get((leaf, number))
        if runners is None:
            runners = tuple(runner.timed(clock, number) for runner in self[leaf])
            self._timed[leaf, number] = runners
        return runners

    def __missing__(self, leaf: int) -> tuple[HookRunner, ...]:
        for hook in self._hooks[leaf]:
            if id(hook) not in self._known:
                self._known[id(hook)] = HookRunner(hook, self._lane)
        runners = self[leaf] = tuple(self._known[id(hook)] for hook in self._hooks[leaf])
        return runners


def reapply(
    argument: Any,
    hooks: tuple[Hook, ...],
    lane: Lane,
    *,
    seed_key: SeedKey,
    key: RestoreKey,
    subs: RestoreKey,
    yields_batches: bool = False,
) -> tuple[Any, RestoreKey]:
    """Return one output of `hooks` for `argument`, and the remaining numbers.

    Args:
        argument: Argument of the first hook.
        hooks: Applied one after another.
        lane: The lane to run them in.
        seed_key: Seeds their random numbers, as it did the first time.
        key: The restore key of `argument`.
        subs: For each hook that yields several outputs the number of the requested one, followed
            by whatever later stages appended.
        yields_batches: Whether each of several outputs is a batch.

    Raises:
        FatalSampleError: If a hook fails.
        StateError: If a hook no longer yields this output.
    """
    for hook in hooks:
        # A request for a certain sample should show why it fails.
        strict = replace(hook, tolerance=Tolerance(0), handler=reraise_exception)
        output = HookRunner(strict, lane)(argument, seed_key)
        if type(output) is GeneratorType:
            if not subs:
                raise StateError(f"{hook.name} yields several outputs, and {key} selects none")
            sub, *rest = subs
            for _ in range(sub):
                next(output, SKIPPED)
                if yields_batches:
                    lane.current.count_batch()
            output = next(output, SKIPPED)
            key, subs, seed_key = (*key, sub), tuple(rest), (*seed_key, sub)
            stamp(output, key)
        if output is SKIPPED:
            raise StateError(
                f"{hook.name} skips {key}, or does not yield this many, so it cannot be restored"
            )
        argument = output
    return argument, subs
