from __future__ import annotations

import pytest

from energon.errors import DatasetNotFoundError, StorageAccessError
from energon.io.backends.object_backend import cause_of, translate
from energon.io.files import forget_stores, open_store
from tests.servers.clouds import S3_KEY, S3_SECRET


def test_a_bucket_that_does_not_exist_is_told(moto_port, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_SECRET)
    forget_stores()
    store, key = open_store("s3://no-such-bucket/x")
    for ask in (lambda: store.read(key), lambda: store.list(key), lambda: store.write(key, b"")):
        with pytest.raises(DatasetNotFoundError, match="no such bucket"):
            ask()
    forget_stores()


@pytest.mark.parametrize(
    ("scheme", "host", "variable"),
    [
        ("s3", "169.254.169.254", "AWS_PROFILE"),
        ("gs", "metadata.google.internal", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az", "169.254.169.254", "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_that_there_are_no_credentials_is_told_with_what_to_do(scheme, host, variable):
    """What the library says where neither environment nor machine have some."""

    error = OSError(f"Error performing PUT http://{host}/token in 5ms - kind: Connect, TimedOut")
    found = translate(error, f"{scheme}://bucket/x")
    assert isinstance(found, StorageAccessError)
    assert "no credentials" in str(found)
    assert variable in str(found)
    busy = translate(
        OSError(f"Error performing PUT http://{host}/token - status code: 503 Busy"), "x"
    )
    assert busy.transient


def test_causes_are_found_below_the_errors_of_libraries():
    def raise_below():
        try:
            raise ConnectionRefusedError("http://me:secret@host")
        except OSError as error:
            raise RuntimeError("could not say secret") from error

    with pytest.raises(RuntimeError) as caught:
        raise_below()
    assert cause_of(caught.value) == "connection refused"
    assert cause_of(ValueError("secret")) == "ValueError"
