"""What is excluded and does not exist is said: an error where data are prepared, else a warning."""

from __future__ import annotations

import json

import pytest

from energon import DefaultTaskEncoder, Quarantine, WorkerConfig, get_train_dataset, get_val_dataset
from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.meta.info import load_split
from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from energon.prepare.verify.dataset import verify_dataset
from energon.sources.tables.jsonl import JsonlSource
from energon.sources.webdataset import WebdatasetSource
from tests.commands import ok, run
from tests.datasets import make_captions, make_crude

INLINE = WorkerConfig(rank=0, world_size=1, num_workers=0)
NEAR = "'shards/0001.tar' is excluded, but matches no shard; did you mean 'shards/001.tar'?"


def excluding(root, *entries):
    path = root / ".nv-meta/split.yaml"
    head = path.read_text().partition("exclude:")[0]
    path.write_text(f"{head}exclude: {json.dumps(entries)}\n")
    return root


def prepare(root, **settings):
    return prepare_dataset(root, split_parts=["train:.*"], **settings)


@pytest.fixture
def root(tmp_path):
    return make_captions(tmp_path / "ds", [2, 2, 1])


def test_prepare_refuses_what_split_yaml_excludes_in_vain(root):
    excluding(root, "shards/002.tar", "shards/0001.tar", "shards/0001.tar/s3")
    with pytest.raises(ConfigError) as caught:
        prepare(root)
    assert f"split.yaml: {NEAR}" in str(caught.value)
    assert "(2 such entries)" in str(caught.value)
    assert "shards/0001.tar" in load_split(root).exclude


def test_prepare_refuses_what_a_list_excludes_in_vain(root, tmp_path):
    (tmp_path / "bad.txt").write_text("# a list\nshards/000.tar/s1\nshards/0001.tar\n")
    with pytest.raises(ConfigError, match=r"bad\.txt: 'shards/0001\.tar' is excluded, but"):
        prepare(root, exclude_from=[tmp_path / "bad.txt"])
    assert load_split(root).exclude == []


@pytest.mark.parametrize(
    ("expression", "hint"),
    [("nothing", ", like 'shards/000.tar'"), ("shards/02.tar", "; did you mean 'shards/002.tar'?")],
)
def test_prepare_refuses_an_expression_that_matches_no_shard(root, expression, hint):
    before = load_split(root)
    with pytest.raises(ConfigError) as caught:
        prepare(root, exclude=["002", expression])
    assert str(caught.value) == f"exclude {expression!r} matches none of 3 shards{hint}"
    assert load_split(root) == before
    done = run(
        *("prepare", root, "--non-interactive", "--force-overwrite", "--split-parts", "train:.*"),
        *("--exclude", expression),
    )
    assert done.exit_code == 2
    assert hint in done.output


def test_what_is_excluded_of_shards_that_are_gone_is_forgotten(root, tmp_path):
    excluding(root, "shards/002.tar", "shards/001.tar/s2")
    (root / "shards/002.tar").unlink()
    prepare(root)
    assert load_split(root).exclude == ["shards/001.tar/s2"]
    prepare(root, exclude=["001"])
    assert load_split(root).exclude == []
    prepare(root)
    assert verify_dataset(root).ok


def test_verify_finds_it_and_repair_forgets_what_it_drops(root):
    excluding(root, "shards/0001.tar", "shards/002.tar/s4", "shards/000.tar/s0")
    done = run("verify", root)
    assert done.exit_code == 1
    assert f"exclude-unmatched: .nv-meta/split.yaml: {NEAR}" in done.output
    excluding(root, "shards/002.tar/s4", "shards/000.tar/s0")
    (root / "shards/002.tar").unlink()
    ok("repair", root, "--drop")
    assert load_split(root).exclude == ["shards/000.tar/s0"]


def test_loaders_warn_once(root, caplog):
    excluding(root, "shards/0001.tar")
    for _ in range(2):
        assert len(WebdatasetSource(root)) == 5
    assert [record.message for record in caplog.records] == [f"{root}: {NEAR}"]
    assert caplog.records[0].levelname == "WARNING"


def test_keys_of_jsonl_files_are_looked_at_too(tmp_path, caplog):
    file = tmp_path / "a.jsonl"
    file.write_text('{"n": 1}\n' * 3)
    prepare_jsonl(file, split_ratio={"train": 1})
    (tmp_path / "a.jsonl.split.yaml").write_text(
        'split_parts: {train: [0, "end"]}\nexclude: [1, "a.jsonl/2", 3, x]\n'
    )
    assert len(JsonlSource(file)) == 1
    lines = ["'3' is excluded, but there are only the samples 0 to 2", "'x' is excluded, but"]
    assert all(line in caplog.text for line in lines)
    with pytest.raises(ConfigError, match=lines[0]):
        prepare_jsonl(file)
    assert [lines[0] in each.message for each in verify_dataset(file).problems] == [True, False]
    done = run("lint", file, "--num-workers", 1)
    assert done.exit_code == 1
    assert all(line in done.output for line in lines)


@pytest.fixture
def lists(root, tmp_path):
    """A list for the dataset, in a folder, and on its own."""
    folder = tmp_path / "lists"
    folder.mkdir()
    (folder / "ds.jsonl").write_text(json.dumps({"shard": "shards/000.tar", "key": "s1"}) + "\n")
    return folder


@pytest.mark.parametrize("name", ["", "ds.jsonl"])
def test_loaders_and_prepare_take_a_file_and_a_folder(root, lists, name):
    for read in (get_val_dataset, get_train_dataset):
        samples = read(root, worker_config=INLINE, batch_size=None, exclude_from=lists / name)
        captions = {each.caption for each, _ in zip(samples, range(4), strict=False)}
        assert captions == {f"caption {n}" for n in (0, 2, 3, 4)}
    ok(
        *("prepare", root, "--non-interactive", "--force-overwrite", "--split-parts", "train:.*"),
        *("--skip-dataset-yaml", "--exclude-from", lists / name),
    )
    assert load_split(root).exclude == ["shards/000.tar/s1"]


def same_names(tmp_path):
    """Two datasets in folders of the same name, with samples of the same shards and keys."""
    return [make_captions(tmp_path / name / "ds", [2, 2, 1]) for name in ("a", "b")]


class Fails(DefaultTaskEncoder):
    """Fails at one sample of the dataset in folder a."""

    def encode_sample(self, sample):
        if sample.__key__ == "s1" and "/a/" in sample.__sources__[0].dataset_path:
            raise ValueError("a bad sample")
        return sample


def captions_of(root, **settings):
    read = get_val_dataset(root, worker_config=INLINE, batch_size=None, **settings)
    return [int(sample.__key__[1:]) for sample in read]


def test_a_sample_that_fails_is_excluded_of_its_own_dataset_only(tmp_path):
    a, b = same_names(tmp_path)
    folder = tmp_path / "failed"
    handler = WorkerConfig(
        rank=0,
        world_size=1,
        num_workers=0,
        global_error_handler=Quarantine(folder, handler=lambda *_: None),
    )
    blend = tmp_path / "blend.yaml"
    blend.write_text("splits: {val: {blend: [{path: a/ds}, {path: b/ds}]}}\n")
    read = get_val_dataset(blend, worker_config=handler, batch_size=None, task_encoder=Fails())
    assert len(list(read)) == 9
    (file,) = folder.iterdir()
    for place in (folder, file):
        assert captions_of(blend, exclude_from=place) == [0, 2, 3, 4, 0, 1, 2, 3, 4]
        assert captions_of(a, exclude_from=place) == [0, 2, 3, 4]
        assert captions_of(b, exclude_from=place) == [0, 1, 2, 3, 4]
        done = run("lint", blend, "--exclude-from", place, "--json", "--num-workers", "1")
        assert json.loads(done.output)["samples"]["val"] == 9
    for root in (a, b):
        prepare(root, exclude_from=[folder])
    assert [load_split(root).exclude for root in (a, b)] == [["shards/000.tar/s1"], []]


def test_an_address_in_a_list_may_be_written_in_other_words(tmp_path):
    a, _ = same_names(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for address in (f"file://{a}/", f"{tmp_path}/b/../a/ds", f"{tmp_path}/link/ds"):
        entry = {"dataset": address, "shard": "shards/000.tar", "key": "s1"}
        (tmp_path / "bad.jsonl").write_text(json.dumps(entry))
        assert captions_of(a, exclude_from=tmp_path / "bad.jsonl") == [0, 2, 3, 4]


def test_a_list_for_a_dataset_that_was_elsewhere_is_a_warning(tmp_path, caplog):
    a, _ = same_names(tmp_path)
    entry = {"dataset": "s3://far/ds", "shard": "shards/000.tar", "key": "s1"}
    (tmp_path / "ds.jsonl").write_text(json.dumps(entry))
    assert captions_of(a, exclude_from=tmp_path) == [0, 1, 2, 3, 4]
    assert f"lists samples of 's3://far/ds', so no sample of {a} is skipped" in caplog.text


def test_lines_without_a_dataset_in_a_folder_must_not_be_ambiguous(tmp_path):
    same_names(tmp_path)
    (tmp_path / "ds.jsonl").write_text("shards/000.tar/s1\n")
    blend = tmp_path / "blend.yaml"
    blend.write_text("splits: {val: {blend: [{path: a/ds}, {path: b/ds}]}}\n")
    assert captions_of(tmp_path / "a/ds", exclude_from=tmp_path) == [0, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"ds\.jsonl has lines that do not name a dataset, and"):
        captions_of(blend, exclude_from=tmp_path)


def test_a_folder_without_a_list_for_the_dataset_excludes_nothing(root, lists, caplog):
    caplog.set_level("INFO", "energon")
    (lists / "ds.jsonl").rename(lists / "other.jsonl")
    samples = get_val_dataset(root, worker_config=INLINE, batch_size=None, exclude_from=lists)
    assert len(list(samples)) == 5
    assert "has no ds.jsonl, so no sample of that dataset is skipped" in caplog.text


def test_lists_that_are_not_there_are_errors(root, lists):
    with pytest.raises(DatasetNotFoundError, match="no such file or folder"):
        get_val_dataset(root, worker_config=INLINE, batch_size=None, exclude_from=lists / "x")
    with pytest.raises(DatasetNotFoundError, match="no such file or folder"):
        prepare(root, exclude_from=[lists / "x"])


def test_a_file_does_not_say_which_of_several_datasets_it_is_for(root, lists, tmp_path):
    make_crude(tmp_path / "other", [2])
    blend = tmp_path / "blend.yaml"
    arguments = {"worker_config": INLINE, "batch_size": None, "exclude_from": lists / "ds.jsonl"}
    blend.write_text("splits: {val: {path: ds}, train: {blend: [{path: ds}, {path: other}]}}\n")
    assert len(list(get_val_dataset(blend, **arguments))) == 4
    with pytest.raises(ConfigError, match=r"that do not name a dataset, and there are 2: .*ds"):
        get_train_dataset(blend, **arguments)


def test_lists_may_be_in_a_store(root, s3):
    from energon.io.files import write_bytes

    write_bytes(f"{s3.address}/lists/ds.jsonl", b"shards/001.tar\n")
    for place in (f"{s3.address}/lists", f"{s3.address}/lists/ds.jsonl"):
        found = get_val_dataset(root, worker_config=INLINE, batch_size=None, exclude_from=place)
        assert len(list(found)) == 3
