"""Datasets that the libraries of MosaicML Streaming and LitData wrote, read without them."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
import threading
import types
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from energon import (
    ConfigError,
    Cooker,
    DatasetNotFoundError,
    DefaultTaskEncoder,
    EmptyDatasetError,
    Sample,
    SecurityError,
    cooker,
    edataclass,
    get_train_dataset,
)
from energon.errors import DecodeError, FormatError, TruncatedError
from energon.io.address import join_address
from energon.io.files import list_files, write_bytes
from energon.metadataset.kind import dataset_kind
from energon.samples.crude import PART_FILES, UnreadableSample
from energon.sources.kinds import kind_of
from energon.sources.source import SampleSelection
from energon.sources.tables.row_kind import RowOptions
from energon_mds.litdata import LitDataFormat, litdata_decoder, litdata_items, table_rows
from energon_mds.mds import MdsFormat
from energon_mds.source import LitDataRecords, MdsRecords
from tests.commands import ok, run
from tests.datasets import jpeg
from tests.mds_files import write_mds
from tests.servers.web import web_server
from tests.sources.reads import read_samples
from tests.task_encoder.runs import config

DATA = Path(__file__).parent / "data"
SOURCES = {"mds": MdsRecords, "litdata": LitDataRecords}
NAMES = ("mds", "mds_zstd", "litdata", "litdata_zstd")


def source_of(path, **settings):
    return SOURCES[dataset_kind(path)](path, **settings)


def every(source):
    """All samples; the error of the first one that cannot be read is raised."""
    samples = read_samples(source, np.arange(len(source)))
    for sample in samples:
        if isinstance(sample, UnreadableSample):
            raise sample.error
    return samples


@pytest.fixture(params=NAMES)
def folder(request, tmp_path):
    shutil.copytree(DATA / request.param, tmp_path / "data")
    return tmp_path / "data"


def edit(folder, change):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("name", NAMES)
def test_records_of_any_ordinals_come_in_their_order(name):
    assert dataset_kind(DATA / name) == name.partition("_")[0]
    source = pickle.loads(pickle.dumps(source_of(DATA / name)))
    assert len(source) == 7
    ordinals = np.random.default_rng(0).integers(0, 7, 50)
    samples = read_samples(source, ordinals)
    assert [sample["id"] for sample in samples] == ordinals.tolist()
    for sample in samples:
        n = sample["id"]
        assert (sample["__key__"], sample["text"]) == (f"{n:09}", f"text {n} ä")
        assert (sample["score"], sample["raw"]) == (n / 4, b"\0" * n + b"r")
        assert sample["image"][:2] == b"\xff\xd8"
        assert sample[PART_FILES]["image"] == "image.jpg"
        assert sample["pixels"] == b"P6\n3 2\n255\n" + bytes((n, 1, 2)) * 6
    assert source.find("000000005") == [5]
    assert source.find("9") == source.find("x") == []
    assert source.locate(6).sample == 0
    with pytest.raises(IndexError, match="0 to 6, not 7"):
        read_samples(source, np.array([7]))


@pytest.mark.parametrize("name", ["litdata_tokens", "litdata_tensors"])
def test_single_tensors_are_read_with_and_without_their_size(name):
    loader = {"litdata_tokens": "TokensLoader", "litdata_tensors": "PyTreeLoader"}[name]
    assert json.loads((DATA / name / "index.json").read_text())["config"]["item_loader"] == loader
    samples = every(source_of(DATA / name))
    assert [sample["0"].tolist() for sample in samples] == [
        list(range(n, 2 * n + 1)) for n in range(40)
    ]
    assert samples[0]["0"].dtype == np.int32


def test_texts_that_early_versions_of_litdata_wrote_are_read(tmp_path):
    shutil.copytree(DATA / "litdata_tokens", tmp_path / "x")
    edit(tmp_path / "x", lambda index: index["config"].pop("item_loader"))
    assert len(every(source_of(tmp_path / "x"))[7]["0"]) == 8


@pytest.mark.parametrize("name", ["mds_arrays", "litdata_arrays"])
def test_arrays_are_read_in_every_form(name):
    samples = every(source_of(DATA / name))
    assert [sample["n"] for sample in samples] == list(range(40))
    n, last = 39, samples[39]
    if name == "mds_arrays":
        assert last["any"].tolist() == [list(range(40))]
        assert (last["any"].dtype, last["typed"].tolist()) == (np.int16, [[n, n]])
        assert last["fixed"].tolist() == [[n] * 3] * 2
    else:
        assert (last["flat"].tolist(), last["row"].tolist()) == ([n, n + 1, n + 2], [n, n + 1])
        assert last["image"].tolist() == last["table"].tolist() == [[n, n]] * 2
        assert (last["image"].dtype, last["table"].dtype) == (np.float32, np.float64)


@pytest.mark.parametrize("name", ["litdata_tables", "litdata_nested"])
def test_lists_and_dicts_are_read_from_tables_and_fields(name):
    pytest.importorskip("pyarrow")
    samples = every(pickle.loads(pickle.dumps(source_of(DATA / name))))
    assert len(samples) == 40
    for n, sample in enumerate(samples):
        turn = {"role": "user", "text": None if n % 2 else "", "n": n, "x": n / 2}
        tags, rows = ["a"] * (n % 4), [[n], [n, -n]]
        meta = {"id": n, "tags": tags, "flags": [True, False], "shares": [n / 4]}
        assert (sample["text"], sample["turns"]) == (f"text {n} ä", [turn] * (n % 3))
        assert (sample["meta"], sample["rows"], sample["raw"]) == (meta, rows, b"\0" * n)
        assert "tensor" not in sample or sample["tensor"].tolist() == [[n, n]]
    options = RowOptions(columns=["text", "raw"])
    chosen = read_samples(LitDataRecords(DATA / name, options=options), np.array([33, 2]))
    assert [set(each) & {"text", "raw", "rows"} for each in chosen] == [{"text", "raw"}] * 2
    assert chosen[0]["text"] == "text 33 ä"


def test_damaged_tables_are_reported(tmp_path):
    pytest.importorskip("pyarrow")
    shutil.copytree(DATA / "litdata_tables", tmp_path / "x")
    chunk = tmp_path / "x/chunk-0-0.bin"
    whole = chunk.read_bytes()
    size = int.from_bytes(whole[-12:-8], "little")
    for content in (
        whole[:-8] + bytes(8),
        whole[:-12] + bytes(4) + whole[-8:],
        whole[:-12] + b"\xff" * 4 + whole[-8:],
        whole[: -12 - size // 2] + bytes(size // 2) + whole[-12:],
        whole[: -12 - size] + whole[-12 - size :].replace(b"text", b"\xff\xff\xff\xff"),
    ):
        chunk.write_bytes(content)
        with pytest.raises((FormatError, DecodeError), match=r"chunk-0-0\.bin[:,] "):
            every(source_of(tmp_path / "x"))
    chunk.write_bytes(whole[:-30])
    with pytest.raises(FormatError, match=rf"has {len(whole) - 30} bytes, but index.json says"):
        every(source_of(tmp_path / "x"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x07\xff\0\0\0a", "field has 6 bytes, its value needs 260"),
        (b"\x0b\x0b", "field has 2 bytes, its value ends after 1"),
        (b"\x20", "a value begins with the unknown byte 32"),
        (b"\x06\xff\xff\xff\xff\0\0\0\0", "4294967295 dicts have no keys"),
        (b"\x05\x01\0\0\0\0\0\0\0" * 9_000, "nested too deep"),
        (b"{", "json: is not JSON"),
        (b"", "json: is not JSON"),
    ],
)
def test_invalid_nested_values_are_reported_with_their_chunk(content, problem):
    config = {"compression": None, "data_format": ["json"], "data_spec": '[1, {"type": null}]'}
    found = LitDataFormat({"chunks": [], "config": config}, "index.json")
    record = len(content).to_bytes(4, "little") + content
    with pytest.raises(FormatError, match=f"chunk-7: has an invalid record: .*{problem}"):
        found.row(0, record, "chunk-7")
    assert found.row(0, b"\x05\0\0\0[1,2]", "chunk-7") == {"0": 1, "1": 2}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"data_format": ["no_header_tensor:10"]}, "'no_header_tensor:10'"),
        ({"item_loader": "TemporalArrayLoader"}, "TemporalArrayLoader; write its arrays again"),
        ({"item_loader": "ParquetLoader"}, "Parquet files, read them as FOLDER/"),
        ({"encryption": {"level": "chunk"}}, "is encrypted"),
    ],
)
def test_items_that_cannot_be_read_are_refused(change, problem):
    config = {"compression": None, "data_format": ["int"], "data_spec": '[1, {"type": null}]'}
    with pytest.raises(ConfigError, match=problem):
        LitDataFormat({"chunks": [], "config": config | change}, "index.json")


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def write_pickles(folder, kind, pickles):
    """Write a dataset of pickled objects as the libraries do."""
    write_mds(folder, [[*pickles]], column="0", encoding="pkl")
    if kind == "litdata":  # whose chunks are laid out like shards of MDS
        index = json.loads((folder / "index.json").read_text())
        (about,) = index["shards"]
        file = about["raw_data"]
        listed = {"filename": file["basename"], "chunk_size": about["samples"]}
        stored = {"data_format": ["pickle"], "data_spec": '[1, {"type": null}]'}
        chunks = [listed | {"chunk_bytes": file["bytes"]}]
        about = {"chunks": chunks, "config": {"compression": None, **stored}}
        (folder / "index.json").write_text(json.dumps(about))


@pytest.mark.parametrize("kind", SOURCES)
def test_pickles_are_refused_unless_they_are_allowed(tmp_path, kind):
    there, made = tmp_path / "data", tmp_path / "made"
    write_pickles(there, kind, map(pickle.dumps, [{1, 2}, "text", Hostile(made)]))
    refused = r'index\.json: .* pickled objects.*allow=\("pickle",\), with --allow pickle'
    with pytest.raises(SecurityError, match=refused):
        source_of(there)
    by_itself = {"splits": {"train": {"path": str(there), "read": {"allow": ["pickle"]}}}}
    with pytest.raises(ConfigError, match="'allow' is not an option"):
        get_train_dataset(by_itself, worker_config=config(), batch_size=None)
    listing = run("info", there)
    assert listing.exit_code == 2
    assert re.search(refused, listing.output)
    ok("info", there, "--allow", "pickle")
    assert run("lint", there).exit_code != 0
    packing = ("pack", there, tmp_path / "packed")
    assert run(*packing).exit_code == 2
    assert not made.exists()
    data = get_train_dataset(there, worker_config=config(), batch_size=None, allow=("pickle",))
    found = {sample["__key__"]: sample["0"] for sample in islice(data, 3)}
    assert [found[f"{number:09}"] for number in range(3)] == [{1, 2}, "text", None]
    assert made.exists()
    packed = run(*packing, "--allow", "pickle")
    assert "'000000000': part 'json': a dict cannot be written as json" in packed.output
    source = source_of(there, options=RowOptions(allow=("pickle",)))
    assert read_samples(pickle.loads(pickle.dumps(source)), np.arange(2))[1]["0"] == "text"


@cooker(need_primary=True)
def look_up(sample, primary, others):
    name = f"{sample['__key__']}.0"
    return {"own": primary.get(name), "other": others.get(name)}


class LooksUp(DefaultTaskEncoder):
    """Reads a pickled column of another dataset, and of its own, by name."""

    decoder = None
    cookers = (Cooker(look_up),)


@edataclass
class Joined(Sample):
    values: tuple[str, str]

    @classmethod
    def from_joined(cls, one, other):
        values = (one["0"], other["0"])
        return cls(__key__=one["__key__"], __restore_key__=(), values=values)


@pytest.mark.parametrize("kind", SOURCES)
def test_allowed_pickles_are_read_by_name_and_in_joins_too(tmp_path, kind):
    for name, text in (("one", "a"), ("other", "b")):
        write_pickles(tmp_path / name, kind, [pickle.dumps(text)] * 3)
    paths = [str(tmp_path / name) for name in ("one", "other")]
    options = {"worker_config": config(), "batch_size": None}
    aux = {"splits": {"train": {"path": paths[0], "aux": {"others": paths[1]}}}}
    with pytest.raises(SecurityError, match="pickled objects"):
        get_train_dataset(aux, task_encoder=LooksUp(), **options)
    found = get_train_dataset(aux, task_encoder=LooksUp(), allow=("pickle",), **options)
    sample = next(iter(pickle.loads(pickle.dumps(found))))
    assert (sample["own"], sample["other"]) == (b"a", b"b")
    joiner = {"__module__": Joined.__module__, "__class__": Joined.__name__}
    joined = {"join": [{"path": path} for path in paths], "joiner": joiner}
    found = get_train_dataset({"splits": {"train": joined}}, allow=("pickle",), **options)
    assert next(iter(found)).values == ("a", "b")


@pytest.mark.parametrize("kind", SOURCES)
def test_pickles_that_cannot_be_loaded_are_reported(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("ENERGON_ALLOW", "pickle")
    write_pickles(tmp_path / "data", kind, [b"cno_such_module\nx\n."])
    with pytest.raises(
        DecodeError,
        match=r"shard\.00000\.mds, record 0: .*cannot be unpickled: ModuleNotFoundError",
    ):
        every(source_of(tmp_path / "data"))


def test_graphs_are_pickles_that_only_litdata_can_read(monkeypatch):
    serializers = types.ModuleType("litdata.streaming.serializers")
    serializers._SERIALIZERS = {"graph": SimpleNamespace(setup=str, deserialize=bytes.decode)}
    for name in ("litdata", "litdata.streaming"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, serializers.__name__, serializers)
    with pytest.raises(SecurityError, match=r"pickled objects \('graph'\), which could run any"):
        litdata_decoder("graph", "index.json", ())
    assert litdata_decoder("graph", "index.json", ("pickle",))(b"nodes") == "nodes"


@pytest.mark.parametrize("formats", [["int", "str"], []])
def test_formats_that_do_not_match_the_items_are_reported(formats):
    config = {"compression": None, "data_format": formats, "data_spec": '[1, {"type": null}]'}
    problem = f"items have 1 value, but {len(formats)} formats are listed"
    with pytest.raises(FormatError, match=problem):
        LitDataFormat({"chunks": [], "config": config | {"item_loader": "Own"}}, "index.json")


def test_images_are_decoded_and_fields_mapped(folder):
    read = {"sample_type": "CaptioningSample", "field_map": {"image": "image", "caption": "text"}}
    blend = {"splits": {"train": {"path": str(folder), "read": read}}}
    batch = next(iter(get_train_dataset(blend, worker_config=config(), batch_size=4)))
    assert (batch.image.shape, len(batch.caption)) == ((4, 3, 4, 6), 4)
    pixels = {"splits": {"train": {"path": str(folder), "read": {"columns": ["pixels", "id"]}}}}
    sample = next(iter(get_train_dataset(pixels, worker_config=config(), batch_size=None)))
    assert set(sample) >= {"pixels", "id"}
    assert "image" not in sample
    assert (sample["pixels"][0] * 255).round().tolist() == [[sample["id"]] * 3] * 2


@pytest.mark.parametrize("encoding", ["list[jpeg]", "list[png]", "list[pil]", "jpeg_array"])
def test_lists_of_images_are_decoded(tmp_path, encoding):
    contents = []
    for number in range(2):
        image, buffer = Image.new("RGB", (6, 4), (99, 0, number)), io.BytesIO()
        image.save(buffer, "JPEG" if "jpeg" in encoding else "PNG")
        pixels = struct.pack("<3I", 6, 4, 3) + b"RGB" + image.tobytes()
        contents.append(pixels if "pil" in encoding else buffer.getvalue())
    sizes = struct.pack("<3I", 2, *map(len, contents))
    field = (b"" if encoding == "jpeg_array" else bytes(4)) + sizes + b"".join(contents)
    write_mds(tmp_path, [[field]], column="images", encoding=encoding)
    sample = next(iter(get_train_dataset(tmp_path, worker_config=config(), batch_size=None)))
    assert [tuple(image.shape) for image in sample["images"]] == [(3, 4, 6)] * 2


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_splits_are_folders_whose_names_tell_them(tmp_path, kind, caplog):
    names = {"train2017": "train", "x-validation": "val", "Testing": "test", "extra": None}
    for name in names:
        shutil.copytree(DATA / kind, tmp_path / "d" / name)
    assert dataset_kind(tmp_path / "d") == kind
    for name, split in names.items():
        if split:
            found = SOURCES[kind](tmp_path / "d", SampleSelection(split))
            assert found.folder == join_address(str(tmp_path / "d"), name)
    with caplog.at_level("INFO", "energon"):
        assert len(get_train_dataset(tmp_path / "d", worker_config=config(), batch_size=1)) == 7
    (message,) = [each for each in caplog.messages if "splits by the names" in each]
    assert "x-validation/index.json" in message
    assert "left out 1 file of no split like extra/index.json" in message
    about = json.loads(run("info", tmp_path / "d", "--json").output)
    assert {name: each["samples"] for name, each in about["splits"].items()} == {
        split: 7 for split in names.values() if split
    }
    with pytest.raises(ConfigError, match="no split 'dpo', only train, val, test, according to"):
        SOURCES[kind](tmp_path / "d", SampleSelection("dpo"))


def test_a_ratio_divides_a_sole_folder_and_two_folders_of_a_split_are_refused(tmp_path):
    shutil.copytree(DATA / "mds", tmp_path / "train")
    options = RowOptions(split="5,2")
    assert len(MdsRecords(tmp_path, SampleSelection("val"), options=options)) == 2
    shutil.copytree(DATA / "mds", tmp_path / "training_2")
    with pytest.raises(ConfigError, match="index.json are both of the split 'train'"):
        MdsRecords(tmp_path)


@pytest.mark.slow
def test_remote_folders_tell_splits_as_far_as_they_can_be_listed(tmp_path, s3):
    for folder in ("train", "valid", "x_test"):
        for path in (DATA / "mds").iterdir():
            write_bytes(join_address(s3.address, f"{folder}/{path.name}"), path.read_bytes())
            write_bytes(tmp_path / "d" / folder / path.name, path.read_bytes())
    with web_server(tmp_path) as server:
        for address, names in (
            (s3.address, ["train", "val", "test"]),
            (f"http://127.0.0.1:{server.server_port}/d", ["train", "val"]),
        ):
            assert dataset_kind(address) == "mds"
            assert kind_of(address).split_names(address) == names
            assert [s["id"] for s in every(MdsRecords(address, SampleSelection("val")))] == [
                *range(7)
            ]


def test_the_thread_that_reads_lists_the_chunks_of_a_store(tmp_path, monkeypatch):
    threads = []

    def listing(address):
        threads.append(threading.current_thread())
        return list_files(address)

    monkeypatch.setattr("energon_mds.source.list_files", listing)
    address = f"memory://{tmp_path.name}"
    for path in write_mds(tmp_path / "data", [[b"a"], [b"b"], [b"c"]]).iterdir():
        write_bytes(join_address(address, path.name), path.read_bytes())
    assert [sample["text"] for sample in every(MdsRecords(address))] == ["a", "b", "c"]
    assert threads == [threading.current_thread()]


def test_a_ratio_deals_records_where_there_are_no_splits():
    options = RowOptions(split="5,2")
    found = MdsRecords(DATA / "mds", SampleSelection("val"), options=options)
    assert [sample["id"] for sample in every(found)] == [5, 6]
    with pytest.raises(ConfigError, match="no split 'val', only train"):
        MdsRecords(DATA / "mds", SampleSelection("val"))
    keys = MdsRecords(DATA / "mds").keys(np.arange(7))
    with pytest.raises(EmptyDatasetError, match="has 7 samples, but subset and exclude leave none"):
        MdsRecords(DATA / "mds", SampleSelection(exclude=keys))


def test_damaged_chunks_are_reported(folder):
    path = sorted(path for path in folder.iterdir() if path.suffix != ".json")[0]
    whole = path.read_bytes()
    for content in (b"", whole[:40], whole[:-60], b"PK" + whole[2:], bytes(len(whole))):
        path.write_bytes(content)
        with pytest.raises((FormatError, TruncatedError, DecodeError), match=path.name):
            every(source_of(folder))
    path.unlink()
    with pytest.raises(DatasetNotFoundError, match=path.name):
        every(source_of(folder))


@pytest.mark.parametrize("kind", ["sha1", "md5", "sha256"])
def test_compressed_shards_are_compared_with_the_hashes_in_the_index(tmp_path, kind):
    folder = shutil.copytree(DATA / "mds_zstd", tmp_path / "set")
    index = json.loads((folder / "index.json").read_text())
    for about in index["shards"]:
        content = (folder / about["zip_data"]["basename"]).read_bytes()
        known = hashlib.new(kind, content).hexdigest()
        about["zip_data"]["hashes"] = {kind: known.upper(), "xxh64": "of another package"}
    (folder / "index.json").write_text(json.dumps(index))
    count = len(read_samples(MdsRecords(folder), np.arange(3)))
    assert count == 3
    index["shards"][0]["zip_data"]["hashes"][kind] = "0" * len(known)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=rf"shard.00000.mds.zstd: its {kind} is .* copy it again"):
        read_samples(MdsRecords(folder), np.arange(3))


def test_an_index_that_makes_no_sense_is_reported(folder):
    kind = dataset_kind(folder)
    part = {"mds": "shards", "litdata": "chunks"}[kind]
    count = {"mds": "samples", "litdata": "chunk_size"}[kind]
    whole = (folder / "index.json").read_text()

    def fails(change, problem, error=FormatError):
        (folder / "index.json").write_text(whole)
        edit(folder, change)
        with pytest.raises(error, match=problem):
            every(source_of(folder))

    def one_more(index):
        index[part][0][count] += 1

    def elsewhere(index, name):
        about = index[part][0]
        if kind == "mds":
            about = about["zip_data" if about["compression"] else "raw_data"]
        about["filename" if kind == "litdata" else "basename"] = name

    fails(one_more, "records, but index.json says .*; one of them was replaced|do not fit")

    for name in ("../x.mds", "/x.mds", "s3://bucket/x.mds", "a/../../x", "", "a\0b", 7):
        fails(
            lambda index, name=name: elsewhere(index, name),
            f"not an index of .*expected the name of a file.*, got {re.escape(repr(name))}",
        )
    for number in (-1, 2.5, "7", None, 1e400, 10**30):
        fails(
            lambda index, number=number: index[part][0].__setitem__(count, number),
            f"{number!r}|has .* bytes, but index.json says",
        )
    fails(lambda index: index[part].append({}), "not an index of")
    fails(lambda index: index[part].clear(), "has 0 samples", EmptyDatasetError)
    (folder / "index.json").write_text("{")
    with pytest.raises(DatasetNotFoundError):
        dataset_kind(folder)


def test_columns_that_make_no_sense_are_reported():
    index = json.loads((DATA / "mds/index.json").read_text())
    for key, values, problem in (
        ("column_names", ["id", None], "the numbers of column names"),
        ("column_names", None, "TypeError"),
        ("column_names", [None], "columns are called"),
        ("column_names", ["id", "id"], "have the same name"),
        ("column_encodings", [5], "encoded as"),
        ("column_sizes", ["8"], "expected a number of samples or bytes, got '8'"),
        ("column_sizes", [-8], "got -8"),
    ):
        about = index["shards"][0]
        known = [key for key in about if key.startswith("column_")]
        size = len(values or "x")
        changed = about | {each: about[each][:size] for each in known} | {key: values}
        if problem.startswith("the numbers"):
            changed["column_names"] = ["id"] * 9
        with pytest.raises(FormatError, match=f"not an index of MDS shards: .*{problem}"):
            MdsFormat({"shards": [changed]}, "index.json")
    for encoding in ("ndarray:int64:1,", "ndarray:object", "ndarray:int64:-1", "ndarray:x:1"):
        changed = about | {"column_encodings": [encoding, *about["column_encodings"][1:]]}
        with pytest.raises(ConfigError, match=f"encoded as '{encoding}', which is not known"):
            MdsFormat({"shards": [changed]}, "index.json")


def test_a_shard_of_another_size_is_reported(tmp_path):
    shutil.copytree(DATA / "mds", tmp_path / "data")
    shard = tmp_path / "data/shard.00000.mds"
    shard.write_bytes(shard.read_bytes() + b"more")
    with pytest.raises(FormatError, match=r"shard.00000.mds: has \d+ bytes, but index.json says"):
        every(source_of(tmp_path / "data"))


def compressed(folder, name, pack):
    """The shards of a dataset, compressed by other means."""

    def change(index):
        for about in index["shards"]:
            file = folder / about["raw_data"]["basename"]
            content = pack(file.read_bytes())
            file.with_name(f"{file.name}.{name}").write_bytes(content)
            file.unlink()
            zipped = {"basename": f"{file.name}.{name}", "bytes": len(content), "hashes": {}}
            about |= {"compression": f"{name}:6", "zip_data": zipped}

    shutil.copytree(DATA / "mds", folder)
    edit(folder, change)
    return folder


@pytest.mark.parametrize(("name", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress)])
def test_shards_may_be_compressed_as_python_can(tmp_path, name, pack):
    folder = compressed(tmp_path / "data", name, pack)
    expected = every(source_of(DATA / "mds"))
    assert [sample["text"] for sample in every(source_of(folder))] == [
        sample["text"] for sample in expected
    ]
    shard = min(folder.glob(f"*.{name}"))
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(FormatError, match=shard.name):
        every(source_of(folder))


@pytest.mark.parametrize(("name", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress)])
def test_a_shard_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, monkeypatch, name, pack):
    folder = compressed(tmp_path / "data", name, pack)
    shard = min(folder.glob(f"*.{name}"))
    monkeypatch.setenv("ENERGON_LIMIT_UNPACKED_BYTES", "100")
    with pytest.raises(FormatError, match=f"{shard.name}: .*ENERGON_LIMIT_UNPACKED_BYTES"):
        every(source_of(folder))


@pytest.mark.parametrize("level", ["chunk", "batch"])
def test_litdata_unpacks_as_far_as_the_limit(monkeypatch, level):
    zstandard = pytest.importorskip("zstandard")
    content = bytes(3 << 20)
    packed = zstandard.compress(content)
    data = packed
    if level == "batch":
        head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, 1, 0, 1)
        edges = struct.pack("<2I", 0, len(content))
        frame_at = len(head) + len(edges) + 24
        data = head + edges + struct.pack("<IIQII", 0, 1, frame_at, len(packed), len(content))
        data += packed
    monkeypatch.setenv("ENERGON_LIMIT_UNPACKED_BYTES", str(1 << 20))
    with pytest.raises(FormatError, match=r"chunk-0\.bin: .*ENERGON_LIMIT_UNPACKED_BYTES"):
        list(litdata_items(data, "chunk-0.bin", compression="zstd", level=level))


def test_tables_of_litdata_unpack_as_far_as_the_limit(monkeypatch):
    pa = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    table = pa.table({"text": ["x" * 1000] * 3000})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(out, table.schema, options=options) as writer:
        writer.write_table(table)
    data = struct.pack("<I", 0) + out.getvalue() + struct.pack("<I", len(out.getvalue()))
    data += b"LDARW01\0"
    assert len(list(table_rows(data, "chunk-0.bin"))) == 3000
    monkeypatch.setenv("ENERGON_LIMIT_DECODED_BYTES", str(1 << 20))
    with pytest.raises(FormatError, match=r"chunk-0\.bin: .*ENERGON_LIMIT_DECODED_BYTES"):
        list(table_rows(data, "chunk-0.bin"))


def test_a_compression_that_needs_another_library_is_named(tmp_path):
    folder = compressed(tmp_path / "data", "snappy", bytes)
    with pytest.raises(FormatError, match="compressed with 'snappy:6'; expected zstd, gz or bz2"):
        every(source_of(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "good", "bad"),
    [
        ("json", b"{}", b"{"),
        ("str", b"text", b"\xff"),
        ("str_decimal", b"1.5", b"\xff"),
        ("jpeg", jpeg(0), b"no image"),
        ("str_int", b"7", b"seven"),
        ("pil", struct.pack("<3I", 1, 1, 1) + b"L" + b"\0", struct.pack("<3I", 9, 9, 1) + b"L"),
        ("pil", struct.pack("<3I", 1, 1, 1) + b"L" + b"\0", struct.pack("<3I", 1, 1, 3) + b"XYZ"),
        ("ndarray", b"\x08\x04\x01\0", b"\xff"),
        ("jpeg_array", struct.pack("<I", 0), b"\xff\xff\xff\xff"),
    ],
)
def test_a_value_that_cannot_be_read_is_one_failed_sample(tmp_path, caplog, encoding, good, bad):
    folder = write_mds(tmp_path / "data", [[good, bad, good]], column="x", encoding=encoding)
    dataset = get_train_dataset(folder, worker_config=config(), batch_size=1, repeat=False)
    keys = sorted(batch["__key__"][0] for batch in dataset)
    assert keys == ["000000000", "000000002"]
    assert "shard.00000.mds, record 1: has an invalid record: " in caplog.text
    result = run("lint", folder, "--num-workers", 1)
    assert "shard.00000.mds, record 1: " in result.output
    assert "3 samples: 1 problem" in result.output
    assert "lack parts" not in result.output


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "I;16", "F", "LAB"]
)
def test_images_of_every_mode_are_kept_and_decoded(tmp_path, mode):
    from PIL import Image

    values = np.arange(96, dtype={"I": "<i4", "F": "<f4"}.get(mode, "u1")).tobytes()
    size = {"1": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "I;16": 2, "LAB": 3}.get(mode, 1)
    size = {"I": 4, "F": 4}.get(mode, size)
    image = Image.frombytes(mode, (8, 1 if mode == "1" else 2), values[: 16 * size])
    header = struct.pack("<3I", *image.size, len(mode)) + mode.encode()
    folder = write_mds(tmp_path / "data", [[header + image.tobytes()]], column="x", encoding="pil")
    [sample] = every(MdsRecords(folder))
    kept = Image.open(io.BytesIO(sample["x"]))
    assert kept.size == image.size
    assert kept.convert("RGB").tobytes() == image.convert("RGB").tobytes() or mode in (
        "I;16",
        "LAB",
    )
    if mode != "P":  # without a palette, a file of these has one of grays
        assert (np.asarray(kept) == np.asarray(image)).all()
    [batch] = get_train_dataset(folder, worker_config=config(), batch_size=1, repeat=False)
    assert batch["x"].shape == (1, 3, *reversed(image.size))


def test_a_compression_that_cannot_be_read_is_reported_by_info(tmp_path):
    shutil.copytree(DATA / "mds_zstd", tmp_path / "data")
    edit(tmp_path / "data", lambda index: index["shards"][0].update(compression="br:11"))
    result = run("info", tmp_path / "data")
    assert result.exit_code != 0
    assert "is compressed with 'br:11'; expected zstd, gz or bz2" in result.output
