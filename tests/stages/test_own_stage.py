"""Stages of others: the one that CONTRIBUTING.md shows, and one with state names of its own."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from energon.errors import StateError
from energon.stages.base import Dataset, ThroughDataset, ThroughIterator, unpack
from energon.stages.lane import Lane
from energon.testing import check_resume
from tests.stages.numbers import numbers

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_stage_of_the_page_passes_the_test_of_the_page(monkeypatch):
    stage, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    module = types.ModuleType("stage_of_the_page")
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(stage, str(PAGE), "exec"), module.__dict__)
    exec(compile(test, str(PAGE), "exec"), module.__dict__)
    module.test_a_limit_is_dealt_to_the_lanes()


@dataclass(frozen=True)
class WithoutRepeats(ThroughDataset):
    """Leave out an item whose last digit has come before."""

    dataset: Dataset

    def _open(self, lane):
        return _WithoutRepeats(self, lane)


class _WithoutRepeats(ThroughIterator):
    saves = {"inner": dict, "seen": list, "left_out": int, "last": int | None}  # noqa: RUF012

    def __init__(self, stage, lane):
        self.inner = stage.dataset.open(lane)
        self.seen, self.left_out, self.last = [], 0, None

    def __next__(self):
        for item in self.inner:
            digit = item["n"] % 10
            if digit not in self.seen:
                self.seen.append(digit)
                self.last = item["n"]
                return item["n"], self.left_out
            self.left_out += 1
        raise StopIteration

    def state_dict(self):
        return {
            "inner": self.inner.state_dict(),
            "seen": list(self.seen),
            "left_out": self.left_out,
            "last": self.last,
        }

    def load_state_dict(self, state):
        inner, seen, self.left_out, self.last = unpack(state, self.saves)
        self.inner.load_state_dict(inner)
        self.seen = list(seen)


def test_a_stage_saves_under_names_of_its_own():
    items = check_resume(WithoutRepeats(numbers(100)), lanes=3)
    assert [number for number, _ in items] == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seen", {}, "saved state has seen: {}, expected list; it is damaged"),
        ("left_out", None, "left_out: None, expected int"),
        ("left_out", True, "left_out: True, expected int"),
        ("last", "x", r"last: 'x', expected int \| None"),
        ("inner", [], "inner: .*expected dict"),
        ("row", 3, r"has \['inner', 'last', 'left_out', 'row', 'seen'\], this stage needs"),
    ],
)
def test_a_state_that_is_not_as_declared_is_refused(name, value, message):
    stage = WithoutRepeats(numbers(100))
    state = stage.open(Lane(0, 1)).state_dict() | {name: value}
    with pytest.raises(StateError, match=message):
        stage.open(Lane(0, 1), state)
