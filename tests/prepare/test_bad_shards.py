"""Shards that are unusual or damaged: each is prepared as it should be, or refused with advice."""

from __future__ import annotations

import os
import tarfile

import numpy as np
import pytest

from energon import DefaultTaskEncoder, get_loader
from energon.errors import FormatError, TruncatedError
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.formats.tar.writer import END, encode_header, padded
from energon.inspect.lint import lint_dataset
from energon.prepare.dataset import prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.verify.dataset import verify_dataset
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import CRUDE
from tests.sources.reads import read_samples
from tests.task_encoder.runs import flat, val


def write(path, names, *, end=END, content=b"x"):
    with open(path, "wb") as file:
        for name in names:
            file.write(encode_header(name, len(content)) + padded(content))
        file.write(end)


def keys(root):
    source = WebdatasetSource(root)
    return [sample["__key__"] for sample in read_samples(source, np.arange(len(source)))]


def test_names_without_extension_and_hidden_files(tmp_path):
    write(tmp_path / "0.tar", ["README", "a.txt", ".hidden", "dir/.x.txt", "__m__/b.txt", "c.txt"])
    prepare_dataset(tmp_path, **CRUDE)
    assert keys(tmp_path) == ["a", "c"]


@pytest.mark.parametrize("data", [END, b"", bytes(10_240)])
def test_empty_shards(tmp_path, data):
    (tmp_path / "0.tar").write_bytes(data)
    with pytest.raises(FormatError, match=r"0\.tar: (has no samples|ends at byte 0)"):
        prepare_dataset(tmp_path, **CRUDE)


RESERVED = ["__key__", "__restore_key__", "__shard__", "__sources__", "__joined__"]


@pytest.mark.parametrize("part", RESERVED)
def test_samples_with_a_part_of_a_reserved_name_fail_alone(tmp_path, caplog, part):
    write(tmp_path / "0.tar", ["a.txt", "b.txt", f"b.{part}", "c.txt", f"d.{part}"])
    prepare_dataset(tmp_path, **CRUDE)
    (warning,) = [each for each in caplog.messages if "reserves" in each]
    assert f"samples with a part named '{part}'" in warning
    (problem,) = verify_dataset(tmp_path, depth="headers").problems
    assert (problem.kind, problem.key, problem.repairable) == ("reserved-part", "b", False)
    assert f"sample 'b' and 1 more has a part named '{part}'" in problem.message
    with get_loader(val(tmp_path, split_part="train")) as batches:
        assert [batch["__key__"] for batch in batches] == [["a", "c"]]
        assert batches.stats()["failed"] == 2
    reasons = [
        each.reason for each in lint_dataset(tmp_path, engine=Engine(num_workers=1)).findings
    ]
    assert [f"'{part}', a name that energon reserves" in each for each in reasons] == [True] * 2


class Raw(DefaultTaskEncoder):
    """Runs no hook on single samples."""

    decoder = None


@pytest.mark.parametrize("part", ["__key__", "__restore_key__"])
@pytest.mark.parametrize("encoder", [Raw, DefaultTaskEncoder])
@pytest.mark.parametrize("batch_size", [2, None])
def test_samples_with_such_a_part_fail_alone_without_hooks(tmp_path, part, encoder, batch_size):
    """Also those that end a lane or follow one another."""
    names = [f"{number}.txt" for number in range(10)]
    for number in (1, 4, 5, 9):
        names.insert(names.index(f"{number}.txt") + 1, f"{number}.{part}")
    write(tmp_path / "0.tar", names)
    prepare_dataset(tmp_path, **CRUDE)
    task_encoder = encoder()
    dataset = val(tmp_path, task_encoder, split_part="train", batch_size=batch_size)
    with get_loader(dataset) as batches:
        keys = [batch["__key__"] for batch in batches]
        counts = batches.stats()
    readable = ["0", "2", "3", "6", "7", "8"]
    assert (keys if batch_size is None else flat(keys)) == readable
    assert counts["failed"] == 4
    assert [counts[name] for name in counts if name.startswith("failed: read: ")] == [4]


def test_parts_of_reserved_names_that_are_not_chosen_are_ignored(tmp_path):
    write(tmp_path / "0.tar", ["a.txt", "a.__key__"])
    prepare_dataset(
        tmp_path, **{**CRUDE, "sample_type": "TextSample", "field_map": {"text": "txt"}}
    )
    with get_loader(val(tmp_path, split_part="train")) as batches:
        assert [(batch.__key__, batch.text) for batch in batches] == [(["a"], ["x"])]


def test_members_of_zero_bytes(tmp_path):
    write(tmp_path / "0.tar", ["a.txt", "b.txt"], content=b"")
    prepare_dataset(tmp_path, **CRUDE)
    source = WebdatasetSource(tmp_path)
    assert [sample["txt"] for sample in read_samples(source, np.arange(2))] == [b"", b""]


def test_a_member_of_five_gigabytes(tmp_path):
    size = 5 << 30
    with open(tmp_path / "0.tar", "wb") as file:
        file.write(encode_header("a.bin", size))
        file.seek(512 + size)
        file.write(encode_header("b.txt", 1) + padded(b"x") + END)
    prepare_dataset(tmp_path, **CRUDE)
    table = PartTable.open(part_table_path(tmp_path / "0.tar"))
    assert table.part_size.tolist() == [size, 1]
    assert table.sample_offset.tolist() == [0, 512 + size, 512 + size + 1024]


def test_a_header_of_five_gigabytes_without_the_content(tmp_path):
    (tmp_path / "0.tar").write_bytes(encode_header("a.bin", 5 << 30) + bytes(10_000))
    with pytest.raises(TruncatedError, match=r"0\.tar: 'a\.bin' at byte 0 has 5368709120 bytes"):
        prepare_dataset(tmp_path, **CRUDE)


@pytest.mark.parametrize("kind", ["L", "x"])
def test_an_extended_header_of_five_gigabytes_is_refused_before_it_is_read(tmp_path, kind):
    size = 5 << 30
    header = tarfile.TarInfo("././@LongLink")
    header.size, header.type = size, kind.encode()
    with open(tmp_path / "0.tar", "wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.seek(512 + size)
        file.write(encode_header("a.txt", 1) + padded(b"x") + END)
    with pytest.raises(FormatError, match=r"0\.tar: an extended header of 5368709120 bytes"):
        prepare_dataset(tmp_path, **CRUDE)


def test_unicode_and_names_of_300_characters(tmp_path):
    names = [
        "ä/ö.txt",
        "日本語.txt",
        "x" * 300 + ".txt",
        "d" * 150 + "/" + "e" * 90 + ".txt",
        "😀.txt",
    ]
    write(tmp_path / "0.tar", names)
    prepare_dataset(tmp_path, **CRUDE)
    assert keys(tmp_path) == [name.removesuffix(".txt") for name in names]
    table = PartTable.open(part_table_path(tmp_path / "0.tar"))
    assert [table.index_of(name.removesuffix(".txt")) for name in names] == list(range(5))


def test_names_that_are_no_unicode(tmp_path):
    write(tmp_path / "0.tar", ["a.txt", os.fsdecode(b"\xff\xfe.txt")])
    prepare_dataset(tmp_path, **CRUDE)
    assert keys(tmp_path) == ["a", os.fsdecode(b"\xff\xfe")]


def test_names_that_lead_elsewhere_are_names_and_no_more(tmp_path):
    folder = tmp_path / "ds"
    folder.mkdir()
    write(folder / "0.tar", ["../../evil.txt", "/abs.txt", "a/../b.txt"])
    prepare_dataset(folder, **CRUDE)
    assert keys(folder) == ["../../evil", "/abs", "a/../b"]
    assert os.listdir(tmp_path) == ["ds"]


def test_another_file_that_is_called_tar(tmp_path):
    (tmp_path / "0.tar").write_bytes(b"PK\3\4" + os.urandom(5000))
    with pytest.raises(FormatError, match=r"0\.tar: no tar header at byte 0"):
        prepare_dataset(tmp_path, **CRUDE)


def test_an_archive_whose_end_marker_is_missing(tmp_path):
    write(tmp_path / "0.tar", ["a.txt"], end=b"")
    with pytest.raises(TruncatedError, match="without the end marker"):
        prepare_dataset(tmp_path, **CRUDE)
