from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.io.backends.local import OpenFile
from energon.sources.shards import (
    LOCAL_SPAN_BYTES,
    SKIPPED_GAP_BYTES,
    SMALL_PART_BYTES,
    lazy_spans,
    read_columns,
    read_spans,
)

PATTERN = np.random.default_rng(0).bytes(4 * LOCAL_SPAN_BYTES)


class CountedFile(OpenFile):
    """A file that notes the sizes of its reads."""

    def __init__(self, path):
        super().__init__(path)
        self.sizes = []

    def pread(self, offset, size):
        self.sizes.append(size)
        return super().pread(offset, size)


def open_pattern(folder):
    path = folder / "pattern"
    path.write_bytes(PATTERN)
    return CountedFile(str(path))


def check(file, low, high):
    buffers, base = read_spans(file, np.array(low), np.array(high))
    for begin, end, buffer, start in zip(low, high, buffers, base.tolist(), strict=True):
        assert buffer[begin - start : end - start] == PATTERN[begin:end]


GAPS = st.sampled_from([0, 1, 512, SKIPPED_GAP_BYTES, SKIPPED_GAP_BYTES + 1, 300_000])
SIZES = st.sampled_from([0, 1, 700, 32_000, 250_000])


@given(samples=st.lists(st.tuples(GAPS, SIZES), min_size=1, max_size=14))
@settings(max_examples=60, deadline=None)
def test_every_sample_lies_in_its_buffer(tmp_path_factory, samples):
    low, high, position = [], [], 0
    for gap, size in samples:
        if position + gap + size > len(PATTERN):
            break
        low.append(position + gap)
        position += gap + size
        high.append(position)
    file = open_pattern(tmp_path_factory.mktemp("spans"))
    check(file, low, high)
    content = sum(end - begin for begin, end in zip(low, high, strict=True))
    assert sum(file.sizes) <= content + SKIPPED_GAP_BYTES * len(samples)
    assert len(file.sizes) <= len(samples)


def test_neighbours_are_read_at_once_and_distant_samples_apart(tmp_path):
    file = open_pattern(tmp_path)
    check(file, [0, 1_000, 500_000, 501_000], [900, 1_900, 500_900, 501_900])
    assert file.sizes == [1_900, 1_900]


def test_the_same_sample_may_be_wanted_twice(tmp_path):
    file = open_pattern(tmp_path)
    check(file, [100, 100, 700], [600, 600, 900])
    assert file.sizes == [800]


def test_no_read_is_much_longer_than_a_span(tmp_path):
    file = open_pattern(tmp_path)
    low = list(range(0, len(PATTERN), 4096))
    check(file, low, [begin + 4096 for begin in low])
    assert file.sizes == [LOCAL_SPAN_BYTES] * 4


def test_a_local_file_is_read_as_its_buffers_are_taken(tmp_path):
    file = open_pattern(tmp_path)
    low = np.array([0, 1_000, 500_000])
    buffers, _ = lazy_spans(file, low, low + 900)
    assert file.sizes == []
    assert next(buffers) is next(buffers)
    assert file.sizes == [1_900]
    assert next(buffers) == PATTERN[500_000:500_900]


def test_small_parts_beside_each_other_take_one_read_a_sample(tmp_path):
    file = open_pattern(tmp_path)
    starts = np.array([[0, 90_112, 91_136], [120_000, 211_000, 212_000]])
    sizes = np.array([[90_000, 40, 300], [90_000, 500, 12]])
    columns = read_columns(file, starts, sizes)
    assert file.sizes == [90_000, 90_000, 1_324, 1_012]
    assert columns == [
        [PATTERN[a : a + n] for a, n in zip(*of_part, strict=True)]
        for of_part in zip(starts.T, sizes.T, strict=True)
    ]


def test_no_samples_have_empty_columns(tmp_path):
    none = np.empty((0, 3), np.int64)
    assert list(map(len, read_columns(open_pattern(tmp_path), none, none))) == [0, 0, 0]


PART_SIZES = st.sampled_from([0, 1, 500, SMALL_PART_BYTES, SMALL_PART_BYTES + 1, 40_000])


@given(data=st.data(), parts=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_parts_are_read_right_wherever_they_are(tmp_path_factory, data, parts):
    """Only the first sample decides what is read together, and others may differ from it."""
    file = open_pattern(tmp_path_factory.mktemp("columns"))
    row = st.lists(st.tuples(st.integers(0, 99_000), PART_SIZES), min_size=parts, max_size=parts)
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    starts, sizes = np.moveaxis(np.array(rows), -1, 0)
    for place, column in enumerate(read_columns(file, starts, sizes)):
        assert column == [PATTERN[row[place][0] :][: row[place][1]] for row in rows]
