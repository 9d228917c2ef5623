"""A hook that ends the program ends the run with an error that says so, wherever it runs."""

import asyncio
import functools
import os
import re
import signal
import sys
import threading
import time

import pytest

from energon import Cooker, DefaultTaskEncoder, basic_sample_keys, stateless
from energon.errors import FatalSampleError, WorkerError
from energon.loader import get_loader
from tests.effort import mixed
from tests.loader.fake_pipeline import fake
from tests.task_encoder.runs import config, train
from tests.waiting import wait_until

PLACES = {"in-line": (0, "process"), "thread": (1, "thread"), "process": (1, "process")}


@stateless
def cook(sample):
    return {**basic_sample_keys(sample), "text": sample["txt"]}


class Plain(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


def ending(name, end):
    """An encoder one of whose hooks calls `end`."""

    class Encoder(Plain):
        pass

    def hook(self, *arguments):
        end()

    if name == "generator":
        name = "encode_sample"

        @stateless
        def hook(self, sample):
            yield sample
            end()

    if name == "select_samples_to_pack":
        Encoder.pack_selected_samples = lambda self, samples: samples
    setattr(Encoder, name, hook)
    return Encoder()


def first_batch(place, encoder, root):
    workers, kind = PLACES[place]
    is_packed = "pack_selected_samples" in vars(type(encoder))
    packed = {"packing_buffer_size": 4} if is_packed else {}
    dataset = train(root, encoder, worker_config=config(num_workers=workers), **packed)
    with get_loader(dataset, workers=kind) as loader:
        return next(iter(loader))


@pytest.mark.parametrize(
    ("place", "hook"), mixed([*PLACES], ["encode_sample", "generator", "batch", "encode_batch"])
)
def test_sys_exit_in_a_hook_names_the_hook_and_the_samples(root, place, hook):
    name = "encode_sample" if hook == "generator" else hook
    with pytest.raises(FatalSampleError) as caught:
        first_batch(place, ending(hook, lambda: sys.exit(3)), root)
    assert re.search(rf"{name} raised SystemExit\(3\) on sample 's\d+' of", str(caught.value))
    assert "SkipSample" in str(caught.value)


def test_sys_exit_in_packing_names_the_hook(root):
    with pytest.raises(FatalSampleError, match="select_samples_to_pack raised SystemExit"):
        first_batch("process", ending("select_samples_to_pack", sys.exit), root)


def interrupt():
    raise KeyboardInterrupt


def cancel():
    raise asyncio.CancelledError("by hand")


@pytest.mark.parametrize("place", ["thread", "process"])
def test_an_interrupt_that_a_hook_raises_is_not_one_of_the_user(root, place):
    with pytest.raises(FatalSampleError, match=r"encode_sample raised KeyboardInterrupt\(\)"):
        first_batch(place, ending("encode_sample", interrupt), root)


@pytest.mark.parametrize("place", PLACES)
def test_whatever_else_is_no_exception_is_named(root, place):
    with pytest.raises(FatalSampleError, match=r"encode_sample raised CancelledError\('by hand'\)"):
        first_batch(place, ending("encode_sample", cancel), root)


def end_process():
    os._exit(4)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["batch", "encode_batch"])
def test_os_exit_in_a_hook_for_batches_names_the_place_and_the_code(root, hook):
    with pytest.raises(WorkerError) as caught:
        first_batch("process", ending(hook, end_process), root)
    message = str(caught.value)
    assert "exited with code 4 in a batch or pack that begins at lane 0 row 0" in message
    assert "in end_process" in message
    assert "in hook" in message


def handler_of(kind):
    def leave(number, frame, code=7):
        raise SystemExit(code)

    class Handler:
        def method(self, number, frame):
            leave(number, frame)

        def __call__(self, number, frame):
            leave(number, frame)

    return {
        "function": leave,
        "partial": functools.partial(leave, code=7),
        "method": Handler().method,
        "object": Handler(),
    }[kind]


@pytest.mark.parametrize("kind", ["function", "partial", "method", "object"])
def test_a_signal_handler_of_the_program_ends_it_while_a_hook_runs(root, kind):
    done = threading.Event()

    def receive():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(done.is_set)

    before = signal.signal(signal.SIGTERM, handler_of(kind))
    try:
        with pytest.raises(SystemExit) as caught:
            first_batch("in-line", ending("encode_sample", receive), root)
        assert caught.value.code == 7
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_of_the_user_stays_one_while_a_hook_runs(root):
    def receive():
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: False)

    with pytest.raises(KeyboardInterrupt):
        first_batch("in-line", ending("encode_sample", receive), root)


def exit_at_row_2(lane, row):
    return (lane, row) if row < 2 else sys.exit("enough")


@pytest.mark.parametrize("place", PLACES)
def test_sys_exit_in_code_that_is_no_hook_names_the_function_and_the_batch(place):
    workers, kind = PLACES[place]
    with get_loader(fake(exit_at_row_2, workers=workers), workers=kind) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        message = r"SystemExit\('enough'\) was raised by exit_at_row_2 .* in batch 2 of lane 0"
        with pytest.raises(WorkerError, match=message):
            next(batches)


class ExitsWhenLoaded:
    def __reduce__(self):
        return sys.exit, ("not here",)


@pytest.mark.slow
def test_sys_exit_while_a_worker_loads_the_pipeline_is_an_error():
    message = r"raised SystemExit: not here\n.*cannot be loaded"
    pipeline = fake(workers=1, print_of={"cause": ExitsWhenLoaded()})
    loader = get_loader(pipeline, start_method="forkserver")  # forks load nothing
    with loader, pytest.raises(WorkerError, match=message):
        next(iter(loader))


def test_sigterm_ends_processes_that_a_hook_forks(root):
    class Forking(Plain):
        def encode_sample(self, sample):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                os.write(writer, b".")
                time.sleep(5)
                os._exit(0)
            os.read(reader, 1)
            os.kill(child, signal.SIGTERM)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def batch(self, samples):
            return samples

    dataset = train(root, Forking(), worker_config=config(num_workers=1), batch_size=1)
    with get_loader(dataset) as loader:
        assert next(iter(loader)) == [-signal.SIGTERM]
