"""Joins end to end: from a document to batches, and again from a state."""

from __future__ import annotations

import json
import os
import shutil
import stat
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from energon import (
    CaptioningSample,
    ConfigError,
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    EmptyDatasetError,
    Sample,
    SecurityError,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    stateless,
    traverse_metadataset,
)
from energon.prepare.dataset import prepare_dataset
from tests.datasets import make_captions, write_shard


@edataclass
class Pair(Sample):
    caption: str
    text: str | None = None

    @classmethod
    def from_joined(cls, captions, texts):
        text = None if texts is None else texts.text
        return cls.derive_from(captions, caption=captions.caption, text=text)


def join_pair(captions, texts):
    return Pair.from_joined(captions, texts)


def join_by_name(*, left, right):
    assert left.__key__ == right.__key__
    return Pair.from_joined(left, right)


def join_crude(*samples):
    merged = CrudeSample(samples[0])
    for sample in samples[1:]:
        merged.update({part: value for part, value in sample.items() if part[0] != "_"})
    return merged


def shout(sample):
    return TextSample.derive_from(sample, text=sample.text.upper())


def make_texts(root: Path, numbers, *, per_shard=4, kind="TextSample") -> Path:
    """A dataset of texts; sample n has the key `s<n>` and the text `text <n>`."""
    numbers = list(numbers)
    for shard, start in enumerate(range(0, len(numbers), per_shard)):
        samples = [
            (f"s{n}", {"text": f"text {n}".encode()}) for n in numbers[start : start + per_shard]
        ]
        write_shard(root / f"{shard}.tar", samples)
    field_map = {"field_map": {"text": "text"}} if kind == "TextSample" else {}
    prepare_dataset(root, split_parts=["train:.*", "val:.*"], sample_type=kind, **field_map)
    return root


@pytest.fixture
def root(tmp_path):
    make_captions(tmp_path / "captions", [5, 7, 8])
    make_texts(tmp_path / "texts", [*range(19, -1, -1)])
    return tmp_path


def document(root, joined, *, function="join_pair", extra="") -> Path:
    path = root / "join.yaml"
    node = f"""join: {joined}
    joiner: {{__module__: {__name__}, __function__: {function}}}
    {extra}"""
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
        f"  train:\n    {node}\n  val:\n    {node}\n"
    )
    return path


def config(**settings):
    return WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **settings})


class Plain(DefaultTaskEncoder):
    @stateless
    def batch(self, samples):
        return samples


def val(path, encoder=None, *, allow=("code",), **settings):
    dataset = get_val_dataset(
        path,
        worker_config=config(),
        batch_size=None,
        task_encoder=encoder or Plain(),
        allow=allow,
        **settings,
    )
    return list(get_loader(dataset))


def pairs(samples):
    return [(sample.__key__, sample.caption, sample.text) for sample in samples]


def expected(numbers, missing=()):
    return [(f"s{n}", f"caption {n}", None if n in missing else f"text {n}") for n in numbers]


@pytest.mark.parametrize(
    ("joined", "function"),
    [
        ("[{path: captions}, {path: texts}]", "join_pair"),
        ("{right: {path: texts}, left: {path: captions}}", "join_swapped"),
        ("{left: {path: captions}, right: {path: texts}}", "join_by_name"),
    ],
)
def test_joins_datasets_with_other_shards_in_another_order(root, joined, function):
    if function == "join_swapped":
        # The first dataset decides on the order: that of the texts is the other way round.
        found = pairs(val(document(root, joined, function="join_by_name")))
        assert found == expected(range(19, -1, -1))
        return
    assert pairs(val(document(root, joined, function=function))) == expected(range(20))


def test_a_type_joins_with_its_from_joined(root):
    path = document(root, "[{path: captions}, {path: texts}]")
    path.write_text(path.read_text().replace("__function__: join_pair", "__class__: Pair"))
    (first, *_) = val(path, allow=())
    assert pairs([first]) == expected([0])
    assert first.__restore_key__ == (0, 0, 0)
    assert [Path(source.dataset_path).name for source in first.__sources__] == ["captions"]


def test_types_of_energon_merge_fields(root):
    path = document(root, "[{path: texts}, {path: captions}]")
    text = path.read_text()
    path.write_text(
        text.replace(f"__module__: {__name__}", "__module__: megatron.energon").replace(
            "__function__: join_pair", "__class__: CaptioningSample"
        )
    )
    make_captions(root / "texts2", [20])
    path.write_text(path.read_text().replace("path: texts}", "path: texts2}"))
    (first, *_) = val(path)
    assert isinstance(first, CaptioningSample)
    assert [Path(s.dataset_path).name for s in first.__sources__] == ["texts2", "captions"]


@pytest.mark.parametrize(
    ("nonmatch", "wanted"),
    [
        ("skip", expected([n for n in range(20) if n % 3])),
        ("none", expected(range(20), missing=range(0, 20, 3))),
    ],
)
def test_samples_without_a_match_are_skipped_or_none(root, nonmatch, wanted):
    make_texts(root / "some", [n for n in range(30) if n % 3])
    path = document(root, f"[{{path: captions}}, {{path: some, nonmatch: {nonmatch}}}]")
    assert pairs(val(path)) == wanted


LISTS = {
    "sample of the first": ("captions", ["shards/000.tar/s1"], {1}),
    "sample of the second": ("texts", ["0.tar/s18"], {18}),
    "shard of the first": ("captions", ["shards/001.tar"], set(range(5, 12))),
    "shard of the second": ("texts", ["1.tar", "4.tar/s0"], {12, 13, 14, 15, 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("nonmatch", ["error", "skip", "none"])
@pytest.mark.parametrize(("dataset", "entries", "numbers"), LISTS.values(), ids=list(LISTS))
def test_a_joined_sample_is_excluded_with_any_of_its_parts(
    root, dataset, entries, numbers, nonmatch
):
    path = document(root, f"[{{path: captions}}, {{path: texts, nonmatch: {nonmatch}}}]")
    lists = root / "lists"
    lists.mkdir()
    (lists / f"{dataset}.jsonl").write_text("\n".join(entries))
    assert pairs(val(path)) == expected(range(20))
    before = cached(root)
    left = expected(n for n in range(20) if n not in numbers)
    assert pairs(val(path, exclude_from=lists)) == left
    path.write_text(path.read_text() + "    subset: {range: [0, 10]}\n")
    in_subset = expected(n for n in range(10) if n not in numbers)
    assert pairs(val(path, exclude_from=lists)) == in_subset
    prepare_dataset(root / dataset, split_parts=["train:.*", "val:.*"], exclude_from=[lists])
    assert pairs(val(path)) == in_subset
    assert cached(root) == before or dataset == "nothing"


def test_a_joined_sample_is_found_among_those_that_are_left(root):
    (root / "texts.jsonl").write_text("4.tar/s2\n0.tar/s18\n")
    read = get_val_datasets(
        document(root, "[{path: captions}, {path: texts}]"),
        worker_config=config(),
        batch_size=None,
        exclude_from=root,
        task_encoder=Plain(),
        allow=("code",),
    )
    ((_, leaf),) = read
    source = leaf.source
    assert len(source) == 18
    keys = source.keys(np.arange(18))
    assert keys == [source.locate(n).key for n in range(18)]
    assert [source.find(f"s{n}") for n in (1, 2, 3, 19)] == [[1], [], [2], [17]]
    assert [each.path.name for each, _ in source.origins(2)] == ["captions", "texts"]
    rows = sorted(row for extents in source.extents(np.arange(18)) for row in extents.requested)
    assert rows == sorted([*range(18), *range(18)])


def test_a_join_of_which_all_samples_are_excluded_is_an_error(root):
    (root / "texts.jsonl").write_text("".join(f"{19 // 4 - n // 4}.tar/s{n}\n" for n in range(9)))
    path = document(root, "[{path: captions}, {path: texts}]", extra="subset: {range: [0, 9]}")
    with pytest.raises(EmptyDatasetError, match="the exclusion of 9 samples leaves none"):
        val(path, exclude_from=root)


def test_a_row_of_a_join_is_described_by_all_its_samples(root):
    dataset = get_val_dataset(
        document(root, "[{path: captions}, {path: texts}]"),
        worker_config=config(),
        batch_size=None,
        task_encoder=Plain(),
        allow=("code",),
    )
    text = dataset.describe_row(0, 1, 6)
    assert f"sample 's6' of {root / 'captions'}" in text
    assert f"sample 's6' of {root / 'texts'}" in text
    assert json.loads(dataset.quarantine_entry(0, 1, 6)) == {
        "dataset": str(root / "captions"),
        "shard": "shards/001.tar",
        "key": "s6",
    }


def test_a_join_of_one_dataset_gives_its_samples_to_the_joiner(root):
    texts = val(document(root, "[{path: texts}]", function="shout"))
    assert [sample.text for sample in texts[:2]] == ["TEXT 19", "TEXT 18"]


def test_samples_without_a_match_are_an_error_with_place_and_advice(root):
    make_texts(root / "some", range(5))
    with pytest.raises(
        ConfigError, match=r"lacks 15 of the 20 keys of .*captions.*'s5'(.|\n)*skip"
    ):
        val(document(root, "[{path: captions}, {path: some}]"))


def test_members_and_join_may_be_subsets(root):
    path = document(
        root,
        "[{path: captions, subset: {range: [5, 15]}}, "
        '{path: texts, nonmatch: skip, subset: {range: ["0%", "50%"]}}]',
        extra="subset: {range: [1, end]}",
    )
    # Captions 5 to 14, texts 19 to 10, without the first that both have.
    assert pairs(val(path)) == expected(range(11, 15))


def test_subflavors_of_members_and_join_arrive(root):
    path = document(
        root,
        "[{path: captions, subflavors: {a: 1, b: 1}}, {path: texts, subflavors: {a: 2}}]",
        extra="subflavors: {b: 3, c: 3}",
    )
    assert val(path)[0].__subflavors__ == {"a": 1, "b": 3, "c": 3}
    traversed = traverse_metadataset(path, split_part="val")
    assert [(Path(each.path).name, each.subflavors) for each in traversed] == [
        ("captions", {"a": 1, "b": 3, "c": 3}),
        ("texts", {"a": 2, "b": 3, "c": 3}),
    ]


class CookText(Plain):
    decoder = None

    @staticmethod
    @stateless
    def cook(sample, media):
        text = sample["txt"].decode() + "|" + sample["text"].decode()
        return TextSample(**basic_sample_keys(sample), text=f"{text}|{media.get('note').decode()}")

    cookers = (Cooker(cook.__func__),)


def test_joined_crude_samples_are_cooked_with_auxiliary_data(root):
    make_texts(root / "crude", range(20), kind="CrudeWebdataset")
    captions = root / "captions" / ".nv-meta" / "dataset.yaml"
    captions.write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    path = document(
        root,
        "[{path: captions}, {path: crude, aux: {media: filesystem://./media}}]",
        function="join_crude",
    )
    (root / "media").mkdir()
    (root / "media" / "note").write_bytes(b"media")
    first = val(path, CookText())[0]
    assert first.text == "caption 0|text 0|media"
    assert first.__key__ == "s0"


def test_a_join_resumes_like_any_other_dataset(root):
    path = document(root, "[{path: captions}, {path: texts}]")

    def open_loader(world_size=1, rank=0):
        dataset = get_train_dataset(
            path,
            worker_config=config(world_size=world_size, rank=rank, lanes=4),
            batch_size=3,
            task_encoder=Plain(),
            shuffle_buffer_size=10,
            allow=("code",),
        )
        return get_savable_loader(dataset)

    loader = open_loader()
    whole = [pairs(batch) for batch in islice(iter(loader), 40)]
    assert {pair for batch in whole for pair in batch} == set(expected(range(20)))
    for stop in (1, 7, 20):
        loader = open_loader()
        assert [pairs(batch) for batch in islice(iter(loader), stop)] == whole[:stop]
        state = json.loads(json.dumps(loader.save_state_rank()))
        again = open_loader()
        again.restore_state_rank(state)
        assert [pairs(batch) for batch in islice(iter(again), 40 - stop)] == whole[stop:]
    dataset = open_loader().dataset
    batch = next(iter(open_loader()))
    assert pairs([dataset.restore_sample(batch[0].__restore_key__)]) == pairs(batch[:1])


def cached(root):
    return sorted(path.name for path in (root / "join.yaml.cache").glob("*"))


def test_the_index_is_built_once_and_again_when_anything_changes(root):
    path = document(root, "[{path: captions}, {path: texts, nonmatch: skip}]")
    val(path)
    (one,) = cached(root)
    before = (root / "join.yaml.cache" / one).stat()
    val(path)
    assert (root / "join.yaml.cache" / one).stat().st_mtime_ns == before.st_mtime_ns
    seen = {one}
    document(root, "[{path: captions}, {path: texts, nonmatch: none}]")
    val(path)
    seen |= set(cached(root))
    assert len(seen) == 2
    split = root / "texts/.nv-meta/split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude: [0.tar/s19]"))
    assert pairs(val(path)) == expected(range(19))
    assert len(cached(root)) == 2
    shutil.rmtree(root / "texts")
    make_texts(root / "texts", range(20), per_shard=7)
    assert pairs(val(path)) == expected(range(20))
    assert len(cached(root)) == 3


def test_a_damaged_index_is_built_again(root, caplog):
    path = document(root, "[{path: captions}, {path: texts}]")
    val(path)
    (name,) = cached(root)
    file = root / "join.yaml.cache" / name
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    assert pairs(val(path)) == expected(range(20))
    assert file.read_bytes() == content
    assert "building a join index again" in caplog.text


def test_the_lock_of_a_process_that_was_killed_when_its_index_was_whole_goes(root):
    path = document(root, "[{path: captions}, {path: texts}]")
    pairs(val(path))
    (index,) = cached(root)
    digest = index.removeprefix("join_index_").removesuffix(".bin")
    lock = root / "join.yaml.cache" / f".{digest}.lock"
    lock.touch()
    assert pairs(val(path)) == expected(range(20))
    assert not lock.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_leaves_the_cache_of_the_user(root, monkeypatch):
    path = document(root, "[{path: captions}, {path: texts}]")
    (root / "cache").mkdir()
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(root / "cache"))
    root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert pairs(val(path)) == expected(range(20))
    finally:
        root.chmod(0o755)
    assert cached(root) == []
    assert len([*(root / "cache" / "joins").iterdir()]) == 1


def test_a_document_in_memory_uses_the_cache_of_the_user(root, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(root / "cache"))
    node = {
        "join": [{"path": str(root / "captions")}, {"path": str(root / "texts")}],
        "joiner": {"__module__": __name__, "__function__": "join_pair"},
    }
    assert pairs(val({"splits": {"val": node}})) == expected(range(20))
    assert len([*(root / "cache" / "joins").iterdir()]) == 1


def test_a_join_may_be_part_of_a_blend(root):
    path = root / "blend.yaml"
    path.write_text(
        f"""
splits:
  train:
    blend:
      - weight: 3
        join: {{left: {{path: captions}}, right: {{path: texts}}}}
        joiner: {{__module__: {__name__}, __function__: join_by_name}}
      - {{path: captions}}
"""
    )
    dataset = get_train_dataset(
        path,
        worker_config=config(lanes=1),
        batch_size=8,
        task_encoder=Plain(),
        allow=("code",),
    )
    batches = islice(iter(get_loader(dataset)), 10)
    kinds = [type(sample).__name__ for batch in batches for sample in batch]
    assert kinds.count("Pair") == 60
    assert [*dataset.fingerprint(1)["leaves"]] == ["captions&texts/train", "captions/train"]


def test_validation_per_dataset_names_the_join(root):
    path = document(root, "[{path: captions}, {path: texts}]")
    ((dataset, leaf),) = get_val_datasets(
        path, worker_config=config(), batch_size=None, task_encoder=Plain(), allow=("code",)
    )
    assert (leaf.name, [Path(each).name for each in leaf.paths]) == (
        "captions",
        ["captions", "texts"],
    )
    assert len(list(get_loader(dataset))) == 20


@pytest.mark.parametrize(
    ("joined", "extra", "kind", "message"),
    [
        ("[]", "", ConfigError, r"join.yaml:9:5: joins no datasets; expected one or more"),
        ("[{path: captions, nonmatch: skip}, {path: texts}]", "", ConfigError, "the first dataset"),
        ("[{path: captions}, {path: inner.yaml}]", "", ConfigError, "inner.yaml is a metadataset"),
        ("[{path: captions}, {path: none}]", "", FileNotFoundError, r"join.yaml:9:31: .*none"),
        (
            "[{path: captions}, {path: texts, shuffle_over_epochs_multiplier: 2}]",
            "",
            ConfigError,
            "the samples of a join have one order",
        ),
        (
            "[{path: captions}, {path: other, nonmatch: skip}]",
            "",
            EmptyDatasetError,
            "no sample who",
        ),
    ],
)
def test_refuses_joins_that_make_no_sense(root, joined, extra, kind, message):
    (root / "inner.yaml").write_text("splits: {train: {path: captions}, val: {path: captions}}")
    make_texts(root / "other", range(100, 105))
    with pytest.raises(kind, match=message):
        val(document(root, joined, extra=extra))


@pytest.mark.parametrize(
    ("joiner", "allow", "kind", "message"),
    [
        (f"{{__module__: {__name__}, __function__: none}}", ["code"], ConfigError, "has no 'none'"),
        (
            f"{{__module__: {__name__}, __function__: Pair}}",
            ["code"],
            ConfigError,
            "a class is named by __class__",
        ),
        (
            f"{{__module__: {__name__}, __class__: Plain}}",
            ["code"],
            ConfigError,
            "has no from_joined",
        ),
        ("{__module__: not_there_at_all, __function__: f}", ["code"], ConfigError, "cannot import"),
        (f"{{__module__: {__name__}}}", [], ConfigError, "expected a __module__, and a __class__"),
        (f"{{__module__: {__name__}, __function__: join_pair}}", [], SecurityError, "--allow code"),
        (f"{{__module__: {__name__}, __class__: Plain}}", [], SecurityError, "ENERGON_ALLOW=code"),
        ("{__module__: os, __function__: system}", [], SecurityError, "whose `from_joined` is"),
        ("{__module__: not_imported_yet, __function__: f}", [], SecurityError, "=code"),
    ],
)
def test_refuses_joiners_with_their_place(root, joiner, allow, kind, message):
    path = document(root, "[{path: captions}, {path: texts}]")
    text = path.read_text().replace(f"{{__module__: {__name__}, __function__: join_pair}}", joiner)
    path.write_text(text)
    with pytest.raises(kind, match=message) as info:
        val(path, allow=allow)
    assert f"{path}:10:5: " in str(info.value)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_give_the_same_batches(root, num_workers):
    path = document(root, "[{path: captions}, {path: texts}]")

    def deliver(workers):
        dataset = get_train_dataset(
            path,
            worker_config=config(num_workers=workers, lanes=4),
            batch_size=3,
            task_encoder=Plain(),
            allow=("code",),
        )
        with get_savable_loader(dataset) as loader:
            return [pairs(batch) for batch in islice(iter(loader), 12)]

    assert deliver(num_workers) == deliver(0)
