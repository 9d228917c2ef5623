"""What datasets of every kind have to do, in one suite; what is special stands with its kind.

Which bad input is tried with which kind. A dash says that there is no such thing:

|                        | tokens | parquet | arrow | folder | mds | litdata | jsonl |
|------------------------|--------|---------|-------|--------|-----|---------|-------|
| cut off                | x      | x       | x     | x      | x   | x       | x     |
| of another kind, empty | x      | x       | x     | x      | x   | x       | x     |
| index against data     | x      | x       | x     | x      | x   | x       | x     |
| missing column         | -      | x       | x     | x      | x   | x       | -     |
| mixed schemas          | x      | x       | x     | -      | x   | -       | -     |
| no rows at all         | x      | x       | x     | x      | x   | x       | x     |
| no rows in one file    | x      | x       | x     | -      | x   | x       | -     |
| 2^31 documents         | x      | -       | -     | -      | -   | -       | -     |
| unknown type           | x      | -       | -     | -      | x   | x       | -     |

Token files have no columns, and lines of JSON are one part each; a folder has a schema for each
sample, LitData one for all. The types of Parquet and Arrow are those of pyarrow. MDS, LitData and
JSONL are tried compressed and not.

What every kind can do, with the tests that try it; a row covers all of them unless it says so:

| what | tests |
|---|---|
| address, section and layout in the documentation | `test_every_kind_is_documented` |
| snippet of the documentation | `docs/test_examples.py`, on `kinds.md` and `aux.md` |
| order on (1, 0), (1, 3), (2, 1), (4, 2) and more with 8 lanes | `test_the_order_is_equal_...` |
| resume at random steps | `test_the_order_is_equal_...` |
| `restore_sample` | `test_single_samples_are_restored_by_their_keys` |
| origin of cooked samples | `test_cooked_samples_say_where_they_come_from` |
| the same from a store, where that is possible | `test_the_order_is_that_of_files_in_a_store` |
| packing | `test_packs_are_equal_on_all_topologies_and_after_any_restore` |
| blend with tar shards | `test_it_is_blended_with_tar_shards` |
| join with tar shards | `test_it_is_joined_with_tar_shards_by_key` |
| order of a join on all topologies | `test_a_join_with_tar_shards_is_equal_on_all_topologies` |
| auxiliary data, files of the same dataset | `test_its_parts_are_files_by_name` |
| info, lint, preview, plan, mount | `test_the_commands_take_it`; mount of lines, others refuse it |
| measures, stored and looked up | `test_its_samples_can_be_measured` |
| stores, requests | `test_requests.py`; not Arrow, which is mapped into memory |
| cut off, of another kind, empty | `test_damaged_files_are_errors_that_name_the_file` |
| permission denied | `test_a_file_that_may_not_be_read_is_reported_as_that` |
| a folder in its place | `test_a_folder_in_place_of_a_chunk_is_reported` |
| index against data | `test_an_index_that_disagrees_with_its_data_is_reported` |
| missing column | `test_a_missing_column_is_reported_with_those_that_there_are` |
| mixed schemas | `test_files_of_different_schemas_are_told_apart` |
| no rows at all, or in one file | `test_a_dataset_without_samples_...`, `test_a_file_without_...` |
| 2^31 documents | `test_documents_beyond_...`; `test_tokens.py`, where only claimed |
| unknown type | `test_values_of_an_unknown_type_are_named` |
| options of other kinds | `test_unknown_options_are_refused_with_the_known_ones` |
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import struct
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import zstandard

from energon import (
    ConfigError,
    Cooker,
    DecodeFileStore,
    DefaultTaskEncoder,
    Quarantine,
    Sample,
    SampleDecoder,
    cooker,
    edataclass,
    get_savable_loader,
    get_train_dataset,
)
from energon.errors import EnergonError, FormatError, NoSuchFileError
from energon.formats import compressed
from energon.inspect.measure import measure_dataset
from energon.metadataset import kind as kinds
from energon.metadataset.kind import dataset_kind
from energon.metadataset.resolve import resolve
from energon.prepare.engines import Engine
from energon.prepare.jsonl import prepare_jsonl
from energon.samples.crude import key_of
from energon.samples.provenance import get_source_info
from energon.sources.files.open import open_file_store
from energon.sources.kinds import kind_named
from energon.sources.measures import SourceMeasures
from energon.sources.open_tree import TreeOpener
from energon.sources.source import OpenRequest
from energon.sources.tables.token_files import TokenSource
from energon.stages.hooks.failures import quarantine_file
from tests.commands import ok, run
from tests.datasets import jpeg, make_crude, write_crude
from tests.kind_checks import check_kind, plain
from tests.sources.distant import upload
from tests.sources.reads import read_samples
from tests.task_encoder.runs import config, one_lane, train
from tests.token_files import numbered, write_tokens

DATA = Path(__file__).parents[2] / "plugins/energon-mds/tests/data"
N = 60


class Contents(DefaultTaskEncoder):
    """Batches of keys and of what samples hold."""

    decoder = None

    def batch(self, samples):
        rows = [plain(sample) for sample in samples]
        return {
            "__key__": [row["__key__"] for row in rows],
            "__restore_key__": [row["__restore_key__"] for row in rows],
            "content": [str(sorted((str(k), v) for k, v in row.items())) for row in rows],
        }


def tokens(folder):
    write_tokens(folder / "corpus", numbered([3, 1, 0, 7, 5, 12] * 10))
    return {"path": str(folder / "corpus")}


def token_windows(folder):
    return {**tokens(folder), "read": {"unit": "sequence", "length": 4}}


def token_lines(folder):
    documents = numbered([3, 1, 0, 7, 5, 12] * 10)
    pairs = [list(pair) for pair in zip(documents[::2], documents[1::2], strict=True)]
    write_tokens(folder / "corpus", pairs)
    return {"path": str(folder / "corpus"), "read": {"unit": "line"}}


def parquet(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "rows").mkdir()
    for part in range(3):
        rows = {"n": list(range(20 * part, 20 * part + 20)), "text": ["text"] * 20}
        pq.write_table(pa.table(rows), folder / f"rows/{part}.parquet", row_group_size=7)
    return {"path": str(folder / "rows")}


def arrow(folder):
    datasets = pytest.importorskip("datasets")
    rows = {"n": list(range(N)), "text": ["text"] * N}
    datasets.Dataset.from_dict(rows).save_to_disk(folder / "saved", num_shards=3)
    return {"path": str(folder / "saved")}


def media(folder):
    for number in range(N):
        path = folder / "images" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    return {"path": str(folder / "images")}


def chunks(name):
    def copy(folder):
        shutil.copytree(DATA / name, folder / name)
        return {"path": str(folder / name)}

    return copy


def lines(suffix, pack, *, long=compressed.LONG_BYTES):
    def write(folder):
        path = folder / f"lines.jsonl{suffix}"
        path.write_bytes(pack("\n".join(json.dumps({"n": n}) for n in range(N)).encode()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compressed, "LONG_BYTES", long)
            prepare_jsonl(path)
        return {"path": str(path)}

    return write


KINDS = {
    "tokens": tokens,
    "token lines": token_lines,
    "token windows": token_windows,
    "parquet": parquet,
    "arrow": arrow,
    "folder": media,
    "mds": chunks("mds"),
    "mds_zstd": chunks("mds_zstd"),
    "litdata": chunks("litdata"),
    "litdata_zstd": chunks("litdata_zstd"),
    "jsonl": lines("", bytes),
    "jsonl.gz": lines(".gz", gzip.compress),
    "jsonl.zst": lines(".zst", zstandard.ZstdCompressor().compress),
    "jsonl.zst copied": lines(".zst", zstandard.ZstdCompressor().compress, long=0),
}
WITH_FILES = ("jsonl", "jsonl.gz", "jsonl.zst", "jsonl.zst copied")
"""Kinds that can be mounted."""


SHARDS = "webdataset"
"""The kind that the suites of shards are about, and which the others are blended with here."""


def test_every_kind_that_can_be_trained_on_is_in_this_suite(tmp_path):
    tried = {SHARDS}
    for name, make in KINDS.items():
        (tmp_path / name).mkdir()
        tried.add(dataset_kind(make(tmp_path / name)["path"]))
    assert tried == trained_on()


def trained_on():
    """The names of all kinds that can be trained on, those of the plugin included."""
    entries = (*kinds.KINDS, *kinds.added_kinds())
    return {entry.name for entry in entries if entry.home and entry.has_samples}


DOCUMENTED = {
    "tokens": ("kinds.md#token-files", "formats.md#token-files"),
    "parquet": ("kinds.md#parquet-files", "formats.md#parquetfooters"),
    "arrow": ("kinds.md#hugging-face-datasets", None),
    "folder": ("kinds.md#folders-of-media-files", "formats.md#folderlisting"),
    "mds": ("kinds.md#mds-and-litdata", "kinds.md#files"),
    "litdata": ("kinds.md#mds-and-litdata", "kinds.md#files"),
    "jsonl": ("aux.md#jsonl-files", "formats.md#jsonl-files"),
    SHARDS: ("prepare.md", "formats.md#shards"),
}
"""Where a kind is described, and the layout on disk of what energon reads or writes itself."""


def test_every_kind_is_documented():
    docs = Path(__file__).parents[2] / "docs"
    table = (docs / "kinds.md").read_text()
    assert set(DOCUMENTED) == trained_on()
    for usage, layout in DOCUMENTED.values():
        link = usage.removeprefix("kinds.md")
        assert f"]({link})" in table.partition("\n## ")[0]
        for place in filter(None, (usage, layout)):
            page, _, anchor = place.partition("#")
            headings = re.findall(r"^#+ (.*)$", (docs / page).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
            assert not anchor or anchor in anchors, place


SLOW = {"jsonl.zst copied": pytest.mark.slow}
"""Kinds that differ from another only in where bytes are read."""


@pytest.fixture(params=[pytest.param(name, marks=SLOW.get(name, ())) for name in KINDS])
def entry(request, tmp_path):
    """What a document says of a dataset of the kind."""
    entry = KINDS[request.param](tmp_path)
    entry["kind"] = request.param
    return entry


def turn_of(entry):
    """Which topology a kind meets in one test; in the others, it meets those that follow."""
    return [*KINDS].index(entry.pop("kind"))


def document(folder, content):
    path = folder / "document.yaml"
    path.write_text(json.dumps({"splits": {"train": content}}))
    return path


@pytest.mark.slow
def test_the_order_is_equal_on_all_topologies_and_after_any_restore(entry, tmp_path):
    kind = entry.pop("kind")
    expected = check_kind(document(tmp_path, entry), encoder=Contents)
    contents = {text for batch in expected for text in batch["content"]}
    assert len(contents) >= (7 if kind.startswith(("mds", "litdata")) else 50)


class Packing(Contents):
    """Batches of packs of samples, up to three in each."""

    def select_samples_to_pack(self, samples):
        ordered = sorted(samples, key=lambda sample: plain(sample)["__key__"])
        return [ordered[at : at + 3] for at in range(0, len(ordered), 3)]

    def pack_selected_samples(self, samples):
        keys = [plain(sample)["__key__"] for sample in samples]
        return {"__key__": ",".join(keys), "__restore_key__": (), "count": len(keys)}


@pytest.mark.slow  # many processes
def test_packs_are_equal_on_topologies_and_after_any_restore(entry, tmp_path):
    turn = turn_of(entry)
    settings = {"num_batches": 24, "packing_buffer_size": 5, "batch_size": 2}
    packs = check_kind(document(tmp_path, entry), encoder=Packing, turn=turn, **settings)
    assert {key.count(",") for batch in packs for key in batch["__key__"]} == {1, 2}


@pytest.mark.slow  # many processes
def test_the_order_is_that_of_files_in_a_store(entry, tmp_path, s3):
    if entry["kind"] == "arrow":
        pytest.skip("Arrow files are mapped into memory")
    settings = {"encoder": Contents, "num_batches": 24, "turn": turn_of(entry) + 1}
    here = Path(entry["path"])
    expected = check_kind(document(tmp_path, entry), resumed=1, **settings)
    shutil.copytree(here.parent, tmp_path / "copy" / "data")
    address = upload(tmp_path / "copy" / "data", s3.address)
    far = {**entry, "path": f"{address}/{here.name}"}
    found = check_kind(document(tmp_path, far), resumed=4, **settings)
    assert found == expected


class Cooking(DefaultTaskEncoder):
    """Lists of samples, which a cooker passes on."""

    decoder = None
    cookers = (Cooker(lambda sample: sample),)

    def batch(self, samples):
        return samples


def test_cooked_samples_say_where_they_come_from(entry, tmp_path):
    del entry["kind"]
    dataset = train(document(tmp_path, entry), Cooking())
    _, *batches = one_lane(dataset, 4)[0]
    for sample in chain.from_iterable(batches):
        (source,) = get_source_info(sample)
        assert source.dataset_path == entry["path"]
        assert source.index == key_of(sample)[2]
        key = sample["__key__"] if isinstance(sample, dict) else sample.__key__
        assert source.file_names
        assert all(name.startswith(f"{key}.") for name in source.file_names)
        if isinstance(sample, dict):
            assert source.shard_name == sample["__shard__"]
            parts = {name for name in sample if not name.startswith("__")}
            assert {name.removeprefix(f"{key}.") for name in source.file_names} == parts


def test_single_samples_are_restored_by_their_keys(entry, tmp_path):
    del entry["kind"]
    path = document(tmp_path, entry)
    samples = next(iter(train(path, Cooking())))
    with get_savable_loader(train(path, Cooking())) as loader:
        for sample in samples:
            assert plain(loader.restore_sample(key_of(sample))) == plain(sample)


def length_of(sample):
    return len(str(sorted((name, str(plain(value))) for name, value in sample.items())))


def test_its_samples_can_be_measured(entry, tmp_path):
    path = document(tmp_path, {"path": entry["path"], "read": entry.get("read", {})})
    named = {"name": "length", "function_name": f"{__name__}:length_of"}
    for measured in (True, False):
        (report,) = measure_dataset(path, length_of, **named, engine=Engine(num_workers=1))
        assert (report.measured > 0) == measured
    leaf = resolve(path, split_part="train").leaves[0]
    kind = kind_named(leaf.kind)
    source = kind.open(OpenRequest(leaf, kind.config(leaf)))
    ordinals = np.arange(len(source))
    lengths = SourceMeasures(source, ordinals)["length"]
    assert lengths.tolist() == [length_of(each) for each in read_samples(source, ordinals)]


OWN_MEASURES = {
    "tokens": ("tokens", lambda sample: len(sample["tokens"])),
    "jsonl": ("bytes", lambda sample: len(sample["json"]) + 1),
    "parquet": ("n", lambda sample: sample["n"]),
    "arrow": ("n", lambda sample: sample["n"]),
}
"""The measures that datasets of a kind have without `energon measure`; lines end with a byte."""


def test_its_own_numbers_are_measures(entry, tmp_path):
    path = document(tmp_path, {"path": entry["path"], "read": entry.get("read", {})})
    leaf = resolve(path, split_part="train").leaves[0]
    kind = kind_named(leaf.kind)
    source = kind.open(OpenRequest(leaf, kind.config(leaf)))
    samples = source.read(np.arange(len(source))).samples(0, len(source))
    measures = SourceMeasures(source, np.arange(len(source)))
    if leaf.kind not in OWN_MEASURES:
        assert list(measures) == []
        return
    name, of = OWN_MEASURES[leaf.kind]
    assert list(measures) == [name]
    values = measures[name].astype(int).tolist()
    assert values[:-1] == [of(sample) for sample in samples[:-1]]
    assert values[-1] in (of(samples[-1]), len(samples[-1].get("json", b"")))


class Failing(Cooking):
    def encode_sample(self, sample):
        if key_of(sample)[2] % 3 == 1:
            raise ValueError("one of three")
        return sample


def test_samples_in_quarantine_are_excluded(entry, tmp_path):
    del entry["kind"]
    path, folder = document(tmp_path, entry), tmp_path / "quarantine"

    def keys(encoder, **settings):
        handler = Quarantine(folder, handler=lambda *_: None)
        alone = config(global_error_handler=handler)
        dataset = train(path, encoder, worker_config=alone, repeat=False, **settings)
        return {plain(sample)["__key__"] for sample in chain.from_iterable(dataset)}

    left = keys(Failing())
    assert left < keys(Cooking())
    assert keys(Cooking(), exclude_from=folder) == left


def opened(entry, folder, *, subset=None, exclude=()):
    node = {**entry, "subset": {"range": subset}} if subset else entry
    leaf = resolve(document(folder, node), split_part="train", training=True).leaves[0]
    kind = kind_named(leaf.kind)
    return kind.open(OpenRequest(leaf, kind.config(leaf), exclude))


def keys_of(source):
    return source.keys(np.arange(len(source)))


@pytest.mark.slow
def test_excluded_samples_move_no_other_into_or_out_of_a_subset(entry, tmp_path):
    del entry["kind"]
    every = keys_of(opened(entry, tmp_path))
    count, rng = len(every), np.random.default_rng(3)
    for subset in ([0, count], [1, "end"], [2, count - 1], ["0%", "50%"], ["50%", "100%"]):
        inside = keys_of(opened(entry, tmp_path, subset=subset))
        for excluded in ([every[0]], [inside[-1]], list(rng.choice(every, count // 3, False))):
            source = opened(entry, tmp_path, subset=subset, exclude=excluded)
            assert keys_of(source) == [key for key in inside if key not in excluded]
            whole, numbers = source.unexcluded
            assert keys_of(whole) == inside
            assert {inside[n] for n in numbers} == {*inside} & {*excluded}


def test_keys_match_as_a_whole(entry, tmp_path):
    del entry["kind"]
    source = opened(entry, tmp_path)
    every = keys_of(source)
    for number, key in [*enumerate(every)][:3]:
        assert source.find(key) == [number]
        for other in (f"nonsense/{key}", f"0{key}", f"{key}/", f"{key}.0", source.locate(0).shard):
            if other not in every:
                assert source.find(other) == []
    others = [other for key in every for other in (f"nonsense/{key}", f"0{key}")]
    nonsense = [other for other in others if other not in every]
    assert keys_of(opened(entry, tmp_path, exclude=nonsense)) == every


def test_unknown_options_are_refused_with_the_known_ones(entry, tmp_path):
    del entry["kind"]
    kind = kind_named(dataset_kind(entry["path"]))
    path = document(tmp_path, {**entry, "read": {**entry.get("read", {}), "unheard_of": 1}})
    known = ", ".join(kind.options)
    refused(path, rf"'unheard_of' is not an option of .*{known or 'has none'}")


@pytest.mark.slow  # many processes
def test_it_is_blended_with_tar_shards(entry, tmp_path):
    settings = {"encoder": Contents, "resumed": 4, "turn": turn_of(entry) + 2}
    make_crude(tmp_path / "tars", [20, 15])
    blend = [{"path": str(tmp_path / "tars"), "weight": 1}, {**entry, "weight": 2}]
    expected = check_kind(document(tmp_path, {"blend": blend}), **settings)
    shards = [text for batch in expected for text in batch["content"]]
    share = sum("b'text " in text and "'txt'" in text for text in shards) / len(shards)
    assert share == pytest.approx(1 / 3, abs=0.05)


@edataclass
class Pair(Sample):
    """Samples with one key."""

    first: Any
    second: Any

    @classmethod
    def from_joined(cls, first, second):
        return cls(__key__=plain(first)["__key__"], __restore_key__=(), first=first, second=second)


def joined_with_shards(entry, folder):
    """Write shards with a sample for all but one key of a dataset; return it joined with them."""
    keys = [key for batch in epoch(document(folder, entry)) for key in batch["__key__"]]
    write_crude(folder / "tars", [(key, {"txt": key.encode()}) for key in sorted(keys)[1:]])
    members = [entry, {"path": str(folder / "tars"), "nonmatch": "skip"}]
    joiner = {"__module__": Pair.__module__, "__class__": Pair.__name__}
    return {"join": members, "joiner": joiner}, len(keys) - 1


@pytest.mark.slow
def test_it_is_joined_with_tar_shards_by_key(entry, tmp_path):
    del entry["kind"]
    content, count = joined_with_shards(entry, tmp_path)
    del content["join"][1]["nonmatch"]
    with pytest.raises(ConfigError, match=rf"lacks 1 of the {count + 1} keys of "):
        train(document(tmp_path, content))
    content["join"][1]["nonmatch"] = "skip"
    for members in (content["join"], [{"path": str(tmp_path / "tars")}, entry]):
        path = document(tmp_path, {**content, "join": members})
        pairs = list(get_train_dataset(path, worker_config=config(), batch_size=None, repeat=False))
        assert len({pair.__key__ for pair in pairs}) == len(pairs) == count
        for pair in pairs:
            assert plain(pair.first)["__key__"] == plain(pair.second)["__key__"] == pair.__key__
            shard = pair.second if members is content["join"] else pair.first
            assert shard["txt"] == pair.__key__
    (tmp_path / "lists").mkdir()
    key = pairs[0].__key__
    for member in (entry, {"path": str(tmp_path / "tars")}):
        source = opened(member, tmp_path)
        file = quarantine_file(tmp_path / "lists", member["path"])
        shard = source.locate(source.find(key)[0]).shard
        file.write_text(json.dumps({"shard": shard, "key": key}))
        left = get_train_dataset(
            document(tmp_path, content),
            worker_config=config(),
            batch_size=None,
            repeat=False,
            exclude_from=tmp_path / "lists",
        )
        assert {pair.__key__ for pair in left} == {pair.__key__ for pair in pairs} - {key}
        file.unlink()


@pytest.mark.slow  # many processes
def test_a_join_with_tar_shards_is_equal_on_topologies(entry, tmp_path):
    turn = turn_of(entry) + 3
    content, _ = joined_with_shards(entry, tmp_path)
    path = document(tmp_path, content)
    check_kind(path, encoder=Contents, num_batches=24, resumed=4, turn=turn)
    for command in (["info"], ["preview", "--count", "1"], ["plan"], ["lint", "--num-workers", 1]):
        ok(command[0], path, *command[1:])


@cooker(need_primary=True)
def compared(sample, own, primary):
    """Compare the parts of a sample with the files that stores have by their names."""
    key = sample["__key__"]
    facts = ("__", "label")  # of a folder, `label` is no file
    parts = [name for name, value in sample.items() if value is not None]
    parts = [name for name in parts if not name.startswith(facts)]
    for store in (own, primary):
        found = store.get_many([f"{key}.{part}" for part in parts], sample)
        assert plain(found) == plain([sample[part] for part in parts])
        assert store.get_size(f"{key}.{parts[0]}") == len(store.get_raw(f"{key}.{parts[0]}")[0])
        for name in ("nothing.jpg", f"{key}.nothing"):
            with pytest.raises(NoSuchFileError, match=re.escape(name)):
                store.get(name)
    files = [source.file_names[0] for source in get_source_info(sample)[1:]]
    assert files == 2 * [f"{key}.{part}" for part in parts]
    return {"__key__": key, "__restore_key__": key_of(sample), "count": len(parts)}


class Compared(DefaultTaskEncoder):
    cookers = (Cooker(compared),)


@pytest.mark.slow
def test_its_parts_are_files_by_name(entry, tmp_path):
    if entry.pop("kind").startswith("token"):  # typed samples have no cookers
        store = DecodeFileStore(open_file_store(entry["path"]), decoder=SampleDecoder())
        (sample,) = read_samples(TokenSource(entry["path"]), np.array([4]))
        for name in ("4.tokens", "4.tokens.npy"):
            assert store.get(name).tolist() == sample["tokens"].tolist()
        return
    content = {**entry, "aux": {"own": entry["path"]}}
    batches = train(document(tmp_path, content), Compared(), repeat=False, batch_size=7)
    assert all(count for batch in batches for count in batch["count"])


@pytest.mark.slow  # many processes
def test_the_commands_take_it(entry, tmp_path):
    kind = entry.pop("kind")
    path = document(tmp_path, entry) if "read" in entry else entry["path"]
    for command in (["info", "--json"], ["preview", "--count", "1"], ["plan"]):
        ok(command[0], path, *command[1:])
    found = run("prepare", entry["path"], "--json")
    assert (found.exit_code, json.loads(found.output)["samples"] > 0) == (0, True), found.output
    assert run("lint", path, "--num-workers", 1).output.endswith("samples: no problems\n")
    if kind in WITH_FILES:
        assert {each.name for each in TreeOpener().open(entry["path"]).entries()} >= {"0.json"}
    else:
        with pytest.raises(ConfigError, match="cannot be shown as files|needs no mounting"):
            TreeOpener().open(entry["path"])


def largest_file(path):
    """The file that holds most of the samples of a dataset, or the one at the address."""
    at = Path(path)
    files = [each for each in at.rglob("*") if each.is_file() and each.name != "index.json"]
    return max(files, key=lambda each: each.stat().st_size) if files else at


def epoch(path):
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=2, repeat=False, task_encoder=Contents()
    )
    return list(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut off", "of another kind", "empty"])
def test_damaged_files_are_errors_that_name_the_file(entry, tmp_path, damage):
    kind = entry.pop("kind")
    path = f"{entry['path']}.bin" if kind.startswith("token") else entry["path"]
    file = largest_file(path)
    if kind == "folder" and damage == "empty":
        pytest.skip("an empty file is an image that cannot be decoded, which hooks report")
    content = file.read_bytes()
    if damage == "cut off":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "of another kind":
        file.write_bytes((b"PK\x03\x04" + os.urandom(len(content)))[: len(content) - 1])
    else:
        file.write_bytes(b"")
    if kind == "folder":
        assert file.stem in run("lint", entry["path"], "--num-workers", 1).output
        return
    with pytest.raises(EnergonError) as caught:
        epoch(document(tmp_path, entry))
    assert file.stem.partition(".")[0] in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_may_not_be_read_is_reported_as_that(kind):
    with TemporaryDirectory() as name:  # other users cannot look into those of pytest
        Path(name).chmod(0o755)
        entry = KINDS[kind](Path(name))
        content = {"splits": {"train": entry}}
        epoch(content)  # imports what is needed
        path = f"{entry['path']}.bin" if kind.startswith("token") else entry["path"]
        file = largest_file(path)
        with unreadable(file), pytest.raises(EnergonError, match=f"{file}.*[Pp]ermission denied"):
            epoch(content)


@contextmanager
def unreadable(file):
    """Take the right to read a file away, from root as well."""
    file.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        file.chmod(0o644)


CHUNKS = ("mds", "mds_zstd", "litdata", "litdata_zstd")


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_folder_in_place_of_a_chunk_is_reported(kind, tmp_path):
    entry = KINDS[kind](tmp_path)
    file = largest_file(entry["path"])
    file.unlink()
    file.mkdir()
    refused(document(tmp_path, entry), f"{file}: is a folder, expected a file")


def refused(path, words):
    """Check that a dataset is refused before or while it is read, with these words."""
    with pytest.raises(EnergonError, match=words):
        epoch(path)


def no_tokens(folder):
    write_tokens(folder / "corpus", [])
    return folder / "corpus"


def no_rows(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), folder / "0.parquet")
    return folder / "0.parquet"


def no_saved_rows(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"n": []}).save_to_disk(folder / "saved")
    return folder / "saved"


def no_media(folder):
    (folder / "images/cat").mkdir(parents=True)
    return folder / "images"


def no_shards(folder):
    path = chunks("mds")(folder)["path"]
    edited(Path(path, "index.json"), lambda index: index["shards"].clear())
    return path


def no_lines(suffix, pack):
    def write(folder):
        path = folder / f"lines.jsonl{suffix}"
        path.write_bytes(pack(b""))
        with pytest.raises(FormatError, match=f"{path}: has no samples; expected"):
            prepare_jsonl(path)
        return path  # and training asks for its index

    return write


def no_items(folder):
    path = chunks("litdata")(folder)["path"]
    edited(Path(path, "index.json"), lambda index: index["chunks"].clear())
    return path


EMPTY = {
    "tokens": no_tokens,
    "parquet": no_rows,
    "arrow": no_saved_rows,
    "folder": no_media,
    "mds": no_shards,
    "litdata": no_items,
    "jsonl": no_lines("", bytes),
    "jsonl.gz": no_lines(".gz", gzip.compress),
    "jsonl.zst": no_lines(".zst", zstandard.ZstdCompressor().compress),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_a_dataset_without_samples_is_refused_by_name(tmp_path, kind):
    path = EMPTY[kind](tmp_path)
    refused(path, rf"{tmp_path}.*(has 0 |is missing; run|holds no files)")


def edited(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def an_empty_pair(folder):
    write_tokens(folder / "corpus" / "a", numbered([3, 1]))
    write_tokens(folder / "corpus" / "b", [])
    write_tokens(folder / "corpus" / "c", numbered([2]))
    return folder / "corpus", 3


def an_empty_parquet_file(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = parquet(folder)["path"]
    none = pa.table({"n": pa.array([], pa.int64()), "text": pa.array([], pa.string())})
    for number in (0, 1):
        pq.write_table(none, f"{path}/{number}0.parquet")
    return path, N


def an_empty_arrow_file(folder):
    pa = pytest.importorskip("pyarrow")
    path = Path(arrow(folder)["path"])
    file = path / "data-00001-of-00003.arrow"
    with pa.ipc.open_stream(file) as stream:
        schema = stream.schema
    with pa.ipc.new_stream(str(file), schema):
        pass
    return path, N - 20


def an_empty_shard(folder):
    path = Path(chunks("mds")(folder)["path"])
    (path / "none.mds").write_bytes(struct.pack("<II", 0, 8))

    def add(index):
        about = {"basename": "none.mds", "bytes": 8, "hashes": {}}
        index["shards"].insert(1, {**index["shards"][0], "samples": 0, "raw_data": about})

    edited(path / "index.json", add)
    return path, 7


def an_empty_chunk(folder):
    path = Path(chunks("litdata")(folder)["path"])
    (path / "none.bin").write_bytes(struct.pack("<II", 0, 8))

    def add(index):
        about = {"filename": "none.bin", "chunk_size": 0, "chunk_bytes": 8}
        index["chunks"].insert(1, {**index["chunks"][0], **about})

    edited(path / "index.json", add)
    return path, 7


ONE_EMPTY = {
    "tokens": an_empty_pair,
    "parquet": an_empty_parquet_file,
    "arrow": an_empty_arrow_file,
    "mds": an_empty_shard,
    "litdata": an_empty_chunk,
}


@pytest.mark.parametrize("kind", ONE_EMPTY)
def test_a_file_without_samples_among_others_is_passed_over(tmp_path, kind):
    path, count = ONE_EMPTY[kind](tmp_path)
    assert sum(len(batch["content"]) for batch in epoch(path)) == count
    assert f"samples: {count}" in run("info", path).output


def fewer_tokens(folder):
    entry = tokens(folder)
    data = folder / "corpus.bin"
    data.write_bytes(data.read_bytes()[:-2])
    return entry["path"], r"corpus\.(idx|bin): "


def other_parquet(folder):
    entry = parquet(folder)
    ok("prepare", entry["path"])
    file = Path(entry["path"], "1.parquet")
    about = file.stat()
    file.write_bytes(bytes(about.st_size))  # as a disk that has lost it
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    return entry["path"], r"1\.parquet: .*(damaged|changed)"


def other_records(name, edit):
    def write(folder):
        path = chunks(name)(folder)["path"]
        edited(Path(path, "index.json"), edit)
        return path, r"has \d+ records, but index\.json says"

    return write


def claim_more_samples(index):
    index["shards"][0]["samples"] += 1


def claim_more_items(index):
    index["chunks"][0]["chunk_size"] += 1


def other_lines(suffix, pack):
    def write(folder):
        path = Path(lines(suffix, pack)(folder)["path"])
        path.write_bytes(path.read_bytes() + pack(b"\n{}"))
        return path, r"lines\.jsonl.*run `energon prepare"

    return write


def missing_arrow(folder):
    path = Path(arrow(folder)["path"])
    (path / "data-00001-of-00003.arrow").unlink()
    return path, r"data-00001.*state\.json"


def missing_image(folder):
    path = Path(media(folder)["path"])
    (path / "metadata.csv").write_text("file_name,text\ncat/0.jpg,a\ncat/1.jpg,b\n")
    return path, r"metadata\.csv:3: names 'cat/1\.jpg'"


DISAGREEING = {
    "tokens": fewer_tokens,
    "parquet": other_parquet,
    "arrow": missing_arrow,
    "folder": missing_image,
    "mds": other_records("mds", claim_more_samples),
    "mds_zstd": other_records("mds_zstd", claim_more_samples),
    "litdata": other_records("litdata", claim_more_items),
    "litdata_zstd": other_records("litdata_zstd", claim_more_items),
    "jsonl": other_lines("", bytes),
    "jsonl.gz": other_lines(".gz", gzip.compress),
    "jsonl.zst": other_lines(".zst", zstandard.ZstdCompressor().compress),
}


@pytest.mark.parametrize("kind", DISAGREEING)
def test_an_index_that_disagrees_with_its_data_is_reported(tmp_path, kind):
    refused(*DISAGREEING[kind](tmp_path))


def unknown_dtype(folder):
    path = Path(f"{tokens(folder)['path']}.idx")
    data = bytearray(path.read_bytes())
    data[17] = 99
    path.write_bytes(data)
    return path, r"corpus\.idx: .*99"


def unknown_encoding(folder):
    path = chunks("mds")(folder)["path"]
    edited(
        Path(path, "index.json"),
        lambda index: [
            each["column_encodings"].__setitem__(0, "hologram") for each in index["shards"]
        ],
    )
    return path, r"index\.json: .*hologram"


def unknown_format(folder):
    path = chunks("litdata")(folder)["path"]
    edited(
        Path(path, "index.json"),
        lambda index: index["config"]["data_format"].__setitem__(0, "hologram"),
    )
    return path, r"index\.json: .*hologram"


UNKNOWN = {"tokens": unknown_dtype, "mds": unknown_encoding, "litdata": unknown_format}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_values_of_an_unknown_type_are_named(tmp_path, kind):
    refused(*UNKNOWN[kind](tmp_path))


def test_documents_beyond_the_two_billionth_are_read(tmp_path):
    """An index of 40 GB, a hole for the most part: only its last two documents have tokens."""
    count = 2**31 + 10
    lengths = 34
    pointers = lengths + 4 * count
    documents = pointers + 8 * count
    with open(tmp_path / "corpus.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1))
        for at, form, numbers in (
            (lengths + 4 * (count - 2), "<2i", (3, 2)),
            (pointers + 8 * (count - 1), "<q", (6,)),
            (documents + 8 * (count - 2), "<3q", (count - 2, count - 1, count)),
        ):
            file.seek(at)
            file.write(struct.pack(form, *numbers))
    np.arange(5, dtype="<u2").tofile(tmp_path / "corpus.bin")
    source = TokenSource(tmp_path / "corpus.idx")
    assert len(source) == count
    found = read_samples(source, np.array([count - 1, count - 2, 0]))
    assert [sample["tokens"].tolist() for sample in found] == [[3, 4], [0, 1, 2], []]
    assert found[0]["__key__"] == str(count - 1)
    assert source.locate(count - 1).offset == 6


WITH_COLUMNS = ("parquet", "arrow", "folder", "mds", "mds_zstd", "litdata", "litdata_zstd")


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_a_missing_column_is_reported_with_those_that_there_are(tmp_path, kind):
    entry = KINDS[kind](tmp_path)
    for read in (
        {"columns": ["body"]},
        {"sample_type": "TextSample", "field_map": {"text": "body"}},
    ):
        refused(document(tmp_path, {**entry, "read": read}), r"body.*(only|there are) ")


def mixed_parquet(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, column in enumerate(([1], ["one"])):
        pq.write_table(pa.table({"n": column}), folder / f"{number}.parquet")
    return folder, r"1\.parquet: has string in column 'n'.*int64"


def mixed_arrow(folder):
    pa = pytest.importorskip("pyarrow")
    path = Path(arrow(folder)["path"])
    with pa.ipc.new_stream(
        str(path / "data-00001-of-00003.arrow"), pa.schema([("n", pa.string())])
    ):
        pass
    return path, r"data-00001.*'(n|text)'"


def mixed_mds(folder):
    path = chunks("mds")(folder)["path"]
    edited(
        Path(path, "index.json"),
        lambda index: index["shards"][0]["column_names"].__setitem__(0, "other"),
    )
    return path, r"index\.json: its shards have 2 different sets of columns"


def mixed_tokens(folder):
    write_tokens(folder / "a", numbered([3, 1]))
    write_tokens(folder / "b", numbered([3, 1]), modes=[0, 1])
    return folder, r"modes"


MIXED = {"tokens": mixed_tokens, "parquet": mixed_parquet, "arrow": mixed_arrow, "mds": mixed_mds}


@pytest.mark.parametrize("kind", MIXED)
def test_files_of_different_schemas_are_told_apart(tmp_path, kind):
    refused(*MIXED[kind](tmp_path))


@pytest.mark.slow  # many processes
def test_long_compressed_files_are_entered_in_the_middle(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "SPACING_BYTES", 1 << 18)
    monkeypatch.setattr(compressed, "LONG_BYTES", 1 << 19)
    generator = np.random.default_rng(0)
    rows = [json.dumps({"n": n, "x": generator.bytes(4000).hex()}) for n in range(250)]
    path = tmp_path / "long.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode(), 1))
    prepare_jsonl(path)
    assert path.with_name("long.jsonl.gz.frames").stat().st_size > compressed.SPACING_BYTES
    check_kind(path, encoder=Contents, num_batches=12, resumed=3)
