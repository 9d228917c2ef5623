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
    yield from open_place("moto", request)
