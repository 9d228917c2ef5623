from __future__ import annotations

import numpy as np

from energon.plan.seeds import combine, derive_seed


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
