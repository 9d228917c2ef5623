from __future__ import annotations

import datetime as dt
import json
import logging
import os
import pickle
import struct
from decimal import Decimal
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon import (
    ConfigError,
    Cooker,
    DatasetNotFoundError,
    DefaultTaskEncoder,
    EmptyDatasetError,
    SampleDecoder,
    TextSample,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
)
from energon.errors import DecodeError, FormatError, StateError, TruncatedError
from energon.inspect.planned_run import list_step
from energon.inspect.saved_run import open_saved_run
from energon.io.address import join_address
from energon.io.files import forget_stores, write_bytes
from energon.metadataset.kind import dataset_kind
from energon.sources import decoded_blocks
from energon.sources.source import SampleSelection
from energon.sources.tables import parquet
from energon.sources.tables.arrow import ArrowSource
from energon.sources.tables.parquet import KIND, ParquetGroups, ParquetOptions, ParquetSource
from energon.sources.webdataset import WebdatasetSource
from tests.commands import ok, run, run_python
from tests.datasets import jpeg
from tests.sources.reads import read_samples
from tests.task_encoder.runs import config

N = 60


def write_rows(path, numbers, *, row_group_size=7, **columns):
    """A file of rows `n` and `text`, and of more columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {"n": list(numbers), "text": [f"text {n}" for n in numbers], **columns}
    pq.write_table(pa.table(rows), path, row_group_size=row_group_size)
    return path


@pytest.fixture
def folder(tmp_path):
    """Three files with 60 rows, and others that hold none."""
    for part in range(3):
        write_rows(tmp_path / "data" / f"{part:03}.parquet", range(20 * part, 20 * part + 20))
    (tmp_path / "data" / "_metadata.parquet").write_bytes(b"of another tool")
    (tmp_path / "data" / "README.md").write_text("rows")
    return tmp_path / "data"


def numbers(source, ordinals=None):
    found = read_samples(source, np.arange(len(source)) if ordinals is None else np.array(ordinals))
    return [sample["n"] for sample in found]


@pytest.mark.parametrize("name", ["data", "data/*.parquet", "data/00[012].parquet", "**/*.parquet"])
def test_the_address_is_a_folder_or_a_pattern(tmp_path, folder, name):
    assert dataset_kind(tmp_path / name) == "parquet"
    assert numbers(ParquetSource(tmp_path / name)) == list(range(N))


def test_the_address_is_a_file(folder):
    assert dataset_kind(folder / "001.parquet") == "parquet"
    assert numbers(ParquetSource(folder / "001.parquet")) == list(range(20, 40))


def test_rows_of_any_ordinals_come_in_their_order(folder):
    source = pickle.loads(pickle.dumps(ParquetSource(folder)))
    ordinals = np.random.default_rng(0).integers(0, N, 200)
    samples = read_samples(source, ordinals)
    assert [sample["n"] for sample in samples] == ordinals.tolist()
    assert [sample["text"] for sample in samples] == [f"text {n}" for n in ordinals]
    first = read_samples(source, np.array([41]))[0]
    assert (first["__key__"], first["__shard__"]) == ("002/1", "002.parquet")
    assert source.find("002/1") == [41]
    assert (
        source.find("002.parquet/1")
        == source.find("002/20")
        == source.find("x/1")
        == source.find("002/x")
        == []
    )
    place = source.locate(41)
    assert (place.key, place.shard, place.sample, place.parts) == (
        *("002/1", "002.parquet", 1),
        ("n", "text"),
    )
    assert read_samples(source, np.array([], np.int64)) == []
    with pytest.raises(IndexError, match="0 to 59, not 60"):
        read_samples(source, np.array([60]))


def test_columns_that_no_field_needs_are_never_read(folder):
    """The bytes of the other column are destroyed, so that reading them would fail."""
    for path in folder.glob("0*.parquet"):
        metadata = pq.read_metadata(path)
        with open(path, "r+b") as file:
            for group in range(metadata.num_row_groups):
                chunk = metadata.row_group(group).column(0)
                file.seek(min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))))
                file.write(b"\xff" * chunk.total_compressed_size)
    read = {"sample_type": "TextSample", "field_map": {"text": "text"}}
    document = {"splits": {"train": {"path": str(folder), "read": read}}}
    dataset = get_train_dataset(document, worker_config=config(), batch_size=None, repeat=False)
    samples = list(dataset)
    assert isinstance(samples[0], TextSample)
    assert sorted(sample.text for sample in samples) == sorted(f"text {n}" for n in range(N))
    source = ParquetSource(folder, options=ParquetOptions(columns=["text"]))
    assert set(read_samples(source, np.array([0]))[0]) >= {"text"}
    assert "n" not in read_samples(source, np.array([0]))[0]
    with pytest.raises(FormatError, match=r"000\.parquet: row group 0 cannot be read"):
        read_samples(ParquetSource(folder), np.array([0]))


@pytest.fixture
def decoded(monkeypatch):
    """The row groups that were decoded, in order."""
    groups = []
    decode = ParquetGroups._decode

    def count(self, group, columns):
        groups.append(group)
        return decode(self, group, columns)

    monkeypatch.setattr(ParquetGroups, "_decode", count)
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("fill", [0, 2000])  # large rows are decoded ahead
@pytest.mark.parametrize(("ranks", "settings"), [(1, {}), (1, {"lanes": 1}), (2, {}), (5, {})])
def test_a_row_group_is_decoded_once_in_an_epoch(tmp_path, decoded, ranks, settings, fill):
    for part in range(10):
        rows = range(20 * part, 20 * part + 20)
        write_rows(tmp_path / f"{part}.parquet", rows, fill=[os.urandom(fill) for _ in rows])
    rows = []
    for rank in range(ranks):
        workers = config(rank=rank, world_size=ranks, **settings)
        dataset = get_train_dataset(tmp_path, worker_config=workers, batch_size=2, repeat=False)
        rows += [n for batch in dataset for n in batch["n"]]
    assert sorted(rows) == list(range(200))
    # Where the parts of two ranks meet, they share a row group.
    assert set(decoded) == set(range(30))
    assert 30 <= len(decoded) <= 30 + ranks - 1


def test_row_groups_are_decoded_once_where_few_fit_into_memory(tmp_path, decoded, monkeypatch):
    fill = [np.random.default_rng(n).bytes(500) for n in range(4000)]
    write_rows(tmp_path / "rows.parquet", range(4000), row_group_size=50, fill=fill)
    group = 50 * 600
    monkeypatch.setattr(decoded_blocks, "_kept", decoded_blocks._Kept())  # not of other tests
    monkeypatch.setattr(decoded_blocks, "BUDGET_BYTES", 8 * group)
    monkeypatch.setattr(decoded_blocks, "MAX_SOURCE_BYTES", 4 * group)
    dataset = get_train_dataset(tmp_path, worker_config=config(), batch_size=8, repeat=False)
    assert dataset.plan.leaves[0].parallel_slices == 3
    assert sum(len(batch["n"]) for batch in dataset) == 4000
    assert len(decoded) == 80


def test_lanes_that_a_failed_batch_puts_out_of_step_read_on(tmp_path):
    class Failing(DefaultTaskEncoder):
        decoder = None
        batches = 0

        def batch(self, samples):
            self.batches += 1
            if self.batches in (3, 7, 8, 30):
                raise ValueError("no batch of these")
            return super().batch(samples)

    write_rows(tmp_path / "rows.parquet", range(1000), row_group_size=50, data=[b"x"] * 1000)
    dataset = get_train_dataset(
        tmp_path, worker_config=config(), batch_size=4, repeat=False, task_encoder=Failing()
    )
    rows = [n for batch in dataset for n in batch["n"]]
    assert len(set(rows)) == len(rows) == 984


def test_a_batch_may_mix_files_of_known_and_unknown_types(tmp_path):
    content = [jpeg(0), b"\0\1 neither text nor an image", None, b"words"]
    pq.write_table(pa.table({"data": content}), tmp_path / "rows.parquet")

    class Encoder(DefaultTaskEncoder):
        decoder = None

    for order in ({"shuffle_over_epochs_multiplier": None}, {}):
        dataset = get_train_dataset(
            tmp_path,
            worker_config=config(),
            batch_size=4,
            repeat=False,
            task_encoder=Encoder(),
            **order,
        )
        [batch] = dataset
        assert sorted(batch["data"], key=str) == sorted(content, key=str)


def test_a_state_of_slices_that_did_not_follow_row_groups_is_refused(folder):
    dataset = get_train_dataset(folder, worker_config=config(), batch_size=4)
    with get_savable_loader(dataset) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.save_state_rank()))
    [leaf] = state["fingerprint"]["leaves"].values()
    leaf["slice"] = leaf["slice"][:2]
    with get_savable_loader(dataset) as loader, pytest.raises(StateError, match="slice"):
        loader.restore_state_rank(state)


def keys_of(loader, batches):
    return [list(batch["__key__"]) for batch in islice(iter(loader), batches)]


def test_runs_over_row_groups_continue_with_other_lanes(folder):
    dataset = get_train_dataset(folder, worker_config=config(lanes=2), batch_size=5)
    with get_savable_loader(dataset) as loader:
        seen = keys_of(loader, 4)
        state = json.loads(json.dumps(loader.save_state_rank()))
    dataset = get_train_dataset(folder, worker_config=config(lanes=4), batch_size=5)
    with get_savable_loader(dataset) as loader:
        loader.restore_state_rank(state, relane=True)
        seen += keys_of(loader, 8)
    assert len({key for keys in seen for key in keys}) == N


def test_the_plan_of_a_saved_run_follows_row_groups(folder):
    dataset = get_train_dataset(folder, worker_config=config(lanes=2), batch_size=5)
    with get_savable_loader(dataset) as loader:
        seen = keys_of(loader, 4)
        state = json.loads(json.dumps(loader.save_state_rank()))
    run = open_saved_run(state).run
    assert [[each.key for each in list_step(run, step)] for step in range(4)] == seen


def test_files_of_hugging_face_datasets_are_unpacked_and_decoded(tmp_path):
    names = ["cat", "dog"]
    features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    table = pa.table(
        {
            "image": [{"bytes": jpeg(n), "path": f"{n}.jpg"} for n in range(6)],
            "several": [[{"bytes": jpeg(n), "path": None}] * 2 for n in range(6)],
            "raw": [jpeg(n) for n in range(6)],
            "label": [n % 2 for n in range(6)],
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, tmp_path / "train.parquet")
    dataset = get_train_dataset(
        tmp_path / "train.parquet", worker_config=config(), batch_size=None, repeat=False
    )
    for sample in dataset:
        number = int(sample["__key__"].rpartition("/")[2])
        assert sample["image"].shape == sample["raw"].shape == (3, 8, 12)
        assert len(sample["several"]) == 2
        assert all((image == sample["image"]).all() for image in sample["several"])
        assert sample["label_name"] == names[number % 2] == names[sample["label"]]
    source = ParquetSource(
        tmp_path / "train.parquet", options=ParquetOptions(columns=["label_name"])
    )
    assert read_samples(source, np.array([1]))[0]["label_name"] == "dog"
    assert "label" not in read_samples(source, np.array([1]))[0]
    assert source.class_names == {"label": names}


def test_all_types_become_what_python_has_for_them(tmp_path):
    table = pa.table(
        {
            "list": [[1, 2], [], None],
            "struct": [{"a": 1, "b": [{"c": "x"}]}] * 3,
            "dictionary": pa.array(["x", "y", "x"]).dictionary_encode(),
            "none": pa.array([None] * 3, pa.string()),
            "__index_level_0__": [7, 8, 9],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    samples = read_samples(ParquetSource(tmp_path / "x.parquet"), np.arange(3))
    assert [sample["list"] for sample in samples] == [[1, 2], [], None]
    assert samples[1]["struct"] == {"a": 1, "b": [{"c": "x"}]}
    assert [sample["dictionary"] for sample in samples] == ["x", "y", "x"]
    assert samples[0]["none"] is None
    assert "__index_level_0__" not in samples[0]
    told = KIND.describe(str(tmp_path))["columns"]
    assert list(told) == ["list", "struct", "dictionary", "none"]


def test_folders_of_a_hive_partitioned_tree_become_parts(tmp_path):
    for year in (2023, 2024):
        for language in ("en", "a%20b"):
            write_rows(tmp_path / f"year={year}" / f"lang={language}" / "0.parquet", [year])
    source = ParquetSource(tmp_path)
    found = {(s["year"], s["lang"], s["n"]) for s in read_samples(source, np.arange(4))}
    assert found == {(y, lang, y) for y in (2023, 2024) for lang in ("en", "a b")}
    assert read_samples(source, np.array([0]))[0]["__key__"] == "year=2023/lang=a%20b/0/0"
    told = KIND.describe(str(tmp_path))["columns"]
    assert told == {"n": "int64", "text": "string", "year": "int64", "lang": "string"}
    write_rows(tmp_path / "year=2024" / "lang=__HIVE_DEFAULT_PARTITION__" / "0.parquet", [0])
    assert None in {s["lang"] for s in read_samples(ParquetSource(tmp_path), np.arange(5))}


def test_names_of_files_say_the_split_or_a_ratio_does(tmp_path):
    for name, count in (("train-00000", 8), ("validation-00000", 3), ("test", 2)):
        write_rows(tmp_path / f"{name}.parquet", range(count))
    sizes = {
        name: len(ParquetSource(tmp_path, SampleSelection(name)))
        for name in ("train", "val", "valid", "test")
    }
    assert sizes == {"train": 8, "val": 3, "valid": 3, "test": 2}
    with pytest.raises(
        ConfigError, match="no split 'dev2', only train, val, test, according to the names"
    ):
        ParquetSource(tmp_path, SampleSelection("dev2"))
    options = ParquetOptions(split="10,3,0")
    assert len(ParquetSource(tmp_path, SampleSelection("val"), options=options)) == 3
    one = tmp_path / "train-00000.parquet"
    with pytest.raises(ConfigError, match="no split 'val', only train; say which rows"):
        ParquetSource(one, SampleSelection("val"))
    parts = [
        numbers(ParquetSource(one, SampleSelection(name), options=ParquetOptions(split="50,25,25")))
        for name in ("train", "val", "test")
    ]
    assert parts == [[0, 1, 2, 3], [4, 5], [6, 7]]


class Encoder(DefaultTaskEncoder):
    cookers = (
        Cooker(
            lambda s: TextSample(
                **basic_sample_keys(s), text=s["text"] if "text" in s else s["txt"]
            )
        ),
    )


def test_an_epoch_holds_each_row_once(folder):
    dataset = get_train_dataset(
        folder, worker_config=config(lanes=4), batch_size=3, repeat=False, task_encoder=Encoder()
    )
    texts = [text for batch in dataset for text in batch.text]
    assert sorted(texts) == sorted(f"text {n}" for n in range(N))
    assert texts != sorted(texts, key=lambda text: int(text.split()[1]))


def test_the_folder_may_say_itself_what_its_rows_become(folder):
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: energon, __class__: TextSample}\nfield_map: {text: text}\n"
    )
    dataset = get_train_dataset(folder, worker_config=config(), batch_size=None)
    assert isinstance(next(iter(dataset)), TextSample)


def test_prepare_notes_the_footers_and_notices_changes(folder, monkeypatch):
    result = run("prepare", folder)
    assert (result.exit_code, result.output) == (0, "Done. Found 60 samples.\n")
    assert (folder / ".nv-meta" / "parquet.footers").is_file()
    read = []
    real = parquet.ParquetFiles.read_footer

    def count(self, found):
        read.append(found.key)
        return real(self, found)

    monkeypatch.setattr(parquet.ParquetFiles, "read_footer", count)
    assert numbers(ParquetSource(folder)) == list(range(N))
    assert read == []
    write_rows(folder / "001.parquet", range(100, 103))
    os.utime(folder / "001.parquet", ns=(1, 1))
    write_rows(folder / "003.parquet", range(200, 202))
    assert numbers(ParquetSource(folder)) == [*range(20), 100, 101, 102, *range(40, 60), 200, 201]
    assert read == ["001.parquet", "003.parquet"]


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 40, b"ENFOOT01" + b"\xff" * 8, b"ENFOOT01" + struct.pack("<Q", 2) + b"[]"],
)
def test_a_damaged_table_of_footers_is_made_again(folder, content, caplog):
    run("prepare", folder)
    (folder / ".nv-meta" / "parquet.footers").write_bytes(content)
    with caplog.at_level(logging.WARNING, "energon"):
        assert numbers(ParquetSource(folder)) == list(range(N))
    assert "run `energon prepare` again" in caplog.text


def test_many_files_are_noticed(folder, monkeypatch, caplog):
    monkeypatch.setattr(parquet, "MANY_FILES", 2)
    with caplog.at_level(logging.WARNING, "energon"):
        ParquetSource(folder)
    assert "reading the footers of 3 files" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "energon"):
        ParquetSource(folder)
    assert not caplog.text  # the user's cache has them now


def test_footers_of_a_read_only_folder_are_read_once_and_kept(folder, monkeypatch, caplog):
    (folder / ".nv-meta").write_text("a file where the folder of the footers would be")
    read = []
    real = parquet.ParquetFiles.read_footer
    monkeypatch.setattr(parquet, "MANY_FILES", 2)
    monkeypatch.setattr(
        parquet.ParquetFiles,
        "read_footer",
        lambda self, found: read.append(found.key) or real(self, found),
    )
    with caplog.at_level(logging.WARNING, "energon"):
        assert run("prepare", folder).output.endswith("Done. Found 60 samples.\n")
    assert "the footers are kept in the user's cache" in caplog.text
    assert len(read) == 3
    caplog.clear()
    with caplog.at_level(logging.WARNING, "energon"):
        assert len(ParquetSource(folder)) == N
    assert (len(read), caplog.text) == (3, "")


def test_info_tells_columns(folder):
    about = json.loads(run("info", folder, "--json").output)
    assert (about["kind"], about["samples"], about["shards"]) == ("parquet", N, 3)
    assert about["columns"] == {"n": "int64", "text": "string"}
    assert "columns: n (int64), text (string)" in run("info", folder).output


def lists_of_images():
    """Rows as of conversations with any number of images."""
    one, other = ({"bytes": jpeg(n), "path": path} for n, path in enumerate(("1.jpg", None)))
    return [[one, other], [], None, [other, None]]


def test_lists_of_images_are_decoded_one_by_one(tmp_path):
    pq.write_table(pa.table({"images": lists_of_images()}), tmp_path / "x.parquet")
    samples = read_samples(ParquetSource(tmp_path / "x.parquet"), np.arange(4))
    decoded = [SampleDecoder(image_decode="rgb8", guess_content=True)(each) for each in samples]
    first, second = decoded[0]["images"]
    assert first.shape == second.shape == decoded[3]["images"][0].shape
    assert (first != second).any()
    assert [each["images"] for each in decoded[1:3]] == [[], None]
    assert decoded[3]["images"][1] is None


def test_lint_names_rows_with_a_damaged_image_in_a_list(tmp_path):
    rows = lists_of_images()
    rows[3][0] = {"bytes": jpeg(0)[:60], "path": None}
    pq.write_table(pa.table({"images": rows}), tmp_path / "x.parquet")
    result = run("lint", tmp_path / "x.parquet", "--num-workers", 1)
    assert result.exit_code == 1
    assert "x/3" in result.output
    assert "x/0" not in result.output


def test_files_that_a_table_only_names_are_warned_of(tmp_path, caplog):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": jpeg(0), "path": "0.jpg"}, {"bytes": None, "path": "a/1.jpg"}, None]
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / "named.parquet")
    samples = read_samples(ParquetSource(tmp_path / "named.parquet"), np.arange(3))
    assert [sample["image"] is None for sample in samples] == [False, True, True]
    (record,) = caplog.records
    assert "column 'image' has the path of a file, such as 'a/1.jpg'" in record.getMessage()


def test_few_requests_come_before_the_first_batch_of_prepared_files_far_away(tmp_path, s3):
    for number in range(20):
        table = pa.table({"n": list(range(20 * number, 20 * number + 20))})
        pq.write_table(table, tmp_path / "file.parquet", row_group_size=10)
        content = (tmp_path / "file.parquet").read_bytes()
        write_bytes(join_address(s3.address, f"{number:03}.parquet"), content)
    ok("prepare", s3.address)
    forget_stores()
    state = None
    for _ in range(3):
        s3.proxy.requests.clear()
        dataset = get_train_dataset(s3.address, worker_config=config(lanes=1), batch_size=8)
        opening = list(s3.proxy.requests)
        assert len(opening) <= 9
        assert not any(request.path.endswith(".parquet") for request in opening)
        with get_savable_loader(dataset) as loader:
            if state is not None:
                loader.restore_state_rank(state)
            next(iter(loader))
            state = loader.save_state_rank()
        rest = s3.proxy.requests[len(opening) :]
        assert all(request.is_data for request in rest)  # row groups, and nothing about files


def test_remote_files_are_read_by_ranges_and_their_footers_kept(folder, s3):
    for path in folder.glob("0*.parquet"):
        write_bytes(join_address(s3.address, f"data/{path.name}"), path.read_bytes())
    for name in ("data", "data/*.parquet"):
        address = join_address(s3.address, name)
        assert dataset_kind(address) == "parquet"
        source = pickle.loads(pickle.dumps(ParquetSource(address)))
        assert numbers(source) == list(range(N))
    batches = []
    for address in (folder, join_address(s3.address, "data")):
        dataset = get_train_dataset(
            address, worker_config=config(), batch_size=4, task_encoder=Encoder()
        )
        batches.append([batch.text for batch in islice(dataset, 40)])
    assert batches[0] == batches[1]
    assert numbers(ParquetSource(join_address(s3.address, "data/001.parquet"))) == [*range(20, 40)]
    result = run("prepare", join_address(s3.address, "data"))
    assert (result.exit_code, result.output) == (0, "Done. Found 60 samples.\n")


def footer_at(data):
    return len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (lambda data: b"", TruncatedError, "0 bytes that end with b''"),
        (lambda data: data[:-20], TruncatedError, "truncated, or not a Parquet file"),
        (lambda data: b"PK" * 50, TruncatedError, "not a Parquet file"),
        (lambda data: data[:-4] + b"PARE", FormatError, "is encrypted"),
        (lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", FormatError, "its footer has"),
        (
            lambda data: data[: footer_at(data)] + b"\xff" * 40 + data[footer_at(data) + 40 :],
            FormatError,
            "its footer is damaged",
        ),
        (lambda data: data[footer_at(data) - 4 :], FormatError, "cannot be read"),
    ],
)
def test_a_damaged_file_is_reported(folder, change, error, problem):
    path = folder / "001.parquet"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(error, match=problem) as caught:
        read_samples(ParquetSource(folder), np.arange(20, 40))
    assert "001.parquet" in str(caught.value)


def test_a_huge_row_group_is_refused(folder, monkeypatch):
    monkeypatch.setenv("ENERGON_LIMIT_DECODED_BYTES", "100")
    with pytest.raises(FormatError, match="row group 0 has .* bytes, more than 100; if you trust"):
        read_samples(ParquetSource(folder), np.array([0]))
    monkeypatch.setenv("ENERGON_LIMIT_PARQUET_FOOTER_BYTES", "100")
    with pytest.raises(FormatError, match="its footer has .* bytes, more than 100; if you trust"):
        ParquetSource(folder)


def test_a_dictionary_does_not_expand_beyond_the_limit(tmp_path, monkeypatch):
    """700 bytes stand for 2 MB; a limit that is larger changes only that environment variable."""
    texts = pa.DictionaryArray.from_arrays(np.zeros(1000, np.int32), pa.array(["x" * 2000]))
    table = pa.table({"text": texts.cast("string")})
    pq.write_table(table, tmp_path / "0.parquet", compression="zstd")
    monkeypatch.setenv("ENERGON_LIMIT_DECODED_BYTES", "1000000")
    with pytest.raises(FormatError, match="0.parquet: row group 0 has .*DECODED_BYTES to a larger"):
        read_samples(ParquetSource(tmp_path), np.array([0]))
    monkeypatch.setenv("ENERGON_LIMIT_DECODED_BYTES", "3000000")
    assert read_samples(ParquetSource(tmp_path), np.array([999]))[0]["text"] == "x" * 2000


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "lz4", "gzip", "brotli"])
def test_rows_of_several_batches_come_in_their_order(tmp_path, monkeypatch, compression):
    monkeypatch.setattr("energon.formats.parquet.ROW_BATCH_BYTES", 4000)
    rows = [
        {
            "text": f"text {n % 7} " * 20,
            "image": {"bytes": bytes([n]) * 30, "path": f"{n}.png"},
            "list": [f"{n}", "same"] if n % 3 else None,
            "number": n,
        }
        for n in range(200)
    ]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "0.parquet", compression=compression)
    source = ParquetSource(tmp_path)
    group = source.groups.table(0, source.columns)
    assert group.table.column("text").num_chunks > 2
    order = np.random.default_rng(0).permutation(200)
    for sample, n in zip(read_samples(source, order), order.tolist(), strict=True):
        assert sample["image"] == rows[n]["image"]["bytes"]
        assert {name: sample[name] for name in ("text", "list", "number")} == {
            name: rows[n][name] for name in ("text", "list", "number")
        }


def test_a_footer_that_lies_about_its_rows_is_reported(folder):
    source = ParquetSource(folder)
    write_rows(folder / "000.parquet", range(20), row_group_size=5)
    with pytest.raises(FormatError, match=r"000\.parquet"):
        read_samples(source, np.array([0, 19]))


@pytest.mark.parametrize("empty", [0, 1])
def test_columns_without_values_go_with_any_type(tmp_path, empty):
    for number, values in enumerate((["a", "b"], [None, None])):
        name = (number + empty) % 2
        pq.write_table(pa.table({"x": values, "n": [number] * 2}), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"x": ["c"], "n": [2]}), tmp_path / "2.parquet")
    rows = read_samples(ParquetSource(tmp_path), np.arange(5))
    assert sorted((row["n"], row["x"]) for row in rows if row["n"] != 1) == [
        (0, "a"),
        (0, "b"),
        (2, "c"),
    ]
    assert [row["x"] for row in rows if row["n"] == 1] == [None, None]
    pq.write_table(pa.table({"x": [1], "n": [3]}), tmp_path / "3.parquet")
    with pytest.raises(FormatError, match=rf"3\.parquet: has int64 .*{empty}\.parquet has string"):
        ParquetSource(tmp_path)


def test_mixed_schemas_are_refused_where_they_matter(folder):
    write_rows(folder / "003.parquet", ["a", "b"])
    problem = r"003\.parquet: has string in column 'n', but .*000\.parquet has int64 there"
    with pytest.raises(FormatError, match=problem):
        ParquetSource(folder)
    options = ParquetOptions(columns=["text"])
    assert len(ParquetSource(folder, options=options)) == N + 2


TEXT, STRUCT = pa.string(), pa.struct
PROMOTED = [
    (["a"], TEXT, [None], pa.null()),
    ([["a"]], pa.list_(TEXT), [[], None], pa.list_(pa.null())),
    ([1, None], pa.int32(), [2**40], pa.int64()),
    ([0.5], pa.float32(), [0.1], pa.float64()),
    ([2], pa.int64(), [0.5], pa.float64()),
    (["a"], TEXT, ["b"], pa.large_string()),
    (["a"], TEXT, ["b"], pa.string_view()),
    (["a", "b"], pa.dictionary(pa.int8(), TEXT), ["b"], TEXT),
    ([b"a"], pa.binary(1), [b"bc"], pa.binary()),
    ([[1]], pa.list_(pa.int32()), [[2]], pa.large_list(pa.int64())),
    ([[1, 2]], pa.list_(pa.int32(), 2), [[3]], pa.list_(pa.int32())),
    ([dt.datetime(2024, 1, 1)], pa.timestamp("us"), [dt.datetime(2025, 1, 1)], pa.timestamp("ns")),
    ([Decimal("1.50")], pa.decimal128(10, 2), [Decimal("0.1234")], pa.decimal128(12, 4)),
    (
        [{"a": 1, "b": "x"}, None],
        STRUCT([("a", pa.int32()), ("b", TEXT)]),
        [{"a": 2, "b": "y"}],
        STRUCT([("b", TEXT), ("a", pa.int32())]),
    ),
    ([[{"a": 1}]], pa.list_(STRUCT([("a", pa.int8())])), [], pa.list_(STRUCT([("b", TEXT)]))),
    ([[("a", 1)]], pa.map_(TEXT, pa.int32()), [[("a", 2)]], pa.map_(TEXT, pa.int64())),
]


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("case", range(len(PROMOTED)))
def test_values_of_several_types_become_those_that_pyarrow_promotes_them_to(
    tmp_path, case, is_later
):
    first, kind, second, other = PROMOTED[case]
    tables = [pa.table({"x": pa.array(first, kind)}), pa.table({"x": pa.array(second, other)})]
    if is_later:
        tables.reverse()
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    samples = read_samples(ParquetSource(tmp_path), np.arange(len(first) + len(second)))
    values = [value for table in tables for value in table["x"].to_pylist()]
    read = [sample["x"] for sample in samples]
    # Python sees equal values, whatever the type; of structs, those that have all fields.
    assert [_with_fields(each, "b") for each in read] == [
        _with_fields(each, "b") for each in values
    ]
    kinds = {type(value) for value in read if value is not None}
    assert len(kinds) <= 1 or pa.types.is_temporal(kind)


def test_large_whole_numbers_become_the_nearest_float(tmp_path):
    pq.write_table(pa.table({"x": [2**60 + 1]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": [0.5]}), tmp_path / "1.parquet")
    assert [row["x"] for row in read_samples(ParquetSource(tmp_path), np.arange(2))] == [
        2.0**60,
        0.5,
    ]


def _with_fields(value, name):
    match value:
        case dict():
            return {name: None, **value}
        case list():
            return [_with_fields(each, name) for each in value]
    return value


def test_columns_that_only_some_files_have_are_none_in_the_others(tmp_path):
    files = [{"bytes": jpeg(n), "path": None} for n in range(2)]
    pq.write_table(pa.table({"n": [0, 1]}), tmp_path / "0.parquet")
    pq.write_table(
        pa.table({"n": [2, 3], "image": files, "tag": ["a", "b"]}), tmp_path / "1.parquet"
    )
    source = ParquetSource(tmp_path)
    assert source.part_names == ["n", "image", "tag"]
    samples = read_samples(source, np.arange(4))
    assert [sample["tag"] for sample in samples] == [None, None, "a", "b"]
    assert [sample["image"] for sample in samples] == [None, None, *(f["bytes"] for f in files)]
    only = ParquetSource(tmp_path, options=ParquetOptions(columns=["tag"]))
    assert [sample["tag"] for sample in read_samples(only, np.arange(4))] == [None, None, "a", "b"]
    described = KIND.describe(str(tmp_path))["columns"]
    assert {name: described[name] for name in ("n", "tag")} == {"n": "int64", "tag": "string"}


def test_a_value_that_the_common_type_has_no_room_for_is_one_failed_sample(tmp_path, caplog):
    late = pa.array([0, 2**60], pa.timestamp("us"))  # nanoseconds end in 2262
    pq.write_table(pa.table({"x": late}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": pa.array([0], pa.timestamp("ns"))}), tmp_path / "1.parquet")
    dataset = get_train_dataset(tmp_path, worker_config=config(), batch_size=1, repeat=False)
    assert sorted(batch["__key__"][0] for batch in dataset) == ["0/0", "1/0"]
    assert "0.parquet: row 1 has a value in column 'x' that cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"columns": "n"}, "columns is 'n'; expected a list of names"),
        ({"columns": []}, "columns is .*; expected a list of names"),
        ({"columns": ["m"]}, "there is no column 'm', only n, text"),
        ({"sample_type": "TextSample"}, "sample_type and field_map belong together"),
        (
            {"sample_type": "TextSample", "field_map": {"text": "txet"}},
            "no sample has a part txet; there are n, text; did you mean 'text'?",
        ),
        (
            {"sample_type": "TextSmaple", "field_map": {"text": "text"}},
            "no sample type 'TextSmaple'; did you mean 'TextSample'?",
        ),
        ({"split": "x"}, "split is 'x'; expected up to three numbers"),
        ({"length": 3}, "'length' is not an option of a set of Parquet files"),
    ],
)
def test_options_that_make_no_sense_are_refused(folder, options, problem):
    document = {"splits": {"train": {"path": str(folder), "read": options}}}
    with pytest.raises(ConfigError, match=problem):
        get_train_dataset(document, worker_config=config(), batch_size=1)


def test_nothing_to_read_is_an_error(tmp_path, folder):
    empty = write_rows(tmp_path / "empty" / "x.parquet", [])
    with pytest.raises(EmptyDatasetError, match="has 0 of 0 rows in 1 file$"):
        ParquetSource(empty)
    write_rows(folder / "0000.parquet", np.array([], np.int64))
    with pytest.raises(DatasetNotFoundError, match=r"there are no \.parquet files"):
        ParquetSource(tmp_path / "data" / "x*.parquet")
    with pytest.raises(EmptyDatasetError, match="but subset and exclude leave none"):
        ParquetSource(folder / "000.parquet", SampleSelection(exclude=["000.parquet"]))


def test_excluded_and_narrowed_rows_keep_their_keys(folder):
    source = ParquetSource(
        folder, SampleSelection(exclude=["000/1", "001.parquet/0", "002.parquet"])
    )
    assert len(source) == 38
    assert numbers(source)[:3] == [0, 2, 3]
    assert source.find("001/0") == []
    half = ParquetSource(folder, SampleSelection(subsets=[("50%", "100%")]))
    assert numbers(half) == list(range(30, 60))
    assert half.ranges()[1] == {"001.parquet": (10, 20), "002.parquet": (0, 20)}
    assert source.slice_cost.blocks == (6, 7, 6, 6, 7, 6)
    assert half.slice_cost.blocks == (4, 6, 7, 7, 6)


def test_fingerprints_tell_contents_apart(folder):
    first = ParquetSource(folder).fingerprint()
    assert ParquetSource(folder).fingerprint() == first
    assert ParquetSource(folder, SampleSelection(exclude=["000/1"])).fingerprint() != first
    write_rows(folder / "003.parquet", [1])
    assert ParquetSource(folder).fingerprint() != first


NO_PANDAS = """
import sys
import numpy as np
from energon.sources.tables.parquet import ParquetSource
ParquetSource(sys.argv[1]).read(np.arange(3))
assert "pandas" not in sys.modules
"""


def test_rows_are_read_without_importing_pandas_which_takes_a_second(folder):
    pytest.importorskip("pandas")
    run_python(NO_PANDAS, folder)


def unreadable_table():
    """Four rows, of which the second and third have values that Python does not have."""
    offsets, text = np.array([0, 1, 3, 4, 5], np.int32), b"a\xff\xfecd"
    column = pa.Array.from_buffers(TEXT, 4, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    return pa.table({"text": column, "day": pa.array([0, 1, 3 * 10**6, 3], pa.date32())})


UNREADABLE = ["row 1 has a value in column 'text'", "row 2 has a value in column 'day'"]


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [None, SampleDecoder()])
@pytest.mark.parametrize("rows", [4, 400])
def test_a_value_that_cannot_be_read_is_one_failed_sample(tmp_path, caplog, decoder, rows):
    more = pa.table({"text": ["x"] * rows, "day": pa.array([0] * rows, pa.date32())})
    pq.write_table(pa.concat_tables([unreadable_table(), more]), tmp_path / "a.parquet")

    class Encoder(DefaultTaskEncoder):
        pass

    Encoder.decoder = decoder
    dataset = get_train_dataset(
        tmp_path, worker_config=config(), batch_size=1, repeat=False, task_encoder=Encoder()
    )
    read = {batch["__key__"][0] for batch in dataset}
    assert read == {f"a/{n}" for n in range(rows + 4)} - {"a/1", "a/2"}
    for problem in UNREADABLE:
        assert f"a.parquet: {problem} that cannot be read: " in caplog.text


def test_samples_that_cannot_be_read_fail_in_joins_and_lint_too(tmp_path, caplog):
    pq.write_table(unreadable_table(), tmp_path / "a.parquet")
    write_rows(tmp_path / "other" / "a.parquet", range(4))
    result = run("lint", tmp_path / "a.parquet", "--num-workers", 1)
    assert all(problem in result.output for problem in UNREADABLE)
    assert "4 samples: 2 problems" in result.output
    paths = [{"path": str(tmp_path / name)} for name in ("other/a.parquet", "a.parquet")]
    joiner = {"__module__": __name__, "__function__": "first_of_join"}
    document = {"splits": {"train": {"join": paths, "joiner": joiner}}}
    dataset = get_train_dataset(
        document, worker_config=config(), batch_size=1, repeat=False, allow=("code",)
    )
    assert sorted(batch["n"][0] for batch in dataset) == [0, 3]
    sample = pickle.loads(
        pickle.dumps(read_samples(ParquetSource(tmp_path / "a.parquet"), np.array([1]))[0])
    )
    assert sample["__key__"] == "a/1"
    with pytest.raises(DecodeError, match="cannot be read"):
        sample["text"]


def first_of_join(first, second):
    return first


def test_json_of_hugging_face_datasets_is_decoded_and_packed(tmp_path):
    import datasets

    values = [{"a": [1]}, [1, "x"], None, "text"]
    features = datasets.Features({"value": datasets.Json(), "n": datasets.Value("int64")})
    table = datasets.Dataset.from_dict({"value": values, "n": [0, 1, 2, 3]}, features=features)
    (tmp_path / "in").mkdir()
    table.to_parquet(tmp_path / "in/a.parquet")
    table.save_to_disk(tmp_path / "saved")
    for source in (ParquetSource(tmp_path / "in"), ArrowSource(tmp_path / "saved")):
        assert [sample["value"] for sample in read_samples(source, np.arange(4))] == values
    ok("pack", tmp_path / "in", tmp_path / "out")
    packed = read_samples(WebdatasetSource(tmp_path / "out"), np.arange(4))
    assert [json.loads(sample["json"]).get("value") for sample in packed] == values


def test_damaged_json_in_a_column_is_one_failed_sample(tmp_path):
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", "{", "[2]"]))
    pq.write_table(pa.table({"value": column}), tmp_path / "a.parquet")
    one, damaged, two = read_samples(ParquetSource(tmp_path), np.arange(3))
    assert (one["value"], two["value"]) == (1, [2])
    with pytest.raises(DecodeError, match="a.parquet: row 1 .*'value'.*is not JSON"):
        damaged["value"]
