from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon.plan.leaves.subset import exclude_indices, include_ordinals


@given(st.integers(1, 60), st.sets(st.integers(0, 59)))
def test_ordinals_number_what_is_left_in_order(n, excluded):
    left = [index for index in range(n) if index not in excluded]
    gone = np.array(sorted(index for index in excluded if index < n), np.int64)
    assert include_ordinals(np.arange(len(left)), gone).tolist() == left
    assert exclude_indices(np.array(left, np.int64), gone).tolist() == list(range(len(left)))
