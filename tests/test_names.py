"""One name means one thing, and what a kind of dataset is called is known in few places."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import energon

ROOT = Path(energon.__file__).parent


def modules():
    """Yield the path below the package, and the text, of each module."""
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


JSONL_AT_HOME = {
    "formats/meta/jsonl.py": "the format",
    "prepare/jsonl.py": "indexes, splits and upkeep",
    "sources/jsonl.py": "the kind",
    "metadataset/kind.py": "the registry",
}
JSONL_TABLES = {
    "prepare/importers/folder.py": "metadata.jsonl is a table of image folders",
    "prepare/importers/table.py": "tables of JSON lines are a source of `energon pack`",
    "sources/media_folder.py": "metadata.jsonl is a table of media folders",
    "stages/quarantine.py": "quarantine files are lines of JSON",
    "webdataset/records.py": "jsonl_to_samples, a name of the fluid interface",
    "webdataset/__init__.py": "jsonl_to_samples, a name of the fluid interface",
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
