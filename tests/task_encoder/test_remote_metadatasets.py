"""Metadatasets in an object store: joins, nested documents, plans, and errors with their places."""

from __future__ import annotations

import json
from itertools import islice
from threading import Barrier
from typing import ClassVar

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

from energon import (
    ConfigError,
    DefaultTaskEncoder,
    SecurityError,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    prepare_metadataset,
)
from energon.cli.main import main
from energon.io.files import write_text
from tests.datasets import make_crude
from tests.sources.distant import upload

DOCUMENT = f"""
vars: {{data: ../data}}
splits:
  train:
    blend:
      - {{path: "${{data}}/a", weight: {{0: 3, 40: 1}}}}
      - path: ../inner/inner.yaml
      - join: [{{path: ../data/a}}, {{path: ../data/b, nonmatch: none, subset: {{range: [0, 9]}}}}]
        joiner: {{__module__: {__name__}, __function__: put_together}}
  val: {{path: ../data/gone}}
"""
INNER = "splits: {train: {path: ../data/b, subset: {range: ['0%', '50%']}}}"


def put_together(first, second):
    text = second["txt"] if second else b"nothing"
    return {**first, "txt": first["txt"] + b" and " + text}


class Texts(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return [(sample["__key__"], bytes(sample["txt"])) for sample in samples]


@pytest.fixture
def folder(tmp_path):
    make_crude(tmp_path / "data/a", [12, 9])
    make_crude(tmp_path / "data/b", [7, 7])
    (tmp_path / "blends").mkdir()
    (tmp_path / "blends/m.yaml").write_text(DOCUMENT)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/inner.yaml").write_text(INNER)
    return tmp_path


@pytest.fixture
def address(s3, folder):
    for name in ("data", "blends", "inner"):
        upload(folder / name, s3.address)
    return f"{s3.address}/blends/m.yaml"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def train(path, rank=0, world_size=1):
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, lanes=2)
    return get_train_dataset(
        path, worker_config=config, batch_size=5, task_encoder=Texts(), allow=("code",)
    )


def test_a_distant_document_gives_what_the_local_one_gives(folder, address, cache):
    wanted = [*islice(iter(get_loader(train(folder / "blends/m.yaml"))), 30)]
    loader = get_savable_loader(train(address))
    assert [*islice(iter(loader), 11)] == wanted[:11]
    state = json.loads(json.dumps(loader.save_state_rank()))
    # Both ranks of another topology build no index: it is in the cache of the user.
    (index,) = (cache / "joins").iterdir()
    built = index.stat().st_mtime_ns
    rest = {}
    for rank in range(2):
        loader = get_savable_loader(train(address, rank, 2))
        loader.restore_state_global(state)
        numbers = range(11 + (rank != 1), 30, 2)
        rest |= dict(zip(numbers, iter(loader), strict=False))
    assert [rest[number] for number in range(11, 30)] == wanted[11:]
    assert index.stat().st_mtime_ns == built
    write_text(f"{address.removesuffix('m.yaml')}one.yaml", DOCUMENT.rpartition("  val:")[0])
    assert prepare_metadataset(f"{address.removesuffix('m.yaml')}one.yaml") == [index]


def test_a_distant_run_is_planned_as_a_local_one(folder, address):
    def plan(path, *options):
        words = ["plan", str(path), "--batch-size", "5", "--json", *options]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    local = folder / "blends/m.yaml"
    distant = plan(address, "--batches", "20")
    assert distant["shares"] == plan(local, "--batches", "20")["shares"]
    assert distant["rank"]["requests"] > 0
    for options in (["--key", "s3", "--batches", "20"], ["--step", "7"]):
        assert plan(address, *options) == plan(local, *options)


def test_mistakes_in_distant_documents_have_places_that_lead_there(s3, folder, address):
    inner = f"{s3.address}/inner/inner.yaml"
    write_text(inner, "splits: {train: {path: ../data/b, subsett: 1}}")
    write_text(address, DOCUMENT.replace("nonmatch: none", "nonmatch: nine"))
    with pytest.raises(ConfigError) as info:
        train(address)
    assert str(info.value).startswith(f"{address}:8:53: splits.train.blend[2].join[1].nonmatch is")
    write_text(address, DOCUMENT.replace("data}/a", "data}/x"))
    with pytest.raises(ConfigError) as info:
        train(address)
    first, second = str(info.value).splitlines()
    assert first.startswith(f"{address}:6:10: {s3.address}/data/x does not exist: no 'x' in ")
    assert second.startswith(f"{inner}:1:35: unknown key 'subsett' in splits.train, did you mean")
    write_text(address, DOCUMENT.replace("../inner/inner.yaml", "../../../../inner.yaml"))
    with pytest.raises(ConfigError) as info:
        train(address)
    assert str(info.value).startswith(f"{address}:7:9: '../../../../inner.yaml' is outside s3://")
    write_text(address, DOCUMENT.replace("${data}", "${HOME}"))
    with pytest.raises(SecurityError, match="which a remote document may not"):
        train(address)


class MeetingFileSystem(MemoryFileSystem):
    """Answers for files of some names when three threads ask."""

    protocol = "meeting"
    store, pseudo_dirs = MemoryFileSystem.store, MemoryFileSystem.pseudo_dirs
    meetings: ClassVar[dict[str, Barrier]] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("meeting:", "memory:"))

    def info(self, path, **options):
        if meeting := self.meetings.get(path.rpartition("/")[2]):
            meeting.wait(20)
        return super().info(path, **options)


def test_datasets_of_a_distant_blend_are_opened_together(tmp_path, monkeypatch):
    for name in "abc":
        make_crude(tmp_path / name, [12, 9])
        upload(tmp_path / name, f"memory://{tmp_path.name}")
    fsspec.register_implementation("meeting", MeetingFileSystem, clobber=True)
    # Those of the first phase are asked for their kind, then opened, then measured.
    names = (".info.json", "split.yaml", "001.tar")
    monkeypatch.setattr(MeetingFileSystem, "meetings", {name: Barrier(3) for name in names})
    blend = [{"path": f"meeting://{tmp_path.name}/{name}", "weight": 1} for name in "abc"]
    document = {"splits": {"train": {"blend": blend}}}
    assert train(document) is not None


def test_of_a_distant_metadataset_only_the_split_in_use_is_opened(s3, folder, address):
    s3.proxy.requests.clear()
    train(address)
    fetched = [each.path.partition("?")[0] for each in s3.proxy.requests if each.method == "GET"]
    assert not [path for path in fetched if "/gone/" in path]
    documents = [path.rpartition("/")[2] for path in fetched if "/data/" not in path]
    assert sorted(documents) == ["inner.yaml", "m.yaml"]
