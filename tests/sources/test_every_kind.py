"""What datasets of every kind have to do, in one suite; what is special stands with its kind."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard

from energon import ConfigError, DefaultTaskEncoder, get_train_dataset
from energon.errors import EnergonError
from energon.formats.seek_points import SPACING_BYTES
from energon.prepare.jsonl import prepare_jsonl
from energon.sources.browse.open import TreeOpener
from tests.commands import run
from tests.datasets import jpeg, make_crude
from tests.kind_checks import check_kind, plain
from tests.task_encoder.runs import config
from tests.token_files import numbered, write_tokens

DATA = Path(__file__).parents[1] / "data"
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


def lines(suffix, pack):
    def write(folder):
        path = folder / f"lines.jsonl{suffix}"
        path.write_bytes(pack("\n".join(json.dumps({"n": n}) for n in range(N)).encode()))
        prepare_jsonl(path)
        return {"path": str(path)}

    return write


KINDS = {
    "tokens": tokens,
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
}
WITH_FILES = ("jsonl", "jsonl.gz", "jsonl.zst")
"""Kinds that can be mounted."""


@pytest.fixture(params=KINDS)
def entry(request, tmp_path):
    """What a document says of a dataset of the kind."""
    entry = KINDS[request.param](tmp_path)
    entry["kind"] = request.param
    return entry


def document(folder, content):
    path = folder / "document.yaml"
    path.write_text(json.dumps({"splits": {"train": content}}))
    return path


def test_the_order_is_equal_on_all_topologies_and_after_any_restore(entry, tmp_path):
    kind = entry.pop("kind")
    expected = check_kind(document(tmp_path, entry), encoder=Contents)
    contents = {text for batch in expected for text in batch["content"]}
    assert len(contents) >= (7 if kind.startswith(("mds", "litdata")) else 50)


@pytest.mark.slow  # many processes
def test_it_is_blended_with_tar_shards(entry, tmp_path):
    del entry["kind"]
    make_crude(tmp_path / "tars", [20, 15])
    blend = [{"path": str(tmp_path / "tars"), "weight": 1}, {**entry, "weight": 2}]
    expected = check_kind(document(tmp_path, {"blend": blend}), encoder=Contents, resumed=4)
    shards = [text for batch in expected for text in batch["content"]]
    share = sum("b'text " in text and "'txt'" in text for text in shards) / len(shards)
    assert share == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.slow  # many processes
def test_the_commands_take_it(entry, tmp_path):
    kind = entry.pop("kind")
    path = document(tmp_path, entry) if "read" in entry else entry["path"]
    for command in (["info", "--json"], ["preview", "--count", "1"], ["plan"]):
        result = run(command[0], path, *command[1:])
        assert result.exit_code == 0, result.output
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


def test_an_index_that_claims_billions_of_documents_is_reported(tmp_path):
    tokens(tmp_path)
    path = tmp_path / "corpus.idx"
    data = bytearray(path.read_bytes())
    data[18:26] = (2**31).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(EnergonError, match=r"corpus\.idx: .*2147483648 sequences"):
        get_train_dataset(str(tmp_path / "corpus"), worker_config=config(), batch_size=2)


def test_a_missing_column_is_reported_with_those_that_there_are(tmp_path):
    entry = parquet(tmp_path)
    read = {"sample_type": "TextSample", "field_map": {"text": "body"}}
    with pytest.raises(ConfigError, match=r"body.*(n|text)"):
        get_train_dataset(
            document(tmp_path, {**entry, "read": read}), worker_config=config(), batch_size=2
        )


@pytest.mark.slow  # many processes
def test_long_compressed_files_are_entered_in_the_middle(tmp_path):
    generator = np.random.default_rng(0)
    rows = [json.dumps({"n": n, "x": generator.bytes(4000).hex()}) for n in range(1500)]
    path = tmp_path / "long.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode(), 1))
    assert path.stat().st_size > SPACING_BYTES
    prepare_jsonl(path)
    check_kind(path, encoder=Contents, num_batches=12, resumed=3)
