"""Profiles of multi-storage-client, and remotes of rclone. Reading is tested by the store suite."""

from __future__ import annotations

import json

import pytest

from energon.errors import ConfigError
from energon.io.files import forget_stores, open_store
from tests.commands import run_python
from tests.servers.clouds import S3_KEY, S3_SECRET
from tests.servers.places import BUCKET


@pytest.fixture
def configure(monkeypatch, tmp_path):
    """Return a function that writes the only configuration there is."""
    for name in ("MSC_CONFIG", "XDG_CONFIG_DIRS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget_stores()

    def write(path="msc/config.yaml", *, text=None, **profiles):
        target = tmp_path / "config" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text or json.dumps({"profiles": profiles}))

    yield write
    forget_stores()


def roundtrip(address):
    store, key = open_store(address)
    store.write(key, b"content")
    assert store.read_range(key, 1, 3) == b"on"


def storage(kind, **options):
    return {"storage_provider": {"type": kind, "options": options}}


def test_a_profile_of_files_is_a_folder(configure, tmp_path):
    (tmp_path / "data").mkdir()
    configure(data=storage("file", base_path=str(tmp_path / "data")))
    roundtrip("msc://data/x/y")
    assert (tmp_path / "data/x/y").read_bytes() == b"content"


def test_the_profile_that_is_always_there_is_the_file_system(configure, tmp_path):
    roundtrip(f"msc://__filesystem__{tmp_path}/x")
    assert (tmp_path / "x").read_bytes() == b"content"


@pytest.mark.slow
def test_a_remote_of_rclone_is_a_profile(configure, moto_port):
    configure(
        "rclone/rclone.conf",
        text=f"[minio]\ntype = s3\nprovider = Other\naccess_key_id = {S3_KEY}\n"
        f"secret_access_key = {S3_SECRET}\nendpoint = http://127.0.0.1:{moto_port}\n"
        "region = us-east-1\n",
    )
    # In a process of its own: multi-storage-client reads remotes once in a process.
    program = (
        "import sys; from tests.io.test_profiles import roundtrip; from energon import EPath\n"
        "roundtrip(f'rclone://minio/{sys.argv[1]}/profiles/x')\n"
        "print(*[each.name for each in EPath(f'msc://minio/{sys.argv[1]}/profiles').glob('*')])"
    )
    assert run_python(program, BUCKET).stdout == "x\n"


def test_an_unknown_profile_is_a_wrong_configuration(configure):
    with pytest.raises(ConfigError, match=r"msc://nobody: .* cannot open profile 'nobody'"):
        open_store("msc://nobody/x")


@pytest.mark.parametrize(
    "text", ["profiles: [", "- a", "secret_key: {", "profiles: {data: {secret_key: secret_key}}"]
)
def test_an_invalid_configuration_is_not_quoted(configure, text):
    configure(text=text)
    with pytest.raises(ConfigError, match="cannot open profile 'data'") as caught:
        open_store("msc://data/x")
    assert "secret_key" not in str(caught.value)
