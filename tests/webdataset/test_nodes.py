"""Jobs of several nodes: processes that know each other only by RANK and WORLD_SIZE."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

import energon.webdataset as wds
from energon.errors import StateError
from tests.ranks import Forked, finished
from tests.webdataset.node import number
from tests.webdataset.shards import make_shards

NODE = Path(__file__).with_name("node.py")
TOTAL = 36


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("nodes"), [3] * 12)


def job(folder, task, world, **arguments):
    """Run the nodes of a job side by side, and return what each has printed."""
    (folder / "arguments.json").write_text(json.dumps(arguments))
    words = [str(NODE), task, str(folder / "arguments.json")]
    place = {**os.environ, "WORLD_SIZE": str(world)}
    nodes = [Forked(words, {**place, "RANK": str(n)}, imports=()) for n in range(world)]
    return [json.loads(each) for each in finished(nodes)]


def joined(nodes, name, epoch):
    return [n for node in nodes for n in node[name][epoch]]


@pytest.mark.slow
def test_nodes_with_workers_share_epochs_and_take_equal_steps(urls, tmp_path):
    nodes = job(tmp_path, "epochs", 2, urls=urls)
    for name in ("whole", "persistent"):
        for epoch in range(2):
            assert sorted(joined(nodes, name, epoch)) == [*range(TOTAL)]
        # Shards come in another order, and to other nodes.
        assert set(nodes[0][name][0]) != set(nodes[0][name][1])
    assert nodes[0]["whole"] == nodes[0]["persistent"]
    # Epochs of 5 in each of two workers are 10 steps. Epochs of 21 over both nodes are 11 steps of
    # each, and continue through all of the data.
    for name, steps in (("resampled", 10), ("counted", 11)):
        assert [len(epoch) for node in nodes for epoch in node[name]] == [steps] * 6
    assert len({tuple(epoch) for node in nodes for epoch in node["resampled"]}) == 6
    counted = Counter(n for epoch in range(3) for n in joined(nodes, "counted", epoch))
    assert set(counted.values()) <= {1, 2, 3}
    assert len(counted) > 30


@pytest.mark.slow
def test_a_job_goes_on_with_another_number_of_nodes_and_workers(urls, tmp_path):
    before = job(tmp_path, "run", 2, urls=urls, first=5, workers=2, states=[])
    states = [node["state"] for node in before]
    rest = sorted(n for node in before for n in node["rest"])
    following = sorted(n for node in before for n in node["next"])
    given = [n for node in before for n in node["first"]]
    assert sorted(given + rest) == following == [*range(TOTAL)]
    (alone,) = job(tmp_path, "run", 1, urls=urls, first=3, workers=1, states=states)
    assert sorted(alone["first"] + alone["rest"]) == rest
    # One node takes the samples of both in turn.
    both = zip(before[0]["rest"], before[1]["rest"], strict=False)
    assert alone["first"] == [n for pair in both for n in pair][:3]
    assert sorted(alone["next"]) == following
    again = job(tmp_path, "run", 2, urls=urls, first=0, workers=0, states=[alone["state"]])
    assert sorted(n for node in again for n in node["rest"]) == sorted(alone["rest"])
    assert sorted(n for node in again for n in node["next"]) == following


def loader_of(urls, monkeypatch, rank, world, after=lambda loader: loader):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    dataset = wds.WebDataset(urls).map(number)
    return after(wds.WebLoader(dataset, batch_size=None, num_workers=0))


def states_after(urls, monkeypatch, counts, after=lambda loader: loader):
    states = []
    for rank, count in enumerate(counts):
        with loader_of(urls, monkeypatch, rank, len(counts), after) as loader:
            loop = iter(loader)
            for _ in range(count):
                next(loop)
            states.append(loader.state_dict())
    return states


def test_a_state_of_one_rank_is_not_enough_for_all(urls, monkeypatch):
    states = states_after(urls, monkeypatch, [2, 2])
    with loader_of(urls, monkeypatch, 0, 1) as loader:
        loader.load_state_dict(states[:1])
        with pytest.raises(StateError, match="states of all ranks"):
            next(iter(loader))
        loader.load_state_dict(states)
        assert len(list(loader)) == TOTAL - 4
        with pytest.raises(StateError, match="empty"):
            loader.load_state_dict([])


def test_stages_after_the_loader_keep_the_number_of_ranks(urls, monkeypatch):
    def shuffled(loader):
        return loader.shuffle(4)

    states = states_after(urls, monkeypatch, [3, 3], shuffled)
    loader = loader_of(urls, monkeypatch, 0, 1, shuffled)
    with pytest.raises(StateError, match="hold items of a rank"):
        loader.load_state_dict(states)

    def batches(loader):
        return loader.listed(2).map(tuple)

    states = states_after(urls, monkeypatch, [3, 3], batches)
    with loader_of(urls, monkeypatch, 0, 1, batches) as loader:
        loader.load_state_dict(states)
        assert sum(map(len, loader)) == TOTAL - 12
