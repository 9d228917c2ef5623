"""What is packed from each kind of source; those of other libraries were written by them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from energon.errors import ConfigError, DatasetNotFoundError, DuplicateSampleKeyError, FormatError
from energon.formats.meta.info import load_info, load_split
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.metadataset.kind import explain_missing
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.importers import files
from energon.prepare.importers.detect import find_source, open_source
from energon.prepare.importers.row import RowRules
from energon.prepare.verify.dataset import verify_dataset
from energon.prepare.writers.pack import PackOptions, pack_dataset
from tests.datasets import jpeg, write_shard
from tests.prepare.test_pack_recognition import samples_of


def pack(address, target, *, rules=None, maxcount=4, prefix_keys=False, **settings):
    return pack_dataset(
        opened(address, rules=rules, prefix_keys=prefix_keys),
        target,
        PackOptions(maxcount=maxcount, **settings),
        identity={"source": str(address)},
        indexing=Indexing(Engine(num_workers=1)),
    )


def opened(*addresses, kind=None, rules=None, **settings):
    found = find_source([str(address) for address in addresses], kind=kind)
    return open_source(found, rules or RowRules(), **settings)


def kind_of(address):
    return find_source([str(address)]).kind


def test_files_with_equal_names_are_a_sample(tmp_path):
    files = {
        "cats/1.jpg": b"1",
        "cats/1.txt": b"one",
        "cats/1.seg.png": b"s",
        "cats/2.jpg": b"2",
        "b.c/3.jpg": b"3",
        "README": b"",
        ".hidden.txt": b"",
    }
    for name, content in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    source = opened(tmp_path / "in")
    assert [reason.partition(":")[0] for reason in source.skipped()] == ["README"]
    info = pack(tmp_path / "in", tmp_path / "out", maxcount=2)
    assert info.shard_counts == {"shards/00000.tar": 2, "shards/00001.tar": 1}
    assert samples_of(tmp_path / "out") == {
        "b.c/3": {"jpg": b"3"},
        "cats/1": {"jpg": b"1", "seg.png": b"s", "txt": b"one"},
        "cats/2": {"jpg": b"2"},
    }
    parts = PartTable.open(part_table_path(tmp_path / "out/shards/00000.tar"))
    assert parts.part_crc32 is not None


def write_table(folder, suffix, rows):
    path = folder / f"table{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    elif suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        separator = "\t" if suffix == ".tsv" else ","
        lines = [separator.join(rows[0])]
        lines += [separator.join(f'"{value}"' for value in row.values()) for row in rows]
        path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_tables_become_samples_with_their_files(tmp_path, suffix):
    (tmp_path / "images").mkdir()
    for n in range(6):
        (tmp_path / f"images/{n}.jpg").write_bytes(jpeg(n))
    rows = [{"image": f"images/{n}.jpg", "caption": f"c {n}, ä", "size": n} for n in range(6)]
    path = write_table(tmp_path, suffix, rows)
    rules = RowRules(file_columns=("image",), parts={"caption": "txt"}, root=tmp_path)
    pack(
        path,
        tmp_path / "out",
        rules=rules,
        sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"},
        split_ratio={"train": 2, "val": 1},
    )
    found = samples_of(tmp_path / "out") | samples_of(tmp_path / "out", "val")
    assert sorted(found) == [f"{n:09}" for n in range(6)]
    third = found["000000003"]
    assert third["jpg"] == jpeg(3)
    assert third["txt"] == "c 3, ä".encode()
    assert json.loads(third["json"]) == {"size": "3" if suffix in (".csv", ".tsv") else 3}


def test_keys_may_come_from_a_column_and_columns_be_left_out(tmp_path):
    path = write_table(tmp_path, ".jsonl", [{"id": f"k{n}", "a": n, "b": None} for n in range(3)])
    pack(path, tmp_path / "out", rules=RowRules(key_column="id", leave_out=("b",)))
    found = {key: json.loads(parts["json"]) for key, parts in samples_of(tmp_path / "out").items()}
    assert found == {f"k{n}": {"a": n} for n in range(3)}


def test_bytes_in_a_table_are_called_by_what_they_hold(tmp_path):
    png = io.BytesIO()
    Image.new("L", (2, 2)).save(png, "PNG")
    rows = [{"image": {"bytes": jpeg(1), "path": None}, "mask": png.getvalue(), "raw": b"?"}]
    pack(write_table(tmp_path, ".parquet", rows), tmp_path / "out")
    (found,) = samples_of(tmp_path / "out").values()
    assert found == {"image.jpg": jpeg(1), "mask.png": png.getvalue(), "raw.bin": b"?"}
    found = RowRules().sample({"jpg": jpeg(1), "depth": png.getvalue()}, 0, "table")
    assert found == {"__key__": "000000000", "jpg": jpeg(1), "depth.png": png.getvalue()}


def test_lists_of_images_become_numbered_parts():
    image = {"bytes": jpeg(0), "path": None}
    row = {"views": [image, None, jpeg(1)], "none": [], "tags": ["a", "b"]}
    sample = RowRules().sample(row, 0, "t")
    parts = {"views.0.jpg": jpeg(0), "views.2.jpg": jpeg(1)}
    assert sample == {"__key__": "000000000", **parts, "json": {"none": [], "tags": ["a", "b"]}}


@pytest.mark.parametrize(
    ("rows", "rules", "error", "message"),
    [
        ([{"f": "no.jpg"}], {"file_columns": ("f",)}, DatasetNotFoundError, r"row 1: .*no\.jpg"),
        ([{"f": "../x.jpg"}], {"file_columns": ("f",)}, ConfigError, "is not below"),
        ([{"f": "/etc/passwd"}], {"file_columns": ("f",)}, ConfigError, "is not below"),
        (
            [{"a": 1}],
            {"file_columns": ("f",)},
            ConfigError,
            "none of 1 rows has a column 'f', only a",
        ),
        ([{"a": 1}], {"key_column": "id"}, ConfigError, "no column 'id'"),
        ([{"a": None, "b": 1}], {"key_column": "a"}, ConfigError, "has no key"),
        ([{"a": "x", "b": "y"}], {"parts": {"a": "txt", "b": "txt"}}, ConfigError, "two columns"),
        ([{"a": "x", "b": "y"}], {"parts": {"a": "json"}}, ConfigError, "make a part 'json'"),
        ([{"id": "a.b", "x": 1}], {"key_column": "id"}, ConfigError, "replace dots in keys"),
        ([{"a": 1}, {"a": None}], {}, ConfigError, r"jsonl, row 2: has no value that is not null"),
        ([{"id": "x", "a": None}], {"key_column": "id"}, ConfigError, "row 1: has no value"),
    ],
)
def test_rows_that_make_no_sample_are_refused(tmp_path, rows, rules, error, message):
    path = write_table(tmp_path, ".jsonl", rows)
    with pytest.raises(error, match=message):
        pack(path, tmp_path / "out", rules=RowRules(**rules, root=tmp_path))
    assert not list((tmp_path / "out").rglob("*.tar"))


def test_rows_without_their_file_are_left_out_where_that_is_data_file(tmp_path):
    (tmp_path / "b.jpg").write_bytes(b"b")
    path = write_table(tmp_path, ".jsonl", [{"f": "a.jpg"}, {"f": "b.jpg"}, {"f": None}])
    rules = RowRules(file_columns=("f",), root=tmp_path, skip_missing=True)
    source = opened(path, rules=rules)
    assert [sample["__key__"] for sample in source.samples("", 0)] == ["000000001"]
    reason = "a file is missing, or all values are null"
    assert source.skipped() == [f"{path}, row {number}: {reason}" for number in (1, 3)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "x,y\n1,2\n3", "found 1 field, expected 2, as in the first"),
        ("a.csv", "x,y\n1,2,3,4", "found 4 fields, expected 2, as in the first"),
        ("a.csv", 'x\n"1', "unexpected end"),
        ("a.jsonl", '{"a": 1}\n{', "expected JSON lines"),
        ("a.jsonl", "[1]", "expected JSON objects"),
        ("a.json", '{"images": []}', "array with an object for each sample.*a .jsonl file"),
        ("a.json", "", "begins with ''"),
        ("a.json", '[{"a": 1}, 2]', "element 1: expected JSON objects"),
        ("a.json", '[{"a": 1}, {"b"', "element 1: "),
        ("a.json", '[{"a": 1}', "element 1: "),
        ("a.parquet", "PAR1", "a.parquet"),
    ],
)
def test_damaged_tables_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=message):
        list(opened(tmp_path / name).samples(""))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_objects_may_lack_what_others_have(tmp_path, suffix):
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    path = write_table(tmp_path, suffix, [{"text": "a"}, {"image": "0.jpg", "text": "b"}])
    pack(path, tmp_path / "out", rules=RowRules(file_columns=("image",), root=tmp_path))
    found = samples_of(tmp_path / "out")
    assert [sorted(sample) for sample in found.values()] == [["json"], ["jpg", "json"]]


def test_a_column_that_no_object_has_is_noticed_early(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SURE_ROWS", 2)
    path = write_table(tmp_path, ".jsonl", [{"image": 1}, {"image": 2}, {"image": 3}])
    rows = opened(path, rules=RowRules(file_columns=("imag",))).samples("")
    next(rows)
    with pytest.raises(ConfigError, match="none of 2 rows has a column 'imag', only image"):
        next(rows)


@pytest.mark.slow
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9))),
    indent=st.sampled_from([None, 2]),
)
def test_arrays_are_read_a_part_at_a_time(tmp_path_factory, rows, indent):
    path = tmp_path_factory.mktemp("arrays") / "a.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=False), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "ARRAY_CHARACTERS", 5)
        assert list(files.read_rows(files.Table.at(path, RowRules()))) == rows


@pytest.mark.parametrize("suffix", [".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"])
def test_archives_become_shards_of_another_size(tmp_path, suffix):
    folder = tmp_path / "in"
    expected = {}
    for shard in range(2):
        samples = [(f"{shard}_{n}", {"txt": b"x" * n, "jpg": jpeg(n)}) for n in range(5)]
        expected |= dict(samples)
        write_shard(folder / f"{shard}.tar", samples)
        compress(folder / f"{shard}.tar", suffix)
    if suffix != ".tar":
        with pytest.raises(ConfigError, match=r"2 shards are compressed.*\n\n *energon pack "):
            prepare_dataset(folder, split_parts=["train:.*"])
    info = pack(folder, tmp_path / "out", maxcount=3)
    assert list(info.shard_counts.values()) == [3, 3, 3, 1]
    assert samples_of(tmp_path / "out") == expected


def compress(path, suffix):
    data = path.read_bytes()
    target = path.with_name(path.stem + suffix)
    match suffix:
        case ".tgz" | ".tar.gz":
            packed = gzip.compress(data)
        case ".tar.bz2":
            packed = bz2.compress(data)
        case ".tar.xz":
            packed = lzma.compress(data)
        case ".tar.zst":
            import zstandard

            packed = zstandard.ZstdCompressor().compress(data)
        case _:
            packed = data
    path.unlink()
    target.write_bytes(packed)


def test_keys_that_shards_share_are_told_apart_by_their_shard(tmp_path):
    for name in ("a", "sub/b"):
        write_shard(tmp_path / "in" / f"{name}.tar", [("0", {"txt": name.encode()})])
    pack(tmp_path / "in", tmp_path / "out", prefix_keys=True)
    assert samples_of(tmp_path / "out") == {"a/0": {"txt": b"a"}, "sub/b/0": {"txt": b"sub/b"}}


@pytest.mark.parametrize("suffix", [".tar", ".tgz", ".tar.zst"])
def test_archives_that_are_cut_off_are_refused(tmp_path, suffix):
    path = tmp_path / "in/a.tar"
    write_shard(path, [(f"{n}", {"bin": np.random.default_rng(n).bytes(9000)}) for n in range(5)])
    compress(path, suffix)
    path = next((tmp_path / "in").iterdir())
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(FormatError, match="restore"):
        pack(tmp_path / "in", tmp_path / "out")


def test_an_archive_is_recognized_by_its_content_and_files_of_two_samples_are_not_lost(tmp_path):
    path = tmp_path / "in/a.tar"
    write_shard(path, [("0", {"txt": b"first"})])
    path.write_bytes(gzip.compress(path.read_bytes()))
    pack(tmp_path / "in", tmp_path / "out")
    assert samples_of(tmp_path / "out") == {"0": {"txt": b"first"}}
    with tarfile.open(path, "w") as tar:
        for content in (b"first", b"second"):
            member = tarfile.TarInfo("0.txt")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(DuplicateSampleKeyError, match="the field 'txt' twice"):
        pack(tmp_path / "in", tmp_path / "other")


def test_datasets_of_hugging_face_keep_their_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["a", "b"]),
        }
    )

    def rows(split, count):
        return datasets.Dataset.from_list(
            [
                {"image": {"bytes": jpeg(n), "path": None}, "text": f"{split} {n}", "label": n % 2}
                for n in range(count)
            ],
            features=features,
        )

    saved = datasets.DatasetDict({"train": rows("train", 5), "test": rows("test", 3)})
    saved.save_to_disk(str(tmp_path / "in"))
    assert kind_of(tmp_path / "in") == "huggingface"
    pack(tmp_path / "in", tmp_path / "out")
    assert set(load_split(tmp_path / "out").split_parts) == {"train", "test"}
    found = samples_of(tmp_path / "out", "test")
    assert list(found) == [f"test/{n:09}" for n in range(3)]
    assert found["test/000000001"]["jpg"] == jpeg(1)
    assert json.loads(found["test/000000001"]["json"]) == {
        "text": "test 1",
        "label": 1,
        "label_name": "b",
    }


def test_lists_of_images_of_hugging_face_keep_their_encoding_and_json_is_parsed(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = {"views": datasets.Sequence(datasets.Image())}
    row = {"views": [{"bytes": jpeg(n), "path": None} for n in range(2)]}
    if hasattr(datasets, "Json"):
        features["about"] = datasets.Json()
        row["about"] = {"tags": ["a", 1]}
    saved = datasets.Dataset.from_list([row], features=datasets.Features(features))
    saved.save_to_disk(str(tmp_path / "in"))
    pack(tmp_path / "in", tmp_path / "out")
    (sample,) = samples_of(tmp_path / "out", "train").values()
    assert (sample["views.0.jpg"], sample["views.1.jpg"]) == (jpeg(0), jpeg(1))
    if "about" in row:
        assert json.loads(sample["json"]) == {"about": row["about"]}


@pytest.mark.parametrize("root", [None, "a link", "above"])
def test_absolute_paths_of_a_metadata_table_are_those_of_its_files(tmp_path, root):
    folder = tmp_path / "in" / "train"
    folder.mkdir(parents=True)
    for n in range(2):
        (folder / f"{n}.jpg").write_bytes(jpeg(n))
    rows = [{"file_name": str(folder / "0.jpg"), "text": "zero"}]
    write_table(folder, ".jsonl", rows).rename(folder / "metadata.jsonl")
    address = tmp_path / "in"
    if root == "a link":
        address = tmp_path / "link"
        address.symlink_to(tmp_path / "in")
    rules = RowRules(root=tmp_path / "in" if root == "above" else None)
    source = opened(address, rules=rules)
    assert [sample["__key__"] for sample in source.samples("", 0)] == ["train/0"]
    assert source.skipped() == ["train/1.jpg: no row of a metadata table"]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch):
    rows = [{"id": f"k{n:02}", "n": n} for n in range(10)]
    path = write_table(tmp_path, ".jsonl", rows)
    rules = RowRules(key_column="id")
    pack(path, tmp_path / "whole", rules=rules, maxcount=3)
    broken = [*rows[:8], {"id": "a.b", "n": 0}]
    write_table(tmp_path, ".jsonl", broken)
    with pytest.raises(ConfigError, match="replace dots"):
        pack(path, tmp_path / "cut", rules=rules, maxcount=3)
    assert len(list((tmp_path / "cut").rglob("*.tar"))) == 2
    write_table(tmp_path, ".jsonl", rows)
    pack(path, tmp_path / "cut", rules=rules, maxcount=3)
    for shard in load_info(tmp_path / "whole").shard_counts:
        assert (tmp_path / "cut" / shard).read_bytes() == (tmp_path / "whole" / shard).read_bytes()


def test_the_shards_of_an_interrupted_run_are_not_taken_for_all(tmp_path):
    rows = [{"id": f"k{n}", "n": n} for n in range(6)]
    path = write_table(tmp_path, ".jsonl", [*rows, {"id": "a.b", "n": 0}])
    out, rules = tmp_path / "out", RowRules(key_column="id")
    with pytest.raises(ConfigError, match="replace dots"):
        pack(path, out, rules=rules, maxcount=3)
    only = "out has only the shards that an interrupted `energon pack` has written; run the same"
    assert only in explain_missing(str(out))
    with pytest.raises(ConfigError, match=f"{only}.*delete .nv-meta/pack.json"):
        prepare_dataset(out, split_ratio={"train": 1})
    (out / ".nv-meta/pack.json").unlink()
    assert prepare_dataset(out, split_ratio={"train": 1}).num_samples == 3


def test_a_shard_whose_index_a_kill_prevented_has_checksums_after_the_rerun(tmp_path):
    path = write_table(tmp_path, ".jsonl", [{"n": n} for n in range(10)])
    pack(path, tmp_path / "out")
    tables = sorted((tmp_path / "out").rglob("*.tar.parts"))
    tables[-1].unlink()
    for file in (tmp_path / "out/.nv-meta").iterdir():
        if file.name != "pack.json":
            file.unlink()
    pack(path, tmp_path / "out")
    assert all(PartTable.open(table).part_crc32 is not None for table in tables)


def test_what_a_kill_leaves_at_the_very_beginning_is_not_taken_for_a_dataset(tmp_path):
    path = write_table(tmp_path, ".jsonl", [{"n": n} for n in range(3)])
    meta = tmp_path / "out/.nv-meta"
    meta.mkdir(parents=True)
    (meta / ".lock").touch()
    (meta / ".pack.json.0123abcd").touch()
    assert pack(path, tmp_path / "out").num_samples == 3
    assert not (meta / ".pack.json.0123abcd").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["--wait"],
        pytest.param(["--wait", "--overwrite"], marks=pytest.mark.slow),
    ],
)
def test_two_runs_at_once_do_not_disturb_each_other(tmp_path, options):
    path = write_table(tmp_path, ".jsonl", [{"n": n} for n in range(3000)])
    program = "import sys\nfrom energon.cli.main import main\nmain(sys.argv[1:])"
    command = ["pack", str(path), str(tmp_path / "out"), "--maxcount", "100", *options]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    errors = [process.communicate()[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        assert "Traceback" not in error
        assert process.returncode == 0 or (not options and "is writing it now" in error), error
    assert 0 in [process.returncode for process in processes]
    assert verify_dataset(tmp_path / "out", engine=Engine(num_workers=1), depth="content").ok
    assert load_info(tmp_path / "out").num_samples == 3000


def test_going_on_with_another_source_is_refused(tmp_path):
    path = write_table(tmp_path, ".jsonl", [{"n": n} for n in range(5)])
    pack(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="was packed from something else"):
        pack(path, tmp_path / "out", maxcount=3)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        pack(path, tmp_path / "other")
    rules = RowRules(key_column="n")
    write_table(tmp_path, ".jsonl", [{"n": n, "m": 1} for n in range(3)])
    with pytest.raises(ConfigError, match="no longer in the source.*--overwrite"):
        pack(path, tmp_path / "out", rules=rules)
    assert pack(path, tmp_path / "out", rules=rules, overwrite=True).num_samples == 3


def test_kinds_are_found_out(tmp_path):
    write_shard(tmp_path / "shards/a.tar", [("a", {"txt": b"x"})])
    (tmp_path / "a.xyz").touch()
    assert kind_of(tmp_path / "shards") == "shards"
    assert kind_of(tmp_path) == "shards"
    assert kind_of("hf://mnist") == "huggingface"
    with pytest.raises(ConfigError, match="expected a folder, a tar archive or a table"):
        kind_of(tmp_path / "a.xyz")
    with pytest.raises(DatasetNotFoundError, match="does not exist"):
        kind_of(tmp_path / "nothing")


def test_folders_without_files_are_refused(tmp_path):
    (tmp_path / "README").touch()
    with pytest.raises(DatasetNotFoundError, match="no file with an extension"):
        opened(tmp_path)
