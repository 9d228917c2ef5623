"""The table of limits: named after their variables, overridable, and each of them checked."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from energon import limits
from energon.errors import ConfigError
from tests.bounded import run_bounded


def test_rows_are_named_after_themselves():
    assert limits.LIMITS
    for name, limit in limits.LIMITS.items():
        assert limit.name == name
        assert limit.variable == f"ENERGON_LIMIT_{name}"
        assert limit.default > 0
        assert limit.variable in limit.hint


def test_environment_sets_another_limit(monkeypatch):
    limit = limits.BRACE_NAMES
    assert limit.value == limit.default
    monkeypatch.setenv(limit.variable, "1_000")
    assert limit.value == 1000


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5"])
def test_rejects_what_is_no_number(monkeypatch, text):
    monkeypatch.setenv("ENERGON_LIMIT_BRACE_NAMES", text)
    with pytest.raises(ConfigError, match="ENERGON_LIMIT_BRACE_NAMES"):
        limits.BRACE_NAMES.value  # noqa: B018


def test_the_documentation_lists_every_limit():
    page = (Path(__file__).parents[1] / "docs/security.md").read_text()
    rows = [
        f"| `{limit.variable}` | {limit.default:,} | {limit.meaning} |"
        for limit in limits.LIMITS.values()
    ]
    assert [row for row in rows if row not in page] == []


TOO_LARGE = {
    "a document on disk": """
from energon.metadataset.document import read_metadataset
path = root / "mix.yaml"
sparse(path)
read_metadataset(str(path))
""",
    "the splits of a dataset": """
from energon.formats.meta.info import load_split
(root / ".nv-meta").mkdir()
sparse(root / ".nv-meta/split.yaml")
load_split(root)
""",
    "a document in a store": """
from energon.io.files import read_document
from energon.io.files import open_store
store, _ = open_store("memory://x")
taken = 0

def endless(key, start, version):
    global taken
    while True:
        taken += 1 << 20
        yield bytes(1 << 20)

store.backend.stream = endless
try:
    read_document("memory://x/mix.yaml")
finally:
    assert taken < 300 << 20, taken
""",
    "what the index of tables says": """
from energon_mds.source import mds_rows
sparse(root / "index.json")
mds_rows(root)
""",
    "a quarantine file": """
from energon.prepare.verify.quarantine import load_quarantine
sparse(root / "bad.txt")
load_quarantine(root / "bad.txt")
""",
}

LARGE = """
import sys
import textwrap
from pathlib import Path
from energon.errors import ConfigError, FormatError
root = Path(sys.argv[1])

def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)

def refused():
{code}

try:
    refused()
except (ConfigError, FormatError) as error:
    assert "ENERGON_LIMIT_DOCUMENT_BYTES" in str(error), error
else:
    raise AssertionError("nothing was refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOO_LARGE)
def test_no_more_of_a_document_is_read_than_it_may_have(tmp_path, kind):
    code = LARGE.replace("{code}", textwrap.indent(TOO_LARGE[kind], "    "))
    done = run_bounded(code.replace("    global taken", "    nonlocal taken"), tmp_path)
    assert done.returncode == 0, done.stderr
