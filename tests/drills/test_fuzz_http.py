"""Answers of web servers with damage in their heads: the right data, or an error of ours."""

from __future__ import annotations

import os
import time

import pytest

from energon.errors import EnergonError
from energon.io.files import forget_stores, open_store
from energon.io.range_file import RemoteFile
from tests.media_files import damaged
from tests.servers.bad_web import BadWebServer

CONTENT = os.urandom(20_000)
MOST_SECONDS = 60.0
CASES_AT_LEAST = 40


class Recorder:
    """Stands for a socket, and keeps what is sent."""

    def __init__(self):
        self.sent = b""

    def sendall(self, data):
        self.sent += data


def damage_heads(rng):
    """Return what answers requests with a head that is damaged, and all of the right body."""

    def misbehave(ask):
        socket, ask.socket = ask.socket, Recorder()
        ask.behave()
        head, end, body = ask.socket.sent.partition(b"\r\n\r\n")
        ask.socket = socket
        if rng.random() < 0.7:
            # Line by line: nobody could tell where a body begins behind a head that ends early.
            lines = [damaged(x, rng) if rng.random() < 0.3 else x for x in head.split(b"\r\n")]
            lines = [line.translate(None, b"\r\n") or b"x: y" for line in lines]
            head = b"\r\n".join(lines)
        if rng.random() < 0.2:
            body = body[: rng.randrange(len(body) + 1)]
        ask.send(head, end, body)

    return misbehave


@pytest.fixture(autouse=True)
def _settings(monkeypatch, tmp_path):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "3")
    monkeypatch.setenv("ENERGON_STORAGE_FIRST_WAIT_SECONDS", "0.001")
    monkeypatch.setenv("ENERGON_STORAGE_DEADLINE_SECONDS", "4")
    yield
    forget_stores()


def test_damaged_answers_give_the_right_data_or_an_error_of_ours(budget):
    right = 0
    for rng in budget.rounds(CASES_AT_LEAST):
        with BadWebServer(CONTENT, damage_heads(rng)) as server:
            start = rng.randrange(len(CONTENT))
            stop = rng.randrange(start, len(CONTENT)) + 1
            expected = CONTENT[start:stop]
            forget_stores()
            begun = time.monotonic()
            for ask in (read_range, read_file):
                data = answer(ask, f"{server.url}/x.bin", start, stop)
                assert data in (None, expected), budget.seed
                right += data is not None
            # A whole that is asked for once is as long as the server says.
            whole = answer(read_whole, f"{server.url}/x.bin", start, stop)
            assert whole is None or CONTENT.startswith(whole), budget.seed
            assert time.monotonic() - begun < MOST_SECONDS, budget.seed
    assert right


def read_range(url, start, stop):
    store, key = open_store(url)
    return store.read_range(key, start, stop)


def read_file(url, start, stop):
    return RemoteFile(url).pread(start, stop - start)


def read_whole(url, start, stop):
    store, key = open_store(url)
    return store.read(key)


def answer(ask, *arguments):
    """Return the answer, or None for an error of ours."""
    try:
        return ask(*arguments)
    except EnergonError:
        return None
