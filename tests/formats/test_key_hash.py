from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.formats.tables.part_table import PartTable, key_hash, table_hashes
from energon.formats.tar.scan import scan_tar
from tests.datasets import write_shard


def hashes(folder, keys, *, chosen=None):
    write_shard(folder / "s.tar", [(key, {"txt": b""}) for key in keys])
    table = PartTable.from_scan(scan_tar(folder / "s.tar"))
    indices = np.arange(len(keys)) if chosen is None else np.array(chosen)
    return [tuple(row) for row in table_hashes(table, indices).tolist()]


KEYS = st.lists(
    st.text("abcxyz0189_-é", min_size=1, max_size=30), min_size=1, max_size=20, unique=True
)


@given(KEYS, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_a_hash_depends_on_the_key_and_nothing_else(tmp_path_factory, keys, random):
    folder = tmp_path_factory.mktemp("keys")
    of_key = dict(zip(keys, hashes(folder, keys), strict=True))
    assert len(set(of_key.values())) == len(keys)
    alone = [random.choice(keys)]
    assert hashes(folder, alone) == [of_key[alone[0]]]
    assert [key_hash(key.encode()) for key in keys] == [of_key[key][0] for key in keys]
    order = random.sample(range(len(keys)), len(keys))
    assert hashes(folder, keys, chosen=order) == [of_key[keys[at]] for at in order]


def test_keys_that_differ_in_zeros_and_length_differ(tmp_path):
    keys = ["a", "a0", "a00", "b", "0", "00000000", "000000000"]
    assert len(set(hashes(tmp_path, keys))) == len(keys)
    halves = np.array(hashes(tmp_path, [f"{number:08}" for number in range(5000)]), np.uint64)
    for half in halves.T:
        assert len(np.unique(half)) == 5000
        # The upper bits, by which keys are dealt to partitions, are even.
        counts = np.bincount((half >> np.uint64(60)).astype(int), minlength=16)
        assert counts.min() > 200
