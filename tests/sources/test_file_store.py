from __future__ import annotations

import pickle
import random
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, NoSuchFileError
from energon.formats.tables.part_table import part_table_path
from energon.loader.transport.reports import RemoteError
from energon.samples.crude import CrudeSample
from energon.sources.files.open import SystemFileStore, open_file_store
from energon.sources.files.samples import WebdatasetFileStore
from energon.sources.files.store import DecodeFileStore, PrimaryFileStore
from tests.datasets import CRUDE, make_captions, write_shard

EXPECTED = {
    f"{key}.{part}": content
    for number, key in enumerate(("a/x", "a/y", "b/é", "b.c/z", "b/" + "n" * 80))
    for part, content in (
        ("txt", f"text {number}".encode()),
        ("left.bin", bytes([number]) * (number * 20_000)),
    )
    if (number, part) != (3, "txt")
}
"""Small files and large ones, keys of different lengths, and a sample that lacks a part."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    from energon.prepare.dataset import prepare_dataset

    root = tmp_path_factory.mktemp("aux")
    samples: dict[str, dict[str, bytes]] = {}
    for name, content in EXPECTED.items():
        key, _, part = name.rpartition("/")[2].partition(".")
        folder = name.rpartition("/")[0]
        samples.setdefault(f"{folder}/{key}", {})[part] = content
    items = list(samples.items())
    write_shard(root / "s0.tar", items[:2])
    write_shard(root / "s1.tar", items[2:])
    prepare_dataset(root, **CRUDE)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    for name, content in EXPECTED.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.fixture(scope="module")
def foreign(dataset, tmp_path_factory):
    """The same dataset as other tools prepare it: without part tables."""
    root = shutil.copytree(dataset, tmp_path_factory.mktemp("foreign") / "dataset")
    for shard in root.glob("*.tar"):
        part_table_path(shard).unlink()
    return root


@pytest.fixture(scope="module")
def early(foreign, tmp_path_factory):
    """The same as early releases of other tools prepared it: an index of samples alone."""
    root = shutil.copytree(foreign, tmp_path_factory.mktemp("early") / "dataset")
    connection = sqlite3.connect(root / ".nv-meta" / "index.sqlite")
    connection.execute("DROP TABLE sample_parts")
    connection.close()
    return root


@pytest.fixture(params=["dataset", "foreign", "early", "unindexed", "folder"])
def store(request, tmp_path):
    if request.param == "folder":
        return SystemFileStore(request.getfixturevalue("folder"))
    if request.param != "unindexed":
        return WebdatasetFileStore(request.getfixturevalue(request.param))
    root = shutil.copytree(request.getfixturevalue("foreign"), tmp_path / "unindexed")
    (root / ".nv-meta" / "index.sqlite").unlink()
    return WebdatasetFileStore(root)


def test_every_file_is_found_by_its_name(store):
    for name, content in EXPECTED.items():
        data, source = store[name]
        assert data == content
        assert source.file_names == (name,)
        assert source.dataset_path == store.get_path()
        assert name in store


def test_several_files_come_in_the_order_of_their_names(store):
    names = list(EXPECTED) * 3
    random.Random(0).shuffle(names)
    assert store.get_many(names) == [EXPECTED[name] for name in names]
    assert store.get_many([]) == []


@pytest.mark.parametrize("name", ["a/x.jpg", "a/w.txt", "b.c/z.txt", "a/x", "", ".txt", "txt"])
def test_a_missing_file_is_an_error_that_names_it(store, name):
    assert name not in store
    with pytest.raises(NoSuchFileError, match=store.get_path()) as caught:
        store.get(name)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, FileNotFoundError)
    assert repr(name) in str(caught.value)
    with pytest.raises(NoSuchFileError):
        store.get_many(["a/x.txt", name])


@pytest.mark.parametrize("name", [None, 7])
def test_what_is_no_name_fails_only_the_sample(store, name):
    with pytest.raises(NoSuchFileError, match=f"{name} is not a file name: expected text"):
        store.get(name)
    with pytest.raises(NoSuchFileError, match=f"{name} is not a file name: expected text"):
        store.get_many(iter([name]))


def test_a_file_can_be_read_in_parts(store):
    for name, content in EXPECTED.items():
        with store.open(name) as file:
            file.seek(0, 2)
            assert file.tell() == len(content)
            file.seek(len(content) // 2)
            assert file.read(10) == content[len(content) // 2 :][:10]
            file.seek(0)
            assert file.read() == content
            with pickle.loads(pickle.dumps(file)) as copy:
                assert copy.read() == content
    with pytest.raises(NoSuchFileError):
        store.open("a/absent.txt")
    with PrimaryFileStore(store, "a/y").open(".txt") as file:
        assert file.read() == b"text 1"


def test_sources_are_noted_in_the_sample(store):
    sample = CrudeSample(__key__="mine")
    store.get("a/x.txt", sample)
    store.get_many(["b/é.txt", "a/y.txt"], sample)
    assert [source.index for source in sample["__sources__"]] == ["a/x.txt", "b/é.txt", "a/y.txt"]


def test_copies_that_were_pickled_find_the_same(store):
    store.get("a/x.txt")
    again = pickle.loads(pickle.dumps(store))
    assert again.get_many(list(EXPECTED)) == list(EXPECTED.values())
    assert again.identity == store.identity


def test_many_threads_find_the_same(store):
    names = list(EXPECTED) * 20
    random.Random(1).shuffle(names)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(store.get, names)) == [EXPECTED[name] for name in names]


def test_names_are_listed_in_the_order_of_the_dataset(dataset, foreign):
    assert list(WebdatasetFileStore(dataset).names()) == list(EXPECTED)
    assert list(WebdatasetFileStore(foreign).names()) == list(EXPECTED)


def test_files_of_the_own_sample_begin_with_a_dot(store):
    primary = PrimaryFileStore(store, "a/y")
    assert primary.get(".txt") == b"text 1"
    assert primary.get("a/x.txt") == b"text 0"
    assert primary.get_many([".left.bin", "b/é.txt"]) == [EXPECTED["a/y.left.bin"], b"text 2"]
    assert primary.full_name(".txt") == "a/y.txt"
    assert primary.full_name("b/é.txt") == "b/é.txt"
    assert primary.identity == store.identity
    sample = CrudeSample()
    primary.get(".txt", sample)
    assert sample["__sources__"][0].file_names == ("a/y.txt",)


def test_files_are_decoded_by_extension(tmp_path):
    root = make_captions(tmp_path / "captions", [3])
    store = DecodeFileStore(WebdatasetFileStore(root), decoder=SampleDecoder(image_decode="rgb8"))
    assert store.get("s1.json") == {"n": 1}
    assert store.get("s1.jpg").shape == (8, 12, 3)
    assert store.get_many(["s2.txt", "s0.txt"]) == ["caption 2", "caption 0"]
    assert PrimaryFileStore(store, "s2").get(".txt") == "caption 2"
    assert store.get_raw("s1.json")[0] == b'{"n": 1}'


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", ".."])
def test_a_folder_is_never_left(folder, name):
    (folder.parent / "secret").write_bytes(b"")
    with pytest.raises(NoSuchFileError, match="leaves the folder"):
        SystemFileStore(folder).get(name)


def test_a_path_that_winds_inside_the_folder_is_followed(folder):
    assert SystemFileStore(folder).get("b/../a/./x.txt") == b"text 0"


def test_without_a_folder_names_are_absolute_paths(folder):
    store = SystemFileStore()
    assert store.get(str(folder / "a/x.txt")) == b"text 0"
    with pytest.raises(NoSuchFileError, match="not an absolute path"):
        store.get("a/x.txt")


def test_addresses_tell_folders_from_datasets(dataset, folder, tmp_path):
    assert isinstance(open_file_store(str(dataset)), WebdatasetFileStore)
    assert isinstance(open_file_store(f"filesystem://{folder}"), SystemFileStore)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_file_store(f"filesystem://{tmp_path}/missing")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_file_store(str(tmp_path / "missing"))
    (tmp_path / "mixed.yaml").write_text("splits: {}")
    with pytest.raises(ConfigError, match="has no files that can be read by name"):
        open_file_store(str(tmp_path / "mixed.yaml"))


def test_errors_survive_the_way_from_a_worker():
    error = RemoteError.of(NoSuchFileError("'x' is not there")).rebuild()
    assert isinstance(error, NoSuchFileError)
    assert str(error) == "'x' is not there"
