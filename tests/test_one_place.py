"""What is done in one place only, by the calls that do it."""

from __future__ import annotations

import pytest

from tests.source_modules import source_modules

PLACES = {
    ("os.replace", "os.rename", "os.renames"): {
        "io/atomic.py": "where files and folders get their final names",
        "webdataset/shardlists.py": "a process claims a file by renaming it",
    },
    ("status.st_atime_ns",): {"io/disk_cache.py": "which entries of a disk cache go first"},
    ("fcntl.flock", "fcntl.lockf"): {"io/atomic.py": "the locks"},
}


@pytest.mark.parametrize("functions", PLACES, ids=lambda functions: functions[0])
def test_only_one_place_calls(functions):
    found = {each.path for each in source_modules() if each.attributes & {*functions}}
    assert found == {f"energon/{path}" for path in PLACES[functions]}


def test_what_a_sample_of_a_stream_is_stands_in_one_file():
    found = [each.path for each in source_modules() if "\nStreamSample = " in each.text]
    assert found == ["energon/formats/tar/parser.py"]
