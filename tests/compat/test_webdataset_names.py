"""Every public name of webdataset exists in `energon.webdataset`, and takes the same arguments."""

from __future__ import annotations

from pathlib import Path

import energon.webdataset as wds
from tests.compat.names import differences, listed

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"

# What is missing or incompatible on purpose, each with a text of docs/differences.md about it.
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


def test_every_public_name_is_there_with_compatible_parameters():
    found = differences(listed("webdataset"), "energon.webdataset")
    assert set(found) == set(EXCEPTIONS), {n: found[n] for n in set(found) - set(EXCEPTIONS)}


def test_exceptions_are_listed_in_the_documentation():
    text = DIFFERENCES.read_text()
    assert [each for each in set(EXCEPTIONS.values()) if each not in text] == []


def test_the_list_is_of_the_release_that_is_named():
    names = listed("webdataset")
    assert names["version"] == wds.__version__
    assert len(names["modules"]) >= 17
    assert sum(map(len, names["modules"].values())) > 300
