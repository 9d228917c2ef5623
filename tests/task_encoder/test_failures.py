"""What happens to samples that hooks fail on: tolerated, counted, noted, left out from then on."""

from __future__ import annotations

import json
import traceback
from itertools import islice

import pytest

from energon import (
    ConfigError,
    Cooker,
    DatasetNotFoundError,
    DefaultTaskEncoder,
    FatalSampleError,
    Quarantine,
    SampleDecoder,
    SkipSample,
    get_savable_loader,
    reraise_exception,
    stateless,
)
from energon.cli.main import main
from energon.stages.hooks.failures import RATED_CALLS
from tests.datasets import make_crude
from tests.effort import mixed
from tests.encoders import Keys
from tests.task_encoder.runs import config, train, val


class Picky(DefaultTaskEncoder):
    def encode_sample(self, sample):
        number = int(sample["txt"].split()[1])
        if number % 10 == 3:
            raise ValueError(f"number {number} is not what I want")
        if number % 10 == 5:
            raise SkipSample
        return sample


@pytest.fixture
def root(tmp_path):
    return make_crude(tmp_path / "texts", [15, 28, 17])


def run(dataset, **settings):
    with get_savable_loader(dataset, **settings) as batches:
        count = sum(len(batch["__key__"]) for batch in batches)
        return count, batches.stats()


def test_failures_and_skips_are_counted_by_hook_and_dataset(root):
    count, stats = run(val(root, Picky()))
    assert count == 48
    assert stats["failed"] == stats["skipped"] == 6
    assert stats["failed: encode_sample: texts/val"] == 6
    assert stats["skipped: encode_sample: texts/val"] == 6


def test_a_share_of_failures_ends_the_run_once_there_are_enough_calls(root):
    class Careful(Picky):
        @stateless(failure_rate=0.05)
        def encode_sample(self, sample):
            return super().encode_sample(sample)

    batches = islice(get_savable_loader(train(root, Careful())), RATED_CALLS)
    with pytest.raises(FatalSampleError, match=r"in \d+ calls, more than the tolerated share"):
        list(batches)
    run(val(root, Careful()))


def test_the_share_may_be_set_for_all_hooks(root):
    class Careful(Picky):
        __default_failure_rate__ = 0.12

    with get_savable_loader(train(root, Careful())) as batches:
        for _, _ in zip(range(RATED_CALLS), batches, strict=False):
            pass


def test_a_hook_may_have_a_handler_of_its_own(root):
    class Strict(Picky):
        @stateless(error_handler=reraise_exception)
        def encode_sample(self, sample):
            return super().encode_sample(sample)

    with pytest.raises(FatalSampleError, match="'s3'.*number 3 is not what I want"):
        run(val(root, Strict()))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_takes_more_memory_than_there_is_fails_alone(root, workers):
    class Greedy(DefaultTaskEncoder):
        def encode_sample(self, sample):
            if sample["__key__"] == "s3":
                bytearray(1 << 60)
            return sample

    worker_config = config(num_workers=workers)
    count, stats = run(val(root, Greedy(), batch_size=1, worker_config=worker_config))
    assert (count, stats["failed"]) == (59, 1)


def fail_by(error):
    """Return a hook that always fails, which is tolerated as often as it happens."""

    @stateless(failure_tolerance=0)
    def hook(self, *arguments):
        raise error

    return hook


@pytest.mark.parametrize(
    "error",
    [
        RecursionError("too deep"),
        ModuleNotFoundError("No module named 'mising'"),
        SyntaxError("invalid syntax"),
        NameError("name 'smaple' is not defined"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("name", ["encode_sample", "batch", "encode_batch"])
def test_system_errors_of_any_hook_end_the_run_with_their_cause(root, error, name):
    encoder = type("Failing", (DefaultTaskEncoder,), {name: fail_by(error)})()
    with pytest.raises(FatalSampleError, match=f"{name} failed on .*'s0'") as caught:
        run(val(root, encoder))
    assert caught.value.__cause__ is error
    assert f"{type(error).__name__}: {error}" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [NameError("no such name"), ImportError("no such library")])
def test_system_errors_of_decoders_end_the_run_with_their_cause(root, workers, error):
    def decode(data):
        raise error

    class Decoding(DefaultTaskEncoder):
        decoder = SampleDecoder(decoders={"txt": decode})

    with pytest.raises(FatalSampleError, match=f"'s0' .*{type(error).__name__}: {error}") as caught:
        run(val(root, Decoding(), worker_config=config(num_workers=workers)))
    # What comes from a worker has the traceback there for a cause.
    assert "in decode" in "".join(traceback.format_exception(caught.value))


def test_what_a_decoder_of_the_user_cannot_read_is_left_out_and_counted(root):
    class Decoding(DefaultTaskEncoder):
        decoder = SampleDecoder(decoders={"txt": lambda data: {b"text 3": 3}[data]})

    count, stats = run(val(root, Decoding(), batch_size=1))
    assert (count, stats["failed"]) == (1, 59)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_failing_samples_are_noted_once_and_can_be_left_out(root, tmp_path, workers):
    folder = tmp_path / "quarantine"
    worker_config = config(num_workers=workers, global_error_handler=Quarantine(folder))
    run(val(root, Picky(), worker_config=worker_config))
    run(val(root, Picky(), worker_config=worker_config))
    lines = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    keys = {line["key"] for line in lines}
    assert keys == {f"s{n}" for n in range(3, 60, 10)}
    assert lines[0]["reason"].startswith("ValueError: number ")
    assert workers or len(lines) == len(keys)

    count, stats = run(val(root, Picky(), exclude_from=folder))
    assert count == 48
    assert "failed" not in stats


def test_the_command_line_leaves_out_what_is_in_quarantine(root, tmp_path):
    handler = Quarantine(tmp_path / "quarantine")
    run(val(root, Picky(), worker_config=config(global_error_handler=handler)))
    main(
        [
            *("prepare", str(root), "--non-interactive", "--force-overwrite"),
            *("--split-parts", "val:.*", "--sample-type", "CrudeWebdataset"),
            *("--exclude-from", str(tmp_path / "quarantine" / "texts.jsonl")),
        ],
        standalone_mode=False,
    )
    assert "failed" not in run(val(root, Picky()))[1]


def test_a_failing_batch_accuses_none_of_its_samples(root, tmp_path):
    class Fails(Keys):
        @stateless(failure_tolerance=0)
        def batch(self, samples):
            raise ValueError("cannot be batched")

    handler = Quarantine(tmp_path / "quarantine")
    dataset = val(root, Fails(), worker_config=config(global_error_handler=handler))
    with get_savable_loader(dataset) as batches:
        assert list(batches) == []
        assert batches.stats()["failed: batch: texts/val"] == 15
    assert list((tmp_path / "quarantine").iterdir()) == []


def test_a_folder_of_something_else_is_no_quarantine(root, tmp_path, caplog):
    (tmp_path / "quarantine").mkdir()
    val(root, exclude_from=tmp_path / "quarantine")
    assert caplog.messages == []
    val(root, exclude_from=root)
    (said,) = caplog.messages
    assert said.startswith(f"exclude_from: {root} has no texts.jsonl, so no sample")


def test_a_folder_that_is_not_there_is_no_quarantine(root, tmp_path):
    with pytest.raises(DatasetNotFoundError, match="exclude_from"):
        val(root, exclude_from=tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write quarantine files here"):
        Quarantine(tmp_path / "file")


def test_making_a_failing_sample_again_shows_why_it_fails(root):
    with get_savable_loader(val(root, Picky())) as batches:
        next(iter(batches))
        with pytest.raises(FatalSampleError, match="number 3 is not what I want"):
            batches.restore_sample([(0, 0, 3)])
        with pytest.raises(ValueError, match="encode_sample skips"):
            batches.restore_sample([(0, 0, 5)])


def forget(self, *arguments):
    """Forgets to return."""


def forget_in_a_generator(self, *arguments):
    yield None


def cook_nothing(sample):
    sample["txt"] = "nothing"


class Packing(DefaultTaskEncoder):
    def select_samples_to_pack(self, samples):
        return [samples]

    def pack_selected_samples(self, samples):
        return samples[0]


HOOKS = ["encode_sample", "batch", "encode_batch", "postencode_sample", "preencode_sample"]


NAMES = [*HOOKS, "pack_selected_samples"]
# A generator is refused as postencode_sample where samples are packed.
GENERATORS = [name for name in NAMES if name != "postencode_sample"]


@pytest.mark.parametrize(
    ("name", "function", "workers"),
    [*mixed(NAMES, [forget], [0, 1]), *mixed(GENERATORS, [forget_in_a_generator], [0, 1])],
)
def test_a_hook_that_returns_nothing_is_named(root, name, function, workers):
    packs = name in ("pack_selected_samples", "postencode_sample", "preencode_sample")

    class Forgetful(Packing if packs else DefaultTaskEncoder):
        pass

    method = type(function)(function.__code__, globals(), name)
    method.__qualname__ = f"Forgetful.{name}"
    setattr(Forgetful, name, method)
    settings = {"packing_buffer_size": 4} if packs else {}
    worker_config = config(num_workers=workers)
    dataset = val(root, Forgetful(), worker_config=worker_config, **settings)
    message = rf"Forgetful\.{name} (returned|yielded) None for .*`return` missing.*SkipSample"
    with pytest.raises(FatalSampleError, match=message):
        run(dataset, workers="thread")


def test_a_cooker_that_returns_nothing_is_named(root):
    class Cooks(DefaultTaskEncoder):
        cookers = (Cooker(cook_nothing),)

    with pytest.raises(FatalSampleError, match="cook_nothing returned None for sample 's0'"):
        run(val(root, Cooks()))


class FailsAtFirst(DefaultTaskEncoder):
    """Fails on the first samples, and tells how often it was called."""

    def __init__(self, failures):
        super().__init__()
        self.failures = failures
        self.calls = 0

    def encode_sample(self, sample):
        self.calls += 1
        if self.calls <= self.failures:
            raise ValueError("not now")
        return sample


def test_a_hook_that_never_succeeds_ends_the_run_soon(root):
    encoder = FailsAtFirst(1000)
    with pytest.raises(FatalSampleError, match=r"10 failures, and it has not succeeded once"):
        run(val(root, encoder))
    assert encoder.calls == 10
    assert run(val(root, FailsAtFirst(9)))[0] == 51


class SkipsAll(DefaultTaskEncoder):
    calls = 0

    def encode_sample(self, sample):
        self.calls += 1
        if self.calls <= 1000:
            raise SkipSample
        return sample


class YieldsNothing(SkipsAll):
    def encode_sample(self, sample):
        self.calls += 1
        if self.calls > 1000:
            yield sample


@pytest.mark.parametrize("kind", [SkipsAll, YieldsNothing])
def test_a_hook_that_skips_every_sample_is_named(root, caplog, kind):
    with get_savable_loader(train(root, kind())) as loader:
        next(iter(loader))
    (said,) = caplog.messages
    assert said.startswith(f"{kind.__name__}.encode_sample has returned no sample in 1,000 calls")
    assert "(last: sample 's" in said


def test_a_hook_that_has_succeeded_may_fail_more_often(root):
    class FailsLater(FailsAtFirst):
        def encode_sample(self, sample):
            self.calls += 1
            if 4 < self.calls <= 44:
                raise ValueError("not now")
            return sample

    # It succeeds in one lane, and fails in the other from the first sample on.
    worker_config = config(lanes=2)
    assert run(val(root, FailsLater(0), batch_size=4, worker_config=worker_config))[0] == 20
    dataset = train(root, FailsLater(0))
    with get_savable_loader(dataset) as loader:
        next(iter(loader))
        state = loader.save_state_rank()
    again = FailsAtFirst(40)
    with get_savable_loader(train(root, again)) as loader:
        loader.restore_state_rank(state)
        next(iter(loader))
    assert again.calls == 44


def test_who_sets_a_tolerance_gets_it_from_the_first_sample_on(root):
    class Tolerant(FailsAtFirst):
        __default_failure_tolerance__ = 40

    encoder = Tolerant(1000)
    with pytest.raises(FatalSampleError, match="40 failures in a row, which is the limit"):
        run(val(root, encoder))
    assert encoder.calls == 40
    assert run(val(root, Tolerant(39)))[0] == 21


class FailsOften(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        if int(sample["__key__"][1:]) % 2:
            raise ValueError("odd")
        return sample["__key__"]


@pytest.mark.slow
def test_workers_that_fail_for_the_same_cause_are_heard_as_one(tmp_path, caplog):
    root = make_crude(tmp_path / "many", [90, 90])
    dataset = val(root, FailsOften(), worker_config=config(lanes=3, num_workers=3), batch_size=1)
    with get_savable_loader(dataset) as loader:
        assert len(list(loader)) == loader.stats()["failed"] == 90
    told = [text for text in caplog.messages if "ValueError: odd" in text]
    assert ["Traceback" in text for text in told] == [True] + [False] * 9


def test_the_first_failure_of_a_cause_is_logged_in_full_and_repeats_are_counted(tmp_path, caplog):
    root = make_crude(tmp_path / "many", [600, 600])

    class TwoCauses(DefaultTaskEncoder):
        @stateless(failure_tolerance=0)
        def encode_sample(self, sample):
            number = int(sample["__key__"][1:])
            if number < 100:
                return sample
            if number == 700:
                raise KeyError("the other cause")
            raise ValueError("the first cause")

    run(val(root, TwoCauses(), worker_config=config(lanes=3)))
    records = [record.getMessage() for record in caplog.records if record.name == "energon"]
    first = [text for text in records if "the first cause" in text]
    assert ["Traceback" in text for text in first] == [True] + [False] * 11
    assert first[-2].startswith("encode_sample failed 100 times with this error; the")
    assert first[-1].startswith("encode_sample failed 1,000 times with this error; the")
    (other,) = (text for text in records if "the other cause" in text)
    assert "Traceback" in other


def test_failures_without_a_message_are_named_by_their_type(root, caplog):
    class Asserting(Keys):
        def encode_sample(self, sample):
            if sample["__key__"].endswith("3"):
                raise AssertionError
            return sample

    next(iter(get_savable_loader(train(root, Asserting(), batch_size=20))))
    assert "skipped a sample: AssertionError (sample '" in caplog.text


@pytest.mark.parametrize("hook", ["batch", "encode_batch"])
def test_the_log_says_how_many_samples_a_failing_batch_loses(root, caplog, hook):
    def fail(self, samples):
        raise ValueError("too long")

    encoder = type(
        "FailsOnBatches", (DefaultTaskEncoder,), {hook: stateless(failure_tolerance=0)(fail)}
    )
    next(iter(val(root, encoder(), batch_size=4)), None)
    assert "skipped 4 samples: ValueError: too long (sample '" in caplog.text
    assert "skipped a sample" not in caplog.text
