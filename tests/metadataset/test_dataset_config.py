from __future__ import annotations

import pickle

import pytest

from energon.errors import ConfigError
from energon.metadataset.dataset_config import load_dataset_config
from tests.metadataset.folders import without_columns, write

CAPTIONING = """\
sample_type:
  __module__: megatron.energon
  __class__: CaptioningSample
field_map:
  image: jpg
  caption: txt
"""
CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def read(root, text: str, name: str = "dataset.yaml"):
    write(root / ".nv-meta" / name, text)
    return load_dataset_config(root, name)


def message(root, text: str) -> str:
    with pytest.raises(ConfigError) as info:
        read(root, text)
    return without_columns(str(info.value)).replace(f"{root}/.nv-meta/dataset.yaml:", "")


def test_reads_a_sample_type_with_a_field_map(tmp_path):
    config = read(tmp_path, CAPTIONING)
    assert not config.crude
    assert config.sample_type == ("megatron.energon", "CaptioningSample")
    assert config.field_map == {"image": "jpg", "caption": "txt"}
    assert config.given == {"sample_type", "field_map"}
    assert config.origin == f"{tmp_path}/.nv-meta/dataset.yaml"
    assert pickle.loads(pickle.dumps(config)) == config


def test_reads_a_crude_dataset(tmp_path):
    config = read(tmp_path, CRUDE + "subflavors:\n  example_crude_selector: foobar\n", "crude.yaml")
    assert config.crude
    assert config.sample_type is None
    assert config.subflavors == {"example_crude_selector": "foobar"}


@pytest.mark.parametrize(
    "module", ["energon", "megatron.energon.flavors.crude", "megatron.energon.flavors.webdataset"]
)
def test_a_class_may_be_named_by_the_module_that_it_is_at_home_in(tmp_path, module):
    assert read(tmp_path, CRUDE.replace("megatron.energon", module)) == read(tmp_path, CRUDE)
    other = read(tmp_path, CRUDE.replace("megatron.energon", "energons"))
    assert other.dataset_class == ("energons", "CrudeWebdataset")


def test_what_is_said_to_a_class_of_the_program_is_left_to_it(tmp_path):
    config = read(tmp_path, "__module__: my.code\n__class__: Mine\nanything: [1]\n")
    assert config.dataset_class == ("my.code", "Mine")
    assert config.arguments == {"anything": [1]}
    assert not config.crude


def test_reads_a_sample_loader(tmp_path):
    config = read(
        tmp_path,
        "sample_type:\n  __module__: megatron.energon\n  __class__: OCRSample\n"
        "sample_loader: sample_loader.py:sample_loader\n"
        "part_filter: sample_loader.py:part_filter\n",
    )
    assert config.sample_loader == "sample_loader.py:sample_loader"
    assert config.part_filter == "sample_loader.py:part_filter"


@pytest.mark.parametrize("module", ["energon", "megatron.energon"])
def test_a_flavor_of_earlier_times_stands_for_its_sample_type(tmp_path, module):
    text = f"__module__: {module}\n__class__: VQAWebdataset\nfield_map: {{image: jpg}}\n"
    assert read(tmp_path, text).sample_type == (module, "VQASample")


def test_reads_what_the_constructor_takes(tmp_path):
    config = read(
        tmp_path,
        CRUDE
        + "part_filter: [jpg, txt]\nsplit_config: other.yaml\nsplit_part: val\n"
        + "shuffle_over_epochs: -1\nparallel_shard_iters: 4\nmax_samples_per_sequence: null\n"
        + "subset: {range: [0, 10]}\ndecoder: {__class__: X, deep: {a: [1]}}\n",
    )
    assert config.part_filter == ("jpg", "txt")
    assert (config.split_config, config.split_part) == ("other.yaml", "val")
    assert (config.shuffle_over_epochs, config.parallel_shard_iters) == (-1, 4)
    assert config.subset == (0, 10)
    assert config.decoder == {"__class__": "X", "deep": {"a": [1]}}
    assert type(config.decoder["deep"]) is dict
    assert config.max_samples_per_sequence is None
    assert "max_samples_per_sequence" in config.given


def test_a_missing_file_names_the_next_step(tmp_path):
    with pytest.raises(ConfigError, match=f"energon prepare {tmp_path}.*CrudeWebdataset"):
        load_dataset_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [" is empty; expected sample_type"]),
        ("- 1", [" holds no mapping"]),
        (CAPTIONING + "subflavours: {}\n", ["7: unknown key 'subflavours' in the document"]),
        (
            CAPTIONING.replace("__class__", "__clas__").replace("jpg", "3"),
            [
                "3: unknown key '__clas__' in sample_type, did you mean '__class__'?",
                "5: field_map.image is 3, expected text",
            ],
        ),
        (
            CRUDE + "field_map: {a: b}",
            ["3: CrudeWebdataset leaves samples to cookers, drop 'field_map'"],
        ),
        (CRUDE + "part_filter: [1]", ["3: part_filter[0] is 1, expected text"]),
        (CRUDE + "part_filter: {a: 1}", ["3: part_filter is a mapping, expected text"]),
        (CRUDE + "parallel_shard_iters: 0", ["3: parallel_shard_iters is 0, expected at least 1"]),
        (
            CRUDE.replace("Crude", "Crud"),
            ["2: no dataset class megatron.energon.CrudWebdataset, did you"],
        ),
        ("__module__: energon\n__class__: Mine\n", ["2: no dataset class energon.Mine. Expected"]),
        ("__class__: CrudeWebdataset\n", ["1: __module__ and __class__ belong together"]),
        ("field_map: {a: b}\n", ["1: no sample_type; name one"]),
        (
            "sample_type: CaptioningSample\nfield_map: {a: b}\n",
            ["1: sample_type is 'CaptioningSample', expected a mapping like {__mod"],
        ),
        (CAPTIONING[: CAPTIONING.index("field_map")], ["1: no field_map, like"]),
        (CAPTIONING + "sample_loader: a.py\n", ["7: both field_map and sample_loader"]),
        (CAPTIONING + "part_filter: [a]\n", ["7: field_map selects the parts to load"]),
        (
            "sample_loader: a.py\nsample_type: {__module__: a, __class__: b}",
            ["1: needs a part_filter"],
        ),
        (
            "__module__: energon\n__class__: OCRWebdataset\n" + CAPTIONING,
            ["3: OCRWebdataset names the sample type already"],
        ),
    ],
)
def test_says_what_is_wrong_and_in_which_line(tmp_path, text, expected):
    found = message(tmp_path, text).splitlines()
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start)


def test_broken_yaml_is_an_error_of_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.yaml:1:5: not valid YAML: mapping values"):
        read(tmp_path, "a: b: c")
