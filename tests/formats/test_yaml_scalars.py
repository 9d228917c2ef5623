from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.formats.meta.yaml import scalar, scalar_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("~", None),
        ("NULL", None),
        ("true", True),
        ("Yes", True),
        ("no", False),
        ("FALSE", False),
        ("12", 12),
        ("-3", -3),
        ("+3", 3),
        ("1_000", 1000),
        ("010", 10),
        ("0", 0),
        ("1.5", 1.5),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e5", 1e5),
        ("-1.5E-3", -1.5e-3),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("0x10", "0x10"),
        ("0o10", "0o10"),
        ("on", "on"),
        ("y", "y"),
        ("1_", "1_"),
        ("1__0", "1__0"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("infinity", "infinity"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_mean_what_the_dialect_says(text, value):
    found = scalar(text)
    assert (found, type(found)) == (value, type(value))


def test_nan_is_a_number():
    assert math.isnan(scalar(".nan"))


def energons_scalar(text: str) -> Any:
    """What Energon's reader makes of a plain scalar, said as simply as possible."""
    words = {"null": None, "~": None, "true": True, "yes": True, "false": False, "no": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (float,) if "." in text or "e" in text else (int,):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


TEXT = st.text(max_size=12) | st.text("0123456789eE+-._:xinfIaNn", max_size=8)


@given(st.booleans() | st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_values_are_written_as_energon_reads_them(value):
    text = scalar_text(value)
    for read in (scalar, energons_scalar):
        assert (read(text), type(read(text))) == (value, type(value))


@given(TEXT)
def test_text_is_quoted_where_any_reader_would_take_it_for_something_else(value):
    text = scalar_text(value)
    if not text.startswith('"'):
        assert text == value == scalar(text) == energons_scalar(text)


@settings(max_examples=1000)
@given(st.text("019e+-._", min_size=1, max_size=6))
def test_numbers_are_those_of_energon(text):
    ours, theirs = scalar(text), energons_scalar(text)
    assert (ours, type(ours)) == (theirs, type(theirs))
