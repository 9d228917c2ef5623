from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.loader.replicas.context_parallel import ContextParallel
from energon.loader.savable import SavableDataLoader
from energon.worker import Replica, ReplicaMember
from tests.loader.fake_pipeline import fake


@dataclass
class Tokens:
    tokens: object
    positions: object
    name: str


def rejoined(parts, lengths, size, layout):
    """The sequence of which these are the parts of all ranks."""
    whole, starts = [], [0] * size
    for length in lengths:
        step = length // (size if layout == "contiguous" else 2 * size)
        first, last = [], []
        for rank in range(size):
            begin = starts[rank]
            first.append(parts[rank][..., begin : begin + step])
            if layout == "zigzag":
                last.insert(0, parts[rank][..., begin + step : begin + 2 * step])
            starts[rank] = begin + step * (1 if layout == "contiguous" else 2)
        whole += first + last
    return np.concatenate(whole, axis=-1)


@given(
    size=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    packed=st.booleans(),
    kind=st.sampled_from(["dict", "dataclass", "tensor"]),
)
def test_the_parts_of_all_ranks_are_the_whole(size, lengths, layout, packed, kind):
    if kind == "tensor":
        torch = pytest.importorskip("torch")
    lengths = [2 * size * length for length in lengths] if packed else [2 * size * sum(lengths)]
    tokens = np.arange(2 * sum(lengths)).reshape(2, -1)
    positions = np.concatenate([np.arange(length) for length in lengths])
    given = {"tokens": tokens, "positions": positions, "name": "a"}
    if kind == "tensor":
        given |= {name: torch.tensor(given[name]) for name in ("tokens", "positions")}
    given["bounds"] = np.cumsum([0, *lengths])
    parts = []
    for rank in range(size):
        cut = ContextParallel(
            dims={"tokens": -1, "positions": 0},
            rank=rank,
            size=size,
            layout=layout,
            cu_seqlens="bounds" if packed else None,
        )
        batch = given
        if kind == "dataclass":
            batch = Tokens(tokens, positions, "a")
            batch.bounds = given["bounds"]
        part = cut(batch)
        part = vars(part) if kind == "dataclass" else part
        assert part["name"] == "a"
        assert (part["bounds"] == given["bounds"]).all()
        assert part["tokens"].shape == (2, sum(lengths) // size)
        parts.append(part)
    for name in ("tokens", "positions"):
        whole = rejoined([np.asarray(part[name]) for part in parts], lengths, size, layout)
        assert (whole == np.asarray(given[name])).all()
    assert (np.asarray(given["tokens"]) == tokens).all()


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk_of_each_sequence():
    cut = ContextParallel(dims={"x": 0}, rank=1, size=2, cu_seqlens="bounds")
    part = cut({"x": np.arange(12), "bounds": np.array([0, 4, 12])})
    assert part["x"].tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"y": np.zeros(4)}, "no field 'x'.*it has y"),
        ({"x": ["a", "b"]}, "'x' has 0 dimensions, but dims names dimension 0"),
        ({"x": np.zeros(6)}, "sequence of 6 elements, expected a multiple of 4"),
        ({"x": np.zeros(8), "bounds": np.array([0, 4])}, "has 8 elements.*from 0 to 4"),
    ],
)
def test_batches_that_cannot_be_cut_are_named(batch, message):
    bounds = "bounds" if "bounds" in batch else None
    cut = ContextParallel(dims={"x": 0}, rank=0, size=2, cu_seqlens=bounds)
    with pytest.raises(ConfigError, match=message):
        cut(batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": {}}, "names no field"),
        ({"dims": {"x": 0}, "layout": "ring"}, "zigzag, contiguous"),
        ({"dims": {"x": 0}, "rank": 1}, "together"),
        ({"dims": {"x": 0}, "rank": 2, "size": 2}, "rank 2 of 2"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ContextParallel(**arguments)


def test_the_rank_is_that_of_the_replica():
    cut = ContextParallel(dims={"x": 0})
    replica = Replica((ReplicaMember(0, "a", True, context_rank=1),), 0, context_size=2)
    assert cut.of(replica)({"x": np.arange(4)})["x"].tolist() == [1, 2]
    with pytest.raises(ConfigError, match="from_mesh"):
        cut.of(None)


def test_a_loader_delivers_the_part_of_its_rank():
    def make(lane, row):
        return {"x": np.arange(8) + row}

    from energon.loader.options import LoaderOptions

    options = LoaderOptions(context_parallel=ContextParallel(dims={"x": 0}, rank=0, size=2))
    loader = SavableDataLoader(fake(make), options=options)
    batches = iter(loader)
    assert next(batches)["x"].tolist() == [0, 1, 6, 7]
    assert next(batches)["x"].tolist() == [1, 2, 7, 8]
