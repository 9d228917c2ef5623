import sys
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from energon.errors import ConfigError
from energon.loader.getters import get_loader
from energon.loader.memory import pin_batches, to_device
from energon.samples.collate import map_tensors
from energon.samples.crude import sources_of
from tests.loader.fake_pipeline import fake

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
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        pin_batches(True)


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
def test_a_loader_that_cannot_pin_says_so_when_it_is_built():
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        get_loader(fake(), pin_memory=True)
