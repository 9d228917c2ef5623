from __future__ import annotations

import pytest

from tests.servers.places import KINDS, open_place


@pytest.fixture(params=KINDS)
def place(request):
    """Every place there is, one after the other."""
    yield from open_place(request.param, request)
