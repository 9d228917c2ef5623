from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.samples.crude import META_NAMES, CrudeSample
from energon.sources.shard_samples import MAX_LAZY_BYTES, SlicedRows, WholeRows

NAMES = st.lists(st.text(min_size=1, max_size=12), max_size=5, unique=True)


def keys(count):
    return [f"k{n}" for n in range(count)]


def notes(numbers):
    return ["a.tar"] * len(numbers), [(0, 0, n) for n in numbers], [None] * len(numbers)


def about(number):
    return dict(zip(META_NAMES, (f"k{number}", "a.tar", (0, 0, number), None), strict=True))


def check(make, count, expected):
    """Check what `make` returns, as rows and lazily in another order, which are read once each."""
    rows = make().rows(notes(range(count)))
    assert rows == expected
    assert all(type(row) is CrudeSample for row in rows)
    order = list(reversed(range(count)))
    lazy = make().lazy(notes(order), np.array(order, np.int64))
    assert lazy.samples(0, count) == expected[::-1]


@given(NAMES, st.integers(0, 4))
def test_rows_have_a_part_for_each_column(names, count):
    contents = [[f"{n} {name!r}".encode() for n in range(count)] for name in names]
    expected = [
        {**about(n), **{name: f"{n} {name!r}".encode() for name in names}} for n in range(count)
    ]
    check(lambda: WholeRows(tuple(names), keys(count), contents), count, expected)


@given(
    NAMES,
    st.lists(st.lists(st.binary(max_size=6), min_size=5, max_size=5), max_size=4),
    st.sampled_from([b"", bytes(MAX_LAZY_BYTES)]),
)
@settings(deadline=None)
def test_parts_are_cut_out_of_buffers(names, values, large):
    values = [[*row[:4], row[4] + large] for row in values]
    lengths = [list(map(len, row)) for row in values]
    stops = np.cumsum(np.array(lengths, np.int64).reshape(-1, 5), axis=1).T[: len(names)]
    starts = stops - np.array(lengths, np.int64).reshape(-1, 5).T[: len(names)]
    check(
        lambda: SlicedRows(
            tuple(names), keys(len(values)), map(b"".join, values), np.array((starts, stops))
        ),
        len(values),
        [{**about(n), **dict(zip(names, row, strict=False))} for n, row in enumerate(values)],
    )


@pytest.mark.parametrize(
    "name", ["'", '"', "\\", "\n", "{x}", "']: 1, __import__('os').abort(): '", "ü\udc80", "\0"]
)
def test_names_of_parts_are_data_and_never_code(name):
    check(lambda: WholeRows((name,), keys(1), [[b"v"]]), 1, [{**about(0), name: b"v"}])
