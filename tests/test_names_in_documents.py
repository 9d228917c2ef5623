"""What documents name is never called: for callables of Python, numpy and torch, and all documents.

The table of callables is made from what the modules have. A profiler watches each of them.
"""

from __future__ import annotations

import colorsys
import gc
import importlib
import json
import logging
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from types import BuiltinFunctionType, FunctionType

import pytest
from click.testing import CliRunner

import energon.webdataset as wds
from energon import (
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    prepare_metadataset,
)
from energon.cli.main import main
from energon.compat.megatron.datasets.webdataset import StandardWebdatasetFactory
from energon.compat.megatron.getters import load_dataset
from energon.errors import ConfigError, EnergonError, SecurityError, StateError
from energon.inspect.info import describe
from energon.inspect.lint import lint_dataset
from energon.prepare.dataset import prepare_dataset
from energon.prepare.engines import Engine
from energon.samples.field_map import FieldMap
from energon.samples.sample_types import resolve_class
from megatron.energon.dataset_config import load_config
from tests.datasets import make_captions, write_shard
from tests.effort import some

PYTHON = (
    "os posix subprocess shutil tempfile runpy code codeop pty webbrowser pathlib builtins io sys "
    "importlib pickle marshal shelve dbm sqlite3 ctypes ctypes.util logging logging.config "
    "multiprocessing multiprocessing.managers threading signal atexit gc socket ssl urllib.request "
    "http.client http.server ftplib smtplib zipfile tarfile gzip mmap timeit trace pdb cProfile "
    "operator functools inspect unittest.mock asyncio concurrent.futures xml.etree.ElementTree"
)
NUMPY = "numpy numpy.lib.npyio numpy.lib.format numpy.ctypeslib numpy.testing numpy.f2py"
TORCH = (
    "torch torch.hub torch.serialization torch.jit torch.multiprocessing torch.utils.data "
    "torch.distributed torch.utils.cpp_extension torch.package"
)
MODULES = f"{PYTHON} {NUMPY} {TORCH}".split()
MUST = {
    "builtins": "eval exec __import__ open compile breakpoint",
    "os": "system remove popen execv",
    "subprocess": "Popen check_output run",
    "logging": "basicConfig",
    "numpy": "save savez load fromfile",
    "torch": "load save",
    "torch.hub": "load",
    "pickle": "loads load",
}
MOST_OF_A_MODULE = 3


def callables():
    """Yield the callables of the modules: those that have to be there, and some of the others."""
    for module in MODULES:
        found = vars(importlib.import_module(module))
        names = [
            name for name in sorted(found) if name[0] != "_" and watched(found[name]) is not None
        ]
        step = max(1, len(names) // MOST_OF_A_MODULE)
        for name in dict.fromkeys([*MUST.get(module, "").split(), *names[::step]]):
            yield module, name


def watched(value):
    """What shows that `value` is called: its code, or itself if it is built in."""
    # Not isinstance, which asks objects what they are: some warn, or load what they stand for.
    kind = type(value)
    if kind is FunctionType:
        return value.__code__
    if kind is BuiltinFunctionType:
        return value
    made = vars(value).get("__init__") if issubclass(kind, type) else None
    return made.__code__ if type(made) is FunctionType else None


def target_of(module, name):
    return watched(vars(sys.modules[module])[name])


@contextmanager
def watching(names):
    """Give a set that gets the names of what is called meanwhile, in all threads."""
    targets = {id(target): name for name in names if (target := target_of(*name)) is not None}
    called = set()

    def profile(frame, event, argument):
        target = frame.f_code if event == "call" else argument if event == "c_call" else None
        if id(target) in targets:
            called.add(targets[id(target)])

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("documents")
    make_captions(root / "typed", [3, 2])
    return root


CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)
ALONE = Engine(num_workers=1)
NAMED = {"batch_size": None, "worker_config": CONFIG}


def described(folder, description):
    """Write a description of the typed dataset; return the name of its file."""
    text = json.dumps(description)
    (folder / "typed/.nv-meta/hostile.yaml").write_text(text)
    return "hostile.yaml"


def mixed(folder, document):
    (folder / "mix.yaml").write_text(json.dumps(document))
    return folder / "mix.yaml"


def sample_type(module, name):
    fields = {"args": "txt", "repo_or_dir": "txt", "model": "txt", "filename": "txt"}
    return {
        "sample_type": {"__module__": module, "__class__": name},
        "field_map": {**fields, "image": "jpg", "caption": "txt"},
    }


def all_of(dataset):
    return list(islice(get_loader(dataset), 3))


def train_on_a_type(folder, module, name):
    config = described(folder, sample_type(module, name))
    all_of(get_train_dataset(folder / "typed", dataset_config=config, **NAMED))


def validate_on_a_type(folder, module, name):
    config = described(folder, sample_type(module, name))
    for get in (get_val_dataset, get_val_datasets):
        get(folder / "typed", dataset_config=config, **NAMED)


def load_a_type(folder, module, name):
    config = described(folder, sample_type(module, name))
    loader = load_dataset(folder / "typed", dataset_config=config)
    loader.get_datasets(training=False, split_part="train", worker_config=CONFIG)


def lint_a_type(folder, module, name):
    config = described(folder, sample_type(module, name))
    report = lint_dataset(folder / "typed", dataset_config=config, engine=ALONE)
    assert not report.ok
    raise SecurityError(report.findings[0].reason)


def train_on_a_joiner(folder, module, name, key="__class__"):
    member = {"path": "typed", "split_part": "train"}
    node = {"join": [member, member], "joiner": {"__module__": module, key: name}}
    path = mixed(folder, {"splits": {"train": node}})
    prepare_metadataset(path)
    describe(path)
    all_of(get_train_dataset(path, **NAMED))


def train_on_a_joining_function(folder, module, name):
    train_on_a_joiner(folder, module, name, "__function__")


def lint_a_joiner(folder, module, name):
    with suppress(SecurityError, ConfigError):
        train_on_a_joiner(folder, module, name)
    # It decodes the datasets, and knows nothing of a joiner that may not be looked at.
    report = lint_dataset(folder / "mix.yaml", engine=ALONE)
    assert [each.reason for each in report.findings if "has no" not in each.reason] == []


def load_the_class_of_a_description(folder, module, name):
    document = {"__module__": module, "__class__": name, "args": "x", "filename": "x"}
    load_config(document, default_type=StandardWebdatasetFactory)


def load_a_value_of_a_description(folder, module, name):
    document = {"path": str(folder / "typed"), "worker_config": CONFIG, "field_map": {"x": "txt"}}
    document["sample_type"] = {"__module__": module, "__class__": name}
    load_config(document, default_type=StandardWebdatasetFactory)


def train_on_code_beside_a_dataset(folder, module, name):
    description = {
        "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
        "sample_loader": f"{module}.py:{name}",
        "part_filter": f"{module}.py:{name}",
    }
    config = described(folder, description)
    get_train_dataset(folder / "typed", dataset_config=config, **NAMED)


NEED_CODE = [
    train_on_a_type,
    validate_on_a_type,
    load_a_type,
    lint_a_type,
    train_on_a_joiner,
    train_on_a_joining_function,
    load_the_class_of_a_description,
    load_a_value_of_a_description,
    train_on_code_beside_a_dataset,
]


def train_on_a_dataset_class(folder, module, name):
    config = described(folder, {"__module__": module, "__class__": name})
    get_train_dataset(folder / "typed", dataset_config=config, **NAMED)


def train_on_a_decoder(folder, module, name):
    description = sample_type("megatron.energon", "CaptioningSample")
    description["field_map"] = {"image": "jpg", "caption": "txt"}
    description["decoder"] = {"__module__": module, "__class__": name, "args": "x"}
    config = described(folder, description)
    get_train_dataset(folder / "typed", dataset_config=config, **NAMED)


def train_on_a_metadataset_class(folder, module, name):
    document = {"__module__": module, "__class__": name, "splits": {"train": {"path": "typed"}}}
    get_train_dataset(mixed(folder, document), **NAMED)


def restore_a_state(folder, module, name):
    loader = get_savable_loader(get_train_dataset(folder / "typed", **NAMED))
    next(iter(loader))
    state = loader.save_state_rank()
    for lane in state["positions"].values():
        lane["state"] = {"__module__": module, "__class__": name, "__reduce__": [name, ["x"]]}
    loader = get_savable_loader(get_train_dataset(folder / "typed", **NAMED))
    loader.restore_state_rank(state)
    next(iter(loader))


HAVE_NO_SUCH_NAMES = [
    train_on_a_dataset_class,
    train_on_a_decoder,
    train_on_a_metadataset_class,
    restore_a_state,
]


def label_samples(folder, module, name):
    labels = {"__module__": module, "__class__": name, "__function__": name}
    document = {"splits": {"train": {"path": "typed", "subflavors": labels}}}
    (sample, *_) = all_of(get_train_dataset(mixed(folder, document), **NAMED))
    assert sample.__subflavors__ == labels


def stream_with_options(folder, module, name):
    options = {"__module__": module, "__class__": name}
    shards = str(folder / "typed/shards/000.tar")
    (folder / "web.yaml").write_text(
        json.dumps({"dataset": [{"shards": shards, "options": options}]})
    )
    (sample, *_) = wds.WebDataset(str(folder / "web.yaml")).slice(2)
    assert sample["__options__"] == options


def ask_about_a_dataset(folder, module, name):
    described(folder, sample_type(module, name))
    describe(folder / "typed", dataset_config="hostile.yaml")


STAY_DATA = [label_samples, stream_with_options, ask_about_a_dataset, lint_a_joiner]
TAKE_LONG = [train_on_a_joiner, train_on_a_joining_function, lint_a_joiner]
READ = [*NEED_CODE, *HAVE_NO_SUCH_NAMES, *STAY_DATA]


@cache
def names_to_try():
    """Each callable, and some by other ways to it."""
    names = list(callables())
    dotted = [
        (module.partition(".")[0], f"{module.partition('.')[2]}.{name}")
        for module, name in names
        if "." in module
    ]
    assert len(names) > 150
    return names, [*names, *dotted[::4], ("os", "path.join"), ("json", "decoder.JSONDecoder")]


def names_for(read):
    """The names that matter most, and of the others those that fall to this way to read them."""
    names, tried = names_to_try()
    first, share = READ.index(read), 40 if read in TAKE_LONG else 10  # at least one has each name
    most = [name for name in names if name[1] in MUST.get(name[0], "").split()]
    return [*(most[first % 4 :: 4] if read in TAKE_LONG else most), *tried[first % share :: share]]


@pytest.mark.slow
@pytest.mark.parametrize("read", READ, ids=lambda read: read.__name__)
def test_nothing_that_a_document_names_is_called(folder, monkeypatch, read):
    monkeypatch.delenv("ENERGON_ALLOW", raising=False)
    names, _ = names_to_try()
    with watching(names) as used_anyway:
        attempt(read, folder, "megatron.energon", "CaptioningSample")
        attempt(read, folder, colorsys.__name__, "rgb_to_hls")
        attempt(read, folder, "no.such.module", "nothing")
        gc.collect()  # which closes files
        threading.Thread(target=int).start()  # as loaders do when their last thread has ended
    # What energon itself uses cannot be watched, and need not be: the others tell enough.
    used = {id(target_of(*name)) for name in used_anyway}
    quiet = [name for name in names if id(target_of(*name)) not in used]
    assert len(quiet) > 100
    for module, name in some(names_for(read), 5):
        with watching(quiet) as called:
            error = attempt(read, folder, module, name)
        assert not called, f"{module}.{name}"
        if read in STAY_DATA:
            assert error is None
            continue
        assert isinstance(error, SecurityError | ConfigError | StateError), f"{module}.{name}"
        assert isinstance(error, EnergonError)
        if read in NEED_CODE:
            message = str(error)
            assert "ENERGON_ALLOW=code" in message
            assert 'allow=("code",)' in message


def attempt(read, folder, module, name):
    """Return the error that reading a document ends in; None if there is none."""
    try:
        read(folder, module, name)
    except EnergonError as error:
        return error
    return None


def test_the_watch_sees_calls():
    names = [("subprocess", "check_output"), ("os", "getcwd"), ("tempfile", "TemporaryDirectory")]
    with watching(names) as called:
        thread = threading.Thread(target=lambda: importlib.import_module("os").getcwd())
        thread.start()
        thread.join()
        importlib.import_module("tempfile").TemporaryDirectory().cleanup()
    assert called == {("os", "getcwd"), ("tempfile", "TemporaryDirectory")}


EFFECTS = {
    "torch.hub.load": {"repo_or_dir": "txt", "model": "json[name]", "source": "json[source]"},
    "numpy.savez": {"file": "txt"},
    "logging.basicConfig": {"filename": "txt", "filemode": "json[mode]"},
    "subprocess.Popen": {"args": "json[command]"},
}


@pytest.mark.slow
@pytest.mark.parametrize("target", EFFECTS)
@pytest.mark.parametrize("allow", [False, True], ids=["refused", "allowed"])
def test_attacks_that_worked_have_no_effect_unless_code_is_allowed(
    tmp_path, monkeypatch, target, allow
):
    """Real data with real effects: a repository of code, a file written, a log truncated."""
    mark = tmp_path / "mark.npz"
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "hubconf.py").write_text(
        f"open({str(mark)!r}, 'w').close()\ndef model(**rest): return rest\n"
    )
    text = str(repository if target == "torch.hub.load" else mark)
    values = {
        "name": "model",
        "source": "local",
        "mode": "w",
        "command": ["touch", str(mark)],
    }
    parts = {"txt": text.encode(), "json": json.dumps(values).encode()}
    write_shard(tmp_path / "ds/0.tar", [("a", parts)])
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    module, _, name = target.rpartition(".")
    importlib.import_module(module)
    description = {
        "sample_type": {"__module__": module, "__class__": name},
        "field_map": EFFECTS[target],
    }
    (tmp_path / "ds/.nv-meta/dataset.yaml").write_text(json.dumps(description))
    monkeypatch.setattr(logging.root, "handlers", [])
    if allow:
        assert effect_of(module, name, EFFECTS[target], parts, mark)
        return
    with pytest.raises(SecurityError):
        all_of(get_train_dataset(tmp_path / "ds", **NAMED))
    runner = CliRunner()
    for command in (["lint"], ["info"], ["plan"], ["preview"], ["prepare", "--tar-index-only"]):
        runner.invoke(main, [*command, str(tmp_path / "ds")])
    done = subprocess.run(
        [sys.executable, "-m", "energon", "lint", str(tmp_path / "ds")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--allow code" in done.stdout
    with pytest.raises(SecurityError):
        load_config({**description["sample_type"], **values}, default_type=dict)
    assert not mark.exists()


def effect_of(module, name, field_map, parts, mark):
    """Whether an attack leaves its mark where code is allowed: only then is its absence news."""
    found = resolve_class(module, name, allow=("code",))
    decoded = {"txt": parts["txt"].decode(), "json": json.loads(parts["json"])}
    made = found(**FieldMap.parse(field_map).apply(decoded))
    if isinstance(made, subprocess.Popen):
        made.wait()
    for handler in logging.root.handlers:
        handler.close()
    return mark.exists()
