"""The data that most tests of this package read."""

import pytest

from tests.datasets import make_crude


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three shards of 5, 8 and 7 samples."""
    return make_crude(tmp_path_factory.mktemp("crude") / "ds", [5, 8, 7])
