from __future__ import annotations

import pytest

from energon.prepare.dataset import prepare_dataset
from tests.datasets import write_shard

CAPTIONS = {"sample_type": "CaptioningSample", "field_map": {"image": "jpg", "caption": "txt"}}


def prepared(folder, shards, caplog, **settings):
    """Prepare shards with the given parts of each sample; return the warnings."""
    for number, samples in enumerate(shards):
        named = [(f"{number}-{n}", dict.fromkeys(parts, b"x")) for n, parts in enumerate(samples)]
        write_shard(folder / f"{number}.tar", named)
    prepare_dataset(folder, **{"split_ratio": {"train": 1}, **CAPTIONS, **settings})
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


BOTH, IMAGE = ["jpg", "txt"], ["jpg"]


@pytest.mark.parametrize(
    ("shards", "found"),
    [
        ([[BOTH] * 3], None),
        ([[["JPG", "Txt"], ["jpg", "txt", "json"]]], None),
        ([[BOTH, IMAGE, BOTH], [BOTH]], (1, 4, "0-1")),
        ([[BOTH], [IMAGE] * 5], (5, 6, "1-0, 1-1, 1-2, …")),
    ],
)
def test_samples_without_a_mapped_part_are_counted(tmp_path, caplog, shards, found):
    folder = tmp_path / "ds"
    expected = []
    if found is not None:
        lacking, count, keys = found
        words = (
            f"{lacking} of {count} samples lack part txt for field 'caption' and will be skipped"
        )
        expected = [f"{folder}: {words}: {keys}"]
    assert prepared(folder, shards, caplog) == expected


def test_samples_with_another_part_of_the_field_are_complete(tmp_path, caplog):
    shards = [[BOTH, ["jpg", "json"]]]
    either = {"image": "jpg", "caption": "txt,json[text]"}
    assert prepared(tmp_path / "ds", shards, caplog, field_map=either) == []


def test_excluded_samples_are_not_counted(tmp_path, caplog):
    folder, shards = tmp_path / "ds", [[BOTH, IMAGE], [IMAGE, BOTH]]
    lost = tmp_path / "lost.jsonl"
    lost.write_text('{"shard": "0.tar", "key": "0-1"}\n{"shard": "1.tar", "key": null}\n')
    assert prepared(folder, shards, caplog, exclude_from=[lost]) == []
