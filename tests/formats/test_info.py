from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from energon import WorkerConfig, get_loader, get_train_dataset
from energon.cli.main import main
from energon.errors import DatasetNotFoundError, FormatError, SecurityError
from energon.formats.meta.info import DatasetInfo, load_info, load_split
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import make_captions


def write(root, name, text):
    (root / ".nv-meta").mkdir(exist_ok=True)
    (root / ".nv-meta" / name).write_text(text)


def test_reads_what_it_writes_in_order(tmp_path):
    counts = {"b.tar": 5, "a.tar": 0}
    write(tmp_path, ".info.json", DatasetInfo(counts, "7.4.1").to_json())
    info = load_info(tmp_path)
    assert list(info.shard_counts.items()) == list(counts.items())
    assert (info.energon_version, info.num_samples) == ("7.4.1", 5)


def test_reads_the_older_yaml(tmp_path):
    write(tmp_path, ".info.yaml", "shard_counts:\n  shards/000.tar: 1223\n  shards/001.tar: 1420\n")
    assert load_info(tmp_path).shard_counts == {"shards/000.tar": 1223, "shards/001.tar": 1420}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", '{"shard_counts": {"a": "b"}}', "[1]", "{"),
        f'{{"shard_counts": {{"a": {1 << 70}}}}}',
        f'{{"shard_counts": {{"a": {1 << 52}, "b": {1 << 52}}}}}',
    ],
)
def test_damaged_files_say_so(tmp_path, text):
    write(tmp_path, ".info.json", text)
    with pytest.raises(FormatError, match=r"\.info\.json"):
        load_info(tmp_path)


def test_other_folders_say_what_to_do(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="is not a prepared dataset.*energon prepare"):
        load_info(tmp_path)
    with pytest.raises(DatasetNotFoundError, match="does not exist"):
        load_info(tmp_path / "nothing")


def test_a_folder_of_that_name_is_refused(tmp_path):
    (tmp_path / ".nv-meta/.info.json").mkdir(parents=True)
    with pytest.raises(FormatError, match="info.json: is a folder"):
        load_info(tmp_path)


OUTSIDE = [
    "/etc/a.tar",
    "../other/a.tar",
    "..",
    "shards/../../a.tar",
    "s3://bucket/a.tar",
    "file:///a.tar",
]


@pytest.mark.parametrize("shard", OUTSIDE)
def test_shards_outside_of_the_dataset_are_refused_unless_that_is_allowed(
    tmp_path, monkeypatch, shard
):
    write(tmp_path, ".info.json", DatasetInfo({"a.tar": 1, shard: 2}).to_json())
    write(tmp_path, "split.yaml", f"split_parts: {{train: [a.tar, '{shard}']}}")
    for read in (
        load_info,
        lambda *args: load_split(tmp_path, "split.yaml", *args[1:]).shards("train"),
    ):
        with pytest.raises(SecurityError, match=r"not in the folder.*--allow outside") as info:
            read(tmp_path)
        assert repr(shard) in str(info.value)
        read(tmp_path, ("outside",))
        with monkeypatch.context() as context:
            context.setenv("ENERGON_ALLOW", "outside")
            read(tmp_path)


def test_a_command_as_a_shard_is_refused_and_no_switch_is_advised(tmp_path):
    write(tmp_path, ".info.json", DatasetInfo({"pipe:cat a.tar": 1}).to_json())
    for allow in ((), ("outside", "shell")):
        with pytest.raises(SecurityError, match="'pipe:cat a.tar' is a command") as info:
            load_info(tmp_path, allow)
        assert "allow" not in str(info.value)


def test_braces_may_not_hide_where_shards_are(tmp_path):
    write(tmp_path, "split.yaml", "split_parts: {train: ['{a,..}/{b,..}/x.tar']}")
    with pytest.raises(SecurityError, match=r"'\.\./b/x.tar' is not in the folder"):
        load_split(tmp_path).shards("train")


@pytest.mark.parametrize(
    "shard", ["a..b.tar", "a:b.tar", "x/../a.tar", "./a.tar", "...", "~/a.tar"]
)
def test_names_within_the_dataset_may_be_strange(tmp_path, shard):
    write(tmp_path, ".info.json", DatasetInfo({shard: 2}).to_json())
    assert [*load_info(tmp_path).shard_counts] == [shard]


def test_a_name_that_no_file_can_have_is_damage(tmp_path):
    write(tmp_path, ".info.json", DatasetInfo({"a\0.tar": 2}).to_json())
    with pytest.raises(FormatError, match="not a file name"):
        load_info(tmp_path)


def test_links_may_lead_out_of_the_dataset(tmp_path):
    (tmp_path / "other").mkdir()
    root = make_captions(tmp_path / "ds", [2, 2])
    (root / "shards").rename(tmp_path / "other/shards")
    (root / "shards").symlink_to(tmp_path / "other/shards")
    assert len(WebdatasetSource(root)) == 4


def test_a_dataset_that_leads_elsewhere_is_read_where_that_is_allowed(tmp_path, monkeypatch):
    root = make_captions(tmp_path / "ds", [2, 2])
    (root / "shards/001.tar").rename(tmp_path / "001.tar")
    for table in (root / "shards").glob("001.tar.*"):
        table.rename(tmp_path / table.name)
    write(root, ".info.json", DatasetInfo({"shards/000.tar": 2, "../001.tar": 2}).to_json())
    for file in (root / ".nv-meta").glob("index.*"):
        file.unlink()
    both = "[shards/000.tar, ../001.tar]"
    write(root, "split.yaml", f"split_parts: {{train: {both}, val: {both}}}")
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings = {"worker_config": worker_config, "batch_size": None}
    with pytest.raises(SecurityError, match="--allow outside"):
        get_train_dataset(root, **settings)
    dataset = get_train_dataset(root, **settings, allow=("outside",), repeat=False)
    assert sorted(sample.caption for sample in get_loader(dataset)) == [
        f"caption {n}" for n in range(4)
    ]
    runner = CliRunner()
    for command in ("info", "lint", "plan", "verify", "preview"):
        refused = runner.invoke(main, [command, str(root)])
        assert refused.exit_code != 0, command
        allowed = runner.invoke(main, [command, str(root), "--allow", "outside"])
        assert allowed.exit_code == 0, (command, allowed.output, allowed.exception)
        assert "ENERGON_ALLOW" not in os.environ


def test_a_description_may_not_name_splits_outside_of_the_dataset(tmp_path):
    root = make_captions(tmp_path / "ds", [2])
    (tmp_path / "split.yaml").write_text("split_parts: {train: [shards/000.tar]}")
    path = root / ".nv-meta/dataset.yaml"
    path.write_text(path.read_text() + "split_config: ../../split.yaml\n")
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings = {"worker_config": worker_config, "batch_size": None}
    with pytest.raises(SecurityError, match=r"dataset.yaml: .*--allow outside"):
        get_train_dataset(root, **settings)
    assert get_train_dataset(root, **settings, allow=("outside",))
