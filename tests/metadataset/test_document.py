from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from energon.errors import ConfigError
from energon.metadataset import document
from energon.metadataset.document import read_metadataset
from energon.metadataset.grammar import Document, DocumentV1
from tests.metadataset.folders import write

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


@pytest.mark.parametrize(
    "text",
    [
        # The example of the documentation of crude datasets.
        V2
        + """
splits:
  train:
    path: ./my_pimary_ds
    aux:
      foo_bar_source: ./aux_ds123
      fs_source: filesystem://./images
      fs_source_abs: filesystem:///absolute/path/to/images
      remote_source: msc://mybucket/path/ds
    subflavors:
      crude_type: my_dual_aux_example
""",
        V2.replace("megatron.energon", "energon") + "splits: {train: {path: a}}",
        V2 + "splits: {train: {blend: [{path: a, weight: 1}, {path: b, weight: 0.5}]}, val: }",
        V2
        + """
splits:
  train:
    subset: {range: [0%, 12.5%]}
    blend_epochized:
      - path: a
        repetitions: 1.5
        subset: {range: [100, end]}
      - repetitions: 2
        join:
          one: {path: b}
          two: {path: c, nonmatch: skip}
        joiner: {__module__: my.code, __function__: join}
""",
        """
splits:
  train:
    datasets: [&a {path: a, weight: 2}, {<<: *a, path: b}]
  test: {datasets: []}
""",
    ],
)
def test_reads_what_the_grammar_allows(tmp_path, text):
    assert read_metadataset(write(tmp_path / "m.yaml", text)).folder == str(tmp_path)


def test_values_in_memory_are_named_by_their_path():
    with pytest.raises(ConfigError) as info:
        read_metadataset(
            {"splits": {"train": {"blend": [{"path": 1}, {"path": "a", "weight": "x"}]}}}
        )
    assert str(info.value).splitlines() == [
        "document.splits.train.blend[0].path: splits.train.blend[0].path is 1, "
        "expected text (in quotes, if it looks like something else)",
        "document.splits.train.blend[1].weight: splits.train.blend[1].weight is 'x', "
        "expected a number",
    ]


def json_schema():
    schema = TypeAdapter(Document | DocumentV1).json_schema(by_alias=True)
    models = schema["$defs"]
    for model in models.values():
        properties = model.get("properties", {})
        model["properties"] = {name: or_variable(each) for name, each in properties.items()}
    for name in ("Document", "DocumentV1"):
        models[name]["patternProperties"] = {"^x-": {}}
    models["Variable"] = {
        "type": "string",
        "pattern": r"\$\{.+\}",
        "description": "A variable of `vars` or of the environment",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def or_variable(schema):
    if schema.get("type") == "string" and not {"enum", "const"} & set(schema):
        return schema
    return {"anyOf": [schema, {"$ref": "#/$defs/Variable"}]}


def test_the_schema_describes_both_versions():
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    models = schema["$defs"]
    assert {"Document", "DocumentV1", "WeightedReference", "RepeatedBlend"} <= set(models)
    assert models["WeightedReference"]["required"] == ["path"]
    assert models["WeightedReference"]["additionalProperties"] is False
    assert set(models["Document"]["properties"]) == {"__module__", "__class__", "splits", "vars"}
    assert models["SubsetNode"]["properties"]["range"]["anyOf"][0]["minItems"] == 2


def test_the_schema_that_is_shipped_is_that_of_the_grammar():
    shipped = json.loads(Path(document.__file__).with_name("schema.json").read_text())
    # Write it again with: json.dumps(json_schema(), indent=1)
    assert shipped == json_schema()
