import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError, StateError
from energon.loader.state import (
    LanePosition,
    build_state,
    check_fingerprint,
    flatten,
    merge_states,
    read_positions,
    unflatten,
)

positions = st.builds(
    LanePosition,
    batches=st.integers(0, 10**12),
    epoch_batches=st.integers(0, 100),
    state=st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 2**53 - 1)),
    skip_rows=st.lists(st.integers(0, 99), max_size=2).map(tuple),
)


def state_of(*lanes, total=4, fingerprint=None):
    return build_state(
        {lane: LanePosition(batches=lane) for lane in lanes},
        lanes=total,
        fingerprint=fingerprint or {"seed": 1},
    )


@given(st.dictionaries(st.integers(0, 3), positions, min_size=1))
def test_positions_survive_both_forms(by_lane):
    state = build_state(by_lane, lanes=4, fingerprint={"seed": 1})
    for form in (state, flatten(state)):
        saved = merge_states(json.loads(json.dumps(form)))
        assert read_positions(saved, by_lane) == by_lane


def test_the_keys_of_the_flat_form_depend_on_the_lanes_only():
    fresh, later = state_of(0, 2), state_of(0, 2, fingerprint={"seed": 1, "more": {"a": 1}})
    assert flatten(fresh).keys() == flatten(later).keys() == {"header", "lane_0", "lane_2"}
    assert unflatten(flatten(later)) == later


def test_rank_states_make_a_global_state_in_any_order():
    merged = merge_states([state_of(1, 3), state_of(0, 2)])
    assert merged == state_of(0, 1, 2, 3)


def test_a_lane_must_not_come_twice():
    with pytest.raises(StateError, match="lane 2 is in states 0 and 1"):
        merge_states([state_of(0, 2), state_of(2, 3)])


def test_rank_states_must_be_of_one_run():
    with pytest.raises(StateError, match=r"states 0 and 1 .*fingerprint\.seed: saved 1, now 2"):
        merge_states([state_of(0), state_of(1, fingerprint={"seed": 2})])
    with pytest.raises(StateError, match="lanes: saved 4, now 8"):
        merge_states([state_of(0), state_of(1, total=8)])


@pytest.mark.parametrize("bad", [None, [], {}, {"format": "x"}, [3], "text"])
def test_refuses_what_is_no_state(bad):
    with pytest.raises(StateError):
        merge_states(bad)


@pytest.mark.parametrize("name", ["version", "order_version"])
def test_refuses_states_of_other_releases(name):
    with pytest.raises(StateError, match=f"{name} is 99, this release reads 1"):
        merge_states({**state_of(0), name: 99})


def test_names_missing_lanes_in_few_words():
    with pytest.raises(StateError, match="covers lanes 1, 3 of 8, but lanes 0, 2, 4-7 are missing"):
        read_positions(state_of(1, 3, total=8), range(8))


def test_a_damaged_position_is_shown():
    state = state_of(0)
    del state["positions"]["0"]["batches"]
    with pytest.raises(StateError, match="needs batches, epoch_batches and state"):
        read_positions(state, [0])


SAVED = {"seed": 1, "data": {"a": {"count": 3}, "b": {"count": 4}}}
NOW = {"seed": 1, "data": {"a": {"count": 5}, "c": {"count": 4}}}


def test_equal_fingerprints_have_no_differences():
    assert check_fingerprint(SAVED, SAVED) == []


def test_each_difference_is_named_with_both_values():
    with pytest.raises(StateError) as caught:
        check_fingerprint(SAVED, NOW)
    text = str(caught.value)
    assert "data.a.count: saved 3, now 5" in text
    assert "data.b: saved {'count': 4}, now nothing" in text
    assert "data.c: saved nothing, now {'count': 4}" in text
    assert "strict=['data']" in text


def test_chosen_differences_are_let_through():
    assert len(check_fingerprint(SAVED, NOW, strict=False)) == 3
    assert len(check_fingerprint(SAVED, NOW, strict=["data"])) == 3
    assert len(check_fingerprint(SAVED, NOW, strict="data")) == 3
    with pytest.raises(StateError, match=r"data\.b"):
        check_fingerprint(SAVED, NOW, strict=["data.a", "data.c"])


def test_a_name_lets_only_itself_through():
    with pytest.raises(StateError, match="data2"):
        check_fingerprint({"data": 0, "data2": 1}, {"data": 0, "data2": 2}, strict=["data"])


def test_what_is_no_json_is_refused_when_saving():
    with pytest.raises(TypeError):
        build_state({0: LanePosition(state={"a": object()})}, lanes=1, fingerprint={})


@pytest.mark.parametrize("strict", [["nonsense"], "nonsense", ["leaves", "leaf"], [3]])
def test_names_of_differences_that_cannot_be_are_refused(strict):
    run = {"leaves": {"a": 1}, "batch_size": 4}
    with pytest.raises(ConfigError, match="is not part of a state; expected True, False"):
        check_fingerprint(run, run, strict=strict)
    assert check_fingerprint(run, run, strict=["leaves.a", "steps", "mix"]) == []
