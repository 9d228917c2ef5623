from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

import energon.webdataset as wds
from energon.errors import ConfigError, FormatError, SecurityError
from energon.formats.meta.yaml import load, plain
from energon.webdataset import mix
from tests.webdataset.shards import keys, make_shards

SPEC = """\
dataset:
  - shards: {a}
    name: first
    weight: 3
    scaleprob: 0.5
  - shards: [{b}]
    weight: 1
    extensions: TXT
    options: {{language: en}}
"""


def source(*items):
    return wds.DataPipeline([*items])


def check_resume(make):
    items = list(make())
    for done in range(0, len(items) + 1, 3):
        one, other = make(), make()
        loop = iter(one)
        for _ in range(done):
            next(loop)
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        # After the last item, the next loop is the next pass.
        assert list(other) == (items[done:] or items)
    return items


@pytest.mark.parametrize("kind", [wds.RoundRobin, wds.RandomMix])
def test_datasets_may_be_lists_of_anything(kind):
    assert sorted(map(str, kind([[[3]], [], [1, [len]]], longest=True))) == sorted(
        map(str, [[3], 1, [len]])
    )
    with pytest.raises(ConfigError, match="None is not a stage"):
        list(kind([None, [1]]))


def test_datasets_in_turn():
    parts = [source(*"abc"), source(*"12345"), source(*"x")]
    assert "".join(wds.RoundRobin(parts)) == "a1xb2"
    longest = wds.RoundRobin(parts, longest=True)
    assert "".join(check_resume(lambda: wds.RoundRobin(parts, longest=True))) == "a1xb2c345"
    assert "".join(longest.map(str.upper)) == "A1XB2C345"


def test_datasets_at_random_with_weights():
    parts = [[0] * 10_000, [1] * 10_000, [2] * 10_000]
    counts = Counter(wds.RandomMix(parts, [1, 3, 0]).slice(8000))
    assert counts[2] == 0
    assert 0.23 < counts[0] / 8000 < 0.27


def test_mixtures_end_with_the_first_or_with_the_last():
    def make():
        parts = [source(*range(5)).compose(wds.shuffle(3)), source(*range(10, 25))]
        return wds.RandomMix(parts, [1, 1], longest=True)

    assert sorted(check_resume(make)) == [*range(5), *range(10, 25)]
    short = list(wds.RandomMix([source(*range(5)), source(*range(10, 25))]))
    assert len(short) < 20


def test_mixtures_are_a_function_of_the_seed_and_the_epoch():
    parts = [[*range(50)], [*range(50, 100)]]
    mixed = wds.RandomMix(parts)
    assert list(mixed) != list(mixed)
    assert list(wds.RandomMix(parts)) == list(wds.RandomMix(parts))
    assert list(wds.RandomMix(parts, seed=1)) != list(wds.RandomMix(parts, seed=2))


def test_weights_are_added_up_as_often_as_a_dataset_ends(monkeypatch):
    added = []

    def counted(weights):
        added.append(list(weights))
        return accumulate(added[-1])

    monkeypatch.setattr(mix, "accumulate", counted)
    parts = [range(1), range(10), range(100)]
    assert len(list(wds.RandomMix(parts, [1, 2, 3], longest=True))) == 111
    assert list(map(len, added)) == [3, 2, 1, 0]


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0]])
def test_weights_that_make_no_sense(weights):
    with pytest.raises(ConfigError, match="RandomMix of 2 datasets"):
        wds.RandomMix([[1], [2]], weights)


def test_nothing_to_mix():
    with pytest.raises(ConfigError, match="nothing to mix"):
        wds.RoundRobin([])


@pytest.fixture
def spec(tmp_path):
    make_shards(tmp_path / "a", [5, 5])
    make_shards(tmp_path / "b", [5], name="other")
    path = tmp_path / "spec.yaml"
    text = SPEC.format(a="a/shard-{000000..000001}.tar", b="b/other-000000.tar")
    path.write_text(text)
    return path


def test_documents_with_weights_draw_shards(spec):
    dataset = wds.WebDataset(str(spec)).slice(3000)
    counts = Counter("language" in sample["__options__"] for sample in dataset)
    assert 0.2 < counts[True] / 3000 < 0.3
    sample = next(s for s in wds.WebDataset(str(spec)) if s["__options__"].get("name") == "first")
    assert sample["__options__"] == {"name": "first", "scaleprob": 0.5}
    other = next(s for s in wds.WebDataset(str(spec)) if "language" in s["__options__"])
    assert "txt" in other
    assert "json" not in other


def test_documents_can_be_mixed_sample_by_sample(spec):
    seen = []

    def prepare(dataset, options):
        seen.append(options)
        return dataset.map(lambda sample: options.get("language", "?"))

    mixed = wds.mixture(spec, prepare=prepare, resampled=True).slice(2000)
    assert 0.2 < Counter(mixed)["en"] / 2000 < 0.3
    assert seen == [{"name": "first", "scaleprob": 0.5}, {"language": "en"}]


def test_mistakes_in_documents_are_named_with_their_lines(tmp_path):
    path = tmp_path / "spec.yaml"
    for text, message in (
        ("dataset:\n  - shard: a.tar\n", r"spec.yaml:2:5: unknown key 'shard'"),
        ("dataset:\n  - shards: a.tar\n    weight: -1\n", r"spec.yaml:3:.*weight"),
        ("dataset:\n  - shards: a.tar\n    scaleprob: 2\n", r"spec.yaml:3:.*scaleprob"),
        ("dataset: []\n", r"spec.yaml:1"),
        (
            "dataset: [{shards: [a.tar, 1]}]\n",
            r"spec.yaml:1:28: .*shards\[1\] is 1, expected",
        ),
        ("dataset: [{shards: 1}]\n", r"spec.yaml:1:12: dataset\[0\].shards is 1, expected text"),
        ("other: 1\n", "expected a list of sources"),
        ("a: [\n", "spec.yaml:2"),
    ):
        path.write_text(text)
        with pytest.raises((ConfigError, FormatError), match=message):
            wds.WebDataset(str(path))


def test_documents_of_the_older_form(tmp_path):
    make_shards(tmp_path / "a", [2] * 6)
    make_shards(tmp_path / "b", [2] * 2, name="other")
    document = {
        "prefix": f"{tmp_path}/",
        "datasets": [
            {"buckets": "a", "shards": "shard-{000000..000005}.tar", "choose": 2},
            {"buckets": ["b"], "shards": ["other-000000.tar"], "resample": 3},
        ],
    }
    dataset = wds.WebDataset(document)
    epochs = [keys(dataset) for _ in range(3)]
    assert {len(epoch) for epoch in epochs} == {10}
    assert len(set(map(tuple, epochs))) == 3


@pytest.mark.parametrize(
    "text",
    [
        "dataset: [{shards: '${HERE}/a/shard-{000000..000001}.tar'}]",
        "datasets: [{shards: 'a/shard-{000000..000001}.tar', buckets: '{HERE}'}]\nprefix: $",
    ],
    ids=["sources", "selection"],
)
def test_documents_read_the_environment_only_where_that_is_allowed(spec, monkeypatch, text):
    monkeypatch.setenv("WDS_HERE", str(spec.parent))
    spec.write_text(text)
    for open_one in (wds.WebDataset, wds.mixture, lambda path: wds.WebDataset(yaml_of(path))):
        if "datasets" in text and open_one is wds.mixture:
            continue
        with pytest.raises(SecurityError, match=r"\$\{HERE\} reads the env.*--allow env") as info:
            open_one(str(spec))
        assert str(spec.parent / "a") not in str(info.value)
    assert len(list(wds.WebDataset(str(spec), allow=("env",)))) == 10
    monkeypatch.setenv("ENERGON_ALLOW", "env")
    assert len(list(wds.WebDataset(str(spec)))) == 10


def yaml_of(path):
    return plain(load(Path(path).read_bytes(), origin=path))


def test_lists_of_shards_read_the_environment_only_where_that_is_allowed(tmp_path, monkeypatch):
    make_shards(tmp_path / "a", [3])
    monkeypatch.setenv("WDS_HERE", str(tmp_path))
    path = tmp_path / "list.json"
    entry = {"url": "${HERE}/a/shard-000000.tar", "nsamples": 3}
    path.write_text(json.dumps({"shardlist": [entry], "wids_version": 1, "base": ""}))
    with pytest.raises(SecurityError, match="--allow env"):
        wds.WebDataset(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "dataset: [{shards: 's-{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}.tar'}]",
        "dataset: [{shards: &many ['{1..400000}', '{1..400000}', '{1..400000}']}]",
        f"datasets: [{{shards: &many {[f's{n}' for n in range(2000)]}, buckets: *many}}]",
        "datasets: [{shards: a.tar, resample: 1000000000000}]",
    ],
    ids=["braces", "several patterns", "buckets times shards", "draws"],
)
def test_documents_that_list_too_many_shards_are_refused(tmp_path, monkeypatch, text):
    for limit in ("LISTED_SHARDS", "BRACE_NAMES"):
        monkeypatch.setenv(f"ENERGON_LIMIT_{limit}", "20000")
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="ENERGON_LIMIT_(LISTED_SHARDS|BRACE_NAMES)"):
            wds.WebDataset(str(path))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
