"""One name means one thing, and what a kind of dataset is called is known in few places."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict

import pytest

from docs.site.sizes import lines_of_code
from energon.metadataset.kind import KINDS
from energon.samples.sample_types import sample_types
from tests.source_modules import ROOT, SOURCE, source_modules

OWN = SOURCE / "energon"
OTHER_PACKAGES = ("compat/", "webdataset/")
"""What has the names of other packages."""


def modules(skipped=()):
    """Yield the path below the package of each module, and what is known of it."""
    for module in source_modules():
        path = module.path.removeprefix("energon/")
        if path != module.path and not path.startswith(skipped):
            yield path, module


MIXES = {"metadataset"}
"""What is no kind of dataset, but refers to datasets of any kind: it is resolved, not opened."""


def test_only_the_packages_of_kinds_compare_the_name_of_a_kind():
    kinds = {entry.name for entry in KINDS} - MIXES
    # Importers have names of their own for what `energon pack` reads.
    for path, module in modules(("sources/", "formats/", "prepare/importers/")):
        for line, named in module.kinds:
            assert not named & kinds, f"{path}:{line}: ask what the kind can do"


FORCED = {
    "ShardWriter": "webdataset has a class of this name, with other arguments than ours",
    "TarWriter": "webdataset has a class of this name, with other arguments than ours",
}
FORCED_BY_MEGATRON = {
    *(name for name in sample_types() if name != "TokensSample"),
    "BasicDataLoader",
    "Batch",
    "BatchDataset",
    "Cooker",
    "DefaultTaskEncoder",
    "EPath",
    "FileCacheLazy",
    "FileStoreCachePool",
    "MapDataset",
    "Metadataset",
    "SavableDataLoader",
    "SavableDataset",
    "ShardInfo",
    "TaskEncoder",
    "WorkerConfig",
}
"""Classes of megatron.energon that are more than ours of this name."""


def definitions(skipped=()):
    """Return where each class, and each alias of a type, is defined, and the value of the alias."""
    found = defaultdict(list)
    for path, module in modules(skipped):
        for name, value in module.classes:
            found[name].append((path, value))
    return found


def test_no_name_of_a_class_means_two_things():
    twice = {
        name: places
        for name, places in definitions("compat/").items()
        if len({value for _, value in places}) > 1
        or sum(value == "class" for _, value in places) > 1
    }
    assert set(twice) == set(FORCED), twice


MANY = {
    "functions": {"command", "main"},  # those of commands, and those that programs begin with
    "constants": {"KIND"},  # each kind of dataset is the `KIND` of its module
}


@pytest.mark.parametrize("kind", MANY)
def test_no_name_of_a_function_or_constant_means_two_things(kind):
    found = defaultdict(set)
    for path, module in modules(OTHER_PACKAGES):
        for name in getattr(module, kind):
            found[name].add(path)
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert set(twice) == MANY[kind], twice


def test_compat_has_names_of_the_core_only_where_the_other_package_forces_them():
    core, everything = definitions("compat/"), definitions()
    twice = {
        name
        for name, places in everything.items()
        if name in core and len(places) > len(core[name])
    }
    assert twice <= FORCED_BY_MEGATRON, twice - FORCED_BY_MEGATRON


CALLED_BY_OTHERS = {
    "cli/main.py": {
        "format_commands",
        "format_options",
        "list_commands",
        "shell_complete",
    },
    "cli/mount_fuse.py": {"opendir", "readdir_with_offset", "releasedir", "statfs"},
    "io/backends/object_backend.py": {"http_open", "https_open"},
    "formats/compressed.py": {"readinto"},
    "io/range_file.py": {"readinto"},
    "loader/transport/pickling.py": {"persistent_id", "persistent_load"},
    "loader/transport/reports.py": {"emit"},
}
"""Methods of click, fuse, pickle, urllib, io and logging."""
PROGRAMS = ("benchmarks", "examples")
FOR_TESTS = {"io/files.py": {"forget_stores"}, "testing.py": {"check_resume"}}


def test_the_core_has_no_name_that_only_programs_for_other_packages_use():
    """Each function, method and class is used in the core, or in a page or program of ours."""
    defined, used = defaultdict(set), Counter()
    for path, module in modules(OTHER_PACKAGES):
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", module.text)
        used.update(re.findall(r"\w+", code))
        for name in re.findall(r"^(?<!@atexit.register\n) *(?:def|class) (\w+)", code, re.M):
            used[name] -= 1
            defined[name].add(path)
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/site/*.py")]
    pages += [path for name in PROGRAMS for path in ROOT.glob(f"{name}/**/*.py")]
    pages += [ROOT / "README.md", *OWN.glob("viewer/templates/*")]
    for page in pages:
        used.update(re.findall(r"\w+", page.read_text()))
    unused = defaultdict(set)
    for name, paths in defined.items():
        if not (used[name] > 0 or name.startswith("__") or name.endswith("_command")):
            for path in paths:
                unused[path].add(name)
    assert unused == {**CALLED_BY_OTHERS, **FOR_TESTS}


LARGE_ROOMS = {
    "cli": "a file for each command or the few that share code, named like the command",
    "webdataset": "most modules have the names that programs import",
}


def test_packages_of_more_than_fifteen_files_have_subpackages():
    files = Counter(path.rpartition("/")[0] for path, _ in modules() if "__init__" not in path)
    assert {room for room, count in files.items() if count > 15} == {*LARGE_ROOMS}


MEAN_SOMETHING = {
    "loader/ray_actors/pool.py": "what an actor of its own does",
    "loader/ray_actors/workers.py": "how actors become workers",
}
"""Small modules that only one other module of their package imports, and what each is."""


def importers():
    """Return for each module of the package, by its path, the paths of those that import it."""
    paths = {f"energon.{path.removesuffix('.py').replace('/', '.')}": path for path, _ in modules()}
    found = defaultdict(set)
    for path, module in modules():
        for package, names in module.imports:
            for name in (package, *(f"{package}.{each}" for each in names)):
                if paths.get(name, path) != path:
                    found[paths[name]].add(path)
    return found


def test_small_modules_that_serve_one_sibling_are_part_of_it_unless_they_mean_something():
    by_module = importers()
    found = set()
    for path, module in modules():
        users = {user for user in by_module[path] if not user.endswith("__init__.py")}
        package = path.partition("/")[0]
        serves_one = len(users) == 1 and {user.partition("/")[0] for user in users} == {package}
        if serves_one and lines_of_code(module.text) < 80:
            found.add(path)
    assert found <= {*MEAN_SOMETHING}


NO_NOUNS = {"found", "place", "places", "known", "about", "said"}
"""They tell nothing of a value; CONTRIBUTING has the words for positions."""


def test_variables_are_called_by_what_they_hold():
    for module in source_modules():
        names: set[str] = set()
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
        assert not names & NO_NOUNS, module.path


def test_the_logger_has_one_name():
    for path, module in modules():
        assert {*re.findall(r"^(\w+) = logging\.getLogger\(", module.text, re.M)} <= {"logger"}, (
            path
        )
