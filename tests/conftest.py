"""Servers that all rooms share: each is started once, when the first test needs it."""

from __future__ import annotations

import pytest

from tests.servers.places import (  # noqa: F401  # fixtures, found by their names
    azurite_port,
    ceph_port,
    moto_port,
    open_place,
    quick_retries,
)


@pytest.fixture
def s3(request):
    """A folder of a bucket of its own, as `Place`."""
    yield from open_place("moto", request)
