"""What all rooms share: servers, each started once when the first test needs it, and patience."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.servers.places import (  # noqa: F401  # fixtures, found by their names
    azurite_port,
    ceph_port,
    moto_port,
    open_place,
    quick_retries,
)

# No property is about time, and a machine may be busy. CI tries the same examples each time, so
# that what fails there is due to the change; elsewhere they are new in every run.
settings.register_profile(
    "patient",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


@pytest.fixture
def s3(request):
    """A folder of a bucket of its own, as `Place`."""
    yield from open_place("moto", request)
