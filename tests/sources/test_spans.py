from __future__ import annotations

import numpy as np
import pytest
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

    def pread_many(self, offsets, sizes):
        self.sizes += sizes
        return super().pread_many(offsets, sizes)


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
    buffers, _ = lazy_spans([(file, 3)], low, low + 900)
    assert file.sizes == []
    assert next(buffers) is next(buffers)
    assert file.sizes == [1_900]
    assert next(buffers) == PATTERN[500_000:500_900]


def test_small_parts_beside_each_other_take_one_read_a_sample(tmp_path):
    file = open_pattern(tmp_path)
    starts = np.array([[0, 120_000], [90_112, 211_000], [91_136, 212_000]])
    sizes = np.array([[90_000, 90_000], [40, 500], [300, 12]])
    columns = read_columns([(file, 2)], starts, sizes)
    assert file.sizes == [90_000, 1_324, 90_000, 1_012]  # in the order of the file
    assert columns == [
        [PATTERN[a : a + n] for a, n in zip(*of_part, strict=True)]
        for of_part in zip(starts, sizes, strict=True)
    ]


def test_no_samples_have_empty_columns(tmp_path):
    none = np.empty((3, 0), np.int64)
    assert list(map(len, read_columns([(open_pattern(tmp_path), 0)], none, none))) == [0, 0, 0]


PART_SIZES = st.sampled_from([0, 1, 500, SMALL_PART_BYTES, SMALL_PART_BYTES + 1, 40_000])


@given(data=st.data(), parts=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_parts_are_read_right_wherever_they_are(tmp_path_factory, data, parts):
    """Only the first sample decides what is read together, and others may differ from it."""
    file = open_pattern(tmp_path_factory.mktemp("columns"))
    row = st.lists(st.tuples(st.integers(0, 99_000), PART_SIZES), min_size=parts, max_size=parts)
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    first = data.draw(st.integers(0, len(rows)))
    starts, sizes = np.array(rows).T  # (parts, samples) each
    files = [(file, first), (OpenFile(file.path), len(rows) - first)]
    for place, column in enumerate(read_columns(files, starts, sizes)):
        assert column == [PATTERN[row[place][0] :][: row[place][1]] for row in rows]


SAMPLES = st.lists(st.tuples(GAPS, SIZES), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def three_files(tmp_path_factory):
    """Return files of which each has its own number in every byte."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(3):
        (folder / str(number)).write_bytes(bytes([number]) * len(PATTERN))
    return [OpenFile(str(folder / str(number))) for number in range(3)]


@given(samples=st.lists(SAMPLES, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_samples_of_several_files_lie_in_buffers_of_their_own(three_files, samples):
    edges = [np.sort(np.cumsum(each) % len(PATTERN)).reshape(-1, 2) for each in samples]
    low, high = np.concatenate(edges).T
    files = [(three_files[number], len(each)) for number, each in enumerate(samples)]
    buffers, base = lazy_spans(files, low, high)
    sizes, owners = high - low, [n for n, each in enumerate(samples) for _ in each]
    for owner, size, buffer, begin in zip(owners, sizes, buffers, low - base, strict=True):
        assert buffer[begin : begin + size] == bytes([owner]) * size
