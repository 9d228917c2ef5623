import sys
import threading
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from energon.loader.memory import pin_batches, to_device
from energon.loader.savable import get_loader, get_savable_loader
from energon.samples.collate import map_tensors
from energon.samples.provenance import sources_of
from tests.loader.fake_pipeline import fake
from tests.waiting import wait_until

torch = pytest.importorskip("torch")


@dataclass(frozen=True)
class Frozen:
    tensor: object
    text: str = "x"


class Pair(NamedTuple):
    first: object
    second: object


def doubled(value):
    return map_tensors(value, lambda tensor: tensor * 2)


def test_goes_into_containers_and_dataclasses():
    one = torch.ones(())
    batch = {"a": [one, "b"], "c": (one, 3), "d": Pair(one, None), "e": Frozen(one)}
    again = doubled(batch)
    assert again == {"a": [2, "b"], "c": (2, 3), "d": Pair(2, None), "e": Frozen(torch.tensor(2))}
    assert type(again["d"]) is Pair
    assert batch["a"][0] == 1


def test_keeps_what_holds_no_tensor():
    batch = {"a": [1, 2], "b": Frozen("x")}
    assert doubled(batch) is batch


def test_keeps_the_sources_of_a_sample_that_was_just_read():
    raw = {"__key__": "a", "__restore_key__": (0,), "__shard__": "0.tar", "txt": b"x"}
    sources = sources_of("captions", raw)
    batch = {"text": torch.ones(1), "sources": sources}
    assert doubled(batch)["sources"] is sources


def test_keeps_the_class_of_a_dict():
    class Sample(dict):
        pass

    assert type(doubled(Sample(a=torch.ones(1)))) is Sample


def test_moves_to_a_device():
    assert to_device([torch.ones(1)], "meta")[0].device.type == "meta"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pins_nothing_without_cuda():
    assert pin_batches(None) is None
    assert pin_batches(False) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pins_with_cuda():
    batch = pin_batches(None)({"a": [torch.ones(5)]})
    assert batch["a"][0].is_pinned()


def test_torch_may_be_imported_after_the_loader_is_built(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("energon.loader.memory.pin_memory", lambda batch: "pinned")
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "torch")
        loader = get_loader(fake())
    with loader:
        assert next(iter(loader)) == "pinned"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_loader_that_cannot_pin_warns_and_loads(caplog):
    with get_loader(fake(), pin_memory=True) as loader:
        assert next(iter(loader)) is not None
    assert "pin_memory=True has no effect" in caplog.text


def numbers(lane, row):
    return {"numbers": torch.full((40_000,), 1000 * lane + row), "lane": lane}


@pytest.fixture
def pinned_by(monkeypatch):
    """Let tensors be "pinned" on machines without CUDA; lists the threads that did it."""
    threads = []

    def copied(tensor):
        threads.append(threading.current_thread())
        return tensor.clone()

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: -1)  # no device is chosen
    monkeypatch.setattr("energon.loader.memory._pinned", copied)
    return threads


def first_numbers(batches, count):
    return [int(next(batches)["numbers"][0]) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "process"), (2, "thread")])
def test_batches_that_are_pinned_ahead_come_in_the_same_order_and_are_in_no_state(
    workers, kind, pinned_by
):
    pipeline = fake(numbers, workers=workers, lanes=3)
    expected = [1000 * lane + row for row in range(6) for lane in range(3)]
    with get_savable_loader(pipeline, workers=kind) as loader:
        batches = iter(loader)
        assert first_numbers(batches, 4) == expected[:4]
        state = loader.save_state_rank()
        assert first_numbers(batches, 6) == expected[4:10]
    with get_savable_loader(pipeline, workers=kind) as loader:
        loader.restore_state_rank(state)
        assert first_numbers(iter(loader), 4) == expected[4:8]
    assert len(pinned_by) >= 14


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_batch_that_has_arrived_is_pinned_while_the_trainer_works(kind, pinned_by):
    with get_loader(fake(numbers, workers=1), workers=kind) as loader:
        batches = iter(loader)
        rows = first_numbers(batches, 1)
        while set(pinned_by) == {threading.main_thread()}:
            wait_until(loader._stream.arrived)
            rows += first_numbers(batches, 1)
        rows += first_numbers(batches, 2)
    assert rows == list(range(len(rows)))


def test_a_batch_that_cannot_be_pinned_is_made_again(pinned_by, monkeypatch):
    with get_loader(fake(numbers, workers=1), workers="thread") as loader:
        assert first_numbers(iter(loader), 1) == [0]
        wait_until(loader._stream.arrived)
        with monkeypatch.context() as failing:
            failing.setattr("energon.loader.memory._pinned", lambda _: 1 / 0)
            loader._pin.begin(loader._stream.arrived())
            wait_until(loader._pin._ahead[1].done)
        with pytest.raises(ZeroDivisionError):
            next(iter(loader))
        assert first_numbers(iter(loader), 3) == [1, 2, 3]


PINNED = [
    torch.arange(100_000),
    torch.arange(100_000).to(torch.bfloat16),
    torch.ones(50_000, dtype=torch.bool),
    torch.rand(50_000).to(torch.complex64),
    torch.rand(50_000).to(torch.complex64).conj(),
    torch.rand(300, 400).T,
    torch.rand(40_000, requires_grad=True),
    torch.tensor(5),
    torch.zeros(0),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("number", range(len(PINNED)))
def test_pinned_tensors_are_equal(number):
    tensor = PINNED[number]
    (pinned,) = pin_batches(True)([tensor])
    assert pinned.is_pinned() or not tensor.numel()
    assert (pinned.dtype, pinned.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(pinned, tensor)
    assert torch.equal(to_device(pinned, "cuda").cpu(), tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "process"), (2, "thread")])
def test_copies_that_are_still_running_are_not_overwritten(workers, kind):
    busy = torch.rand(4096, 4096, device="cuda")
    with get_loader(fake(numbers, workers=workers, lanes=2), workers=kind) as loader:
        copies = []
        for _, batch in zip(range(40), loader, strict=False):
            assert batch["numbers"].is_pinned()
            busy = busy @ busy  # so that the copies wait
            copies.append(to_device(batch["numbers"], "cuda"))
            del batch
    expected = [1000 * lane + row for row in range(20) for lane in range(2)]
    assert [set(each.tolist()) for each in copies] == [{number} for number in expected]
