"""Datasets of programs: their own classes, arguments that getters pass on, documents."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from common import (
    config,
    copy,
    describe,
    document,
    encoder,
    flat,
    loader,
    prepare,
    raised,
    texts,
    train,
    val,
    write_shards,
)


def own(folder, name, kind, **settings):
    path = copy(folder, "texts", name)
    import_module("own_datasets")
    describe(path, {"__module__": "own_datasets", "__class__": kind, **settings})
    return path


def plain(energon):
    return energon.DefaultTaskEncoder(raw_batch_type=None)


def check_a_class_of_the_program(energon, folder):
    fields = {"conversation": "json", "text": "txt"}
    path = own(folder, "chat", "ChatMLWebdataset", field_map=fields, subflavors={"a": 1})
    found = flat(
        [[s.text, s.conversation, s.__subflavors__, type(s).__name__] for s in [sample]]
        for batch in [val(energon, path, batch_size=None, task_encoder=plain(energon))]
        for sample in loader(energon, batch)
    )
    trained = loader(energon, train(energon, path, task_encoder=plain(energon), workers=2))
    return found, sorted(flat(texts(trained)))


def check_a_class_that_loads_and_filters_samples(energon, folder):
    path = own(folder, "filtered", "Filtered", field_map={"text": "txt"})
    found = loader(energon, val(energon, path, task_encoder=plain(energon)))
    return texts(found)


def check_a_class_in_a_blend(energon, folder):
    own(folder, "blended", "Filtered", field_map={"text": "txt"})
    refs = [{"path": "blended", "weight": 1}, {"path": "blended", "weight": 1}]
    path = document(folder, "own", __class__="MetadatasetV2", splits={"train": {"blend": refs}})
    dataset = train(energon, path, epoch=False, task_encoder=plain(energon))
    return sorted(set(flat(texts(loader(energon, dataset), 40))))


def check_the_factory_of_a_dataset(energon, folder):
    get = import_module("megatron.energon.dataset_config").get_dataset_from_config
    factory = get(
        Path(folder) / "captions",
        split_part="val",
        training=False,
        worker_config=config(energon),
        subflavors={"x": 1},
    )
    return (
        len(factory),
        factory.__sample_type__.__name__,
        factory.subflavors,
        factory.training,
        [shard.name for shard in factory.shards],
        factory.paths[0].name,
        factory.sample_filter("003"),
        sorted({"training", "shards", "subset", "sample_excludes"} - factory.config().keys()),
        [s.caption for s in loader(energon, factory.build())],
    )


def check_samples_are_of_a_type(energon, folder):
    path = Path(folder) / "captions"
    plain_encoder = plain(energon)

    def get(kind):
        return train(energon, path, sample_type=kind, task_encoder=plain_encoder)

    return (
        raised(get, energon.VQASample),
        raised(get, energon.Sample),
        raised(get, energon.CaptioningSample),
    )


def check_arguments_for_datasets(energon, folder):
    structs = import_module("megatron.energon.flavors.webdataset.structs")
    half = structs.DatasetSubset(range=(0.0, 0.5))
    captions = val(energon, Path(folder) / "captions", subset=half, task_encoder=plain(energon))
    return [batch.caption for batch in loader(energon, captions)]


def check_a_key_twice_in_the_splits(energon, folder):
    path = copy(folder, "texts", "twice")
    split = path / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text() + '\nexclude:\n  - "shard-4.tar/024"\n')
    return flat(texts(loader(energon, val(energon, path))))


def check_blends(energon, folder):
    refs = [{"path": "texts", "weight": 3}, {"path": "more", "weight": 1}]
    path = document(folder, "mix", __class__="MetadatasetV2", splits={"train": {"blend": refs}})
    found = flat(texts(loader(energon, train(energon, path, epoch=False)), 100))
    share = sum(each.startswith("texts") for each in found) / len(found)
    return round(share, 1) in (0.7, 0.8), sorted(set(found))


def check_epochized_blends(energon, folder):
    refs = [{"path": "texts", "repetitions": 2}, {"path": "more", "repetitions": 1}]
    splits = {"train": {"blend_epochized": refs}}
    path = document(folder, "epochs", __class__="MetadatasetV2", splits=splits)
    dataset = train(energon, path, batch_size=6)
    return len(dataset), sorted(flat(texts(loader(energon, dataset))))


def check_subsets(energon, folder):
    refs = [{"path": "texts", "subset": {"range": ["50%", "100%"]}}, {"path": "more"}]
    path = document(folder, "concat", __class__="MetadatasetV2", splits={"val": {"blend": refs}})
    return texts(loader(energon, val(energon, path)))


def check_joins(energon, folder):
    kind = {"__module__": "own_datasets", "__class__": "Joined"}
    import_module("own_datasets")
    for name in ("left", "right"):
        path = copy(folder, "captions", name)
        text = {"__module__": "megatron.energon", "__class__": "TextSample"}
        describe(path, {"sample_type": text, "field_map": {"text": "txt"}})
    join = {"left": {"path": "left"}, "right": {"path": "right"}}
    splits = {"val": {"join": join, "joiner": kind}}
    path = document(folder, "join", __class__="MetadatasetV2", splits=splits)
    energon.prepare_metadataset(import_module("megatron.energon.epathlib").EPath(path))
    found = loader(energon, val(energon, path, batch_size=None, task_encoder=plain(energon)))
    return [[sample.__key__, sample.left, sample.right] for sample in found]


def check_auxiliary_data(energon, folder):
    refs = {"path": "texts", "aux": {"media": "filesystem://media", "other": "more"}}
    path = document(folder, "aux", __class__="MetadatasetV2", splits={"val": refs})

    def cook_any(sample, primary, media, other):
        text = [str(media.get(f"{sample['__key__']}.txt", sample))]
        text += [str(other.get(f"{sample['__key__']}.txt", sample)), primary.get(".txt", sample)]
        return energon.TextSample(**energon.basic_sample_keys(sample), text=text)

    cook = energon.stateless(energon.cooker(need_primary=True)(cook_any))
    task_encoder = encoder(energon, cookers=[energon.Cooker(cook)])
    found = list(loader(energon, val(energon, path, batch_size=None, task_encoder=task_encoder)))
    return [s.text for s in found], [len(s.__sources__) for s in found]


def check_old_documents(energon, folder):
    refs = [
        {"path": "texts", "weight": 1, "subflavor": "one", "subflavors": {"b": 2}},
        {"path": "more", "weight": 1, "subflavors": {"__subflavor__": "own", "c": 3}},
    ]
    splits = {"train": {"datasets": refs}, "val": {"datasets": refs}}
    path = document(folder, "old", __class__="Metadataset", splits=splits)
    found = loader(energon, val(energon, path, batch_size=None))
    return sorted({json.dumps(sample.__subflavors__) for sample in found})


def check_references_of_a_metadataset(energon, folder):
    inner = [{"path": "texts", "weight": 2}, {"path": "not/there", "weight": 1}]
    document(folder, "inner", __class__="MetadatasetV2", splits={"train": {"blend": inner}})
    refs = [
        {"path": "inner.yaml", "subflavors": {"x": 1}},
        {"path": "more", "split_part": "val", "aux": {"a": "filesystem://media"}},
    ]
    splits = {"train": {"blend": refs}}
    path = document(folder, "outer", __class__="MetadatasetV2", splits=splits)
    found = energon.traverse_metadataset(path, split_part="train")
    return [
        [type(ref.path).__name__, str(ref.path), ref.split_part, ref.subflavors]
        + [[name, type(aux).__name__, str(aux)] for name, aux in (ref.aux or {}).items()]
        for ref in found
    ]


def check_datasets_of_a_metadataset(energon, folder):
    inner = [{"path": "texts", "weight": 2}, {"path": "more", "weight": 1}]
    document(folder, "weights", __class__="MetadatasetV2", splits={"train": {"blend": inner}})
    refs = [{"path": "weights.yaml", "weight": 3}, {"path": "captions", "weight": 1}]
    splits = {"train": {"blend": refs}}
    path = document(folder, "nested", __class__="MetadatasetV2", splits=splits)
    found = energon.load_dataset(path).get_datasets(
        training=False, split_part="train", worker_config=config(energon)
    )
    return (
        found.blend_mode.name,
        [round(each.weight, 4) for each in found.datasets],
        [each.dataset.paths[0].name for each in found.datasets],
        [len(each.dataset) for each in found.datasets],
    )


def check_validation_dataset_by_dataset(energon, folder):
    refs = [{"path": "texts"}, {"path": "more"}]
    path = document(folder, "vals", __class__="MetadatasetV2", splits={"val": {"blend": refs}})
    found = energon.get_val_datasets(
        path, worker_config=config(energon), batch_size=4, task_encoder=encoder(energon)
    )
    return [
        [source.paths[0].name, source.subflavors, texts(loader(energon, dataset))]
        for dataset, source in found
    ]


def check_some_of_the_shards(energon, folder):
    path = Path(folder) / "some"
    write_shards(path, "some")
    some = prepare(energon, path, ["shard-{0..1}.tar", "shard-4.tar"])
    describe(path, {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})
    found = sorted(flat(texts(loader(energon, train(energon, path)))))
    patterns = [("val", "shard-1.tar")]
    other = prepare(
        energon,
        path,
        ["shard-0.tar", "shard-1.tar", "shard-4.tar"],
        split_config="other.yaml",
        split_parts_patterns=patterns,
    )
    others = flat(texts(loader(energon, val(energon, path, split_config="other.yaml"))))
    again = prepare(
        energon, path, ["shard-0.tar", "shard-1.tar", "shard-4.tar"], tar_index_only=True
    )
    return some, found, other, others, again


def check_a_converter_prepares_what_it_wrote(energon, folder):
    module = "megatron.energon.flavors.webdataset"
    preparator = import_module(f"{module}.prepare").WebdatasetPreparator
    main = import_module(f"{module}.config").MAIN_FOLDER_NAME
    structs = import_module(f"{module}.structs")
    write_shards(Path(folder) / "converted", "converted", shards=2)
    path = import_module("megatron.energon.epathlib").EPath(Path(folder) / "converted")
    (path / main).mkdir(exist_ok=True)
    shards = [str(each.relative_to(path)) for each in sorted(path.glob("**/*.tar"))]
    with (path / main / "dataset.yaml").open("w") as file:
        file.write("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    ratio = [("train", 1.0), ("val", 0), ("test", 0)]
    parts = preparator.prepare_dataset(
        path, shards, split_parts_ratio=ratio, tar_index_only=False, workers=1
    )
    splits = structs.WebdatasetSplits(split_parts={"train": shards})
    info = structs.WebdatasetInfo(shard_counts={"shard-0.tar": 6})
    batches = loader(energon, train(energon, Path(folder) / "converted"))
    return (
        sorted(parts),
        sorted(flat(texts(batches))),
        [splits.split_parts, splits.exclude, info.energon_version, info.shard_counts],
    )


def check_jsonl(energon, folder):
    path = Path(folder) / "lines.jsonl"
    get = energon.CrudeJsonlDatasetFactory.prepare_dataset
    epath = import_module("megatron.energon.epathlib").EPath
    count = get(epath(path))

    @energon.stateless
    def cook(sample):
        return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["json"]["text"])

    task_encoder = encoder(energon, cookers=[energon.Cooker(cook)])
    dataset = train(energon, path, task_encoder=task_encoder)
    return count, sorted(flat(texts(loader(energon, dataset))))


def check_a_guard_before_datasets(energon, folder):
    module = import_module("megatron.energon.dataset_config")
    seen, original = [], module.load_config

    def guard(path, **settings):
        seen.append(path.name)
        return original(path, **settings)

    module.load_config = guard
    try:
        val(energon, Path(folder) / "captions", task_encoder=plain(energon))
    finally:
        module.load_config = original
    return seen
