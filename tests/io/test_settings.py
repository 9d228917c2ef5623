from __future__ import annotations

import pytest

from energon.errors import ConfigError
from energon.io.settings import StorageSettings, parse_bytes


def test_the_environment_goes_over_the_defaults():
    found = StorageSettings.from_environment(
        {
            "ENERGON_STORAGE_ATTEMPTS": "3",
            "ENERGON_STORAGE_HEDGE_AFTER_SECONDS": "0.5",
            "ENERGON_STORAGE_READ_AHEAD_BYTES": "1.5GiB",
            "ENERGON_STORAGE_CACHE_SHARDS": "yes",
            "ENERGON_STORAGE_CACHE_DIR": "/x",
        }
    )
    assert found == StorageSettings(
        attempts=3,
        hedge_after_seconds=0.5,
        read_ahead_bytes=3 << 29,
        cache_shards=True,
        cache_dir="/x",
    )
    assert StorageSettings.from_environment({}) == StorageSettings()


@pytest.mark.parametrize(
    ("text", "wanted"), [("4096", 4096), ("200GB", 200 * 10**9), ("1.5 MiB", 3 << 19), ("2k", 2000)]
)
def test_sizes_have_units(text, wanted):
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CACHE_SHARDS", "maybe"),
        ("ATTEMPTS", "many"),
        ("ATTEMPTS", "0"),
        ("PARALLEL_REQUESTS", "0"),
        ("READ_AHEAD_BYTES", "5 apples"),
        ("DEADLINE_SECONDS", "0"),
        ("REFUSED_SECONDS", "0"),
        ("HEDGE_AFTER_SECONDS", "-1"),
    ],
)
def test_what_makes_no_sense_is_refused(name, value):
    with pytest.raises(ConfigError, match="expected"):
        StorageSettings.from_environment({f"ENERGON_STORAGE_{name}": value})
