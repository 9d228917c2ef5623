from __future__ import annotations

import pytest

from energon.errors import ConfigError
from energon.metadataset.document import read_metadataset
from energon.metadataset.resolve import resolve
from tests.metadataset.folders import make_datasets, without_columns, write

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


def problems(tmp_path, text: str) -> list[str]:
    path = write(tmp_path / "m.yaml", text)
    with pytest.raises(ConfigError) as info:
        read_metadataset(path)
    return without_columns(str(info.value)).replace(f"{path}:", "").splitlines()


BROKEN = """\
__module__: megatron.energn
__class__: MetadatasetV2
splits:
  train:
    blend:
      - path: a
        subset: {range: ["10%", 5]}
      - blend:
          - pth: c
            weight: [3]
          - blend_epochized: [{path: d, repetitions: 0}, 3]
      - blnd: []
      - path: a
        blend: []
      - path:
      - weight: 2
  val:
    path: 3
    aux:
      a-b: c
      d: 1
    weight: .inf
    shuffle_over_epochs_multiplier: 0
  foo: bar
  joined:
    join: [{path: a}, {path: b, nonmatch: skp}]
    joiner: {__module__: a, __clas__: b}
  mapping:
    join: {a: {pat: b}}
    joiner: {__module__: a}
extra: 1
"""


def test_names_every_mistake_with_its_line(tmp_path):
    kinds = "path, blend, blend_epochized, concat, join"
    starts = [
        "1: __module__ is 'megatron.energn', expected 'megatron.energon' or 'energon'; did you "
        "mean 'megatron.energon'?",
        "7: splits.train.blend[0].subset.range is ['10%', 5]: subset ['10%', 5] mixes a percentage",
        "9: unknown key 'pth' in splits.train.blend[1].blend[0], did you mean 'path'? Known are",
        "10: splits.train.blend[1].blend[0].weight is [3], expected a number",
        "11: splits.train.blend[1].blend[1].blend_epochized[0].repetitions is 0, expected more",
        "11: splits.train.blend[1].blend[1].blend_epochized[1] is 3, expected a mapping with one "
        "of",
        "12: unknown key 'blnd' in splits.train.blend[2], did you mean 'blend'?",
        f"14: splits.train.blend[3] has both 'path' and 'blend'; expected one of {kinds}",
        "15: splits.train.blend[4].path is empty, expected text",
        f"16: splits.train.blend[5] has none of {kinds}",
        "18: splits.val.path is 3, expected text",
        "20: splits.val.aux.a-b is 'a-b': becomes an argument of cookers",
        "21: splits.val.aux.d is 1, expected text",
        "22: unknown key 'weight' in splits.val; it is for entries of a `blend`",
        "23: splits.val.shuffle_over_epochs_multiplier is 0: expected a number of epochs",
        f"24: splits.foo is 'bar', expected a mapping with one of {kinds}",
        "26: splits.joined.join[1].nonmatch is 'skp', expected 'error', 'skip' or 'none'; did you "
        "mean 'skip'?",
        "27: unknown key '__clas__' in splits.joined.joiner, did you mean '__class__'?",
        "29: unknown key 'pat' in splits.mapping.join.a, did you mean 'path'?",
        "31: unknown key 'extra' in the document. Known are __module__, __class__, splits",
    ]
    found = problems(tmp_path, BROKEN)
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", " is empty; expected a metadataset"),
        ("[1]", " holds a list; expected a metadataset"),
        ("splits:\n", "1: splits is empty, expected a mapping"),
        ("# x\na: 1\n", "2: the document has no 'splits'"),
        ("splits: {1: {path: a}}", "1: splits[1] is 1, expected text (in quotes"),
        ("splits: {train: {path: a, split: b}}", "1: unknown key 'split' in splits.train, did you"),
        ("__class__: Other\nsplits: {}", "1: __class__ is 'Other', expected 'MetadatasetV2'"),
        (
            "__class__: Metadataset\nsplits: {train: {blend: []}}",
            "2: 'blend' is not part of version 1; set `__class__: MetadatasetV2`",
        ),
        (
            "splits: {train: {datasets: [{path: a, aux: {}}]}}",
            "1: unknown key 'aux' in splits.train.datasets[0]",
        ),
    ],
)
def test_says_what_is_wrong_with_a_document(tmp_path, text, expected):
    found = problems(tmp_path, text)
    assert any(line.startswith(expected) for line in found), found


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("{path: a, subset: {range: [5, 1]}}", "subset.range is [5, 1]: expected 0 <="),
        ("{path: a, subset: {range: [end, 1]}}", "subset.range is ['end', 1]: expected"),
        ("{path: a, subset: {range: [-1, 1]}}", "subset.range is [-1, 1]: expected 0"),
        ("{path: a, subset: {range: [1]}}", "subset.range is [1]: expected [start"),
        ("{path: a, subset: {range: 1}}", "subset.range is 1: expected [start"),
        ("{path: a, subset: {range: [0%, 101%]}}", "subset.range is ['0%', '101%']:"),
        ("{path: a, subset: {range: [a, b]}}", "subset.range is ['a', 'b']: subset"),
        ("{path: a, subflavors: [x]}", "subflavors is ['x'], expected a mapping"),
        ("{blend: [{path: a, weight: '3'}]}", "blend[0].weight is '3', expected a num"),
        ("{blend: [{path: a, weight: -1}]}", "blend[0].weight is -1, expected at least"),
        ("{blend: [{path: a, weight: .nan}]}", "blend[0].weight is nan, expected a fin"),
        ("{blend: [{path: a, weight: yes}]}", "blend[0].weight is True, expected a num"),
        ("{blend: {path: a}}", "blend is a mapping, expected a list"),
    ],
)
def test_says_what_was_found_and_wanted(tmp_path, node, expected):
    (found,) = problems(tmp_path, f"{V2}splits:\n  train: {node}\n")
    assert found.startswith(f"4: splits.train.{expected}")


def test_values_that_are_too_long_are_cut(tmp_path):
    (found,) = problems(tmp_path, f"splits: {{train: {{path: a, subflavors: {'x' * 99}}}}}")
    assert found == f"1: splits.train.subflavors is '{'x' * 56}..., expected a mapping"


def test_names_the_column_of_keys_and_items(tmp_path):
    body = "splits:\n  train: {blend: [{path: a}, 3, {pat: b}]}\n"
    path = write(tmp_path / "m.yaml", V2 + body)
    with pytest.raises(ConfigError) as info:
        read_metadataset(path)
    lines = str(info.value).replace(f"{path}:", "").split("\n")
    assert [line.partition(": ")[0] for line in lines] == ["4:30", "4:34"]


WRONG_IN_EVERY_WAY = """\
vars: {root: .}
splits:
  train:
    blend:
      - {path: shpaes, weight: -1}
      - {path: "${rot}/a", weight: "${nowhere}"}
      - {path: a, weight: auto, temperature: 0.7}
      - temperature: 0.5
        blend: [{path: a, tokens: 5}, {path: gone}]
      - join: [{path: a, nonmatch: skip}, {path: a}]
        joiner: {__module__: m}
  val:
    blend: [{path: a, weight: auto}, {path: elsewhere}]
"""


def test_names_whatever_is_wrong_at_once(tmp_path):
    """Keys, values, references, rules between values, and datasets that are not there."""
    make_datasets(tmp_path, "shapes", "a")
    path = write(tmp_path / "m.yaml", WRONG_IN_EVERY_WAY)
    with pytest.raises(ConfigError) as info:
        resolve(path, split_part="train")
    found = without_columns(str(info.value)).replace(f"{path}:", "").splitlines()
    starts = [
        f"5: {tmp_path}/shpaes does not exist: no 'shpaes' in {tmp_path}, did you mean 'shapes'?",
        "5: splits.train.blend[0].weight is -1, expected at least 0",
        "6: ${rot} is neither in `vars` nor in the environment, did you mean 'root'?",
        "6: ${nowhere} is neither in `vars`",
        "7: unknown key 'temperature' in splits.train.blend[2]; it belongs next to `blend`",
        "8: a temperature is for weights that come from sizes",
        "9: tokens only count for `weight: auto`",
        f"9: {tmp_path}/gone does not exist",
        "10: the first dataset decides which samples there are",
        "11: expected a __module__, and a __class__",
        "13: weights from sizes cannot be compared with the number in 13",
    ]
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts


def test_names_what_is_wrong_in_all_documents_of_a_split(tmp_path):
    make_datasets(tmp_path, "a")
    inner = write(tmp_path / "inner.yaml", "splits: {train: {path: a, wight: 1}}")
    broken = write(tmp_path / "broken.yaml", "splits: {train: {path: a}, train: {path: a}}")
    path = write(
        tmp_path / "m.yaml",
        """\
splits:
  train:
    unit: batch
    blend:
      - {path: inner.yaml}
      - {path: broken.yaml}
      - {path: inner.yaml}
      - {path: m.yaml, split_part: val}
      - {path: m.yaml, split_part: tset}
      - {blend: [{path: a, weight: 0}]}
      - {path: a, blend: []}
  val: {blend: [], unit: sample}
""".replace("      - {path: a, blend: []}\n", ""),
    )
    with pytest.raises(ConfigError) as info:
        resolve(path, split_part="train")
    found = without_columns(str(info.value)).splitlines()
    starts = [
        f"{inner}:1: unknown key 'wight'",
        f"{broken}:1: duplicate key 'train'",
        f"{path}:1: no split 'tset', which {path}:9:10 asks for; there is 'train', 'val'",
        f"{path}:10: all weights of the blend are 0",
        f"{path}:11: the list is empty",
    ]
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts
