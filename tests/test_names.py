"""One name means one thing, and what a kind of dataset is called is known in few places."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import energon
from docs.site.sizes import lines_of_code
from energon.metadataset.kind import KINDS
from energon.samples.sample_types import sample_types

ROOT = Path(energon.__file__).parent


def modules():
    """Yield the path below the package, and the text, of each module."""
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


JSONL_AT_HOME = {
    "formats/meta/jsonl.py": "the format",
    "prepare/jsonl.py": "its index and its splits, verified and repaired",
    "sources/tables/jsonl.py": "the kind",
    "metadataset/kind.py": "the registry of kinds and of tables",
}
JSONL_TABLES = {
    "stages/hooks/failures.py": "quarantine files are lines of JSON",
    "webdataset/records.py": "jsonl_to_samples, a name of the fluid interface",
}


def test_jsonl_is_known_by_name_in_its_own_files_and_in_the_registry_only():
    found = {path for path, text in modules() if "jsonl" in text.lower()}
    elsewhere = {path for path in found if not path.startswith(("cli/", "compat/"))}
    assert elsewhere == {*JSONL_AT_HOME, *JSONL_TABLES}
    # Commands speak of such files in their help, and import nothing that is only for them.
    for path, text in modules():
        if path.startswith("cli/"):
            code = [
                node.id if isinstance(node, ast.Name) else getattr(node, "module", None) or ""
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Name | ast.ImportFrom)
            ]
            assert not [name for name in code if re.search("jsonl", name, re.I)], path


MIXES = {"metadataset"}
"""What is no kind of dataset, but refers to datasets of any kind: it is resolved, not opened."""


def test_only_the_packages_of_kinds_compare_the_name_of_a_kind():
    kinds = {entry.name for entry in KINDS} - MIXES
    for path, text in modules():
        if path.startswith(("sources/", "formats/", "prepare/importers/")):
            continue  # importers have names of their own for what `energon pack` reads
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Compare) or "kind" not in ast.unparse(node):
                continue
            named = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            assert not named & kinds, f"{path}:{node.lineno}: ask what the kind can do"


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
    for path, text in modules():
        if not path.startswith(skipped):
            for name, value in defined_in(text):
                found[name].append((path, value))
    return found


@cache
def defined_in(text):
    """Return the classes and aliases that a module defines, each with what it is."""
    tree = ast.parse(text)
    found = [(node.name, "class") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, ast.unparse(node.value)
            is_alias = name[:1].isupper() and not name.isupper()
            if is_alias and not value.startswith("TypeVar("):
                found.append((name, value))
    return found


def test_no_name_of_a_class_means_two_things():
    twice = {
        name: places
        for name, places in definitions(("compat/",)).items()
        if len({value for _, value in places}) > 1
        or sum(value == "class" for _, value in places) > 1
    }
    assert set(twice) == set(FORCED), twice


MANY = {"command", "main"}
"""Functions of many modules: those of commands, and those that programs begin with."""


def test_no_name_of_a_function_means_two_things():
    found = defaultdict(set)
    for path, text in modules():
        if not path.startswith(("compat/", "webdataset/")):
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    found[node.name].add(path)
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert set(twice) == MANY, twice


def constants(text):
    """Return the names in capitals that a module gives to values, without private ones."""
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=targets, value=value) if not is_type_variable(value):
                yield from names_in(targets)
            case ast.AnnAssign(target=target, value=ast.expr()):
                yield from names_in([target])


def is_type_variable(value):
    return ast.unparse(value).startswith("TypeVar(")


def names_in(targets):
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and each.id.isupper() and not each.id.startswith("_"):
                yield each.id


def test_no_name_of_a_constant_means_two_things():
    found = defaultdict(set)
    for path, text in modules():
        if not path.startswith(("compat/", "webdataset/")):
            for name in constants(text):
                found[name].add(path)
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert set(twice) == {"KIND"}, twice  # each kind of dataset is the `KIND` of its module


def test_compat_has_names_of_the_core_only_where_the_other_package_forces_them():
    core, everything = definitions(("compat/",)), definitions()
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
    for path, text in modules():
        if not path.startswith(("compat/", "webdataset/")):
            code = re.sub(r'"""[\s\S]*?"""|#.*', "", text)
            used.update(re.findall(r"\w+", code))
            for name in re.findall(r"^(?<!@atexit.register\n) *(?:def|class) (\w+)", code, re.M):
                used[name] -= 1
                defined[name].add(path)
    repository = ROOT.parents[1]
    pages = [*repository.glob("docs/*.md"), *repository.glob("docs/site/*.py")]
    pages += [path for name in PROGRAMS for path in repository.glob(f"{name}/**/*.py")]
    pages += [repository / "README.md", *ROOT.glob("viewer/templates/*")]
    for page in pages:
        used.update(re.findall(r"\w+", page.read_text()))
    unused = defaultdict(set)
    for name, paths in defined.items():
        if not (used[name] > 0 or name.startswith("__") or name.endswith("_command")):
            for path in paths:
                unused[path].add(name)
    assert unused == {**CALLED_BY_OTHERS, **FOR_TESTS}


def test_files_are_named_by_what_they_hold():
    verbs = {"looking", "surviving", "watching", "through", "end", "once", "keeping", "opening"}
    stems = {Path(path).stem for path, _ in modules() if not path.startswith("webdataset/")}
    assert not stems & verbs


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
    paths = {path.removesuffix(".py").replace("/", "."): path for path, _ in modules()}
    found = defaultdict(set)
    for path, text in modules():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("energon."):
                package = node.module.removeprefix("energon.")
                for name in (package, *(f"{package}.{each.name}" for each in node.names)):
                    if paths.get(name, path) != path:
                        found[paths[name]].add(path)
    return found


def test_small_modules_that_serve_one_sibling_are_part_of_it_unless_they_mean_something():
    by_module = importers()
    found = set()
    for path, text in modules():
        users = {user for user in by_module[path] if not user.endswith("__init__.py")}
        package = path.partition("/")[0]
        serves_one = len(users) == 1 and {user.partition("/")[0] for user in users} == {package}
        if serves_one and lines_of_code(text) < 80:
            found.add(path)
    assert found <= {*MEAN_SOMETHING}


def test_the_logger_has_one_name():
    for path, text in modules():
        assert {*re.findall(r"^(\w+) = logging\.getLogger\(", text, re.M)} <= {"logger"}, path
