from __future__ import annotations

import pytest

from tests.servers.places import KINDS, open_place

TAKE_LONG = ("ceph", "msc")
"""Kinds of places that start slowly; others of their kind are tried everywhere."""


@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.slow) if kind in TAKE_LONG else kind for kind in KINDS
    ]
)
def place(request):
    """Every place there is, one after the other."""
    yield from open_place(request.param, request)
