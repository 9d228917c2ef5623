"""Every public name of webdataset exists in `energon.webdataset`, and takes the same arguments."""

from __future__ import annotations

from pathlib import Path

import energon.webdataset as wds
from tests.compat.names import differences, listed

DIFFERENCES = Path(__file__).parents[2] / "docs" / "migration.md"

# What is missing or incompatible on purpose, each with a text of docs/migration.md about it.
_SELECT = "`select(…, **kw)`"
_MULTI = "`multi.EOF`, `multi.reader`, `multi.the_protocol`"
_INTERNAL = "`WebDataset.create_url_iterator`, `WebDataset.update_cache_info`"
EXCEPTIONS = {
    **dict.fromkeys(
        [
            f"webdataset{module}.{kind}.select"
            for module in ("", ".compat")
            for kind in ("FluidInterface", "FluidWrapper", "WebDataset", "WebLoader")
        ],
        _SELECT,
    ),
    **dict.fromkeys([f"webdataset.multi.{n}" for n in ("EOF", "reader", "the_protocol")], _MULTI),
    **dict.fromkeys(
        [
            f"webdataset{module}.WebDataset.{name}"
            for module in ("", ".compat")
            for name in ("create_url_iterator", "update_cache_info")
        ],
        _INTERNAL,
    ),
    **dict.fromkeys(
        [f"webdataset{module}.LMDBCached.add_samples" for module in ("", ".filters")],
        "`LMDBCached.add_samples`",
    ),
}

CHANGED_SINCE_0_2_86 = [
    "webdataset.ResampledShards",
    "webdataset.WebDataset",
    "webdataset.bench",
    "webdataset.cache.cached_tarfile_samples",
    "webdataset.cache.cached_tarfile_to_samples",
    "webdataset.cache.cached_url_opener",
    "webdataset.cache.get_file_cached",
    "webdataset.cache.lru_cleanup",
    "webdataset.cache.maybe_cached_tarfile_to_samples",
    "webdataset.cached_tarfile_samples",
    "webdataset.cached_tarfile_to_samples",
    "webdataset.cborsiterators",
    "webdataset.compat.WebDataset",
    "webdataset.filters._shuffle",
    "webdataset.filters.shuffle",
    "webdataset.lru_cleanup",
    "webdataset.maybe_cached_tarfile_to_samples",
    "webdataset.shardlists.ResampledShards",
    "webdataset.shuffle",
]
"""Names of 0.2.86 that webdataset 1.0 has removed, or whose positional parameters it has moved."""


def test_every_public_name_is_there_with_compatible_parameters():
    found = differences(listed("webdataset"), "energon.webdataset")
    assert set(found) == set(EXCEPTIONS), {n: found[n] for n in set(found) - set(EXCEPTIONS)}


def test_names_of_0_2_111_are_there_with_compatible_parameters():
    assert set(differences(listed("webdataset-0.2.111"), "energon.webdataset")) <= set(EXCEPTIONS)


def test_names_of_0_2_86_are_there_unless_newer_releases_changed_them():
    changed = differences(listed("webdataset-0.2.86"), "energon.webdataset")
    assert set(changed) - set(EXCEPTIONS) == set(CHANGED_SINCE_0_2_86)


def test_exceptions_are_listed_in_the_documentation():
    text = DIFFERENCES.read_text()
    assert [each for each in set(EXCEPTIONS.values()) if each not in text] == []
    names = {name.rpartition(".")[2].lstrip("_") for name in CHANGED_SINCE_0_2_86}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_the_list_is_of_the_release_that_is_named():
    names = listed("webdataset")
    assert names["version"] == wds.__version__
    assert len(names["modules"]) >= 17
    assert sum(map(len, names["modules"].values())) > 300
