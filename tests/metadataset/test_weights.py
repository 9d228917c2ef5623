from __future__ import annotations

import pytest

from energon.errors import ConfigError
from energon.metadataset.document import read_metadataset
from energon.metadataset.leaf import BlendMode
from energon.metadataset.resolve import resolve
from energon.plan.blends.curve import Clock
from tests.metadataset.folders import make_datasets, without_columns, write

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    "


def resolved(tmp_path, body):
    if not (tmp_path / "a").exists():
        make_datasets(tmp_path, *"abcdef")
    return resolve(write(tmp_path / "m.yaml", V2 + body), split_part="train")


def shares(found, row, *, lanes=1, batch_size=1, sizes=None):
    mix = found.mix.settle(sizes or [1] * len(found.sources))
    return mix.shares(row, row + 1, Clock(lanes, batch_size), ())


def test_a_weight_may_be_a_schedule(tmp_path):
    found = resolved(
        tmp_path,
        """blend:
      - path: a
        weight: {0: 5, 1_000: 2, 2e3: ramp to 0, 5000: 0}
      - {path: b, weight: 5}
""",
    )
    assert found.blend_mode is BlendMode.DATASET_WEIGHT
    assert [leaf.weight for leaf in found.leaves] == [0.5, 0.5]
    assert shares(found, 999) == (0.5, 0.5)
    assert shares(found, 1000) == pytest.approx((2 / 7, 5 / 7), rel=1e-3)
    assert shares(found, 1500) == pytest.approx((1 / 6, 5 / 6), rel=1e-3)
    assert shares(found, 2000) == (0, 1)


@pytest.mark.parametrize(("unit", "row"), [("samples", 25), ("batches", 200), ("rows", 100)])
def test_a_blend_says_what_its_schedules_count(tmp_path, unit, row):
    body = f"{{schedule_unit: {unit}, blend: [{{path: a, weight: {{0: 1, 100: 3}}}}, {{path: b}}]}}"
    found = resolved(tmp_path, body)
    assert shares(found, row - 1, lanes=4, batch_size=8) == (0.5, 0.5)
    assert shares(found, row, lanes=4, batch_size=8) == (0.75, 0.25)


def test_weights_may_come_from_sizes(tmp_path):
    body = "{temperature: 0.5, blend: [{path: a, weight: auto}, {path: b, weight: auto}]}"
    found = resolved(tmp_path, body)
    assert [leaf.weight for leaf in found.leaves] == [None, None]
    assert shares(found, 0, sizes=[100, 900]) == pytest.approx((0.25, 0.75))
    body = """blend:
      - {path: a, weight: auto, tokens: 3e9}
      - weight: auto
        tokens: 1e9
        blend: [{path: b}, {path: c, weight: 3}]
"""
    assert shares(resolved(tmp_path, body), 0) == pytest.approx((0.75, 0.0625, 0.1875))


def test_limits_and_stopping_strategies_arrive_at_the_mix(tmp_path):
    found = resolved(
        tmp_path,
        """stopping_strategy: first_exhausted
    blend:
      - {path: a, max_epochs: 2}
      - {max_epochs: 1.5, blend: [{path: b}, {path: c, max_epochs: 1}]}
      - {path: d}
""",
    )
    assert found.mix.limits == {0: 2, 1: 1.5, 2: 1}
    assert found.mix.stop_at_first


def test_lines_are_one_source_of_a_blend(tmp_path):
    found = resolved(
        tmp_path,
        """unit: batch
    blend:
      - {path: a, weight: 3}
      - weight: 1
        blend_epochized:
          - {path: b, repetitions: 2}
          - repetitions: 3
            concat: [{path: c}, {path: d, subset: {range: [0, 5]}}]
      - concat: [{path: e}, {path: f}]
""",
    )
    assert found.sources == ((0,), (1, 2, 3), (4, 5))
    assert found.mix.sources == (0, 1, 2)
    assert shares(found, 0) == pytest.approx((0.6, 0.2, 0.2))
    assert [leaf.repetitions for leaf in found.leaves] == [1, 2, 3, 3, 1, 1]
    assert found.unit == "batch"


def test_concatenated_datasets_are_one_line(tmp_path):
    found = resolved(tmp_path, "concat: [{path: a}, {path: b}]")
    assert found.blend_mode is BlendMode.SAMPLE_REPETITIONS
    assert found.sources == ((0, 1),)
    assert resolve(tmp_path / "m.yaml", split_part="train", training=False).sources == ((0, 1),)


@pytest.mark.parametrize(
    ("body", "line", "text"),
    [
        ("blend: [{path: a, weight: {5: 1}}]", 5, "expected the weight at the beginning, as in {0"),
        ("blend: [{path: a, weight: {}}]", 5, "expected the weight at the beginning"),
        ("blend: [{path: a, weight: {0: ramp to 1}}]", 5, "no weight before 0 to ramp from"),
        ("blend: [{path: a, weight: {0: 1, 1.5: 2}}]", 5, "position 1.5 is not a whole number"),
        ("blend: [{path: a, weight: {0: 1, x: 2}}]", 5, "'x' is not a position; expected a number"),
        ("blend: [{path: a, weight: {0: 1, 9: go to 2}}]", 5, "'go to 2' at 9; expected a number"),
        ("blend: [{path: a, weight: {0: 1, 9: ramp to 2e}}]", 5, "'ramp to 2e' at 9; expected a"),
        ("blend: [{path: a, weight: {0: 1, 9: -2}}]", 5, "-2 at 9; expected a finite number"),
        ("blend: [{path: a, weight: {0: 1, 9: .nan}}]", 5, "nan at 9; expected a finite number"),
        ("blend: [{path: a, weight: {0: 0, 9: 0}}]", 5, "is always 0"),
        ("blend: [{path: a, weight: automatic}]", 5, "'automatic', expected a number"),
        ("blend: [{path: a, max_epochs: 0}]", 5, "max_epochs is 0, expected more than 0"),
        ("blend: [{path: a, weight: auto}, {path: b}]", 5, "weights from sizes cannot be compared"),
        ("blend: [{path: a, tokens: 5}, {path: b}]", 5, "tokens only count for `weight: auto`"),
        (
            "blend: [{path: a, tokens: 5, weight: auto}, {path: b, weight: auto}]",
            5,
            "has no tokens, but",
        ),
        ("blend: [{path: a}]\n    temperature: 0.5", 6, "write `weight: auto` in the entries"),
        ("blend: [{path: a, weight: auto}]\n    temperature: 5", 6, "temperature is 5: sizes are"),
        (
            "blend: [{path: a, weight: {0: 1, 50: 0}}, {path: b, weight: {0: 1, 20: ramp to 0}}]",
            5,
            "all weights of the blend are 0 from position 50 on",
        ),
        ("blend: [{path: a}]\n    stopping_strategy: first", 6, "expected 'all_exhausted' or"),
        ("blend: [{path: a}]\n    unit: batches", 6, "expected 'sample' or 'batch'"),
        (
            "blend:\n    - {unit: batch, blend: [{path: a}]}",
            6,
            "draws what the call says; the unit",
        ),
        ("blend: [{path: a}]\n    blend_unit: batch", 6, "unknown key 'blend_unit'"),
        ("concat: []", 5, "the list is empty"),
        ("concat: [{path: a, weight: 2}]", 5, "unknown key 'weight' in splits.train.concat[0]; it"),
        ("concat: [{blend: [{path: a}]}]", 5, "blend below the concat of"),
    ],
)
def test_says_what_is_wrong_and_in_which_line(tmp_path, body, line, text):
    with pytest.raises(ConfigError) as info:
        resolved(tmp_path, body)
    found = without_columns(str(info.value))
    assert found.startswith(f"{tmp_path}/m.yaml:{line}: ")
    assert text in found


def test_validation_does_not_care_about_weights(tmp_path):
    make_datasets(tmp_path, "a", "b")
    body = "blend: [{path: a, weight: 0}, {path: b, weight: {0: 1, 5: 0}, max_epochs: 1}]"
    path = write(tmp_path / "m.yaml", V2 + body)
    found = resolve(path, split_part="train", training=False)
    assert found.blend_mode is BlendMode.NONE
    assert [leaf.weight for leaf in found.leaves] == [1, 1]
    assert read_metadataset(path).content.splits["train"].blend[1].max_epochs == 1


@pytest.mark.parametrize(
    "body",
    [
        "blend: [{path: a, weight: 1.0e+308}, {path: b}]",
        "blend: [{path: a, weight: auto, tokens: 1.0e+19}, {path: b, weight: auto, tokens: 1}]",
        "blend: [{path: a, max_epochs: 1.0e+19}]",
        "blend: [{path: a, weight: {0: 1, 10: ramp to 1e308}}, {path: b}]",
        "blend: [{path: a, weight: {0: 1, 10000000000000000000: 2}}, {path: b}]",
        "blend_epochized: [{path: a, repetitions: 1.0e+19}]",
        "{path: a, shuffle_over_epochs_multiplier: 10000000000000000000}",
    ],
)
def test_numbers_beyond_any_run_are_refused_where_they_are_written(tmp_path, body):
    with pytest.raises(ConfigError, match=r"m\.yaml:.*at most 1e\+15|m\.yaml:.*to 1e\+15"):
        resolved(tmp_path, body)
