from __future__ import annotations

import os

import pytest

from energon.errors import ObjectChangedError
from energon.io.files import open_store
from tests.effort import mixed
from tests.servers.web import web_server


@pytest.mark.parametrize(("tags", "heeds_conditions"), mixed([True, False], [True, False]))
def test_a_replaced_file_is_noticed_whether_or_not_the_server_heeds_conditions(
    tmp_path, tags, heeds_conditions
):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old content")
    os.utime(path, (10**9, 10**9))
    with web_server(tmp_path, tags=tags, heeds_conditions=heeds_conditions) as server:
        store, key = open_store(f"{server.url}/x.bin")
        version = store.info(key).version
        assert store.read_range(key, 0, 3, version=version) == b"old"
        path.unlink()
        path.write_bytes(b"new content")
        with pytest.raises(ObjectChangedError, match="replaced in the meantime"):
            store.read_range(key, 0, 3, version=version)
        with pytest.raises(ObjectChangedError, match="replaced in the meantime"):
            list(store.stream(key, 4, version=version))
