from __future__ import annotations

import pytest

from energon.errors import StorageAccessError, StorageError
from energon.io.backends.object_stores import find_token
from energon.io.files import forget_stores, list_files, open_store
from tests.datasets import make_crude
from tests.servers.hub import PAGE, hub
from tests.sources.distant import train

TOKEN = "hf_secret"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A private repository that holds a prepared dataset below `data`."""
    make_crude(tmp_path / "repository/data", [8, 5])
    with hub(tmp_path / "repository", "me/texts", token=TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
        forget_stores()
        yield tmp_path / "repository"
    forget_stores()


def test_a_dataset_of_the_hub_is_trained_on_and_the_token_stays_with_the_hub(repository):
    expected, _, _ = train(repository / "data", batches=8)
    # The server that has the files refuses every request that carries a token.
    assert train("hf://datasets/me/texts/data", batches=8)[0] == expected


def test_lists_all_pages(repository):
    below = [path for path in (repository / "data").rglob("*") if path.is_file()]
    found = list_files("hf://datasets/me/texts/data")
    assert [each.key for each in found] == sorted(
        str(path.relative_to(repository / "data")) for path in below
    )
    assert list_files("hf://datasets/me/texts/nothing") == []


def test_a_look_for_the_first_file_takes_one_page(tmp_path, monkeypatch):
    make_crude(tmp_path / "repository/data", [8, 5])
    monkeypatch.setattr("energon.io.backends.reader_process.reads_here", lambda: True)
    with hub(tmp_path / "repository", "me/texts") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        forget_stores()
        store, key = open_store("hf://datasets/me/texts/data")
        assert store.has_any(key)
        assert server.num_pages == 1
        assert len(store.list(key)) > PAGE
    forget_stores()


def test_a_refused_token_is_told_without_the_token(repository, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    forget_stores()
    store, key = open_store("hf://datasets/me/texts/data/000.tar")
    for ask in (lambda: store.read(key), lambda: store.list("data")):
        with pytest.raises(StorageAccessError, match="access denied, 401") as caught:
            ask()
        assert "hf_another" not in str(caught.value)


def test_the_hub_is_not_written(repository):
    store, key = open_store("hf://datasets/me/texts/x")
    for change in (lambda: store.write(key, b"x"), lambda: store.delete(key)):
        with pytest.raises(StorageError, match="hf upload"):
            change()


def test_the_token_of_a_log_in_is_used_where_the_environment_has_none(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert find_token() is None
    (tmp_path / "token").write_text("hf_logged_in\n")
    assert find_token() == "hf_logged_in"
