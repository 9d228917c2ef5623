from __future__ import annotations

import pytest

from tests.servers.places import (  # noqa: F401  # fixtures, found by their names
    KINDS,
    azurite_port,
    ceph_port,
    moto_port,
    open_place,
    quick_retries,
)


@pytest.fixture(params=KINDS)
def place(request):
    """Every place there is, one after the other."""
    yield from open_place(request.param, request)


@pytest.fixture
def s3(request):
    yield from open_place("moto", request)
