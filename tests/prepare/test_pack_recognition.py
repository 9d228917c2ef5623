"""What a source is, by its names and contents; nothing becomes samples that are none."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.meta.info import load_split
from energon.io.files import write_bytes
from energon.prepare.importers.selection import select
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from tests.commands import ok, run
from tests.datasets import jpeg, write_shard
from tests.sources.reads import read_samples

META = {"__key__", "__shard__", "__restore_key__", "__subflavors__"}


def write(root, files):
    for name, content in files.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(root)


def parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def samples_of(root, split="train"):
    source = WebdatasetSource(root, SampleSelection(split))
    found = read_samples(source, np.arange(len(source)))
    return {
        each["__key__"]: {part: data for part, data in each.items() if part not in META}
        for each in found
    }


def fields_of(root, split="train"):
    return {key: json.loads(parts["json"]) for key, parts in samples_of(root, split).items()}


def packs(*arguments):
    done = ok("pack", *arguments)
    return done.output


def refuses(*arguments):
    done = run("pack", *arguments)
    assert done.exit_code != 0, done.output
    assert not list(Path(arguments[-1]).rglob("*.tar"))
    return done.output


@pytest.mark.parametrize("how", ["folder", "pattern", "files"])
def test_the_rows_of_all_tables_of_a_folder_are_samples(tmp_path, how):
    for shard in range(2):
        parquet(tmp_path / f"data/part-{shard}.parquet", [{"n": 10 * shard + n} for n in range(3)])
    write(tmp_path / "data", {"README.md": "a card", ".gitattributes": ""})
    source = {
        "folder": [tmp_path / "data"],
        "pattern": [tmp_path / "data/*.parquet"],
        "files": sorted((tmp_path / "data").glob("*.parquet")),
    }[how]
    assert "6 samples in 1 shard" in packs(*source, tmp_path / "out")
    assert fields_of(tmp_path / "out") == {
        f"part-{shard}/{n:09}": {"n": 10 * shard + n} for shard in range(2) for n in range(3)
    }


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".jsonl", bytes),
        (".jsonl.gz", gzip.compress),
        (".ndjson.bz2", bz2.compress),
        (".jsonl.xz", lzma.compress),
        (".csv.gz", gzip.compress),
        (".jsonl.zst", None),
    ],
)
def test_tables_may_be_compressed(tmp_path, suffix, compress):
    compress = compress or pytest.importorskip("zstandard").compress
    text = "n\n0\n1\n" if "csv" in suffix else lines([{"n": 0}, {"n": 1}])
    write(tmp_path / "in", {f"a{suffix}": compress(text.encode())})
    packs(tmp_path / "in", tmp_path / "out")
    assert [int(found["n"]) for found in fields_of(tmp_path / "out").values()] == [0, 1]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst"])
def test_compressed_tables_that_are_damaged_are_named(tmp_path, suffix):
    write(tmp_path, {f"a{suffix}": b"no such data"})
    assert f"a{suffix}: " in refuses(tmp_path / f"a{suffix}", tmp_path / "out")


def test_json_arrays_are_tables_and_json_objects_are_samples(tmp_path):
    write(tmp_path / "arrays", {"a.json": '[{"n": 1}, {"n": 2}]', "b.json": '[{"n": 3}]'})
    packs(tmp_path / "arrays", tmp_path / "out")
    assert list(fields_of(tmp_path / "out")) == ["a/000000000", "a/000000001", "b/000000000"]
    write(tmp_path / "objects", {"a.json": '{"n": 1}', "b.json": '{"n": 2}'})
    packs(tmp_path / "objects", tmp_path / "out2")
    assert fields_of(tmp_path / "out2") == {"a": {"n": 1}, "b": {"n": 2}}


def test_tables_of_several_kinds_have_to_be_chosen_from(tmp_path):
    write(tmp_path / "in", {"a.csv": "n\n1\n", "b.jsonl": '{"n": 1}\n'})
    said = refuses(tmp_path / "in", tmp_path / "out")
    assert "several kinds, .csv, .jsonl" in said
    assert "1 sample" in packs(f"{tmp_path}/in/*.csv", tmp_path / "out")


def test_token_files_of_megatron_are_refused_unless_they_are_wanted_as_files(tmp_path):
    write(tmp_path / "in", {"t.bin": b"tokens", "t.idx": b"MMIDIDX\0\0" + bytes(20)})
    said = refuses(tmp_path / "in", tmp_path / "out")
    assert "t.bin and t.idx are an indexed dataset of Megatron-LM" in said
    assert f"train from the folder as it is, and see `energon info {tmp_path}/in`" in said
    packs(tmp_path / "in", tmp_path / "out", "--as-files")
    assert set(samples_of(tmp_path / "out")["t"]) == {"bin", "idx"}


def test_files_with_other_bytes_may_be_called_as_token_files_are(tmp_path):
    write(tmp_path / "in", {"t.bin": b"x", "t.idx": b"y"})
    packs(tmp_path / "in", tmp_path / "out")
    assert samples_of(tmp_path / "out") == {"t": {"bin": b"x", "idx": b"y"}}


@pytest.mark.parametrize(
    "files",
    [
        {"0.arrow": "ARROW1", "1.arrow": "ARROW1"},
        {"0.zip": "PK", "1.jpg": "x"},
        {"a.py": "x", "b.py": "y", "c.txt": "z"},
        {"a.jpg": "x", "b.jpg": "y", "words.csv": "word,count\na,1\n"},
        {"a.jpg": "x", "b.jpg": "y", "boxes.json": '[{"box": [1, 2]}]'},
    ],
)
def test_files_that_do_not_group_into_samples_are_refused(tmp_path, files):
    write(tmp_path / "in", files)
    said = refuses(tmp_path / "in", tmp_path / "out")
    assert "do not group into samples" in said
    assert "--as-files" in said
    packs(tmp_path / "in", tmp_path / "out", "--as-files")
    assert len(samples_of(tmp_path / "out")) == len(files)


def test_the_refusal_says_how_to_pack_the_table_that_lies_there(tmp_path):
    write(tmp_path / "in", {"a.jpg": "x", "words.csv": "word,count\na,1\n"})
    assert f"energon pack {tmp_path}/in/words.csv" in refuses(tmp_path / "in", tmp_path / "out")


def test_what_is_about_a_folder_is_left_out_and_said(tmp_path):
    files = {"a.jpg": "1", "b.jpg": "2", "README.md": "", "Thumbs.db": "", "notes.odt": "", "x": ""}
    write(tmp_path / "in", files)
    said = packs(tmp_path / "in", tmp_path / "out")
    assert list(samples_of(tmp_path / "out")) == ["a", "b"]
    for name in ("README.md", "Thumbs.db", "notes.odt", "x"):
        assert f"skipped: {name}: not a sample" in said


def test_samples_that_differ_in_their_parts_are_counted(tmp_path):
    write(tmp_path / "in", {"a.JPG": "1", "a.txt": "", "b.jpg": "2", "b.txt": "", "c.jpg": "3"})
    said = packs(tmp_path / "in", tmp_path / "out")
    assert "2 samples with jpg + txt, e.g. a" in said
    assert "1 sample with jpg, e.g. c" in said


def photos(root, *, count=3):
    rows = ["image,caption"]
    for n in range(count):
        write(root, {f"{n}.jpg": jpeg(n)})
        rows.append(f"{n}.jpg,photo {n}")
    return write(root, {"captions.csv": "\n".join(rows)})


@pytest.mark.parametrize("source", ["in", "in/captions.csv"])
def test_columns_that_name_files_become_parts_without_an_option(tmp_path, source):
    photos(tmp_path / "in")
    said = packs(tmp_path / source, tmp_path / "out")
    assert "column 'image' holds paths; packing those files" in said
    assert samples_of(tmp_path / "out")["000000002"] == {
        "jpg": jpeg(2),
        "json": b'{"caption": "photo 2"}',
    }


def test_a_column_that_seems_to_name_files_which_are_not_there_is_said(tmp_path):
    write(tmp_path, {"t.csv": "image,link\na/b.jpg,https://x.org/y.jpg\n"})
    said = packs(tmp_path / "t.csv", tmp_path / "out")
    assert "column 'image' seems to name files ('a/b.jpg')" in said
    assert "link" not in said
    write(tmp_path / "files", {"a/b.jpg": "x"})
    packs(tmp_path / "t.csv", tmp_path / "out2", "--root", tmp_path / "files")
    assert samples_of(tmp_path / "out2")["000000000"]["jpg"] == b"x"


def test_an_image_folder_has_the_splits_keys_and_files_of_its_tables(tmp_path):
    for split in ("train", "test"):
        rows = [{"file_name": f"x/{n}.JPG", "mask_file_name": f"{n}.png", "n": n} for n in range(3)]
        write(tmp_path / f"in/{split}", {"metadata.jsonl": lines(rows), "more.jpg": "?"})
        for n in range(3):
            write(tmp_path / f"in/{split}", {f"x/{n}.JPG": f"{split} {n}", f"{n}.png": "m"})
    said = packs(tmp_path / "in", tmp_path / "out")
    assert "skipped: test/more.jpg: no row of a metadata table" in said
    assert "in: splits by the names of its files and folders: train (1 file like train/" in said
    assert "splits of the source: train, test" in said
    assert list(load_split(tmp_path / "out").split_parts) == ["train", "test"]
    found = samples_of(tmp_path / "out", "test")
    assert list(found) == [f"test/x/{n}" for n in range(3)]
    assert found["test/x/1"] == {"jpg": b"test 1", "mask.png": b"m", "json": b'{"n": 1}'}


def test_image_folders_may_have_tables_of_other_kinds(tmp_path):
    parquet(tmp_path / "in/metadata.parquet", [{"file_name": "a.b.jpg", "text": "x"}])
    write(tmp_path / "in", {"a.b.jpg": "1"})
    packs(tmp_path / "in", tmp_path / "out")
    assert samples_of(tmp_path / "out") == {"a_b": {"jpg": b"1", "json": b'{"text": "x"}'}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("name,text\na.jpg,x\n", "has no column 'file_name'"),
        ("file_name,text\nb.jpg,x\n", "b.jpg: no such file"),
    ],
)
def test_image_folders_whose_table_does_not_fit_are_refused(tmp_path, table, message):
    write(tmp_path / "in", {"metadata.csv": table, "a.jpg": "1"})
    assert message in refuses(tmp_path / "in", tmp_path / "out")


def test_lists_of_files_are_refused(tmp_path):
    rows = [{"file_name": "a.jpg", "frame_file_names": ["b.jpg", "c.jpg"]}]
    write(tmp_path / "in", {"metadata.jsonl": lines(rows), "a.jpg": "", "b.jpg": "", "c.jpg": ""})
    assert "'frame_file_names' has lists" in refuses(tmp_path / "in", tmp_path / "out")


def test_splits_in_the_names_of_files_and_folders_are_kept(tmp_path):
    for name in ("train-00000", "train-00001", "validation-00000"):
        parquet(tmp_path / f"tables/{name}.parquet", [{"n": 1}, {"n": 2}])
    packs(tmp_path / "tables", tmp_path / "t")
    assert len(samples_of(tmp_path / "t", "train")) == 4
    assert len(samples_of(tmp_path / "t", "val")) == 2
    write(tmp_path / "files", {"train/a.txt": "1", "train/b.txt": "2", "test/c.txt": "3"})
    packs(tmp_path / "files", tmp_path / "f")
    assert list(samples_of(tmp_path / "f", "test")) == ["test/c"]
    for name in ("train", "dev"):
        write_shard(tmp_path / f"shards/{name}/0.tar", [(f"{name}0", {"txt": b"x"})])
    packs(tmp_path / "shards", tmp_path / "s")
    assert list(samples_of(tmp_path / "s", "val")) == ["dev0"]


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        (["*.csv"], DatasetNotFoundError, "no file matches"),
        (["nothing"], DatasetNotFoundError, "does not exist: no 'nothing'"),
        (["a", "b"], ConfigError, "one folder at a time"),
    ],
)
def test_sources_that_make_no_sense_are_refused(tmp_path, monkeypatch, sources, error, message):
    monkeypatch.chdir(write(tmp_path, {"a/1.txt": "", "b/2.txt": ""}))
    with pytest.raises(error, match=message):
        select(sources)


def test_patterns_choose_files_of_stores(s3, tmp_path):
    for shard in range(3):
        write_bytes(f"{s3.address}/data/{shard}.jsonl", lines([{"n": shard}]).encode())
    write_bytes(f"{s3.address}/data/notes.txt", b"x")
    packs(f"{s3.address}/data/[01].jsonl", tmp_path / "out")
    assert list(fields_of(tmp_path / "out")) == ["0/000000000", "1/000000000"]
    packs(f"{s3.address}/data/0.jsonl", f"{s3.address}/data/2.jsonl", tmp_path / "out2")
    assert [found["n"] for found in fields_of(tmp_path / "out2").values()] == [0, 2]
    write(tmp_path, {"here.jsonl": "{}"})
    said = refuses(f"{s3.address}/data/0.jsonl", tmp_path / "here.jsonl", tmp_path / "out3")
    assert "some files are in a store" in said


def test_a_single_archive_is_packed(tmp_path):
    write_shard(tmp_path / "in/0.tar", [("a", {"txt": b"x"})])
    write_shard(tmp_path / "in/1.tar", [("b", {"txt": b"x"})])
    packs(tmp_path / "in/1.tar", tmp_path / "out")
    assert list(samples_of(tmp_path / "out")) == ["b"]


def test_files_beside_archives_are_said_to_be_left_out(tmp_path):
    write_shard(tmp_path / "in/0.tar", [("a", {"txt": b"x"})])
    write(tmp_path / "in", {"b.jpg": "x", "0.tar.idx": "", "README": ""})
    said = packs(tmp_path / "in", tmp_path / "out")
    assert "skipped: b.jpg: not an archive" in said
    assert "0.tar.idx" not in said


def test_a_first_run_that_wrote_no_shard_does_not_block_the_corrected_command(tmp_path):
    photos(tmp_path / "in")
    os.rename(tmp_path / "in/0.jpg", tmp_path / "in/0.jpg.part")
    said = refuses(tmp_path / "in/captions.csv", "--file-column", "image", tmp_path / "out")
    assert "0.jpg: no such file" in said
    done = packs(tmp_path / "in/captions.csv", "--skip-missing", tmp_path / "out")
    assert "2 samples in 1 shard" in done
    refused = run("pack", tmp_path / "in/captions.csv", tmp_path / "out")
    assert "was packed from something else, or differently" in refused.output


def test_a_column_names_files_even_if_most_of_them_are_missing(tmp_path):
    photos(tmp_path / "in")
    os.remove(tmp_path / "in/0.jpg")
    os.remove(tmp_path / "in/1.jpg")
    assert "0.jpg: no such file" in refuses(tmp_path / "in/captions.csv", tmp_path / "out")
    assert "1 sample in" in packs(tmp_path / "in/captions.csv", "--skip-missing", tmp_path / "out")


def test_a_first_run_that_wrote_no_shard_does_not_block_another_in_a_store(s3, tmp_path):
    photos(tmp_path / "in")
    os.remove(tmp_path / "in/0.jpg")
    target = f"{s3.address}/packed"
    failed = run("pack", tmp_path / "in/captions.csv", "--file-column", "image", target)
    assert failed.exit_code != 0
    assert "2 samples" in packs(tmp_path / "in/captions.csv", "--skip-missing", target)


def test_files_of_a_table_are_found_in_the_one_folder_beside_it_that_has_them(tmp_path):
    write(tmp_path / "data", {"t.csv": "file,caption\na/0.jpg,one\n", "images/a/0.jpg": "x"})
    write(tmp_path / "data", {"other/b.txt": "y"})
    expected = {"000000000": {"jpg": b"x", "json": b'{"caption": "one"}'}}
    said = packs(tmp_path / "data/t.csv", tmp_path / "out")
    assert f"column 'file' holds paths in {tmp_path}/data/images (--root)" in said
    assert samples_of(tmp_path / "out") == expected
    packs(tmp_path / "data", tmp_path / "out2")
    assert samples_of(tmp_path / "out2") == expected
    write(tmp_path / "data", {"small/a/0.jpg": "z"})
    said = refuses(tmp_path / "data/t.csv", tmp_path / "out3")
    assert f"several folders, {tmp_path}/data/images, {tmp_path}/data/small" in said


def test_a_root_that_is_no_folder_is_refused(tmp_path):
    write(tmp_path, {"t.csv": "file\n0.jpg\n"})
    assert "--root nowhere: no such folder" in refuses(
        tmp_path / "t.csv", tmp_path / "out", "--root", "nowhere"
    )


@pytest.mark.parametrize(
    ("header", "said"),
    [("file;caption", "in which ';' seems to"), ("file\tcaption", "in which '\\t' seems to")],
)
def test_columns_that_something_else_separates_are_refused(tmp_path, header, said):
    write(tmp_path, {"t.csv": f"{header}\nx{header[4]}y\n"})
    assert said in refuses(tmp_path / "t.csv", tmp_path / "out")


def test_names_the_row_and_column_that_cannot_be_written(tmp_path):
    rows = [{"n": 1, "t": timedelta(1)}, {"n": 2, "t": None}]
    for name, number in (("first", 0), ("last", 1)):
        parquet(tmp_path / f"{name}.parquet", rows if number == 0 else rows[::-1])
        said = refuses(tmp_path / f"{name}.parquet", tmp_path / name)
        assert f"sample '00000000{number}': part 'json'" in said
        assert "field 't': JSON cannot represent a timedelta; convert it" in said
    assert not (tmp_path / "first").exists()


def test_refuses_columns_with_the_same_name(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path, {"t.csv": "a,b,a\n1,2,3\n"})
    same = pa.table([[1], [2], [3]], names=["a", "b", "a"])
    pq.write_table(same, tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        said = refuses(tmp_path / name, tmp_path / "out")
        assert f"{name}: columns 1 and 3 have the same name, 'a'; rename or remove one" in said


def test_tables_of_another_encoding_are_told_how_to_be_converted(tmp_path):
    (tmp_path / "t.csv").write_bytes("caption\ngrün\n".encode("latin1"))
    assert "is not UTF-8 text" in refuses(tmp_path / "t.csv", tmp_path / "out")


@pytest.mark.parametrize(
    ("files", "kind", "said"),
    [
        ({"a.jpg": "x"}, "table", "in, taken for tables: no samples to pack"),
        ({"a.jpg": "x"}, "imagefolder", "taken for a folder with a metadata table: no samples"),
        ({"a.jpg": "x"}, "shards", "tar archives: no samples to pack; skipped: a.jpg: not an"),
        ({"t.csv": "a,b\n"}, None, "taken for tables: no samples to pack"),
    ],
)
def test_a_source_without_samples_is_refused_before_anything_is_written(
    tmp_path, files, kind, said
):
    write(tmp_path / "in", files)
    how = [] if kind is None else ["--kind", kind]
    assert said in refuses(tmp_path / "in", tmp_path / "out", *how)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "option"),
    [
        ("files", ("--key-column", "id")),
        ("files", ("--part", "caption:txt")),
        ("files", ("--prefix-keys",)),
        ("archives", ("--skip-missing",)),
        ("t.csv", ("--prefix-keys",)),
    ],
)
def test_options_of_other_kinds_of_sources_are_refused(tmp_path, source, option):
    write(tmp_path, {"files/a.jpg": "x", "t.csv": "a,b\n1,2\n"})
    write_shard(tmp_path / "archives/0.tar", [("a", {"txt": b"x"})])
    said = refuses(tmp_path / source, tmp_path / "out", *option)
    assert f"; {option[0]} does not apply, omit it" in said


def test_what_was_packed_into_a_folder_of_the_source_is_not_packed_again(tmp_path):
    write(tmp_path / "in", {f"{n}.jpg": "x" for n in range(3)})
    for _ in range(2):
        assert "3 samples" in packs(tmp_path / "in", tmp_path / "in/out")
    found = select([str(tmp_path / "in")], target=tmp_path / "in/out")
    assert found.names == ("0.jpg", "1.jpg", "2.jpg")
    assert list(samples_of(tmp_path / "in/out")) == ["0", "1", "2"]
    said = packs(tmp_path / "in", tmp_path / "out2")
    assert list(samples_of(tmp_path / "out2")) == ["0", "1", "2"]
    assert "skipped: out/: a separate dataset" in said


def test_targets_that_cannot_be_folders_are_refused(tmp_path):
    write(tmp_path, {"in/a.jpg": "x", "file": "x"})
    assert "is a file; expected a folder" in refuses(tmp_path / "in", tmp_path / "file")
    assert "Not a directory" in refuses(tmp_path / "in", tmp_path / "file/out")


def test_a_target_that_is_forgotten_is_asked_for(tmp_path):
    done = run("pack", tmp_path)
    assert done.exit_code == 2
    assert f"energon pack {tmp_path} {tmp_path}_packed" in " ".join(done.output.split())
