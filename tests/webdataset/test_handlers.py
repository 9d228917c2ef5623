from __future__ import annotations

import pytest

import energon.webdataset as wds
from energon.errors import MissingExtraError, SecurityError
from tests.webdataset.shards import tar_bytes

TOLERANT = [
    wds.ignore_and_continue,
    wds.warn_and_continue,
    wds.ignore_and_stop,
    wds.warn_and_stop,
]


@pytest.mark.parametrize("handler", TOLERANT)
@pytest.mark.parametrize("error", [SecurityError("shell"), MissingExtraError("no such package")])
def test_what_would_fail_for_all_items_is_never_tolerated(handler, error):
    with pytest.raises(type(error)):
        handler(error)


@pytest.mark.parametrize("handler", TOLERANT)
def test_a_refused_command_is_no_end_of_the_data(handler):
    with pytest.raises(SecurityError, match="ENERGON_ALLOW=shell"):
        list(wds.WebDataset("pipe:cat a.tar", shardshuffle=False, handler=handler))


def fail(sample):
    raise ValueError("no good")


@pytest.mark.parametrize("stage", [wds.map, wds.select])
def test_errors_of_functions_say_which_sample_it_was(stage):
    samples = [{"__key__": "a/1", "__url__": "x.tar", "txt": b""}]
    with pytest.raises(ValueError, match="no good") as caught:
        list(stage(fail)(samples))
    assert caught.value.__notes__ == ["sample 'a/1' of x.tar"]
    with pytest.warns(UserWarning, match="ValueError: no good; sample 'a/1' of x.tar"):
        assert list(stage(fail, handler=wds.warn_and_continue)(samples)) == []


@pytest.mark.parametrize("stage", [wds.map, wds.select, wds.decode])
def test_handlers_are_not_asked_about_interrupts(stage):
    def interrupt(*_):
        raise KeyboardInterrupt

    asked = []
    samples = [{"__key__": "a/1", "__url__": "x.tar", "txt": b""}]
    with pytest.raises(KeyboardInterrupt) as caught:
        list(stage(interrupt, handler=asked.append)(samples))
    assert asked == []
    assert "sample 'a/1' of x.tar" in caught.value.__notes__


def test_a_pipeline_that_finds_no_sample_in_many_shards_says_so(tmp_path, caplog):
    dataset = wds.WebDataset(
        f"{tmp_path}/{{000..249}}.tar",
        shardshuffle=False,
        handler=wds.ignore_and_continue,
        empty_check=False,
    )
    assert list(dataset) == []
    (record,) = caplog.records
    about = "100 shards in a row have no samples: DatasetNotFoundError: "
    assert record.getMessage().startswith(f"{about}{tmp_path}/099.tar: no such file")


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_handler_is_asked_once_about_a_field_that_occurs_twice(tmp_path, goes_on):
    members = [("1.txt", b"a"), ("2.txt", b"b"), ("2.txt", b"c"), ("3.txt", b"d")]
    (tmp_path / "x.tar").write_bytes(tar_bytes(members))
    asked = []

    def handler(error):
        asked.append(error)
        return goes_on

    dataset = wds.WebDataset(str(tmp_path / "x.tar"), shardshuffle=False, handler=handler)
    assert [sample["txt"] for sample in dataset] == ([b"a", b"b", b"d"] if goes_on else [b"a"])
    assert len(asked) == 1
