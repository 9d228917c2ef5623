"""Random streams in loaders with workers: each sample once, or the number of items that is set."""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.webdataset.test_places import check_job, in_torch, in_web_loader, random_job


@pytest.mark.slow
@pytest.mark.parametrize("load", [in_torch, in_web_loader])
def test_loaders_read_each_sample_once_or_the_length_that_is_set(load, budget):
    for random in budget.rounds():

        @seed(random.getrandbits(64))
        @settings(max_examples=10, database=None)
        @given(data=st.data())
        def check(data):
            check_job(load, *random_job(data.draw))

        check()
