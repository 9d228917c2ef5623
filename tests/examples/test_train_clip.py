"""The example that trains CLIP on Parquet files and tar shards."""

from __future__ import annotations

import runpy

import pytest
import torch

from tests.ranks import EXAMPLES, train, train_and_kill

pytest.importorskip("pyarrow")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(EXAMPLES / "train_clip.py"))


@pytest.fixture(scope="module")
def data(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip") / "data"
    program["make_data"](folder)
    return folder


def model_of(path):
    return torch.load(path)["model"]


@pytest.mark.slow  # the first optimizer of a process takes seconds
def test_a_run_goes_on_where_it_was_saved(program, data, tmp_path):
    main = program["main"]
    main([str(data), str(tmp_path / "whole.pt"), "--steps", "4"])
    main([str(data), str(tmp_path / "cut.pt"), "--steps", "2"])
    main([str(data), str(tmp_path / "cut.pt"), "--steps", "4"])
    cut = model_of(tmp_path / "cut.pt")
    for name, value in model_of(tmp_path / "whole.pt").items():
        assert torch.equal(value, cut[name]), name


@pytest.mark.slow  # some seconds of training
def test_images_find_their_captions(program, data, tmp_path):
    by_chance = program["main"]([str(data), str(tmp_path / "none.pt"), "--steps", "0"])
    assert program["main"]([str(data), str(tmp_path / "some.pt"), "--steps", "80"]) > 0.4
    assert by_chance < 0.3


@pytest.mark.slow  # four processes that import torch
def test_a_killed_run_goes_on_with_two_ranks_as_if_nothing_had_happened(data, tmp_path):
    settings = {"program": "train_clip.py"}
    steps = 3 + train_and_kill(data, tmp_path / "cut.pt", ranks=1, **settings)
    train(data, tmp_path / "cut.pt", "--steps", steps, ranks=2, **settings)
    train(data, tmp_path / "whole.pt", "--steps", steps, ranks=1, **settings)
    cut = model_of(tmp_path / "cut.pt")
    for name, value in model_of(tmp_path / "whole.pt").items():
        # The bias of keys cancels in the softmax: its gradient is noise, which Adam scales up.
        assert name.endswith("k_proj.bias") or torch.allclose(value, cut[name], atol=1e-3), name
