from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.formats.meta.braces import expand_braces
from energon.formats.meta.info import load_split
from energon.prepare.dataset import prepare_dataset
from energon.prepare.verify.quarantine import QuarantineEntry, load_quarantine, write_quarantine
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import CRUDE, write_shard

names = st.text("ab{},.\\ 0é/", min_size=1, max_size=10).map(lambda text: f"x{text}x")


@given(
    st.lists(
        st.builds(
            QuarantineEntry,
            st.sampled_from(["", "/data/x", "s3://bucket/x"]),
            names,
            st.none() | names,
            st.text(max_size=5),
        ),
        max_size=6,
    )
)
def test_entries_come_back_and_stand_for_themselves(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("q") / "q.jsonl"
    write_quarantine(path, entries)
    assert load_quarantine(path) == entries
    for entry in entries:
        name = entry.shard if entry.key is None else f"{entry.shard}/{entry.key}"
        assert expand_braces(entry.excluded) == [name]


@pytest.mark.parametrize("line", ["{", '{"key": "a"}', '{"shard": 3, "key": []}'])
def test_lines_that_make_no_sense_are_refused(tmp_path, line):
    path = tmp_path / "q.txt"
    path.write_text(f"a.tar\n{line}\n")
    with pytest.raises(ConfigError, match=r"q\.txt:2: expected"):
        load_quarantine(path)


def test_what_is_listed_is_left_out_and_stays_out(tmp_path):
    for n in range(3):
        write_shard(tmp_path / f"{n}.tar", [(f"{n}_{k}{{}}", {"txt": b"x"}) for k in range(4)])
    path = tmp_path / "q.jsonl"
    path.write_text("0.tar\n" + json.dumps({"shard": "1.tar", "key": "1_2{}"}) + "\n")
    prepare_dataset(tmp_path, **CRUDE, exclude_from=[path])
    assert len(WebdatasetSource(tmp_path)) == 7
    path.write_text("2.tar/2_0{}\n1.tar/1_2{}\n")
    prepare_dataset(tmp_path, **CRUDE, exclude_from=[path])
    assert len(WebdatasetSource(tmp_path)) == 6
    prepare_dataset(tmp_path, **CRUDE)
    assert len(load_split(tmp_path).exclude) == 3
