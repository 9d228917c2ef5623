from __future__ import annotations

import os
from math import prod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, DatasetNotFoundError, EmptyDatasetError
from energon.metadataset import resolve as resolver
from energon.metadataset.leaf import BlendMode, Leaf, TraversedDatasetReference, multiply_shuffle
from energon.metadataset.resolve import resolve, traverse_metadataset
from energon.plan.blends.curve import Clock
from tests.commands import run_python
from tests.metadataset.folders import make_datasets, without_columns, write

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"


def message(kind: type[Exception], path, **arguments) -> str:
    with pytest.raises(kind) as info:
        resolve(path, **{"split_part": "train", **arguments})
    return without_columns(str(info.value))


def weights(path, **arguments) -> dict[str, float]:
    leaves = resolve(path, **{"split_part": "train", **arguments}).leaves
    return {os.path.basename(leaf.path): leaf.weight for leaf in leaves}


def test_a_dataset_is_one_leaf(tmp_path):
    make_datasets(tmp_path, "a")
    path = str(tmp_path / "a")
    for given_path in (path, tmp_path / "a", path + "/"):
        found = resolve(given_path, split_part="val", dataset_config="crude.yaml")
        leaf = Leaf(path, "val", dataset_config="crude.yaml", origin=path)
        assert found.leaves == (leaf,)
        assert found.blend_mode is BlendMode.NONE


def test_a_relative_path_starts_from_the_working_directory(tmp_path, monkeypatch):
    make_datasets(tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    assert resolve("a", split_part="train").leaves[0].path == str(tmp_path / "a")
    document = {"splits": {"train": {"path": "a"}}}
    assert resolve(document, split_part="train").leaves[0].path == str(tmp_path / "a")


def test_everything_that_a_reference_says_arrives_at_the_leaf(tmp_path):
    make_datasets(tmp_path, "a")
    path = write(
        tmp_path / "meta" / "m.yaml",
        V2
        + """
  train:
    path: ../a
    split_part: val
    dataset_config: crude.yaml
    split_config: other.yaml
    shuffle_over_epochs_multiplier: 3
    subset: {range: ["10%", "50%"]}
    subflavors: {text: x, deep: {list: [1]}}
    aux:
      near: ./aux
      absolute: /data/aux
      folder: filesystem://./images
      absolute_folder: filesystem:///data/images
      bucket: msc://bucket/aux
      bucket_folder: filesystem+msc://bucket/images
""",
    )
    (leaf,) = resolve(path, split_part="train").leaves
    assert leaf == Leaf(
        path=str(tmp_path / "a"),
        split_part="val",
        dataset_config="crude.yaml",
        split_config="other.yaml",
        shuffle_over_epochs_multiplier=3,
        subsets=(("10%", "50%"),),
        subflavors={"text": "x", "deep": {"list": [1]}},
        aux={
            "near": str(tmp_path / "meta/aux"),
            "absolute": "/data/aux",
            "folder": f"filesystem://{tmp_path}/meta/images",
            "absolute_folder": "filesystem:///data/images",
            "bucket": "msc://bucket/aux",
            "bucket_folder": "filesystem+msc://bucket/images",
        },
        origin=f"{path}:6:5",
    )
    assert type(leaf.subflavors["deep"]) is dict
    assert type(leaf.subflavors["deep"]["list"]) is list


NESTED = {
    "outer.yaml": V2
    + "  train:\n    blend:\n      - {path: a, weight: 3}\n      - {path: sub/inner.yaml}\n",
    "sub/inner.yaml": V2
    + "  train:\n    blend:\n      - {path: ../b}\n      - {path: ../c, weight: 3}\n",
}


def test_weights_are_normalised_at_each_level_and_multiplied(tmp_path):
    make_datasets(tmp_path, "a", "b", "c")
    for name, text in NESTED.items():
        write(tmp_path / name, text)
    found = resolve(tmp_path / "outer.yaml", split_part="train")
    assert found.blend_mode is BlendMode.DATASET_WEIGHT
    assert [leaf.weight for leaf in found.leaves] == [0.75, 0.0625, 0.1875]
    assert [leaf.origin for leaf in found.leaves] == [
        f"{tmp_path}/outer.yaml:6:10",
        f"{tmp_path}/sub/inner.yaml:6:10",
        f"{tmp_path}/sub/inner.yaml:7:10",
    ]


def test_validation_ignores_weights_and_repetitions(tmp_path):
    make_datasets(tmp_path, "a", "b")
    path = write(
        tmp_path / "m.yaml",
        V2
        + "  val:\n    blend:\n    - {path: a, weight: 3}\n"
        + "    - blend_epochized: [{path: b, repetitions: 4}]\n",
    )
    found = resolve(path, split_part="val", training=False)
    assert [(leaf.weight, leaf.repetitions) for leaf in found.leaves] == [(1, 1), (1, 1)]
    assert found.blend_mode is BlendMode.NONE


def test_outer_levels_override_subflavors_and_come_last_in_subsets(tmp_path):
    make_datasets(tmp_path, "a")
    write(
        tmp_path / "inner.yaml",
        V2
        + "  train:\n    path: a\n    subflavors: {x: 1, y: 1}\n    subset: {range: [0, 10]}\n"
        + "    shuffle_over_epochs_multiplier: 2\n",
    )
    path = write(
        tmp_path / "outer.yaml",
        V2
        + "  train:\n    subset: {range: [0%, 50%]}\n    blend:\n      - path: inner.yaml\n"
        + "        subflavors: {y: 2, z: 2}\n        subset: {range: [20%, end]}\n"
        + "        shuffle_over_epochs_multiplier: 3\n",
    )
    (leaf,) = resolve(path, split_part="train").leaves
    assert leaf.subflavors == {"x": 1, "y": 2, "z": 2}
    assert leaf.subsets == ((0, 10), ("20%", "end"), ("0%", "50%"))
    assert leaf.shuffle_over_epochs_multiplier == 6


@pytest.mark.parametrize(
    ("inner", "outer", "both"),
    [(2, 3, 6), (-1, 3, -1), (3, -1, -1), (-1, -1, -1), (None, -1, None), (2, None, None)],
)
def test_null_rules_multipliers_then_minus_one(inner, outer, both):
    assert multiply_shuffle(inner, outer) == both


def test_only_the_split_that_is_used_has_to_exist(tmp_path):
    make_datasets(tmp_path, "a")
    path = write(tmp_path / "m.yaml", V2 + "  train: {path: a}\n  val: {path: missing}\n  test:\n")
    assert len(resolve(path, split_part="train").leaves) == 1
    assert f"{path}:5: {tmp_path}/missing does not exist" in message(
        DatasetNotFoundError, path, split_part="val"
    )
    assert message(EmptyDatasetError, path, split_part="test") == f"{path}:3: split 'test' is empty"
    assert message(ConfigError, path, split_part="tst") == (
        f"{path}:6: no split 'tst'; there is 'train', 'val', 'test'; did you mean 'test'?"
    )


def test_a_nested_document_uses_the_same_split_unless_told_otherwise(tmp_path):
    make_datasets(tmp_path, "a", "b")
    write(tmp_path / "inner.yaml", V2 + "  train: {path: a}\n  val: {path: b}\n")
    path = write(
        tmp_path / "m.yaml",
        V2
        + "  train: {path: inner.yaml}\n  val: {path: inner.yaml, split_part: train}\n"
        + "  test: {path: inner.yaml}\n",
    )
    assert resolve(path, split_part="train").leaves[0].path == str(tmp_path / "a")
    leaf = resolve(path, split_part="val").leaves[0]
    assert (leaf.path, leaf.split_part) == (str(tmp_path / "a"), "train")
    assert f"no split 'test', which {path}:6:10 asks for" in message(
        ConfigError, path, split_part="test"
    )


def test_configs_are_handed_down_to_leaves_that_name_none(tmp_path):
    make_datasets(tmp_path, "a", "b")
    write(
        tmp_path / "inner.yaml",
        V2 + "  train:\n    blend:\n    - path: a\n    - {path: b, dataset_config: own.yaml}\n",
    )
    path = write(tmp_path / "m.yaml", V2 + "  train: {path: inner.yaml, split_config: s.yaml}\n")
    leaves = resolve(path, split_part="train", dataset_config="crude.yaml").leaves
    assert [leaf.dataset_config for leaf in leaves] == ["crude.yaml", "own.yaml"]
    assert [leaf.split_config for leaf in leaves] == ["s.yaml", "s.yaml"]


def test_version_1_is_a_blend(tmp_path):
    make_datasets(tmp_path, "a", "b", "c")
    text = """
splits:
  train:
    datasets:
      - path: a
        weight: 5
        subflavor: old
        subflavors: {x: 1}
      - path: b
        split_part: val
        weight: 2
        shuffle_over_epochs_multiplier: null
      - path: inner.yaml
        weight: 3
"""
    write(tmp_path / "inner.yaml", "splits: {train: {datasets: [{path: c}]}}")
    for head in ("#\n", "__module__: megatron.energon\n__class__: Metadataset"):
        found = resolve(write(tmp_path / "m.yaml", head + text), split_part="train")
        assert found.blend_mode is BlendMode.DATASET_WEIGHT
        assert [leaf.weight for leaf in found.leaves] == [0.5, 0.2, 0.3]
        assert found.leaves[0].subflavors == {"x": 1, "__subflavor__": "old"}
        assert found.leaves[1].split_part == "val"
        assert found.leaves[1].shuffle_over_epochs_multiplier is None
        assert found.leaves[0].origin == f"{tmp_path}/m.yaml:6:9"


def test_documents_of_both_versions_nest(tmp_path):
    make_datasets(tmp_path, "a", "b")
    write(tmp_path / "one.yml", "splits: {train: {datasets: [{path: a}, {path: b}]}}")
    path = write(tmp_path / "two.yaml", V2 + "  train: {blend: [{path: one.yml}, {path: a}]}\n")
    assert [leaf.weight for leaf in resolve(path, split_part="train").leaves] == [0.25, 0.25, 0.5]


def test_a_document_may_be_given_as_values(tmp_path):
    make_datasets(tmp_path, "a", "b")
    document = {
        "splits": {"train": {"blend": ({"path": tmp_path / "a"}, {"path": f"{tmp_path}/b"})}}
    }
    leaves = resolve(document, split_part="train").leaves
    assert [leaf.weight for leaf in leaves] == [0.5, 0.5]
    assert leaves[1].origin == "document.splits.train.blend[1].path"
    document = {"splits": {"train": {"blend": [{"path": "x", "weigth": 1}]}}}
    assert message(ConfigError, document).startswith(
        "document.splits.train.blend[0].weigth: unknown key 'weigth' in splits.train.blend[0], "
        "did you mean 'weight'?"
    )


def test_names_all_that_is_missing(tmp_path):
    make_datasets(tmp_path, "a")
    (tmp_path / "unprepared").mkdir()
    path = write(
        tmp_path / "m.yaml",
        V2
        + "  train:\n    blend:\n    - path: a\n    - path: gone/deep\n    - path: unprepared\n"
        + "    - path: gone.yaml\n",
    )
    assert message(DatasetNotFoundError, path).splitlines() == [
        f"{path}:7: {tmp_path}/gone/deep does not exist: no 'gone' in {tmp_path}",
        f"{path}:8: {tmp_path}/unprepared holds no files; put tar shards into it and run "
        f"`energon prepare {tmp_path}/unprepared`",
        f"{path}:9: {tmp_path}/gone.yaml does not exist: no 'gone.yaml' in {tmp_path}",
    ]
    assert message(DatasetNotFoundError, tmp_path / "no").startswith(
        f"{tmp_path}/no does not exist"
    )


@pytest.mark.parametrize(
    ("body", "place", "text"),
    [
        ("blend: [{path: a, weight: 0}]", 5, "all weights of the blend are 0"),
        ("concat:\n      - blend: [{path: a}]", 6, "blend below the concat of"),
        ("blend_epochized:\n      - blend: [{path: a}]", 6, "blend below the blend_epochized of"),
        ("blend_epochized:\n      - path: v1.yaml", None, "blend below the blend_epochized of"),
        ("path: inner.yaml\n    aux: {x: a}", 6, "auxiliary data belong to a dataset"),
        ("path: inner.yaml\n    subset: {range: [0, 10]}", 6, "Use percentages"),
        ("blend: [{path: a}]\n    subset: {range: [0, end]}", 6, "Use percentages"),
        ("path: media", 5, "has no shards, only media metadata"),
        ("path: lost", 5, "was prepared, but its .nv-meta/.info.json is missing"),
        ("path: nosuch://host/a", 5, "neither energon nor fsspec knows nosuch"),
    ],
)
def test_refuses_what_makes_no_sense_and_names_the_place(tmp_path, body, place, text):
    make_datasets(tmp_path, "a", "b")
    write(tmp_path / "media/.nv-meta/index.sqlite", "")
    write(tmp_path / "lost/.nv-meta/index.sqlite", "")
    write(tmp_path / "lost/.nv-meta/split.yaml", "split_parts: {train: [0.tar]}")
    write(tmp_path / "inner.yaml", V2 + "  train: {path: a}\n")
    write(tmp_path / "v1.yaml", "splits: {train: {datasets: [{path: a}]}}")
    path = write(tmp_path / "m.yaml", V2 + f"  train:\n    {body}\n")
    found = message(ConfigError, path)
    assert text in found
    assert found.startswith(f"{path}:{place}: " if place else f"{tmp_path}/v1.yaml:1: ")


@pytest.mark.parametrize("body", ["{blend: []}", "{blend_epochized: []}", "{datasets: []}"])
def test_an_empty_blend_is_an_empty_dataset(tmp_path, body):
    path = write(tmp_path / "m.yaml", f"splits:\n  train:\n    {body}\n")
    assert message(EmptyDatasetError, path) == f"{path}:3: the list is empty"


def test_documents_that_contain_themselves_are_refused(tmp_path):
    a = write(tmp_path / "a.yaml", V2 + "  train: {path: b.yaml}\n  val: {path: d}\n")
    b = write(tmp_path / "b.yaml", V2 + "  train: {blend: [{path: link.yaml}]}\n")
    os.symlink("a.yaml", tmp_path / "link.yaml")
    assert message(ConfigError, a) == (
        f"{b}:4: the metadataset contains itself: {a} (train) -> {b} (train) -> {a} (train)"
    )


def test_documents_without_end_are_refused(tmp_path):
    make_datasets(tmp_path, "a")
    for number in range(300):
        write(tmp_path / f"{number}.yaml", f"splits: {{train: {{path: {number + 1}.yaml}}}}")
    write(tmp_path / "300.yaml", "splits: {train: {path: a}}")
    assert resolve(tmp_path / "270.yaml", split_part="train").leaves[0].path == f"{tmp_path}/a"
    assert "documents are nested too deeply" in message(ConfigError, tmp_path / "0.yaml")


def test_a_split_may_be_made_of_another_one_of_the_same_document(tmp_path):
    make_datasets(tmp_path, "d")
    path = write(
        tmp_path / "a.yaml", V2 + "  train: {path: a.yaml, split_part: val}\n  val: {path: d}\n"
    )
    assert resolve(path, split_part="train").leaves[0].split_part == "val"


def test_errors_of_a_nested_document_name_that_document(tmp_path):
    inner = write(tmp_path / "inner.yaml", V2 + "  train: {pth: a}\n")
    path = write(tmp_path / "m.yaml", V2 + "  train: {path: inner.yaml}\n")
    assert message(ConfigError, path).startswith(f"{inner}:4: unknown key 'pth'")
    write(tmp_path / "inner.yaml", "splits: {a: 1, a: 2}")
    assert message(ConfigError, path).startswith(f"{inner}:1: duplicate key")


def test_traverse_lists_datasets_once_for_each_reference(tmp_path):
    make_datasets(tmp_path, "a", "b")
    path = write(
        tmp_path / "m.yaml",
        V2
        + "  train:\n    blend:\n    - {path: a, aux: {x: b}}\n"
        + "    - {path: b, subflavors: {f: 1}, split_part: val}\n",
    )
    assert traverse_metadataset(path, split_part="train") == [
        TraversedDatasetReference(f"{tmp_path}/a", "train", {"x": f"{tmp_path}/b"}, {}),
        TraversedDatasetReference(f"{tmp_path}/b", "val", {}, {"f": 1}),
    ]


def test_nests_as_deep_as_yaml_may(tmp_path):
    make_datasets(tmp_path, "a")
    body = "{path: a}"
    for _ in range(48):
        body = f"{{blend: [{body}, {body if len(body) < 20 else '{path: a}'}]}}"
    path = write(tmp_path / "m.yaml", V2 + f"  train: {body}\n")
    assert sum(leaf.weight for leaf in resolve(path, split_part="train").leaves) == pytest.approx(1)


# A tree: ("leaf",) or a list of (weight, subtree), each nested in place or in a file of its own.
TREES = st.recursive(
    st.just("leaf"),
    lambda inner: st.lists(
        st.tuples(st.integers(1, 9) | st.floats(0.01, 10), inner, st.booleans()),
        min_size=1,
        max_size=4,
    ),
    max_leaves=12,
)


def write_tree(tree, folder: Path, weight_key: str, blend_key: str, name: str) -> dict:
    """Return the node of a tree; the leaf at an address is the dataset `a`, marked with it."""
    if tree == "leaf":
        return {"path": str(folder / "a"), "subflavors": {"address": name}}
    entries = []
    for number, (weight, subtree, own_file) in enumerate(tree):
        node = write_tree(subtree, folder, weight_key, blend_key, f"{name}.{number}")
        if own_file:
            path = folder / f"{name}.{number}.yaml"
            path.write_text(repr({"splits": {"train": node}}))
            node = {"path": path.name}
        entries.append({**node, weight_key: weight})
    return {blend_key: entries}


def factors(tree, name: str = "t", above: tuple = ()) -> dict[str, tuple]:
    """Return, for the address of each leaf, all (weight, sum of siblings) on its way."""
    if tree == "leaf":
        return {name: above}
    found = {}
    total = sum(weight for weight, _, _ in tree)
    for number, (weight, subtree, _) in enumerate(tree):
        found |= factors(subtree, f"{name}.{number}", (*above, (weight, total)))
    return found


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(TREES)
def test_any_tree_gives_the_products_along_its_paths(tmp_path, tree):
    if not (tmp_path / "a").exists():
        make_datasets(tmp_path, "a")
    expected = factors(tree)
    for key, blend_key in (("weight", "blend"), ("repetitions", "blend_epochized")):
        node = write_tree(tree, tmp_path, key, blend_key, "t")
        path = write(tmp_path / "m.yaml", repr({"splits": {"train": node}}))
        leaves = resolve(path, split_part="train").leaves
        assert [leaf.subflavors["address"] for leaf in leaves] == [*expected]
        for leaf, steps in zip(leaves, expected.values(), strict=True):
            if key == "weight":
                assert leaf.weight == pytest.approx(prod(w / total for w, total in steps))
            else:
                assert leaf.repetitions == pytest.approx(prod(w for w, _ in steps))
        if key == "weight":
            assert sum(leaf.weight for leaf in leaves) == pytest.approx(1)


@pytest.mark.slow
def test_a_plain_dataset_is_resolved_without_the_grammar(tmp_path):
    make_datasets(tmp_path, "a")
    program = (
        "import sys; from energon.metadataset.resolve import resolve\n"
        "resolve(sys.argv[1], split_part='train')\n"
        "sys.exit(bool({'pydantic', 'torch'} & {*sys.modules}))"
    )
    run_python(program, tmp_path / "a")


def test_what_is_not_there_may_be_listed_all_the_same(tmp_path):
    document = {
        "__module__": "energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": [{"path": str(tmp_path / "away"), "weight": 1}]}},
    }
    with pytest.raises(DatasetNotFoundError):
        traverse_metadataset(document, split_part="train")
    (found,) = traverse_metadataset(document, split_part="train", must_exist=False)
    assert found.path == str(tmp_path / "away")
    document["splits"]["train"]["blend"][0]["path"] += ".yaml"
    with pytest.raises(DatasetNotFoundError):
        traverse_metadataset(document, split_part="train", must_exist=False)


def test_a_misspelled_split_is_named_where_it_is_written(tmp_path):
    make_datasets(tmp_path, "a")
    path = write(tmp_path / "m.yaml", V2 + "  valid: {path: a}\n  trian: {path: a}\n")
    assert message(ConfigError, path, split_part="train").startswith(f"{path}:5: no split 'train'")
    document = {"splits": {"trian": {"path": str(tmp_path / "a")}}}
    with pytest.raises(ConfigError, match=r"^document\.splits\.trian: no split 'train'"):
        resolve(document, split_part="train")


@pytest.mark.parametrize("path", ["", None, 3, b"", ["a", "b"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ConfigError, match="expected the folder of a dataset, the file of a meta"):
        resolve(path, split_part="train")


def test_an_empty_path_is_not_the_folder_of_the_document(tmp_path):
    path = write(tmp_path / "m.yaml", V2 + '  train: {path: ""}\n')
    assert message(ConfigError, path, split_part="train") == f"{path}:4: the path is empty"


def test_documents_that_name_others_twice_are_each_followed_once(tmp_path, monkeypatch):
    make_datasets(tmp_path, "a")
    for level in range(41):
        path = "a" if level == 40 else f"{level + 1}.yaml"
        entries = ", ".join([f"{{path: {path}}}"] * 2)
        write(tmp_path / f"{level}.yaml", f"{V2}  train: {{blend: [{entries}]}}")
    asked: list[str] = []
    kind_of = resolver.dataset_kind
    monkeypatch.setattr(resolver, "dataset_kind", lambda path: asked.append(path) or kind_of(path))
    said = message(ConfigError, str(tmp_path / "0.yaml"))
    assert "beyond 100,000 datasets and blends" in said
    assert len(asked) < 100
    assert (
        resolve(str(tmp_path / "39.yaml"), split_part="train").mix.shares(0, 1, Clock(1, 1), ())
        == (0.25,) * 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("word", ["blend", "concat"])
def test_of_many_entries_few_are_looked_up_before_they_are_refused(tmp_path, monkeypatch, word):
    entries = "".join(f"    - path: missing{n}\n" for n in range(1000))
    path = write(tmp_path / "m.yaml", f"{V2}  train:\n   {word}:\n{entries}")
    asked: list[str] = []
    kind_of = resolver.dataset_kind
    monkeypatch.setattr(resolver, "dataset_kind", lambda path: asked.append(path) or kind_of(path))
    said = message(ConfigError, path).splitlines()
    assert "the rest was not read after 100 problems" in said[-1]
    assert sum("does not exist" in line for line in said) == 100
    assert len(asked) == 101
    monkeypatch.setenv("ENERGON_LIMIT_METADATASET_NODES", "999")
    asked.clear()
    assert "beyond 999 datasets and blends" in message(ConfigError, path)
    assert asked == [path]
