"""The assistant of `energon prepare`, through a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pexpect
import pytest
from click.testing import CliRunner
from pexpect.fdpexpect import fdspawn

from energon.cli.main import main
from energon.formats.meta import yaml
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import jpeg, make_captions, write_shard
from tests.effort import some
from tests.sources.distant import upload

COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """Answers the command's questions."""

    def __init__(self, *arguments):
        command = ["-m", "energon.cli.main", "prepare", *map(str, arguments), "--num-workers", "1"]
        own, shown = pty.openpty()
        # Whatever runs the tests, this is a terminal in which long questions wrap.
        fcntl.ioctl(shown, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 120, 0, 0))
        # A fork of this process that runs Python before the command could wait for its threads.
        self.command = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, *command],
            stdin=shown,
            stdout=shown,
            stderr=shown,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(shown)
        self.process = fdspawn(own, encoding="utf-8", timeout=250)

    def answer(self, question, text):
        """Wait for a question, and return what was shown before it, without colours."""
        self.process.expect_exact(question)
        shown = COLOUR.sub("", self.process.before)
        self.process.expect_exact(": ")
        self.process.send(f"{text}\r")
        return shown

    def end(self):
        """Wait for the end; return what was shown and the exit code."""
        self.process.expect(pexpect.EOF)
        self.process.close()
        return self.process.before, self.command.wait()


def piped(root, answers, *options):
    command = [sys.executable, "-m", "energon", "prepare", root, "--num-workers", "1", *options]
    return subprocess.run(command, input=answers, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_takes_answers_from_a_pipe_in_the_order_in_which_scripts_write_them(tmp_path):
    root = tmp_path / "ds"
    write_captions(root)
    done = piped(root, "1,0,0\ny\n0\ny\njpg\njson[about]\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Done\n")
    described = yaml.load((root / ".nv-meta/dataset.yaml").read_text(), origin="")
    assert "Captioning" in str(described)
    assert described["field_map"] == {"image": "jpg", "caption": "json[about]"}
    short = piped(root, "y\n1,0,0\ny\n")
    assert (
        "standard input ends before an answer to 'Sample type, by number or name'" in short.stderr
    )


def handed(root, answers=None, *options):
    return CliRunner().invoke(
        main, ["prepare", str(root), "--num-workers", "1", *options], input=answers
    )


def test_takes_answers_that_a_program_hands_over_in_memory(tmp_path):
    root = tmp_path / "ds"
    write_captions(root)
    first = handed(root, "1,0,0\ny\n0\ny\njpg\njson[about]\n")
    assert first.exit_code == 0, first.output
    assert first.stdout.endswith("Done\n")
    assert document(root)["field_map"] == {"image": "jpg", "caption": "json[about]"}
    again = handed(root, "n\n")
    assert again.exit_code == 2
    assert "is already prepared; pass --overwrite to" in again.output
    # Crude samples are the last of the list.
    assert handed(root, "y\n1,0,0\ny\n11\n").exit_code == 0
    assert "CrudeWebdataset" in (root / ".nv-meta/dataset.yaml").read_text()
    assert handed(root, "y\n1,0,0\nn\n").exit_code == 0
    (root / ".nv-meta/dataset.yaml").unlink()
    # Options ask nothing, so what is piped is left to others.
    assert handed(root, "x\n", "--split-ratio", "1,0,0", "--force-overwrite").exit_code == 0
    refused = handed(root)
    assert refused.exit_code != 0
    assert "is already prepared" in f"{refused.output}{refused.exception}"


def write_captions(root, counts=(2, 1, 1), names="{}.tar"):
    number = 0
    for shard, count in enumerate(counts):
        samples = []
        for _ in range(count):
            parts = {"jpg": jpeg(number), "json": b'{"about": "cat %d"}' % number}
            samples.append((f"k{number}", parts))
            number += 1
        write_shard(root / names.format(shard), samples)
    return root


def document(root, name="dataset.yaml"):
    path = root / ".nv-meta" / name
    return yaml.load(path.read_text(), origin=str(path))


@pytest.mark.slow
def test_prepares_a_folder_by_answers(tmp_path):
    root = write_captions(tmp_path / "ds")
    terminal = Terminal(root)
    shown = terminal.answer("Split ratio", "train:2,held:1")
    assert "0.tar: k0" in shown
    assert "image, 12 by 8 pixels" in shown
    assert "▀" in shown
    assert "{'about': 'cat 0'}" in shown
    shown = terminal.answer("Sample type", "0")
    assert "CrudeWebdataset" in shown
    terminal.answer("Map fields to parts?", "")
    terminal.answer("image (torch.Tensor)", "")
    terminal.answer("caption (str)", "txt")
    terminal.process.expect_exact("no sample has a part 'txt'; there are jpg, json")
    terminal.answer("caption (str)", "json[nothing]")
    terminal.process.expect_exact("but json has only")
    terminal.answer("caption (str)", "json[ab\t")
    terminal.process.expect_exact("= 'cat 0'")
    shown = terminal.answer("write this to", "y")
    assert "CaptioningSample" in shown
    assert "{0..1}.tar" in shown
    shown, code = terminal.end()
    assert code == 0
    assert "4 samples in 3 shards" in shown
    assert document(root)["field_map"] == {"image": "jpg", "caption": "json[about]"}
    assert len(WebdatasetSource(root, SampleSelection("held"))) == 1


def test_a_field_map_of_an_option_is_checked_against_samples_before_anything_is_asked(tmp_path):
    root = write_captions(tmp_path / "ds")
    field_map = '{"image": "jpg", "caption": "json[title]"}'
    done = handed(root, "1\n", "--sample-type", "CaptioningSample", "--field-map", field_map)
    assert done.exit_code == 2
    assert "has only the keys" in done.output
    assert "Split ratio" not in done.output
    assert not (root / ".nv-meta").exists()


@pytest.mark.slow
def test_nothing_is_written_after_a_no(tmp_path):
    root = write_captions(tmp_path / "ds")
    terminal = Terminal(root, "--split-ratio", "1")
    terminal.answer("Sample type", "")
    terminal.answer("write this to", "n")
    shown, code = terminal.end()
    assert code == 1
    assert "Aborted" in shown
    assert not (root / ".nv-meta").exists()


@pytest.mark.slow
@pytest.mark.parametrize("key", some(["\x03", "\x04"], 2))
def test_ends_when_nobody_wants_to_answer(tmp_path, key):
    root = write_captions(tmp_path / "ds")
    terminal = Terminal(root)
    terminal.process.expect_exact("Split ratio")
    terminal.process.expect_exact("]: ")
    terminal.process.send(key)
    shown, code = terminal.end()
    assert code == (130 if key == "\x03" else 1)
    assert "Traceback" not in shown
    assert not (root / ".nv-meta").exists()


@pytest.mark.slow
def test_keeps_a_present_description_and_asks_before_preparing_again(tmp_path):
    root = make_captions(tmp_path / "ds", [2])
    before = (root / ".nv-meta/dataset.yaml").read_text()
    terminal = Terminal(root)
    terminal.answer("is already prepared. Prepare it again?", "y")
    terminal.answer("Split ratio", "1")
    terminal.answer("Keep this dataset.yaml?", "")
    terminal.answer("write this to", "")
    assert terminal.end()[1] == 0
    assert (root / ".nv-meta/dataset.yaml").read_text() == before


def test_asks_nothing_if_options_say_it_all(tmp_path):
    root = write_captions(tmp_path / "ds")
    field_map = '{"image": "jpg", "caption": "json[about]"}'
    options = ("--split-ratio", "1", "--sample-type", "CaptioningSample")
    assert handed(root, "", *options, "--field-map", field_map).exit_code == 0


def test_asks_nothing_if_told_so(tmp_path):
    root = write_captions(tmp_path / "ds")
    done = handed(root, "", "--non-interactive")
    assert done.exit_code == 2
    assert "--split-ratio" in done.output
    done = handed(root, "", "--non-interactive", "--split-ratio", "1", "--sample-type", "")
    assert done.exit_code == 2
    assert "no sample type ''" in done.output


def test_control_characters_of_samples_do_not_reach_the_terminal(tmp_path):
    root = tmp_path / "ds"
    write_shard(root / "0.tar", [("a\x1b[31m", {"txt": b"\x1b]0;title\x07 red"})])
    terminal = Terminal(root)
    terminal.process.expect_exact("Split ratio")
    shown = terminal.process.before
    assert "\x1b]0;" not in shown
    assert "a\x1b[31m" not in shown
    assert "[31m" in shown
    terminal.command.kill()
    terminal.end()


@pytest.mark.slow
def test_shows_the_samples_of_a_bucket_and_writes_there(s3, tmp_path):
    address = upload(write_captions(tmp_path / "ds"), s3.address)
    terminal = Terminal(address, "--split-ratio", "1")
    shown = terminal.answer("Sample type", "CaptioningSample")
    assert "0.tar: k0" in shown
    assert "{'about': 'cat 0'}" in shown
    terminal.answer("Map fields to parts?", "")
    terminal.answer("image (torch.Tensor)", "")
    terminal.answer("caption (str)", "json[about]")
    shown = terminal.answer(f"{address}/.nv-meta?", "y")
    assert "caption: " in shown
    assert terminal.end()[1] == 0
    assert len(WebdatasetSource(address, SampleSelection("train"))) == 4
    terminal = Terminal(address)
    terminal.answer(f"{address} is already prepared. Prepare it again?", "n")
    assert terminal.end()[1] == 1
