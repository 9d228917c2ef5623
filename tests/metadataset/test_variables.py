from __future__ import annotations

import json
from pathlib import Path

import pytest

from energon.errors import ConfigError, SecurityError
from energon.formats.meta.yaml import load
from energon.metadataset.document import read_metadataset
from energon.metadataset.resolve import resolve
from energon.metadataset.variables import substitute
from tests.metadataset.folders import make_datasets, without_columns, write

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


def problems(tmp_path: Path, text: str) -> list[str]:
    path = write(tmp_path / "m.yaml", V2 + text)
    with pytest.raises(ConfigError) as info:
        read_metadataset(path)
    return without_columns(str(info.value)).replace(f"{path}:", "").splitlines()


def test_variables_and_the_environment_become_values(tmp_path, monkeypatch):
    make_datasets(tmp_path, "data/a", "data/b", "data/c", "data/d")
    monkeypatch.setenv("WHERE", str(tmp_path / "data"))
    monkeypatch.setenv("WEIGHT", "2.5")
    monkeypatch.delenv("NOT_SET", raising=False)
    path = write(
        tmp_path / "m.yaml",
        V2
        + """
vars:
  root: ./data
  deep: {boost: 3, name: b}
  flavors: {kind: x, list: [1, "${deep.boost}"]}
splits:
  train:
    blend:
      - {path: "${root}/a", weight: "${deep.boost}", subflavors: "${flavors}"}
      - {path: "${WHERE}/${deep.name}", weight: "${env:WEIGHT}"}
      - {path: "${NOT_SET:-data}/c", weight: "${NOT_SET:-4}", subflavors: {x: "$${root}"}}
      - {path: "${root}/d", weight: 1, subset: {range: ["${p:-50}%", "100%"]}}
""",
    )
    leaves = resolve(path, split_part="train", allow=("env",)).leaves
    assert [leaf.path for leaf in leaves] == [str(tmp_path / "data" / name) for name in "abcd"]
    assert [leaf.weight for leaf in leaves] == pytest.approx(
        [3 / 10.5, 2.5 / 10.5, 4 / 10.5, 1 / 10.5]
    )
    assert leaves[0].subflavors == {"kind": "x", "list": [1, 3]}
    assert leaves[2].subflavors == {"x": "${root}"}
    assert leaves[3].subsets == (("50%", "100%"),)


def test_variables_of_the_document_go_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOT", "/environment")
    text = "vars: {ROOT: /document}\nsplits: {train: {path: '${ROOT}'}, val: {path: '${env:ROOT}'}}"
    splits = read_metadataset(write(tmp_path / "m.yaml", V2 + text), ["env"]).content.splits
    assert splits["train"].path == "/document"
    assert splits["val"].path == "/environment"


def test_anchors_may_live_in_keys_that_are_ignored(tmp_path):
    text = """
x-common: &common
  subflavors: {kind: x}
  weight: 2
splits:
  train:
    blend:
      - {<<: *common, path: a}
      - {<<: *common, path: b, weight: 1}
"""
    make_datasets(tmp_path, "a", "b")
    leaves = resolve(write(tmp_path / "m.yaml", V2 + text), split_part="train").leaves
    assert [leaf.weight for leaf in leaves] == pytest.approx([2 / 3, 1 / 3])
    assert {leaf.subflavors["kind"] for leaf in leaves} == {"x"}


def test_names_all_references_that_lead_nowhere_with_their_lines(tmp_path):
    found = problems(
        tmp_path,
        """vars: {root: /data, map: {a: 1}, loop: "${again}", again: "${loop}"}
splits:
  train:
    blend:
      - path: ${rot}/a
      - path: ${map}/a
      - path: ${map.b}
      - path: ${1 + 1}
      - path: ${loop}
""",
    )
    expected = [
        "3: ${again} refers to itself",
        "3: ${loop} refers to itself",
        "7: ${rot} is neither in `vars` nor in the environment, did you mean 'root'? ${rot:-def",
        "8: ${map} is not text that could be put into other text",
        "9: ${map.b} is neither in `vars` nor",
        "10: ${1 + 1} expected a name, like ${root} or ${env:HOME}",
        "11: ${",
    ]
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected
    assert found[-1].endswith("refers to itself")


def test_mistakes_behind_references_keep_their_lines(tmp_path):
    (found,) = problems(
        tmp_path,
        "vars: {root: a}\nsplits:\n  train:\n    blend:\n    - {path: a, wight: '${root}'}\n",
    )
    assert found.startswith(
        "7: unknown key 'wight' in splits.train.blend[0], did you mean 'weight'?"
    )


def test_a_dict_may_refer_to_variables():
    document = {"vars": {"n": "a"}, "splits": {"train": {"path": "${n}"}}}
    assert read_metadataset(document).content.splits["train"].path == "a"
    document["splits"]["train"]["path"] = "${nothing_of_that_name}"
    with pytest.raises(ConfigError, match=r"^document\.splits\.train\.path: \$\{nothing"):
        read_metadataset(document)


@pytest.mark.parametrize("reference", ["${env:SECRET}", "${SECRET}", "${SECRET:-x}", "${NONE:-x}"])
def test_a_document_reads_the_environment_only_where_that_is_allowed(
    tmp_path, monkeypatch, reference
):
    monkeypatch.setenv("SECRET", "of-the-user")
    monkeypatch.delenv("NONE", raising=False)
    make_datasets(tmp_path, "of-the-user", "x")
    path = write(tmp_path / "m.yaml", f"splits:\n  train:\n    path: {reference}")
    with pytest.raises(SecurityError, match=r"m.yaml:3:5: \$\{.*--allow env on") as info:
        resolve(path, split_part="train")
    assert "of-the-user" not in str(info.value)
    document = {"splits": {"train": {"path": f"{tmp_path}/{reference}"}}}
    with pytest.raises(
        SecurityError, match=r"^document.splits.train.path: \$\{.*ENERGON_ALLOW=env"
    ):
        resolve(document, split_part="train")
    wanted = str(tmp_path / ("x" if "NONE" in reference else "of-the-user"))
    assert resolve(path, split_part="train", allow=("env",)).leaves[0].path == wanted
    assert resolve(document, split_part="train", allow=("env",)).leaves[0].path == wanted
    monkeypatch.setenv("ENERGON_ALLOW", "env")
    assert resolve(path, split_part="train").leaves[0].path == wanted


def test_names_of_the_environment_are_not_proposed_where_it_may_not_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    path = write(tmp_path / "m.yaml", "splits: {train: {path: '${SECRET_TOKEM}'}}")
    with pytest.raises(ConfigError, match="neither in `vars` nor") as info:
        resolve(path, split_part="train")
    assert "SECRET_TOKEN" not in str(info.value)
    with pytest.raises(ConfigError, match="did you mean 'SECRET_TOKEN'"):
        resolve(path, split_part="train", allow=("env",))


def test_a_remote_document_never_reads_the_environment(tmp_path, monkeypatch):
    text = V2 + "vars: {a: b}\nsplits: {train: {path: 's3://${env:SECRET}/${a}'}}"
    monkeypatch.setenv("SECRET", "secret")
    document = load(text, origin="s3://bucket/m.yaml")
    with pytest.raises(SecurityError, match=r"s3://bucket/m.yaml:4.*\$\{env:SECRET\}") as info:
        substitute(document, is_remote=True, allow=("env",))
    assert "secret" not in str(info.value)


def laughing(levels, width, last, join):
    """Variables of which each is made of several of the next."""
    lines = [f"  v{n}: {join([f'${{v{n + 1}}}'] * width)}" for n in range(levels)]
    return "\n".join(["vars:", *lines, f"  v{levels}: {last}", "splits: {train: {path: '${v0}'}}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (laughing(15, 10, "x", "".join), "EXPANDED_VALUES"),
        (laughing(15, 10, "''", "".join), "EXPANDED_VALUES"),
        (laughing(2, 100, "x" * 10_000, "".join), "EXPANDED_CHARACTERS"),
        (laughing(15, 10, "x", json.dumps), "EXPANDED_VALUES"),
        (laughing(18, 40, "${v0}", "".join), "EXPANDED_VALUES"),
        (laughing(1, 2000, json.dumps([0] * 2000), json.dumps), "EXPANDED_VALUES"),
        (
            laughing(4, 1, "x", lambda names: "[" * 60 + f'"{names[0]}"' + "]" * 60),
            "DOCUMENT_DEPTH",
        ),
    ],
    ids=["text", "nothing", "long text", "lists", "loops", "a long list", "deep lists"],
)
def test_references_that_multiply_are_refused(tmp_path, text, limit):
    path = write(tmp_path / "m.yaml", V2 + text)
    with pytest.raises(ConfigError, match=rf"m.yaml:\d+.*set ENERGON_LIMIT_{limit} to a larger"):
        resolve(path, split_part="train")


def test_limits_can_be_raised_and_lowered(tmp_path, monkeypatch):
    make_datasets(tmp_path, "x")
    path = write(tmp_path / "m.yaml", "vars: {a: x}\nsplits: {train: {path: '${a}'}}")
    monkeypatch.setenv("ENERGON_LIMIT_EXPANDED_VALUES", "0")
    with pytest.raises(ConfigError, match="EXPANDED_VALUES"):
        resolve(path, split_part="train")
    monkeypatch.delenv("ENERGON_LIMIT_EXPANDED_VALUES")
    assert resolve(path, split_part="train").leaves


@pytest.mark.parametrize(
    "text", ["${" * 200_000, "${a" * 200_000, "${a:-" * 200_000, "${a:" * 200_000]
)
def test_references_without_an_end_take_no_longer_than_others(text):
    # Quadratic searches for a closing brace would take minutes.
    document = load(f"splits: '{text}'", origin="m.yaml")
    assert substitute(document) == (document, [])
    assert substitute(load(f"a: '}}{text}:x'", origin="m.yaml"))[1] == []
