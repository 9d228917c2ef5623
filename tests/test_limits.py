"""The table of limits: named after their variables, overridable, and each of them checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from energon import limits
from energon.errors import ConfigError


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
