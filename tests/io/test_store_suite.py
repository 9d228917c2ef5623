"""What every store promises, tried on every store against a real server."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from energon.errors import DatasetNotFoundError, ObjectChangedError, TruncatedError
from energon.io.address import join_address
from energon.io.files import open_store
from tests.servers.proxy import Fault

CONTENT = bytes(range(256)) * 512


@pytest.fixture
def path(place):
    """An object with CONTENT, as store and key."""
    store, key = open_store(join_address(place.address, "folder/x.bin"))
    store.write(key, CONTENT)
    return store, key


@pytest.mark.slow
def test_gives_back_what_was_written(path, place):
    store, key = path
    if place.proxy is not None:
        assert place.proxy.requests, "nothing went to the server"
    assert store.read(key) == CONTENT
    assert b"".join(store.stream(key, 1000)) == CONTENT[1000:]
    assert store.info(key).size == len(CONTENT)


@pytest.mark.slow
def test_reads_exact_ranges_alone_and_together(path):
    store, key = path
    ranges = [(0, 1), (5, 5), (len(CONTENT) - 3, len(CONTENT)), (100, 70_000)]
    assert [store.read_range(key, *each) for each in ranges] == [CONTENT[a:b] for a, b in ranges]
    pieces = store.together(partial(store.read_range, key), ranges)
    assert pieces == [CONTENT[a:b] for a, b in ranges]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "stop"), [(len(CONTENT) - 3, len(CONTENT) + 1), (len(CONTENT) + 5, len(CONTENT) + 9)]
)
def test_a_range_behind_the_end_says_where_the_object_ends(path, start, stop):
    store, key = path
    advice = "restore it, or run `energon prepare` again if the dataset was prepared with it"
    with pytest.raises(TruncatedError, match=f"ends at byte {len(CONTENT)}.*{advice}"):
        store.read_range(key, start, stop)


@pytest.mark.slow
def test_a_missing_object_is_not_found(path):
    store, key = path
    for read in (store.info, store.read, lambda key: store.read_range(key, 0, 1)):
        with pytest.raises(DatasetNotFoundError):
            read(key + ".gone")


@pytest.mark.slow
def test_an_object_that_was_replaced_is_not_read_as_the_old_one(path):
    store, key = path
    old = store.info(key).version
    assert old is not None
    assert store.read_range(key, 0, 10, version=old) == CONTENT[:10]
    store.write(key, CONTENT[::-1] + b"longer")
    assert store.info(key).version != old
    with pytest.raises(ObjectChangedError):
        store.read_range(key, 0, 10, version=old)
    assert store.read_range(key, 0, 10) == CONTENT[::-1][:10]


@pytest.mark.slow
def test_deletes_and_is_content_if_nothing_is_there(path):
    store, key = path
    store.delete(key)
    store.delete(key)
    with pytest.raises(DatasetNotFoundError):
        store.info(key)


@pytest.mark.slow
def test_an_upload_of_a_file_in_several_parts_is_complete(path, tmp_path):
    store, key = path
    content = os.urandom(11 << 20)
    (tmp_path / "big").write_bytes(content)
    store.write(key, tmp_path / "big")
    assert store.read(key) == content


def test_an_empty_object_is_an_object(path):
    store, key = path
    store.write(key, b"")
    assert store.read(key) == b""
    assert store.info(key).size == 0


def test_names_may_have_any_characters(place):
    names = ["[1]{2}", "a b", "a#b", "a%20b", "a+b", "a?b", "e=&f", "ü"]
    if place.address.startswith("ais://"):
        names.remove("[1]{2}")  # see test_aistore.py
    store, key = open_store(place.address)
    for name in names:
        store.write(f"{key}/{name}.tar", name.encode())
        assert store.read(f"{key}/{name}.tar") == name.encode()
    if place.can_list:
        assert [found.key for found in store.list(key)] == [f"{key}/{name}.tar" for name in names]


@pytest.mark.slow
def test_lists_what_is_below_a_folder_and_nothing_beside_it(place):
    if not place.can_list:
        pytest.skip("web servers do not list")
    store, key = open_store(place.address)
    names = ["a", "b/c", "b/d/e", "bb"]
    for name in names:
        store.write(f"{key}/{name}", name.encode())
    store.write(f"{key}-beside", b"")
    found = store.list(key)
    assert [each.key for each in found] == [f"{key}/{name}" for name in names]
    assert [each.size for each in found] == [len(name) for name in names]
    assert [each.key for each in store.list(f"{key}/b")] == [f"{key}/b/c", f"{key}/b/d/e"]
    # Where listings do not say it, the version is unknown, never another one.
    assert all(each.version in (None, store.info(each.key).version) for each in found)
    assert store.list(f"{key}/nothing") == []
    assert store.has_any(f"{key}/b")
    assert not store.has_any(f"{key}/nothing")


@pytest.mark.slow
def test_many_threads_may_read_at_once(path):
    store, key = path

    def read(number):
        return store.read_range(key, number, number + 1000)

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(read, range(40))) == [CONTENT[n : n + 1000] for n in range(40)]


def test_half_an_upload_is_not_to_be_seen(place, quick_retries, monkeypatch):
    if place.proxy is None or place.address.startswith("msc:"):
        pytest.skip("needs a network, and a client that does not try again on its own")
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "1")
    store, key = open_store(join_address(place.address, "x"))
    store.write(key, b"old")
    place.proxy.plan([Fault("reset")] * 10, lambda request: request.method in ("PUT", "POST"))
    with pytest.raises(OSError, match="x: "):
        store.write(key, b"new" * 1000)
    place.proxy.plan([])
    assert store.read(key) == b"old"
