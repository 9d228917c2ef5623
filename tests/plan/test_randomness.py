from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.plan.randomness import combine, derive_seed, permute

SIZES = [1, 2, 3, 5, 255, 256, 257, 1000, 12_345]


@given(size=st.sampled_from(SIZES), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_is_a_permutation_for_any_size_and_key(size, key):
    images = permute(np.arange(size), np.array([size]), np.array([key], np.uint64))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_sizes_and_keys_may_differ_from_element_to_element():
    sizes = np.array([7, 1000, 3, 10**12])
    keys = np.array([1, 2, 3, 4], np.uint64)
    indices = np.array([6, 999, 2, 10**12 - 1])
    alone = [
        int(permute(indices[i : i + 1], sizes[i : i + 1], keys[i : i + 1])[0]) for i in range(4)
    ]
    assert permute(indices, sizes, keys).tolist() == alone
    assert (np.array(alone) < sizes).all()


@pytest.mark.parametrize("size", [2, 5, 17, 32, 33, 65])
def test_every_place_is_equally_likely(size):
    keys = np.random.default_rng(0).integers(0, 2**63, 100_000).astype(np.uint64)
    for index in {0, size // 2, size - 1}:
        images = permute(np.full(len(keys), index), np.full(len(keys), size), keys)
        expected = len(keys) / size
        deviation = abs(np.bincount(images, minlength=size) - expected).max()
        assert deviation < 4.5 * expected**0.5


def test_seeds_depend_on_every_part_of_the_address_and_its_type():
    addresses = [(1,), (2,), ("1",), (1, 2), (1, "2"), (12,), ("leaf", 1), ("leaf", "1")]
    assert len({derive_seed(*address) for address in addresses}) == len(addresses)


def test_seeds_are_the_same_in_every_process_and_release():
    assert derive_seed(7, "leaf", "a/train") == 17886208993855126480


def test_combined_keys_differ_by_level_and_element():
    keys = np.array([1, 2], np.uint64)
    found = {*combine(keys, 0, 1).tolist(), *combine(keys, 1, 0).tolist(), *keys.tolist()}
    assert len(found) == 6
    assert combine(keys, np.array([0, 1])).tolist()[0] == combine(keys, 0).tolist()[0]
