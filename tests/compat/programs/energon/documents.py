"""Documents that trainers write: metadatasets of both versions, `dataset.yaml`, splits, joins."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from common import (
    config,
    cooked,
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

V2 = "MetadatasetV2"


def plain(energon):
    return energon.DefaultTaskEncoder(raw_batch_type=None)


def subflavors(energon, folder, path, *, get=val, **settings):
    """Return the subflavors of all samples."""
    found = loader(energon, get(energon, path, batch_size=None, **settings))
    return sorted({json.dumps(sample.__subflavors__, sort_keys=True) for sample in found})


def check_one_reference(energon, folder):
    splits = {"val": {"path": "texts", "subflavors": {"a": 1}}}
    path = document(folder, "single", __class__=V2, splits=splits)
    return subflavors(energon, folder, path), texts(loader(energon, val(energon, path)))


def check_split_parts_of_references(energon, folder):
    refs = [{"path": "texts", "split_part": "train"}, {"path": "more"}]
    path = document(folder, "parts", __class__=V2, splits={"val": {"blend": refs}})
    return flat(texts(loader(energon, val(energon, path))))


def check_a_split_of_another_name(energon, folder):
    refs = [{"path": "texts", "split_part": "val"}]
    path = document(folder, "other-name", __class__=V2, splits={"probe": {"blend": refs}})
    found = flat(texts(loader(energon, val(energon, path, split_part="probe"))))
    return found, raised(val, energon, path) is not None


def check_subflavors_of_nested_documents(energon, folder):
    inner = [
        {"path": "texts", "subflavors": {"of": "inner", "i": 1}},
        {"path": "more", "subflavors": {"i": 2}},
    ]
    document(folder, "sub-inner", __class__=V2, splits={"val": {"blend": inner}})
    outer = [{"path": "sub-inner.yaml", "subflavors": {"i": 3, "o": 1}}]
    path = document(folder, "sub-outer", __class__=V2, splits={"val": {"blend": outer}})
    return subflavors(energon, folder, path)


def check_a_document_of_the_first_version_below_one_of_the_second(energon, folder):
    refs = [{"path": "texts", "weight": 1, "subflavors": {"v": 1}}]
    document(folder, "v1-inner", __class__="Metadataset", splits={"val": {"datasets": refs}})
    outer = [{"path": "v1-inner.yaml"}, {"path": "more"}]
    path = document(folder, "v2-outer", __class__=V2, splits={"val": {"blend": outer}})
    return subflavors(energon, folder, path), flat(texts(loader(energon, val(energon, path))))


def check_documents_without_a_class(energon, folder):
    path = Path(folder) / "bare.yaml"
    refs = [{"path": "texts", "weight": 1}]
    path.write_text(json.dumps({"splits": {"val": {"datasets": refs}}}))
    return flat(texts(loader(energon, val(energon, path))))


def check_documents_with_unknown_keys(energon, folder):
    found = []
    for n, each in enumerate(
        (
            {"val": {"path": "texts", "nothing": 1}},
            {"val": {"blend": [{"path": "texts", "wieght": 1}]}},
            {"val": {"blend": [{"path": "texts"}], "blend_epochized": []}},
            {"val": {"blend": [{"weight": 1}]}},
            {"val": {"blend": {"path": "texts"}}},
            {"val": {"path": "texts", "subset": {"range": ["0%"]}}},
            {"val": {"path": "texts", "subset": {"range": ["50%", "10%"]}}},
            {"val": {"path": "texts", "subset": {"range": ["0%", "200%"]}}},
            {"val": {"path": "not/there"}},
            {"val": {"path": 3}},
        )
    ):
        path = document(folder, f"wrong-{n}", __class__=V2, splits=each)
        found.append(raised(val, energon, path) is not None)
    return found


def check_blends_of_both_modes_in_one(energon, folder):
    inner = {"train": {"blend_epochized": [{"path": "texts"}]}}
    document(folder, "both-inner", __class__=V2, splits=inner)
    outer = {"train": {"blend_epochized": [{"path": "both-inner.yaml", "repetitions": 2}]}}
    path = document(folder, "both", __class__=V2, splits=outer)
    dataset = train(energon, path)
    return len(dataset), sorted(flat(texts(loader(energon, dataset))))


def check_repetitions_multiply(energon, folder):
    inner = [{"path": "texts", "repetitions": 2}, {"path": "more"}]
    document(folder, "times-inner", __class__=V2, splits={"train": {"blend_epochized": inner}})
    outer = [{"path": "times-inner.yaml", "repetitions": 2}, {"path": "more", "repetitions": 1}]
    path = document(folder, "times", __class__=V2, splits={"train": {"blend_epochized": outer}})
    found = flat(texts(loader(energon, train(energon, path))))
    return sorted((each, found.count(each)) for each in set(found))


def check_an_epochized_blend_goes_on(energon, folder):
    refs = [{"path": "texts", "repetitions": 1}, {"path": "more", "repetitions": 1}]
    path = document(folder, "goes-on", __class__=V2, splits={"train": {"blend_epochized": refs}})
    dataset = train(energon, path, epoch=False, batch_size=6, virtual_epoch_length=8)
    found = loader(energon, dataset)
    epochs = [sorted(flat(texts(found))) for _ in range(3)]
    return [len(each) for each in epochs], [each == epochs[0] for each in epochs]


def check_validation_ignores_weights(energon, folder):
    refs = [{"path": "texts", "weight": 10}, {"path": "more", "weight": 0.1}]
    path = document(folder, "val-weights", __class__=V2, splits={"val": {"blend": refs}})
    epochized = [{"path": "texts", "repetitions": 3}, {"path": "more", "repetitions": 0.5}]
    other = {"val": {"blend_epochized": epochized}}
    second = document(folder, "val-repetitions", __class__=V2, splits=other)
    return [flat(texts(loader(energon, val(energon, each)))) for each in (path, second)]


def check_no_repetition_of_weights(energon, folder):
    refs = [{"path": "texts", "weight": 1}, {"path": "more", "weight": 1}]
    path = document(folder, "no-repeat", __class__=V2, splits={"train": {"blend": refs}})
    return raised(train, energon, path) is not None


def check_subsets_of_all_kinds(energon, folder):
    found = {}
    for n, bounds in enumerate((["0%", "50%"], [6, 12], [18, "end"], [0, 24], ["33.3%", "66.6%"])):
        splits = {"train": {"path": "texts", "subset": {"range": bounds}}}
        path = document(folder, f"subset-{n}", __class__=V2, splits=splits)
        found[str(bounds)] = sorted(flat(texts(loader(energon, train(energon, path)))))
    return found


def check_subsets_of_subsets(energon, folder):
    inner = {"train": {"path": "texts", "subset": {"range": [4, 20]}}}
    document(folder, "sub-sub", __class__=V2, splits=inner)
    refs = [{"path": "sub-sub.yaml"}, {"path": "more"}]
    outer = {"train": {"blend_epochized": refs, "subset": {"range": ["50%", "100%"]}}}
    path = document(folder, "sub-sup", __class__=V2, splits=outer)
    return sorted(flat(texts(loader(energon, train(energon, path)))))


def check_shuffling_over_epochs_in_documents(energon, folder):
    found = []
    for n, over in enumerate((1, 2)):
        refs = [{"path": "texts", "shuffle_over_epochs_multiplier": over}]
        path = document(folder, f"over-{n}", __class__=V2, splits={"train": {"blend": refs}})
        dataset = train(energon, path, epoch=False, batch_size=None)
        samples = loader(energon, dataset)
        iterator = iter(samples)
        taken = [next(iterator).text for _ in range(48)]
        found.append([len(set(taken)), {taken.count(each) for each in taken} == {2}])
    return found


def check_other_files_of_a_dataset(energon, folder):
    path = copy(folder, "texts", "several")
    text = {"__module__": "megatron.energon", "__class__": "TextSample"}
    meta = path / ".nv-meta"
    (meta / "typed.yaml").write_text(
        json.dumps({"sample_type": text, "field_map": {"text": "txt"}})
    )
    split = json.loads(json.dumps({"split_parts": {"val": ["shard-0.tar"]}, "exclude": []}))
    (meta / "probe.yaml").write_text(json.dumps(split))
    settings = {"dataset_config": "typed.yaml", "split_config": "probe.yaml"}
    refs = [{"path": "several", **settings}]
    mixed = document(folder, "several-doc", __class__=V2, splits={"val": {"blend": refs}})
    return [
        texts(loader(energon, val(energon, path, task_encoder=plain(energon), **settings))),
        texts(loader(energon, val(energon, mixed, task_encoder=plain(energon)))),
    ]


def check_splits_in_json(energon, folder):
    path = copy(folder, "texts", "split-json")
    meta = path / ".nv-meta"
    (meta / "split.yaml").unlink()
    parts = {"split_parts": {"val": ["shard-{1..2}.tar"], "train": []}}
    (meta / "split.json").write_text(json.dumps(parts))
    found = flat(texts(loader(energon, val(energon, path))))
    return found, raised(train, energon, path) is not None


def check_excluded_shards_and_samples(energon, folder):
    path = copy(folder, "texts", "excluding")
    parts = {
        "split_parts": {"val": ["shard-{0..2}.tar"]},
        "exclude": ["shard-1.tar", "shard-2.tar/01{3..5}"],
    }
    (path / ".nv-meta" / "split.yaml").write_text(json.dumps(parts))
    return flat(texts(loader(energon, val(energon, path))))


def check_field_maps(energon, folder):
    path = copy(folder, "captions", "mapped")
    kind = {"__module__": "megatron.energon", "__class__": "TextSample"}
    found = []
    for access in ("txt", "nothing,txt", "json[n]", "nothing,json[n]"):
        describe(path, {"sample_type": kind, "field_map": {"text": access}})
        dataset = val(energon, path, batch_size=None, task_encoder=plain(energon))
        found.append([sample.text for sample in loader(energon, dataset)])
    describe(path, {"sample_type": kind, "field_map": {"unknown": "txt"}})
    return found, raised(val, energon, path, task_encoder=plain(energon)) is not None


def check_arguments_in_a_dataset_document(energon, folder):
    path = copy(folder, "captions", "with-arguments")
    kind = {"__module__": "megatron.energon", "__class__": "TextSample"}
    describe(
        path,
        {
            "sample_type": kind,
            "field_map": {"text": "txt"},
            "subflavors": {"x": 1},
            "shuffle_over_epochs": 1,
            "parallel_shard_iters": 1,
            "max_samples_per_sequence": 2,
        },
    )
    dataset = val(energon, path, batch_size=None, task_encoder=plain(energon))
    found = [[s.text, s.__subflavors__] for s in loader(energon, dataset)]
    trained = train(energon, path, batch_size=None, task_encoder=plain(energon))
    return found, sorted(sample.text for sample in loader(energon, trained))


def check_a_part_filter_of_names(energon, folder):
    path = copy(folder, "texts", "filtered-parts")
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    describe(path, {**crude, "part_filter": ["txt"]})

    @energon.stateless
    def cook(sample):
        made = cooked(energon, sample)
        made.text = sorted(name for name in sample if not name.startswith("__"))
        return made

    task_encoder = encoder(energon, cookers=[energon.Cooker(cook)])
    dataset = val(energon, path, batch_size=None, task_encoder=task_encoder)
    return next(iter(loader(energon, dataset))).text


def check_sample_types_of_programs(energon, folder):
    path = copy(folder, "captions", "own-type")
    import_module("own_datasets")
    kind = {"__module__": "own_datasets", "__class__": "ChatMLSample"}
    describe(path, {"sample_type": kind, "field_map": {"conversation": "json", "text": "txt"}})
    dataset = val(energon, path, batch_size=None, task_encoder=plain(energon))
    return [
        [type(sample).__name__, sample.text, sample.conversation]
        for sample in loader(energon, dataset)
    ]


def check_old_flavors(energon, folder):
    import warnings

    path = copy(folder, "captions", "old-flavor")
    fields = {"image": "json", "caption": "txt"}
    describe(
        path,
        {
            "__module__": "megatron.energon",
            "__class__": "CaptioningWebdataset",
            "field_map": fields,
        },
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = val(energon, path, batch_size=None, task_encoder=plain(energon))
        return [[type(s).__name__, s.caption, s.image] for s in loader(energon, dataset)]


def check_json_lines(energon, folder):
    path = Path(folder) / "read.jsonl"
    lines = [json.dumps({"id": n, "text": f"line {n}"}) + "\n" for n in range(8)]
    path.write_text("".join(lines))
    count = energon.CrudeJsonlDatasetFactory.prepare_dataset(path)

    @energon.stateless
    def cook(sample):
        return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["json"]["text"])

    task_encoder = encoder(energon, cookers=[energon.Cooker(cook)])
    dataset = train(energon, path, batch_size=None, task_encoder=task_encoder)
    found = sorted([s.__key__, s.text] for s in loader(energon, dataset))
    return count, found


def check_json_lines_in_a_blend(energon, folder):
    path = Path(folder) / "blended.jsonl"
    path.write_text("".join(json.dumps({"txt": f"line {n}"}) + "\n" for n in range(6)))
    energon.CrudeJsonlDatasetFactory.prepare_dataset(path)
    refs = [{"path": "blended.jsonl", "subflavors": {"of": "lines"}}, {"path": "texts"}]
    mixed = document(folder, "lines-doc", __class__=V2, splits={"train": {"blend_epochized": refs}})

    @energon.stateless
    def cook(sample):
        return energon.TextSample(
            **energon.basic_sample_keys(sample), text=f"cooked {sample['json']['txt']}"
        )

    @energon.stateless
    def other(sample):
        return cooked(energon, sample)

    cookers = [energon.Cooker(cook, has_subflavors={"of": "lines"}), energon.Cooker(other)]
    task_encoder = encoder(energon, cookers=cookers)
    return sorted(flat(texts(loader(energon, train(energon, mixed, task_encoder=task_encoder)))))


def joined(energon, folder, name, columns, *, joiner="Joined"):
    for column, numbers in columns.items():
        path = Path(folder) / f"{name}-{column}"
        write_shards(path, column, shards=1, samples=6)
        names = [f"{n:03}" for n in range(6) if n not in numbers]
        prepare(energon, path, split_parts_patterns=[("val", ".*")])
        text = {"__module__": "megatron.energon", "__class__": "TextSample"}
        describe(path, {"sample_type": text, "field_map": {"text": "txt"}})
        if names:
            split = {
                "split_parts": {"val": ["shard-0.tar"]},
                "exclude": [f"shard-0.tar/{each}" for each in names],
            }
            (path / ".nv-meta" / "split.yaml").write_text(json.dumps(split))
    return {"__module__": "own_datasets", "__class__": joiner}


def check_joins_that_skip(energon, folder):
    import_module("own_datasets")
    every = set(range(6))
    kind = joined(energon, folder, "skip", {"left": every, "right": {0, 2, 5}})
    join = {"left": {"path": "skip-left"}, "right": {"path": "skip-right", "nonmatch": "skip"}}
    splits = {"val": {"join": join, "joiner": kind}}
    path = document(folder, "skipping", __class__=V2, splits=splits)
    energon.prepare_metadataset(import_module("megatron.energon.epathlib").EPath(path))
    found = loader(energon, val(energon, path, batch_size=None, task_encoder=plain(energon)))
    return [[sample.__key__, sample.left, sample.right] for sample in found]


def check_joins_that_do_not_match(energon, folder):
    import_module("own_datasets")
    every = set(range(6))
    kind = joined(energon, folder, "error", {"left": every, "right": {0, 2, 5}})
    join = {"left": {"path": "error-left"}, "right": {"path": "error-right"}}
    splits = {"val": {"join": join, "joiner": kind}}
    path = document(folder, "not-matching", __class__=V2, splits=splits)

    def run():
        energon.prepare_metadataset(import_module("megatron.energon.epathlib").EPath(path))
        val(energon, path, batch_size=None, task_encoder=plain(energon))

    return raised(run) is not None


def check_joins_in_a_list(energon, folder):
    import_module("own_datasets")
    every = set(range(6))
    kind = joined(energon, folder, "list", {"left": every, "right": every})
    join = [{"path": "list-left"}, {"path": "list-right", "subflavors": {"r": 1}}]
    settings = {"subflavors": {"j": 1}}
    splits = {"val": {"blend": [{"join": join, "joiner": kind, "weight": 1, **settings}]}}
    path = document(folder, "listed", __class__=V2, splits=splits)
    energon.prepare_metadataset(import_module("megatron.energon.epathlib").EPath(path))
    found = loader(energon, val(energon, path, batch_size=None, task_encoder=plain(energon)))
    return [[sample.__key__, sample.left, sample.right, sample.__subflavors__] for sample in found]


def check_a_metadataset_in_a_dict(energon, folder):
    root = Path(folder)
    content = {
        "__module__": "megatron.energon",
        "__class__": V2,
        "splits": {"val": {"blend": [{"path": str(root / "texts")}]}},
    }
    found = energon.load_dataset(content).get_datasets(
        training=False, split_part="val", worker_config=config(energon)
    )
    return [each.dataset.paths[0].name for each in found.datasets], found.blend_mode.name


def check_aux_on_what_is_not_crude(energon, folder):
    refs = {"path": "captions", "aux": {"media": "filesystem://media"}}
    path = document(folder, "aux-typed", __class__=V2, splits={"val": refs})
    return raised(val, energon, path, task_encoder=plain(energon)) is not None


def check_auxiliary_data_that_is_missing(energon, folder):
    refs = {"path": "texts", "aux": {"media": "filesystem://media"}}
    path = document(folder, "aux-missing", __class__=V2, splits={"val": refs})

    @energon.stateless
    def cook(sample, media):
        try:
            text = media.get(f"{sample['__key__']}.none", sample)
        except Exception as error:
            text = isinstance(error, (KeyError, OSError))
        return energon.TextSample(**energon.basic_sample_keys(sample), text=text)

    task_encoder = encoder(energon, cookers=[energon.Cooker(cook)])
    found = loader(energon, val(energon, path, batch_size=None, task_encoder=task_encoder))
    return [sample.text for sample in found]


def check_paths_with_dots(energon, folder):
    deeper = Path(folder) / "deeper" / "still"
    deeper.mkdir(parents=True)
    splits = {"val": {"blend": [{"path": "../../texts"}, {"path": str(Path(folder) / "more")}]}}
    path = deeper / "doc.yaml"
    path.write_text(
        json.dumps({"__module__": "megatron.energon", "__class__": V2, "splits": splits})
    )
    return flat(texts(loader(energon, val(energon, path))))


def check_the_path_of_a_getter(energon, folder):
    epath = import_module("megatron.energon.epathlib").EPath
    paths = [str(Path(folder) / "texts"), Path(folder) / "texts", epath(Path(folder) / "texts")]
    return [len(flat(texts(loader(energon, val(energon, path))))) for path in paths]


def check_validation_up_to_a_limit(energon, folder):
    found = loader(energon, val(energon, Path(folder) / "texts", batch_size=2, limit=2))
    return texts(found), texts(found), len(found)


def check_configurations_are_loaded(energon, folder):
    load = import_module("megatron.energon.dataset_config").load_config
    content = {"__module__": "megatron.energon", "__class__": "SystemFileStore"}
    made = load(dict(content), default_type=energon.FileStore)
    return type(made).__name__, raised(
        load, {**content, "nothing": 1}, default_type=energon.FileStore
    ) is not None


def check_datasets_by_hand(energon, folder):
    epath = import_module("megatron.energon.epathlib").EPath
    factory = energon.CrudeWebdataset(
        epath(Path(folder) / "texts"),
        split_part="val",
        training=False,
        worker_config=config(energon),
        subflavors={"hand": 1},
    )
    standard = energon.StandardWebdatasetFactory(
        epath(Path(folder) / "captions"),
        split_part="val",
        training=False,
        worker_config=config(energon),
        sample_type=energon.CaptioningSample,
        field_map={"image": "json", "caption": "txt"},
    )
    return (
        [[s["__key__"], s["__subflavors__"]] for s in loader(energon, factory.build())],
        [s.caption for s in loader(energon, standard.build())],
        len(factory),
        len(standard),
    )


def check_reading_a_dataset_as_a_store(energon, folder):
    epath = import_module("megatron.energon.epathlib").EPath
    factory = energon.CrudeWebdataset(
        epath(Path(folder) / "texts"),
        split_part="val",
        training=False,
        worker_config=config(energon),
    )
    store = factory.as_file_store()
    data, source = store["003.txt"]
    return data, source.shard_name, source.index, list(source.file_names)


def check_content_of_shards(energon, folder):
    files = sorted((Path(folder) / "texts").glob("*.tar"))
    epath = import_module("megatron.energon.epathlib").EPath
    found = list(energon.BaseWebdatasetFactory.iter_dataset_content(epath(files[0]), ("txt",)))
    return [
        sorted((name, each[name]) for name in each if name in ("txt", "__key__")) for each in found
    ]


def check_metadatasets_built_of_nodes(energon, folder):
    v1 = import_module("megatron.energon.metadataset.metadataset")
    v2 = import_module("megatron.energon.metadataset.metadataset_v2")
    epath = import_module("megatron.energon.epathlib").EPath
    media = v2.AuxFilesystemReference(fs_path="media")
    first = v2.BlendDatasetReference(path="texts", weight=2, aux={"m": media})
    second = v2.BlendDatasetReference(path="more", subflavors={"x": 1})
    half = v2.Subset(range=("0%", "50%"))
    old = v1.DatasetReference(path="texts", weight=1.0, subflavor="s")
    epochized = v2.BlendEpochizedDatasetReference(path="more", repetitions=3, subset=half)
    found = [
        v2.MetadatasetV2(
            path=epath(Path(folder) / "nodes.yaml"),
            splits={
                "val": v2.MetadatasetBlend(blend=[first, second]),
                "train": v2.MetadatasetBlendEpochized(blend_epochized=[epochized]),
            },
        ),
        v1.Metadataset(
            epath(Path(folder) / "old-nodes.yaml"), {"val": v1.MetadatasetBlender(datasets=[old])}
        ),
    ]
    told = []
    for each in found:
        each.post_initialize()
        loaded = each.get_datasets(training=False, split_part="val", worker_config=config(energon))
        told.append([loaded.blend_mode.name])
        for one in loaded.datasets:
            told.append([one.dataset.paths[0].name, round(one.weight, 3), one.dataset.subflavors])
            told.append([len(one.dataset), sorted(one.aux or ())])
    trained = found[0].get_datasets(
        training=True, split_part="train", worker_config=config(energon)
    )
    told.append([[one.repetitions, one.dataset.paths[0].name] for one in trained.datasets])
    told.append([first.path.name if hasattr(first.path, "name") else first.path, second.weight])
    return told
