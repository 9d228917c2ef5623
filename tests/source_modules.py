"""The facts about modules of the source that checks of its structure compare, from one walk."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

BY_NAME = {"getattr", "setattr", "delattr", "hasattr"}
BY_TEXT = {
    *("import_module", "__import__", "exec", "eval", "resolve_name", "run_path", "run_module"),
    *("attrgetter", "methodcaller", "Unpickler", "unsafe_load", "full_load", "find_spec"),
}
UNPICKLING = {
    *("pickle.loads", "pickle.load", "cloudpickle.loads", "cloudpickle.load", "marshal.loads"),
    *("torch.load", "np.load", "shelve.open", "dill.loads", "joblib.load"),
}
PRINTING = {"click.echo", "click.secho", "print"}
CALLS = {
    *(*BY_NAME, *BY_TEXT, "get", "pop", "compile"),
    *(name.rpartition(".")[2] for name in (*UNPICKLING, *PRINTING)),
}
FACTS = (
    *(ast.Constant, ast.Attribute, ast.Call, ast.Subscript, ast.Import, ast.ImportFrom),
    *(ast.ClassDef, ast.Compare, ast.JoinedStr),
)


@dataclass
class SourceModule:
    """What a module imports, defines, says and calls.

    Attributes:
        path: Where it is, below the folder of sources.
        text: Its program.
        imports: What it imports anywhere, with the names that it takes from there.
        attributes: Names of names, such as "os.replace", whether it calls them or not.
        classes: Its classes, and aliases of types with what they stand for.
        functions: Its public functions.
        constants: Its public names in capitals.
        strings: Strings of several words, with the numbers of their lines.
        formatted: Strings with values, which are in braces.
        called: The last names of functions that it calls.
        prints: The calls that print.
        kinds: Constants that are compared with a kind, with the numbers of their lines.
        lookups: What looks up, imports, runs or unpickles something by a name that is not written
            there.
    """

    path: str
    text: str
    imports: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    classes: list[tuple[str, str]] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    strings: list[tuple[int, str]] = field(default_factory=list)
    formatted: list[str] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    prints: list[str] = field(default_factory=list)
    kinds: list[tuple[int, set[object]]] = field(default_factory=list)
    lookups: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        tree = ast.parse(self.text)
        for node in tree.body:
            self._add_definition(node)
        for node in ast.walk(tree):
            if isinstance(node, FACTS):
                self._add(node)

    def _add_definition(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef(name=name) if not name.startswith("_"):
                self.functions.add(name)
            case ast.Assign(targets=targets, value=value):
                text = ast.unparse(value)
                if text.startswith("TypeVar("):
                    return
                self.constants |= {*_constants(targets)}
                match targets[0]:
                    case ast.Name(id=name) if name[:1].isupper() and not name.isupper():
                        self.classes.append((name, text))
            case ast.AnnAssign(target=target, value=ast.expr()):
                self.constants |= {*_constants([target])}

    def _add(self, node: ast.AST) -> None:
        match node:
            case ast.Constant(value=str(text)):
                if " " in text:
                    self.strings.append((node.lineno, text))
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                self.attributes.add(f"{module}.{name}")
            case ast.Call(func=ast.Name(id=last) | ast.Attribute(attr=last)):
                self.called.add(last)
                if last not in CALLS:
                    return
                name = ast.unparse(node.func)
                if _is_lookup(node, name):
                    self.lookups.add(ast.unparse(node))
                elif name in PRINTING:
                    self.prints.append(ast.unparse(node))
            case ast.Subscript(value=value, slice=index):
                if not isinstance(index, ast.Constant) and _is_namespace(value):
                    self.lookups.add(ast.unparse(node))
            case ast.Import(names=names):
                self.imports += [(each.name, ()) for each in names]
            case ast.ImportFrom(module=module, level=level, names=names):
                self.imports.append(("." * level + (module or ""), tuple(n.name for n in names)))
                self.attributes |= {f"{module}.{each.name}" for each in names}
            case ast.ClassDef(name=name):
                self.classes.append((name, "class"))
            case ast.Compare():
                if "kind" in ast.unparse(node):
                    found = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                    self.kinds.append((node.lineno, found))
            case ast.JoinedStr(values=values):
                self.formatted.append("".join(map(_in_braces, values)))


def _constants(targets: list[ast.expr]) -> Iterator[str]:
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and each.id.isupper() and not each.id.startswith("_"):
                yield each.id


def _in_braces(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    return f"{{{ast.unparse(part.value)}}}"


def _is_lookup(call: ast.Call, name: str) -> bool:
    function, arguments = call.func, call.args
    last = name.rpartition(".")[2]
    if last in BY_NAME:
        return not (len(arguments) > 1 and isinstance(arguments[1], ast.Constant))
    if (
        isinstance(function, ast.Attribute)
        and last in ("get", "pop")
        and _is_namespace(function.value)
    ):
        return not isinstance(arguments[0], ast.Constant)
    return last in BY_TEXT or name in UNPICKLING or name == "compile"


def _is_namespace(node: ast.expr) -> bool:
    text = ast.unparse(node)
    is_vars = isinstance(node, ast.Call) and text.startswith("vars(")
    return is_vars or text in ("sys.modules", "globals()", "locals()") or text.endswith("__dict__")


def modules_in(folder: Path) -> list[SourceModule]:
    """Parse all modules of a folder."""
    gc.disable()  # trees have no circles, and looking for some takes longer than parsing
    try:
        return [
            SourceModule(path.relative_to(folder).as_posix(), path.read_text())
            for path in sorted(folder.rglob("*.py"))
        ]
    finally:
        gc.enable()


@cache
def source_modules() -> list[SourceModule]:
    """Return the modules of the source, parsed once in this process."""
    return modules_in(SOURCE)
