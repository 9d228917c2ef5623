"""The examples that `torchrun` may start: two ranks begin without data, one of them makes it."""

from __future__ import annotations

import re

import pytest

from tests.ranks import printed

TRAINERS = ["finetune_vlm.py", "train_captioner.py", "train_whisper.py"]


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize("program", TRAINERS)
def test_trainers_continue_on_other_numbers_of_ranks(program, tmp_path):
    for steps, ranks in ((2, 2), (3, 1)):
        arguments = tmp_path / "data", tmp_path / "run.pt", "--steps", steps
        said = printed(*arguments, ranks=ranks, program=program)
        assert re.search(rf"step {steps}: loss \d", said)


@pytest.mark.slow  # processes that import torch
def test_the_ranks_of_an_evaluation_score_each_sample_once(tmp_path):
    said = printed(tmp_path / "data", ranks=2, program="evaluate.py")
    assert re.findall(r"(\w+): \d+ of (\d+) are right", said) == [("easy", "150"), ("hard", "150")]
