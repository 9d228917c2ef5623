"""The public names, and what importing them costs."""

from __future__ import annotations

import inspect
import json
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import energon
from tests.commands import run_python
from tests.datasets import make_captions, make_crude

HEAVY = ("torch", "PIL", "pandas", "cloudpickle", "pydantic", "click", "rich", "yaml")
LOADERS = {"BasicDataLoader", "SavableDataLoader", "get_loader", "get_savable_loader"}


def modules_after(program):
    """Run `program` in a fresh interpreter; return the modules that it has imported."""
    tell = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"
    run = run_python(f"{program}\n{tell}")
    return json.loads(run.stdout.splitlines()[-1])


def command(*arguments):
    return (
        "from energon.cli.main import main\n"
        f"main({list(arguments)!r}, prog_name='energon', standalone_mode=False)"
    )


def test_every_public_name_resolves_to_what_its_room_has():
    for name in energon.__all__:
        home = energon._HOME[name]
        value = getattr(energon, name)
        assert value is getattr(import_module(home), name), name
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ == home, name
            assert inspect.getdoc(value), name


def test_type_checkers_find_the_types():
    assert (Path(energon.__file__).parent / "py.typed").exists()


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'energon' has no attribute 'get_trian_dataset'"):
        energon.get_trian_dataset  # noqa: B018 - the access is the point


def test_systems_without_fcntl_are_told_what_energon_runs_on():
    program = "import sys; sys.modules['fcntl'] = None\nimport energon"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: energon runs on Linux and macOS; on Windows, run it in WSL"
    )


def test_python_runs_energon_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["energon", "info", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("energon", run_name="__main__")
    assert "Usage: python -m energon info" in capsys.readouterr().out


def test_names_can_be_listed_before_they_are_used():
    assert set(energon.__all__) <= set(dir(energon))


def test_megatron_energon_has_the_same_public_names_and_those_of_former_days():
    alias = import_module("megatron.energon")
    assert set(alias.__all__) > set(energon.__all__)
    assert alias.__getattr__("SampleDecoder") is energon.SampleDecoder
    with pytest.raises(AttributeError, match="no attribute 'get_trian_dataset'"):
        alias.get_trian_dataset  # noqa: B018 - the access is the point


def test_megatron_stays_open_for_other_packages():
    import megatron

    assert getattr(megatron, "__file__", None) is None


def test_importing_energon_imports_nothing_heavy():
    modules = modules_after("import energon")
    assert not {name.partition(".")[0] for name in modules} & {*HEAVY, "numpy"}


def test_the_getters_import_nothing_heavy_but_numpy():
    modules = modules_after("from energon import get_train_dataset")
    assert "energon.task_encoder.getters" in modules
    assert not {name.partition(".")[0] for name in modules} & {*HEAVY}


def test_names_of_megatron_energon_come_without_torch_but_for_loaders_which_are_its_data_loaders():
    names = set(import_module("megatron.energon").__all__) - LOADERS
    modules = modules_after(f"from megatron.energon import {', '.join(sorted(names))}")
    assert "energon.task_encoder.getters" in modules
    assert "torch" not in modules


def test_help_comes_without_torch_and_without_the_commands():
    modules = modules_after(command("--help"))
    assert "energon.cli.main" in modules
    assert not {"torch", "numpy", "PIL", "yaml", "energon.prepare"} & set(modules)


def test_info_and_prepare_come_without_torch(tmp_path):
    root = make_crude(tmp_path / "ds", [3, 2])
    modules = modules_after(command("info", str(root)))
    assert "energon.cli.info" in modules
    not_told = {"pydantic", "torch", "PIL", "numpy.ma", "energon.loader.loader"}
    assert not not_told & set(modules)
    modules = modules_after(command("prepare", "--help"))
    assert "energon.cli.prepare" in modules
    assert "torch" not in modules


def test_raw_samples_are_loaded_without_torch(tmp_path):
    root = make_crude(tmp_path / "ds", [3, 2])
    modules = modules_after(
        "from energon import *\n"
        "class Raw(DefaultTaskEncoder):\n"
        "    decoder = None\n"
        "    def batch(self, samples):\n"
        "        return [sample['txt'] for sample in samples]\n"
        "config = WorkerConfig.default_worker_config(num_workers=0)\n"
        f"dataset = get_val_dataset({str(root)!r}, worker_config=config, batch_size=2,\n"
        "                          task_encoder=Raw())\n"
        "assert sum(map(len, get_loader(dataset))) == 5"
    )
    assert "torch" not in modules


NOT_FOR_PLAIN_DATASETS = (
    *("pydantic", "torch", "PIL", "cloudpickle", "sqlite3", "importlib.metadata", "numpy.ma"),
    *("concurrent.futures.thread", "fractions", "gzip", "energon.packing", "energon.stages.pack"),
    *("energon.sources.join", "energon.sources.files.samples", "energon.decode.images"),
    *("energon.metadataset.grammar", "zipfile"),
)
"""What each costs milliseconds to import, and is needed by some datasets only."""


def opened(path, *, typed):
    """A program that opens a dataset, and reads a batch unless samples are typed."""
    return (
        "from energon import WorkerConfig, get_savable_loader, get_train_dataset\n"
        "config = WorkerConfig.default_worker_config(num_workers=0)\n"
        f"dataset = get_train_dataset({str(path)!r}, worker_config=config, batch_size=2)\n"
        + ("" if typed else "next(iter(get_savable_loader(dataset)))\n")
    )


@pytest.mark.parametrize("typed", [False, True])
def test_opening_a_plain_dataset_imports_only_what_it_needs(tmp_path, typed):
    """Each of these makes programs start later; `python -X importtime` tells by how much."""
    root = (make_captions if typed else make_crude)(tmp_path / "ds", [3, 2])
    modules = modules_after(opened(root, typed=typed))
    assert "energon.sources.webdataset" in modules
    assert "yaml" in modules
    of_hooks = {"energon.decode.images"} if typed else set()  # what decodes is chosen when opened
    assert not (set(NOT_FOR_PLAIN_DATASETS) - of_hooks) & set(modules)


def test_balanced_batches_import_only_their_measures(tmp_path):
    """The first batch comes nearly as soon as without balancing."""
    program = opened(make_crude(tmp_path / "ds", [3, 2]), typed=False)
    program = program.replace("import ", "import Balance, ", 1)
    program = program.replace(
        "batch_size=2", 'batch_size=2, balance=Balance(cost="bytes", window=2)'
    )
    modules = modules_after(program)
    assert "energon.sources.measures" in modules
    allowed = {"energon.sources.join"}  # whose samples are measured, too
    assert {*NOT_FOR_PLAIN_DATASETS} & {*modules} <= allowed


def test_what_a_dataset_needs_is_imported_when_it_is_needed(tmp_path):
    """The names above are right: they would be seen."""
    make_captions(tmp_path / "ds", [3, 2])
    (tmp_path / "m.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        "splits: {train: {blend: [{path: ds, subset: {range: [0%, 100%]}}]}}\n"
    )
    modules = modules_after(opened(tmp_path / "m.yaml", typed=False))
    assert {"pydantic", "fractions", "torch", "energon.decode.images"} <= set(modules)


def test_workers_import_neither_torch_nor_what_only_opening_needs(tmp_path):
    """Workers are forked from a process that imports once; hooks of theirs import the rest."""
    root = make_crude(tmp_path / "ds", [3, 2])
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, "
        "get_train_dataset\n"
        "class Telling(DefaultTaskEncoder):\n"
        "    def batch(self, samples):\n"
        "        return sorted(sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    config = WorkerConfig.default_worker_config(num_workers=1)\n"
        f"    dataset = get_train_dataset({str(root)!r}, worker_config=config, batch_size=2,\n"
        "                                task_encoder=Telling())\n"
        "    with get_savable_loader(dataset) as loader:\n"
        "        print(*next(iter(loader)))\n"
    )
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    modules = set(run.stdout.split())
    assert "energon.loader.processes.main" in modules
    assert not modules & {"torch", "PIL", "pydantic", "sqlite3", "numpy.ma", "importlib.metadata"}
