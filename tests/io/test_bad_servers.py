"""Web servers that misbehave: what is read is right, or an error says what is wrong."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from energon.errors import EnergonError, RangesNotSupportedError, StorageError, StorageTimeoutError
from energon.io.backends.object_stores import HUB_ENDPOINT
from energon.io.files import forget_stores, open_store
from energon.io.range_file import RemoteFile
from energon.io.settings import StorageSettings
from energon.io.store import Store
from tests.effort import some
from tests.servers.bad_web import HARMLESS, MISBEHAVIOURS, SLOW, UNKNOWABLE, BadWebServer

CONTENT = os.urandom(50_000)
DEADLINE_SECONDS = 2.0

QUESTIONS = {
    "range": (lambda store, url: store.read_range("x.bin", 1000, 3000), CONTENT[1000:3000]),
    "read": (lambda store, url: store.read("x.bin"), CONTENT),
    "stream": (lambda store, url: b"".join(store.stream("x.bin")), CONTENT),
    "stream from a byte on": (lambda store, url: b"".join(store.stream("x.bin", 7)), CONTENT[7:]),
    "file": (lambda store, url: RemoteFile(f"{url}/x.bin").pread(5000, 2000), CONTENT[5000:7000]),
}


@pytest.fixture(autouse=True)
def _settings(monkeypatch, tmp_path):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "3")
    monkeypatch.setenv("ENERGON_STORAGE_FIRST_WAIT_SECONDS", "0.001")
    monkeypatch.setenv("ENERGON_STORAGE_DEADLINE_SECONDS", str(DEADLINE_SECONDS))
    forget_stores()
    yield
    forget_stores()


def ask(misbehaviour, question):
    """Return the answer, or the error if it is one of ours, and the seconds that it took."""
    with BadWebServer(CONTENT, misbehaviour) as server:
        found, _ = open_store(server.url)
        store = Store(found.backend, StorageSettings.from_environment())
        begun = time.monotonic()
        try:
            answer = QUESTIONS[question][0](store, server.url)
        except EnergonError as error:
            answer = error
        return answer, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize(
    "misbehaviour",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in some([*MISBEHAVIOURS])
    ],
)
def test_answers_are_right_or_named_errors(misbehaviour):
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        answers = list(threads.map(lambda question: ask(misbehaviour, question), QUESTIONS))
    for question, (answer, _) in zip(QUESTIONS, answers, strict=True):
        expected = QUESTIONS[question][1]
        if isinstance(answer, EnergonError):
            # What a library calls an error is not a reason.
            assert not re.search(r": (GenericError|Unknown|Request|Body|Decode)\b", str(answer))
            assert misbehaviour not in HARMLESS or isinstance(answer, RangesNotSupportedError)
        elif misbehaviour in UNKNOWABLE:
            assert expected.startswith(answer) or answer.startswith(expected)
        else:
            assert answer == expected


@pytest.mark.slow
@pytest.mark.parametrize("misbehaviour", some(sorted(SLOW), 4))
def test_the_deadline_holds_for_all_attempts_together(misbehaviour):
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        answers = list(threads.map(lambda question: ask(misbehaviour, question), QUESTIONS))
    for answer, seconds in answers:
        assert isinstance(answer, StorageTimeoutError)
        # Half a minute would be the patience with one connection.
        assert seconds < 25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misbehaviour", "question", "said"),
    [
        ("redirects to a file", "read", "redirects to a file: address, which is refused"),
        ("redirects to another scheme", "read", "another scheme than http and https.*refused"),
        ("redirects to nowhere", "read", "redirects without an address"),
        ("redirects to itself", "read", "redirects again and again"),
        ("chunks", "range", "no Content-Length.*have the file served as it is"),
        ("ranges are short", "range", r"different range.*Requested 1000\.\.3000, got 1000\.\.2000"),
        ("Content-Range that is shifted", "range", r"different range.*got 1001\.\.3001"),
        ("Content-Range of garbage", "range", "unknown form of range"),
        ("no Content-Range", "range", "lacks the range it holds"),
        ("Content-Length of garbage", "range", "Content-Length of the answer is not a number"),
        ("Content-Encoding that is not asked for", "read", r"compresses the answer \(gzip\)"),
        ("HEAD says less", "stream", "has 50000 bytes or more, expected 25000"),
        ("HEAD says more", "stream", "ended at byte 50000 of 100000"),
        ("HEAD says an exabyte", "stream", "ended at byte 50000 of 1152921504606846976"),
        ("headers of garbage", "read", "not HTTP"),
        ("closes at once", "read", "closed before an answer"),
        ("is silent", "range", "no answer in time.*DEADLINE_SECONDS"),
    ],
)
def test_errors_say_what_the_server_does(misbehaviour, question, said):
    answer, _ = ask(misbehaviour, question)
    assert isinstance(answer, StorageError)
    assert re.search(said, str(answer)), answer


@pytest.mark.parametrize("question", ["read", "stream", "stream from a byte on"])
def test_a_server_that_tells_no_length_can_be_streamed(question):
    answer, _ = ask("answers of unknown length, in chunks", question)
    assert answer == QUESTIONS[question][1]


def test_short_ranges_are_asked_for_again(monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "10")
    answer, _ = ask("every other range is short", "range")
    assert answer == CONTENT[1000:3000]


def test_a_server_that_gives_a_byte_at_a_time_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "5")

    def one_byte(ask):
        if ask.method == "HEAD":
            ask.behave()
        else:
            headers = {"Content_Range": ask.content_range()} if ask.has_range else {}
            status = "206 Partial" if ask.has_range else "200 OK"
            ask.answer(status, ask.part[:1], length=len(ask.part), **headers)

    answer, _ = ask(one_byte, "stream")
    assert isinstance(answer, StorageTimeoutError)
    assert "gave up after 5 attempts" in str(answer)


def test_a_slow_reader_is_no_slow_server(monkeypatch):
    monkeypatch.setattr("energon.io.backends.object_backend.RESPONSE_CHUNK_BYTES", 10_000)
    monkeypatch.setattr("energon.io.threads._reads_samples", True)  # in this process
    with BadWebServer(CONTENT) as server:
        store, _ = open_store(server.url)
        data = b""
        for chunk in store.stream("x.bin"):
            data += chunk
            time.sleep(DEADLINE_SECONDS / 3)
    assert data == CONTENT


@pytest.mark.parametrize("scheme", ["hf", "ais"])
def test_places_behind_web_servers_refuse_the_same_redirects(scheme, monkeypatch):
    with BadWebServer(CONTENT, "redirects to a file") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("AIS_ENDPOINT", server.url)
        address = {"hf": "hf://datasets/me/data/x", "ais": "ais://bucket/x"}[scheme]
        store, key = open_store(address)
        with pytest.raises(StorageError, match="redirects to a file: address, which is refused"):
            store.list("") if scheme == "hf" else store.read(key)
    assert HUB_ENDPOINT.startswith("https:")


@pytest.mark.slow
@pytest.mark.parametrize("misbehaviour", some(sorted(set(MISBEHAVIOURS) - SLOW)))
def test_listings_of_the_hub_are_right_or_errors_of_ours(misbehaviour, monkeypatch):
    listing = b'[{"type": "file", "path": "a.tar", "size": 5}, {"type": "directory"}]'
    with BadWebServer(listing, misbehaviour) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        store, _ = open_store("hf://datasets/me/data/x")
        try:
            assert [found.key for found in store.list("")] == ["a.tar"]
        except EnergonError:
            assert misbehaviour not in HARMLESS


@pytest.mark.parametrize(
    "listing", [b"{", b"5", b"[5]", b'[{"type": "file"}]', b'[{"type": "file", "path": 1}]']
)
def test_listings_of_garbage_are_errors_of_ours(listing, monkeypatch):
    with BadWebServer(listing) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        store, _ = open_store("hf://datasets/me/data/x")
        with pytest.raises(StorageError, match="not a listing"):
            store.list("")
