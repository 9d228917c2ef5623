from __future__ import annotations

import pytest

from energon import WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon.errors import ConfigError, SampleError, SecurityError
from energon.inspect.lint import lint_dataset
from energon.prepare.dataset import prepare_dataset
from energon.prepare.engines import Engine
from energon.task_encoder.load import CodeFields
from tests.datasets import jpeg, make_captions, make_crude, write_shard

LOADER = """
def sample_loader(raw):
    assert "jpg" not in raw, "part_filter leaves it out"
    return {"__key__": raw["__key__"] + "!", "text": raw["txt"].upper() + str(raw["json"]["n"])}


def part_filter(part):
    return part in ("txt", "json")
"""


def make_coded(root, code=LOADER):
    return make_captions(root, [3, 2], sample_type="TextSample", field_map=None, sample_loader=code)


def texts(dataset):
    return [(sample.__key__, sample.text) for sample in get_savable_loader(dataset)]


def config(num_workers=0):
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers)


def test_code_of_a_dataset_is_not_run_unless_it_is_allowed(tmp_path, monkeypatch):
    monkeypatch.delenv("ENERGON_ALLOW", raising=False)
    root = make_coded(tmp_path / "ds", "raise SystemExit('this was run')\n")
    with pytest.raises(SecurityError, match='allow=\\("code",\\), .* ENERGON_ALLOW=code'):
        get_train_dataset(root, worker_config=config(), batch_size=None)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_code_of_a_dataset_makes_its_samples(tmp_path, num_workers):
    root = make_coded(tmp_path / "ds")
    dataset = get_val_dataset(
        root, worker_config=config(num_workers), batch_size=None, allow=("code",)
    )
    assert sorted(texts(dataset)) == [(f"s{n}!", f"CAPTION {n}{n}") for n in range(5)]


def test_the_environment_allows_code(tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_ALLOW", "pickle,code")
    dataset = get_val_dataset(make_coded(tmp_path / "ds"), worker_config=config(), batch_size=None)
    assert len(texts(dataset)) == 5


def test_a_part_filter_is_code_for_crude_datasets_too(tmp_path, monkeypatch):
    monkeypatch.delenv("ENERGON_ALLOW", raising=False)
    root = tmp_path / "ds"
    write_shard(root / "0.tar", [("a", {"txt": b"x", "jpg": jpeg(0), "json": b"1"})])
    prepare_dataset(root, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    meta = root / ".nv-meta"
    (meta / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\npart_filter: mine.py:keep\n"
    )
    (meta / "mine.py").write_text("def keep(part):\n    return part != 'jpg'\n")
    with pytest.raises(SecurityError, match=r"part_filter 'mine.py:keep'"):
        get_train_dataset(root, worker_config=config(), batch_size=None)
    dataset = get_val_dataset(
        root, split_part="train", worker_config=config(), batch_size=None, allow=("code",)
    )
    (sample,) = get_savable_loader(dataset)
    assert [part for part in sample if not part.startswith("__")] == ["txt", "json"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sample_loader.py:other", "no function 'other'"),
        ("there.py:sample_loader", "there is no there.py"),
        ("../sample_loader.py", "is not beside it"),
        ("/etc/passwd:sample_loader", "is not beside it"),
    ],
)
def test_says_what_is_wrong_with_the_name_of_a_function(tmp_path, spec, message):
    root = make_coded(tmp_path / "ds")
    path = root / ".nv-meta/dataset.yaml"
    path.write_text(path.read_text().replace("sample_loader.py:sample_loader", spec))
    with pytest.raises(ConfigError, match=message):
        get_train_dataset(root, worker_config=config(), batch_size=None, allow=("code",))


def test_says_where_the_code_fails_as_a_whole(tmp_path):
    root = make_coded(tmp_path / "ds", "import there_is_no_such_module\n")
    with pytest.raises(ConfigError, match=r"sample_loader.py: ModuleNotFoundError"):
        get_train_dataset(root, worker_config=config(), batch_size=None, allow=("code",))


@pytest.mark.parametrize("made", [None, {"texts": "x"}])
def test_says_what_a_sample_loader_has_to_return(made):
    from energon import TextSample

    with pytest.raises(SampleError, match="TextSample"):
        CodeFields(lambda raw: made, TextSample, ()).apply({})


def test_lint_runs_code_only_where_it_is_allowed(tmp_path, monkeypatch):
    monkeypatch.delenv("ENERGON_ALLOW", raising=False)
    root = make_coded(tmp_path / "ds", LOADER.replace('raw["json"]["n"]', '1 // raw["json"]["n"]'))
    alone = Engine(num_workers=1)
    (refused, _) = lint_dataset(root, engine=alone).findings
    assert "ENERGON_ALLOW=code" in refused.reason
    monkeypatch.setenv("ENERGON_ALLOW", "code")
    failing = lint_dataset(root, engine=alone, splits=["train"]).findings
    assert [(each.key, each.reason) for each in failing] == [
        ("s0", "ZeroDivisionError: integer division or modulo by zero")
    ]


def test_samples_stay_crude_without_any_code(tmp_path):
    root = make_crude(tmp_path / "ds", [1])
    dataset = get_val_dataset(root, worker_config=config(), batch_size=None, allow=("code",))
    assert [sample["txt"] for sample in get_savable_loader(dataset)] == ["text 0"]
