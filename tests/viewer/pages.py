"""The pages of a dataset, without a server."""

from __future__ import annotations

from starlette.testclient import TestClient

from energon.viewer.app import make_app
from energon.viewer.shown import Shown


def browse(*paths, base_url="http://localhost", **settings) -> TestClient:
    """Return a client that asks for the pages of datasets."""
    app = make_app(Shown(*paths), **settings)
    return TestClient(app, base_url=base_url, raise_server_exceptions=False)
