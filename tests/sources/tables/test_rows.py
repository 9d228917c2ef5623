from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.samples.crude import CrudeSample
from energon.sources.shard_samples import META_NAMES, join_rows, slice_rows

NAMES = st.lists(st.text(min_size=1, max_size=12), max_size=5, unique=True)


def meta(count):
    keys = [f"k{n}" for n in range(count)]
    return keys, ["a.tar"] * count, [(0, 0, n) for n in range(count)], [None] * count


def about(number):
    return dict(zip(META_NAMES, (f"k{number}", "a.tar", (0, 0, number), None), strict=True))


@given(NAMES, st.integers(0, 4))
def test_rows_have_a_part_for_each_column(names, count):
    contents = [[f"{n} {name!r}".encode() for n in range(count)] for name in names]
    rows = join_rows(tuple(names), meta(count), contents)
    assert rows == [
        {**about(n), **{name: f"{n} {name!r}".encode() for name in names}} for n in range(count)
    ]
    assert all(type(row) is CrudeSample for row in rows)


@given(NAMES, st.lists(st.lists(st.binary(max_size=6), min_size=5, max_size=5), max_size=4))
def test_parts_are_cut_out_of_buffers(names, values):
    buffers, starts, stops = [], [], []
    for row in values:
        edges = [0]
        for value in row:
            edges.append(edges[-1] + len(value))
        buffers.append(b"".join(row))
        starts.append(edges[:-1])
        stops.append(edges[1:])
    bounds = [[row[at] for row in edge] for at in range(len(names)) for edge in (starts, stops)]
    rows = slice_rows(tuple(names), meta(len(values)), buffers, bounds)
    assert rows == [
        {**about(n), **dict(zip(names, values[n], strict=False))} for n in range(len(values))
    ]


@pytest.mark.parametrize(
    "name", ["'", '"', "\\", "\n", "{x}", "']: 1, __import__('os').abort(): '", "ü\udc80", "\0"]
)
def test_names_of_parts_are_data_and_never_code(name):
    assert join_rows((name,), meta(1), [[b"v"]]) == [{**about(0), name: b"v"}]
