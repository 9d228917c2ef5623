from __future__ import annotations

import base64
import io
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from energon import get_loader, get_savable_loader, get_train_dataset
from energon.cli.main import main
from energon.samples.display import half_blocks
from megatron.energon import LogSampleDataset
from tests.commands import ok, run
from tests.datasets import jpeg, make_captions, make_crude, write_crude
from tests.media_files import media_files
from tests.task_encoder.runs import config, val


def test_shows_the_fields_of_typed_samples(tmp_path):
    root = make_captions(tmp_path / "ds", [3, 2])
    output = run("preview", root, "--start", 1, "--count", 2).output
    first, second = output.strip().split("\n\n")
    assert first.startswith("CaptioningSample 's1'\n")
    assert "  image: ndarray (8, 12, 3) uint8" in first
    assert "  caption: 'caption 1'" in first
    assert f"  sources: {root}: s1.jpg, s1.txt in " in first
    assert second.startswith("CaptioningSample 's2'\n")


def test_shows_the_parts_of_crude_samples(tmp_path):
    output = run("preview", make_crude(tmp_path / "ds", [3]), "--split-part", "val").output
    assert output.count("CrudeSample") == 3
    assert "  txt: 'text 2'" in output


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "{worker_id}.jsonl"
    worker_config = config(worker_debug_path=str(path), lanes=1)
    batches = val(make_crude(tmp_path / "ds", [4]), batch_size=3, worker_config=worker_config)
    logged = LogSampleDataset(batches, "train", worker_config)
    with get_loader(logged) as loader:
        for _ in range(2):
            assert len(list(loader)) == 2
    return tmp_path / "0.jsonl"


def test_counts_the_samples_of_logs(log):
    output = run("analyze-debug", log).output
    assert "batches" in output
    assert "rank 0: " in output
    assert "4 different ones" in output
    assert " s3" in output


def test_logs_without_samples_are_refused(log):
    result = run("analyze-debug", log, "--include-modality", "val")
    assert "no line of the modes val" in result.output
    log.write_bytes(b"\xff\0\n")
    assert "0.jsonl:1: not JSON" in run("analyze-debug", log).output
    log.write_text("x\n")
    assert "0.jsonl:1: not JSON" in run("analyze-debug", log).output
    log.write_text(json.dumps([1]) + "\n")
    assert run("analyze-debug", log).exit_code == 1


def test_shows_the_samples_with_a_key(tmp_path):
    make_captions(tmp_path / "a", [30])
    make_crude(tmp_path / "b", [30])
    (tmp_path / "m.yaml").write_text("splits: {train: {blend: [{path: a}, {path: b}]}}\n")
    done = run("preview", tmp_path / "m.yaml", "--key", "s7", "--key", "s29")
    found = re.findall(r"^(\w+) '(\w+)'$", done.output, re.MULTILINE)
    assert found == [
        *(("CaptioningSample", "s7"), ("CrudeSample", "s7")),
        *(("CaptioningSample", "s29"), ("CrudeSample", "s29")),
    ]
    assert run("preview", tmp_path / "m.yaml", "--key", "nothing").exit_code == 2


def test_shows_samples_that_fulfil_conditions(tmp_path):
    root = make_captions(tmp_path / "ds", [30])
    done = run("preview", root, "--where", "json.n>=10 json.n!=11", "--count", 3, "--json")
    assert [each["key"] for each in json.loads(done.output)] == ["s10", "s12", "s13"]
    done = run("preview", root, "--where", "json.n>=10", "--start", 20, "--count", 1, "--json")
    assert [each["key"] for each in json.loads(done.output)] == ["s20"]
    assert run("preview", root, "--where", "json").exit_code == 2
    done = run("preview", root, "--where", "json.n>99")
    assert (done.exit_code, done.output) == (0, f"no sample of split 'train' of {root} matches\n")


def test_says_what_recordings_are_and_shows_a_frame_of_videos(tmp_path):
    files = media_files()
    parts = {"wav": files["wav"], "mp4": files["0.mp4"]}
    write_crude(tmp_path / "ds", [("a", parts), ("b", {"mp4": b"no video"})])
    output = run("preview", tmp_path / "ds", "--html", tmp_path / "sheet.html").output
    assert output == ""
    page = (tmp_path / "sheet.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 1
    output = run("preview", tmp_path / "ds").output
    assert re.search(r"  wav: sound, \d x [\d,]+ Hz, [\d.]+ s", output)
    assert re.search(r"  mp4: video of \d+ x \d+ pixels, \d+ frames/s", output)
    assert "AVDecoder" not in output + page


def test_shows_the_samples_of_a_step(tmp_path):
    root = make_captions(tmp_path / "ds", [30])
    dataset = get_train_dataset(root, worker_config=config(seed_offset=3), batch_size=4)
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        expected = [next(batches).__key__ for _ in range(3)][2]
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    options = ("--state", tmp_path / "state.json")
    done = run("preview", root, *options, "--step", 2, "--json")
    assert [each["key"] for each in json.loads(done.output)] == list(expected)
    assert run("preview", root, *options).exit_code == 2
    assert run("preview", root, "--step", 2).exit_code == 2
    assert run("preview", root, *options, "--step", 2, "--key", "s1").exit_code == 2


def test_draws_images_with_half_blocks(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[:2] = (255, 0, 0)
    lines = list(half_blocks(pixels, 30, 20))
    large = list(half_blocks(np.zeros((90, 90, 3), np.uint8), 30, 20))
    assert {line.count("▀") for line in large} == {30}
    assert len(large) == 15
    assert len(list(half_blocks(np.zeros((90, 9, 3), np.uint8), 30, 20))) == 20
    assert len(lines) == 2
    assert lines[0].count("▀") == 4
    assert lines[0].startswith("\x1b[38;2;255;0;0;48;2;255;0;0m▀")
    assert lines[1].startswith("\x1b[38;2;0;0;0;48;2;0;0;0m▀")
    root = make_captions(tmp_path / "ds", [1])
    assert "▀" in run("preview", root, "--images").output
    # Where nobody looks at a terminal, nothing is drawn.
    assert "▀" not in run("preview", root).output


def test_saves_a_page_with_images_and_texts_beside_it(tmp_path):
    root = make_captions(tmp_path / "ds", [3])
    ok("preview", root, "--count", 2, "--save", tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == [
        *("0000_caption.txt", "0000_image.png", "0001_caption.txt", "0001_image.png"),
        "index.html",
    ]
    with Image.open(tmp_path / "out/0001_image.png") as image:
        assert image.size == (12, 8)
    assert (tmp_path / "out/0001_caption.txt").read_text() == "caption 1"


def test_writes_a_page_that_needs_nothing_else(tmp_path):
    script = b"<script>alert(1)</script>"
    write_crude(tmp_path / "ds", [("<b>", {"jpg": jpeg(1), "txt": script})])
    ok("preview", tmp_path / "ds", "--html", tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert "<h2>&lt;b&gt;</h2>" in page
    assert "<script" not in page
    assert re.findall(r"(?:src|href)=\"(.{5})", page) == ["data:"]
    data = base64.b64decode(re.search(r'src="data:image/jpeg;base64,(.*?)"', page)[1])
    assert Image.open(io.BytesIO(data)).size == (12, 8)


def test_goes_through_splits_until_somebody_says_no(tmp_path):
    root = make_captions(tmp_path / "a", [2])
    arguments = ["preview", str(root), "--split-parts", "train,val"]
    done = CliRunner().invoke(main, arguments, input="y\nn\n")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert [line for line in lines if line.startswith("Sample")] == ["Sample 0", "Sample 1"]
    assert " - caption (<class 'str'>): 'caption 0'" in lines
    assert done.output.count("Continue?") == 2


def test_draws_which_samples_were_seen_when(log, tmp_path):
    image = tmp_path / "seen.png"
    output = run("analyze-debug", log, "--heatmap-path", image).output
    assert "Analyzing 1 log" in output
    assert "Found 4 unique sample keys, 4 steps" in output
    pixels = np.asarray(Image.open(image))
    assert pixels.shape == (4, 4)
    assert sorted(set(pixels.ravel().tolist())) == [0, 25]
    skipped = run("analyze-debug", log, "--skip", 1, "--json").output
    assert json.loads(skipped)["batches"] == 2


def test_samples_before_the_first_are_not_decoded(tmp_path):
    samples = [(f"s{n}", {"json": b"{" if n < 3 else b"%d" % n}) for n in range(6)]
    write_crude(tmp_path / "ds", samples)
    done = ok("preview", tmp_path / "ds", "--start", 2, "--count", 3)
    assert re.findall(r"CrudeSample '(\w+)'", done.output) == ["s3", "s4"]
    assert re.findall(r"skipped a sample: sample '(s\d)'", done.output) == ["s2"]
    done = run("preview", tmp_path / "ds", "--start", 99)
    assert done.exit_code == 2
    assert "--start 99: split 'train' of" in done.output
    assert "has only 6 samples" in done.output
    assert "skipped" not in done.output


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [("png", "PNG", np.uint16), ("tiff", "TIFF", np.uint16), ("tif", "TIFF", np.float32)],
)
def test_images_of_more_than_8_bits_are_drawn_from_their_darkest_to_their_brightest_pixel(
    tmp_path, name, kind, dtype
):
    depth = np.repeat(np.linspace(1000, 3000, 90), 60).reshape(90, 60).astype(dtype)
    buffer = io.BytesIO()
    Image.fromarray(depth).save(buffer, kind)
    write_crude(tmp_path / "ds", [("a", {name: buffer.getvalue()})])
    ok("preview", tmp_path / "ds", "--save", tmp_path / "out")
    with Image.open(tmp_path / f"out/0000_{name}.png") as image:
        rows = np.asarray(image.convert("L")).mean(axis=1)
    assert rows[0] < 8
    assert abs(rows[45] - 128) < 8
    assert rows[-1] > 247


def test_damaged_samples_among_those_that_are_chosen_are_skipped(tmp_path):
    samples = [(f"s{n}", {"jpg": jpeg(n)[: 300 if n == 1 else None]}) for n in range(3)]
    write_crude(tmp_path / "ds", samples)
    done = ok("preview", tmp_path / "ds", "--where", "has:jpg")
    assert re.findall(r"CrudeSample '(\w+)'", done.output) == ["s0", "s2"]
    assert re.search(r"skipped a sample: sample 's1'.*s1\.jpg: \d+ bytes", done.output)
