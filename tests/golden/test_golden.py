"""Orders, states, files and results of commands are those of the revision that recorded them.

A change that is meant to alter one of them runs `python -m tests.golden.runs`, and its message says
why.
"""

from __future__ import annotations

import json
from itertools import islice

import pytest

from tests.effort import some
from tests.golden.commands import COMMANDS, command_results
from tests.golden.runs import (
    CONFIGURATIONS,
    NUM_AFTER,
    RECORDED,
    TOPOLOGIES,
    digest,
    global_batches,
    order,
    saved_states,
    write_datasets,
    written_files,
)

GOLDEN = json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    write_datasets(root)
    return root


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_orders_are_those_recorded(root, name):
    for lanes, ranks in some(TOPOLOGIES, 2):
        expected = GOLDEN["orders"][name][f"{lanes} lanes, {ranks} ranks"]
        assert order(root, name, (lanes, ranks)) == expected, (lanes, ranks)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_recorded_states_continue_as_they_did(root, name):
    for steps, state, after in GOLDEN["states"][name]:
        state = json.loads(json.dumps(state).replace("ROOT", str(root)))
        for ranks in some((1, 4), 2):
            _, batches = global_batches(root, name, (8, ranks), state, start=steps)
            assert digest(list(islice(batches, NUM_AFTER))) == after, (steps, ranks)


@pytest.mark.parametrize("name", some(list(CONFIGURATIONS), 8))
def test_states_are_those_recorded(root, name):
    assert saved_states(root, name) == GOLDEN["states"][name]


def test_written_files_are_those_recorded(tmp_path):
    assert written_files(tmp_path) == GOLDEN["files"]


def test_results_of_commands_are_those_recorded(tmp_path):
    results = command_results(tmp_path)
    assert [line for line, *_ in results] == list(COMMANDS)
    for result, expected in zip(results, GOLDEN["commands"], strict=True):
        assert json.loads(json.dumps(result)) == expected, result[0]
