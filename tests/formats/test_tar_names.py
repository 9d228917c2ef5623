"""Many names at once are split like each alone, and many checksums compared like each alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon.errors import FormatError
from energon.formats.tar.headers import (
    have_checksums,
    nonzero_bytes,
    split_name,
    split_name_fields,
    verify_checksum,
)
from tests.webdataset.shards import tar_bytes

anything = st.text("ab./_é", max_size=12).map(str.encode)
numbered = st.builds(
    lambda folder, number, part: b"%s%03d.%s" % (folder, number, part),
    st.sampled_from([b"", b"d/", b"a.b/c/", b"__x__/"]),
    st.integers(0, 30),
    st.sampled_from([b"txt", b"json", b"left.jpg", b"", b"seg.map.png", b"segmentation"]),
)


@st.composite
def nearly_alike(draw):
    """Names of one pattern but for a letter or two."""
    name = draw(
        st.sampled_from([b"12.txt", b"d/12.a.b", b"_/__.x", b"a.b/c.d", "é.xyzzzzzzz".encode()])
    )
    names = [bytearray(name) for _ in range(draw(st.integers(1, 6)))]
    for _ in range(draw(st.integers(0, 2))):
        changed = draw(st.sampled_from(names))
        changed[draw(st.integers(0, len(name) - 1))] = draw(st.sampled_from(b"./_7\0"))
    return [bytes(each).partition(b"\0")[0] for each in names]


def fields(names, behind=b""):
    """Name fields of headers: cut off, with some bytes behind the zero that ends them."""
    padded = [(name + b"\0" + behind).ljust(32, b"\0") for name in names]
    return np.frombuffer(b"".join(padded), np.uint8).reshape(-1, 32)


def alone(names):
    """The (key, part) of each name, or None."""
    found = [split_name(name.decode("utf-8", "surrogateescape")) for name in names]
    return [
        each and tuple(text.encode("utf-8", "surrogateescape") for text in each) for each in found
    ]


@given(
    st.one_of(st.lists(anything), st.lists(numbered), nearly_alike()),
    st.sampled_from([b"", b"x", b".", b"/"]),
)
@settings(max_examples=300, deadline=None)
@example([b"12.txt", b"1"], b".")
@example([b"12.txt", b"12.a"], b"x")
@example([b"12.txt", b"1..txt"], b"")
@example([b"12.txt", b"1.2txt"], b"")
@example([b"ab.txt", b"__.txt", b"__x__/a.b"], b"")
@example([b"__x__/1.txt", b"__x__/2.txt"], b"")
@example([b"d/.txt", b"e/.txt"], b"")
def test_names_are_split_like_each_alone(names, behind):
    split = split_name_fields(fields(names, behind))
    wanted = alone(names)
    assert split.valid.tolist() == [each is not None for each in wanted]
    split = split.take(split.valid)
    wanted = [each for each in wanted if each is not None]
    keys = [key for key, _ in wanted]
    assert [split.key(row) for row in range(len(keys))] == keys
    same = [key == before for before, key in pairwise(keys)]
    assert split.same_key_as_before().tolist() == same
    rows = np.arange(0, len(keys), 2)
    assert split.key_texts(rows) == [keys[row].decode("utf-8", "surrogateescape") for row in rows]
    parts, which = split.parts()
    assert [parts[number] for number in which] == [part for _, part in wanted]
    if wanted:
        assert parts == list(dict.fromkeys(part for _, part in wanted))


@pytest.mark.parametrize("suffix", [b"%d", b"part_%d"])
def test_any_number_of_different_parts_is_told_apart(suffix):
    names = [b"a." + suffix % number for number in [*range(300), 5, 7]]
    parts, which = split_name_fields(fields(names)).parts()
    assert [b"a." + parts[number] for number in which] == names
    assert len(parts) == 300


@given(st.integers(1, 70), st.data())
def test_checksums_are_compared_like_each_alone(count, data):
    members = [(f"{number:0{1 + number % 90}}.txt", b"") for number in range(count)]
    archive = bytearray(tar_bytes(members)[: 512 * count])
    places = st.tuples(st.integers(0, len(archive) - 1), st.integers(0, 255))
    changes = data.draw(st.lists(places, max_size=5))
    for place, value in changes:
        archive[place] = value
    headers = np.frombuffer(bytes(archive), np.uint8).reshape(-1, 512)
    nonzero = nonzero_bytes(headers)
    assert nonzero.tolist() == headers.any(axis=0).tolist()
    for header, found in zip(headers, have_checksums(headers, nonzero).tolist(), strict=True):
        try:
            verify_checksum(header.tobytes(), "x.tar", 0)
        except FormatError:
            assert not found
        else:
            # One of another notation is left to the slower way.
            assert found or changes
