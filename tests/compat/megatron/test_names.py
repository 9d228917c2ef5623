"""The import paths that programs written for Megatron-Energon use."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import energon
import megatron.energon
from energon.compat.megatron import finder
from energon.compat.megatron.finder import HOMES, MODULES, stub_of, write_stubs
from energon.samples.sample_types import sample_types
from tests.commands import run_python
from tests.compat.names import listed

# What programs import that neither version 7 nor the recorded older ones have.
FORMER_NAMES = {
    "": "__version__ BaseCoreDataset BaseWebdataset DefaultGenericWebdataset BasicDataLoader "
    "DefaultDecoderWebdataset FatalSampleError VQAOCRSample",
    "cli.main": "main",
    "flavors": "VQAOCRSample AVDecoderType ImageDecoderType",
    "flavors.webdataset.sample_decoder": "AVDecoderType ImageDecoderType",
    "wrappers": "WatchdogDataset",
    **dict.fromkeys(
        (
            *("tools.prepare", "tools.prepare_media", "tools.lint", "tools.info", "tools.mount"),
            *("tools.preview", "tools.analyze_debug", "tools.checkpoint"),
        ),
        "command",
    ),
}


def modules():
    return [f"megatron.energon.{module}" for module in MODULES if module]


def test_former_names_are_found_where_programs_import_them():
    for module, members in FORMER_NAMES.items():
        home = import_module(f"megatron.energon.{module}".rstrip("."))
        for name in members.split():
            assert getattr(home, name) is not None
            assert name in home.__all__


def test_names_of_megatron_energon_are_exported():
    """That all of them are there, in all modules, is in `test_public_names`."""
    entries = listed("megatron.energon")["modules"]["megatron.energon"].items()
    recorded = {name for name, entry in entries if entry["kind"] != "module"}
    assert recorded <= set(megatron.energon.__all__)


def test_every_name_of_every_module_resolves_to_the_same_object():
    for module in map(import_module, modules()):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            assert name in dir(module)
            if name in energon.__all__ and name not in OTHERS:
                assert value is getattr(energon, name), (module, name)


def test_names_that_do_not_exist_are_attribute_errors():
    for module in map(import_module, modules()):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            module.nothing  # noqa: B018 - the access is the point


def test_modules_are_there_without_being_imported_first():
    for module in (name for name in modules() if name.count(".") == 2):
        short = module.rpartition(".")[2]
        if not short.startswith("_"):
            assert short in dir(megatron.energon)
    run = "import megatron.energon as e; print(e.wrappers.BatchDataset, e.errors.SkipSample)"
    run_python(run)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import megatron.energon.edataclass", "pass"])
def test_the_function_of_the_same_name_as_a_module_wins(first):
    run = f"{first}\nfrom megatron.energon import edataclass\n@edataclass\nclass A: x: int\nA(x=3)"
    run_python(run)


def test_only_the_package_itself_is_a_file():
    folder = Path(megatron.energon.__file__).parent
    assert [file.name for file in folder.rglob("*.py")] == ["__init__.py"]


# What programs of Megatron-Energon may do more with than programs of ours.
OTHERS = {
    *("TaskEncoder", "DefaultTaskEncoder"),
    *("get_train_dataset", "get_val_dataset", "get_val_datasets"),
    *("SavableDataset", "traverse_metadataset", "__version__"),
    *("BasicDataLoader", "SavableDataLoader", "get_loader", "get_savable_loader", "WorkerConfig"),
    *("Batch", "Cooker", "EPath", "Sample"),
    *(name for name in sample_types() if name != "TokensSample"),
}


def test_names_of_energon_are_the_same_objects_but_for_a_few():
    at_home = {entry.partition("=")[0] for names in HOMES.values() for entry in names.split()}
    assert at_home & set(energon.__all__) == OTHERS - {"__version__"}
    for name in sorted(OTHERS - {"SavableDataset", "__version__"}):
        ours, theirs = getattr(energon, name), getattr(megatron.energon, name)
        assert ours is not theirs
        assert not inspect.isclass(ours) or issubclass(theirs, ours)
        assert inspect.isclass(ours) or takes_as_much(theirs, ours)


def takes_as_much(theirs, ours):
    known = inspect.signature(theirs).parameters
    return all(
        known[name].default == each.default and known[name].kind is each.kind
        for name, each in inspect.signature(ours).parameters.items()
        if name not in ("must_exist", "verdict_seconds", "context_parallel", "shared_workers")
        and not name.startswith("trace")
    )


def test_inspect_knows_modules_and_what_is_in_them():
    table = Path(finder.__file__).read_text()
    for module in map(import_module, modules()):
        assert inspect.getsource(module) == table
        for name in module.__all__:
            if inspect.isclass(kind := getattr(module, name)):
                assert inspect.getmodule(kind).__name__.startswith("energon")


def test_objects_are_pickled_and_modules_reloaded_in_a_fresh_process(tmp_path):
    from megatron.energon.flavors.captioning import CaptioningSample

    sample = CaptioningSample(__key__="a", __restore_key__=(), image=1, caption="b")
    (tmp_path / "sample").write_bytes(pickle.dumps(sample))
    run = (
        "import pickle, sys, importlib\n"
        "import megatron.energon.flavors.captioning as module\n"
        "sample = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert type(sample) is module.CaptioningSample, sample\n"
        "assert importlib.reload(module).CaptioningSample is type(sample)\n"
    )
    run_python(run, tmp_path / "sample")


def test_old_pickles_name_classes_by_the_path_of_megatron_energon():
    data = b"cmegatron.energon.flavors.captioning\nCaptioningSample\n."
    assert issubclass(pickle.loads(data), energon.CaptioningSample)


def test_stubs_have_the_names_of_the_module():
    for name in ("", *(name.removeprefix("megatron.energon.") for name in modules())):
        space = {}
        exec(stub_of(name), space)
        module = import_module(f"megatron.energon.{name}".rstrip("."))
        assert set(module.__all__) <= set(space["__all__"])
        for member in module.__all__:
            if member != "dataclass_slots":
                assert space[member] == getattr(module, member), (name, member)


@pytest.mark.slow
def test_type_checkers_read_the_stubs(tmp_path):
    write_stubs(tmp_path / "megatron" / "energon")
    program = tmp_path / "program.py"
    program.write_text(
        "from megatron.energon.task_encoder.base import DefaultTaskEncoder\n"
        "from megatron.energon import WorkerConfig, nothing\n"
        "reveal_type(WorkerConfig)\n"
        "class Mine(DefaultTaskEncoder[int, int, int, int]): ...\n"
    )
    (tmp_path / "energon").symlink_to(Path(energon.__file__).parent)
    # Without site-packages, where an editable installation of this checkout would come first.
    options = "--no-incremental --no-site-packages --follow-imports=silent"
    options += " --ignore-missing-imports --explicit-package-bases --namespace-packages"
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options.split(), str(program)],
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "Revealed type is" in checked.stdout
    assert "WorkerConfig" in checked.stdout
    errors = [line for line in checked.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1
    assert 'has no attribute "nothing"' in errors[0]
