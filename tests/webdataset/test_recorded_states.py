"""States that earlier revisions have saved still load, and continue with the same items.

`python -m tests.webdataset.test_recorded_states` records them anew.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import energon.webdataset as wds
from tests.webdataset.shards import make_shards
from tests.webdataset.test_state import PIPELINES, number, twins

RECORDED = Path(__file__).with_name("states.json")
SAVED_AT = (0, 1, 5)
URLS = [f"shards/shard-{n:06}.tar" for n in range(4)]


def has_text(sample):
    return b"text" in sample["txt"]


def parts():
    return [wds.DataPipeline(list(range(n)), wds.shuffle(4)) for n in (9, 12)]


ALL_PIPELINES = {
    **PIPELINES,
    "fields": lambda urls: (
        wds.WebDataset(urls, handler=wds.warn_and_continue)
        .select(has_text)
        .info(n=0)
        .log_keys("keys.log")
        .decode()
        .rename(text="txt;jpg", keep=True)
        .map_dict(text=str.upper)
        .associate({"000003": {"extra": 1}})
        .to_tuple("__key__", "text", "json")
        .map_tuple(int, None)
        .batched(3)
        .unbatched()
    ),
    "patterns": lambda urls: (
        wds.WebDataset(urls).rename_keys(words="t*t").xdecode(words=False).extract_keys("words")
    ),
    "random mix": lambda urls: wds.RandomMix(parts(), [1, 2], longest=True).shuffle(3),
    "round robin": lambda urls: wds.RoundRobin(parts(), longest=True).flatmap(twins).with_epoch(15),
    "explicit order": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls, seed=3),
        wds.detshuffle(3),
        wds.tarfile_to_samples(),
        wds.map(number),
    ),
    "records": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(["lines.jsonl"]), wds.jsonl_to_samples(), wds.listed(2)
    ),
    "document": lambda urls: (
        wds.WebDataset(
            {"dataset": [{"shards": urls[:2], "weight": 2}, {"shards": urls[2:], "weight": 1}]}
        )
        .map(number)
        .with_epoch(20)
    ),
    "loader": lambda urls: wds.WebLoader(
        wds.WebDataset(urls, shardshuffle=True).map(number).shuffle(5).listed(2), batch_size=None
    ).unlisted(),
    "loader of an epoch": lambda urls: wds.WebLoader(
        wds.WebDataset(urls, shardshuffle=True).map(number).with_epoch(21), batch_size=2
    ),
}


def write_files():
    make_shards(Path("shards"), [5, 1, 11, 7])
    Path("lines.jsonl").write_text("".join(f"[{n}]\n" for n in range(20)))


def restored(name, state):
    pipeline = ALL_PIPELINES[name](URLS)
    pipeline.load_state_dict(state)
    return [repr(item) for item in islice(pipeline, 40)]


def recorded(name):
    """Return states at several positions, each with the items that follow."""
    found = []
    for count in SAVED_AT:
        pipeline = ALL_PIPELINES[name](URLS)
        list(islice(pipeline, count))
        state = json.loads(json.dumps(pipeline.state_dict()))
        found.append([state, restored(name, state)])
    return found


@pytest.mark.parametrize("name", ALL_PIPELINES)
def test_recorded_states_continue_as_they_did(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files()
    for state, rest in json.loads(RECORDED.read_text())[name]:
        assert restored(name, state) == rest


if __name__ == "__main__":
    from tests.webdataset import test_recorded_states as this  # states name the module of functions

    with TemporaryDirectory() as folder:
        os.chdir(folder)
        write_files()
        states = {name: this.recorded(name) for name in ALL_PIPELINES}
    text = json.dumps(states, separators=(",", ":"))
    RECORDED.write_text(text.replace('],[{"format', '],\n[{"format') + "\n")
