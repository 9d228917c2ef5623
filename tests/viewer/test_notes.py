from __future__ import annotations

import json
import re

import pytest

from energon import WorkerConfig, get_val_dataset
from energon.errors import ConfigError
from energon.formats.meta.info import load_split
from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from energon.viewer.notes import Notes
from tests.commands import run
from tests.datasets import make_crude, write_shard
from tests.viewer.pages import browse

INLINE = WorkerConfig(rank=0, world_size=1, num_workers=0)


def say(client, place, what, reason="", **fields):
    form = re.search(r'name="form" value="(.*?)"', client.get(place).text)[1]
    data = {"form": form, "what": what, "reason": reason, **fields}
    return client.post(f"{place}/note", data=data, follow_redirects=False)


@pytest.fixture
def root(tmp_path):
    return make_crude(tmp_path / "ds", [3, 2])


@pytest.fixture
def client(root, tmp_path):
    return browse(root, notes=Notes(tmp_path / "bad"))


def left(root, folder):
    samples = get_val_dataset(root, worker_config=INLINE, batch_size=None, exclude_from=folder)
    return [sample["__key__"] for sample in samples]


def test_what_is_excluded_is_left_out_by_loaders_and_prepare(client, root, tmp_path):
    answer = say(client, "/s/0/0/1", "exclude", "blurred <b>")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/s/0/0/1"
    say(client, "/s/0/0/3", "exclude")
    assert "excluded: blurred &lt;b&gt;" in client.get("/s/0/0").text
    assert left(root, tmp_path / "bad") == ["s0", "s2", "s4"]
    done = run(
        *("prepare", root, "--non-interactive", "--force-overwrite", "--split-parts", "train:.*"),
        *("--skip-dataset-yaml", "--exclude-from", tmp_path / "bad"),
    )
    assert done.exit_code == 0, done.output
    assert load_split(root).exclude == ["000.tar/s1", "001.tar/s3"]


@pytest.mark.slow
def test_what_is_excluded_is_left_out_by_lint(tmp_path):
    samples = [(f"s{n}", {"json": b"{" if n == 3 else b"{}"}) for n in range(6)]
    write_shard(tmp_path / "ds/0.tar", samples)
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    assert run("lint", tmp_path / "ds", "--workers", 1).exit_code == 1
    client = browse(tmp_path / "ds", notes=Notes(tmp_path / "bad"))
    say(client, "/s/0/0/3", what="exclude", reason="broken")
    for place in (tmp_path / "bad", tmp_path / "bad/ds.jsonl"):
        done = run("lint", tmp_path / "ds", "--workers", 1, "--exclude-from", place)
        assert done.exit_code == 0, done.output
        assert "5 samples: no problems" in done.output
    (tmp_path / "two.yaml").write_text("splits: {train: {blend: [{path: ds}, {path: other}]}}")
    make_crude(tmp_path / "other", [2])
    file = tmp_path / "bad/ds.jsonl"
    done = run("lint", tmp_path / "two.yaml", "--workers", 1, "--exclude-from", file)
    assert done.exit_code == 0, done.output
    assert "7 samples: no problems" in done.output


def test_a_flag_is_a_note_that_excludes_nothing(client, root, tmp_path):
    say(client, "/s/0/0/1", "flag", "look again")
    assert "Flagged: look again" in client.get("/s/0/0/1").text
    assert "flagged: look again" in client.get("/s/0/0").text
    assert len(left(root, tmp_path / "bad")) == 5


def test_what_was_said_last_counts_and_can_be_taken_back(client, root, tmp_path):
    file = tmp_path / "bad/ds.jsonl"
    file.write_text('# kept\n000.tar/s2\n{"shard": "001.tar", "key": "s4", "reason": "failed"}\n')
    say(client, "/s/0/0/1", "flag", "one")
    say(client, "/s/0/0/1", "exclude", "two")
    assert left(root, tmp_path / "bad") == ["s0", "s3"]
    say(client, "/s/0/0/1", "forget")
    say(client, "/s/0/0/4", "forget")
    assert file.read_text() == "# kept\n000.tar/s2\n"


def test_keys_of_any_kind_can_be_excluded(tmp_path):
    keys = ["a b", "{x}", "#not", "../up", 'q"\n{"shard": "0.tar", "key": "good"}', "good"]
    write_shard(tmp_path / "ds/0.tar", [(key, {"txt": b"x"}) for key in keys])
    done = run(
        *("prepare", tmp_path / "ds", "--non-interactive", "--split-parts", "train:.*"),
        *("--split-parts", "val:.*", "--sample-type", "CrudeWebdataset"),
    )
    assert done.exit_code == 0, done.output
    client = browse(tmp_path / "ds", notes=Notes(tmp_path / "bad"))
    for number in range(5):
        assert say(client, f"/s/0/0/{number}", "exclude", "a\nb").status_code == 303
    assert left(tmp_path / "ds", tmp_path / "bad") == ["good"]


def test_lines_of_jsonl_files_can_be_excluded(tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    prepare_jsonl(file)
    client = browse(file, notes=Notes(tmp_path / "bad"))
    say(client, "/s/0/0/3", "exclude", "x")
    written = json.loads((tmp_path / "bad/talk.jsonl.jsonl").read_text())
    assert written == {"dataset": str(file), "shard": "talk.jsonl", "key": "3", "reason": "x"}
    assert "excluded: x" in client.get("/s/0/0").text


def test_several_samples_are_excluded_flagged_and_taken_back_at_once(client, root, tmp_path):
    gallery = client.get("/s/0/0").text
    assert re.findall(r'name="ordinal" value="(\d)" form="picked"', gallery) == [*"01234"]
    answer = say(client, "/s/0/0", "exclude", "same", ordinal=["1", "3"], back="/s/0/0?from=2")
    assert answer.headers["location"] == "/s/0/0?from=2"
    say(client, "/s/0/0", "flag", "look", ordinal=["2", "3"])
    assert left(root, tmp_path / "bad") == ["s0", "s2", "s3", "s4"]
    text = client.get("/s/0/0?view=table").text
    assert len(re.findall('title="(same|look)"', text)) == 3
    say(client, "/s/0/0", "forget", ordinal=[str(n) for n in range(5)])
    assert not (tmp_path / "bad/ds.jsonl").read_text()
    for wrong in ("5", "-1", "x", "9" * 20):
        assert say(client, "/s/0/0", "exclude", ordinal=["0", wrong]).status_code == 404
    assert not (tmp_path / "bad/ds.jsonl").read_text()


def test_forms_of_other_pages_are_refused(client, root, tmp_path):
    assert say(client, "/s/0/0/1", "exclude", form="guess").status_code == 403
    assert client.post("/s/0/0/1/note", data={"what": "exclude"}).status_code == 403
    assert say(client, "/s/0/0/1", "drop").status_code == 400
    assert client.get("/s/0/0/1/note").status_code == 405
    assert say(client, "/s/0/0/1", "exclude", "x" * 70_000).status_code == 413
    assert not (tmp_path / "bad/ds.jsonl").exists()


def test_without_a_folder_nothing_is_written(root, client):
    other = browse(root)
    for place in ("/s/0/0/1", "/s/0/0", "/s/0/0?view=table"):
        assert '/note"' not in other.get(place).text
        assert 'class="pick"' not in other.get(place).text
    assert other.post("/s/0/0/note", data={"what": "exclude"}).status_code == 403
    assert other.post("/s/0/0/1/note", data={"what": "exclude"}).status_code == 403


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write quarantine files"):
        Notes(tmp_path / "file/bad")
