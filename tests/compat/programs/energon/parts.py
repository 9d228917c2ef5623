"""Modules, names, wrappers, stores and commands that programs use."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import islice
from pathlib import Path

from common import command, config, encoder, loader, raised, texts, train, val, write_shards


def module(name):
    return import_module(f"megatron.energon.{name}")


GENERIC = """
    BaseCoreDatasetFactory BaseWebdatasetFactory DefaultGenericWebdatasetFactory
    DefaultDecoderWebdatasetFactory StandardWebdatasetFactory SavableDataset MapDataset
    BlendDataset BatchDataset LimitDataset SavableDataLoader Cooker PackingDataset
    GroupBatchDataset TaskEncoder FileStore Lazy
"""


def check_versions(energon, folder):
    found = import_module("importlib.metadata").version("megatron-energon")
    return energon.__version__ == found, energon.__version__.split(".")[0]


def check_classes_are_subscripted(energon, folder):
    names = GENERIC.split()
    return [name for name in names if not hasattr(getattr(energon, name), "__class_getitem__")]


def check_a_parser_of_documents(energon, folder):
    dataclass = import_module("dataclasses").dataclass
    parser = module("typed_converter").JsonParser(strict=True)

    @dataclass
    class Place:
        x: int
        names: list[str]

    made = parser.raw_to_typed({"x": 3, "names": ["a"]}, Place)
    return made.x, made.names, raised(parser.raw_to_typed, {"names": []}, Place)


def check_shards_of_workers(energon, folder):
    shard = module("flavors.webdataset.structs").ShardInfo
    epath = module("epathlib").EPath
    shards = [shard(name=f"{n}.tar", path=epath(f"/d/{n}.tar"), count=10) for n in range(3)]
    sharder = module("flavors.webdataset.sharder").Sharder
    return [
        [
            list(map(int, each))
            for each in sharder.shard_workers(
                shards,
                config(energon, 2),
                max_samples_per_sequence=None,
                rotation_offset=0,
            )
        ],
    ]


def check_random_numbers_of_workers(energon, folder):
    rng = module("rng").WorkerRng(config(energon))
    settings = config(energon)
    settings.worker_activate(0)
    try:
        state = rng.save_state()
        first = [rng.randbelow(100) for _ in range(5)]
        rng.restore_state(state)
        again = [rng.randbelow(100) for _ in range(5)]
    finally:
        settings.worker_deactivate()
    return first == again


def check_what_is_at_a_path(energon, folder):
    metadata = module("flavors.webdataset.metadata")
    epath = module("epathlib").EPath
    found = metadata.get_dataset_info(epath(Path(folder) / "texts"))
    kinds = [
        metadata.get_dataset_type(epath(Path(folder) / name)).name
        for name in ("texts", "lines.jsonl")
    ]
    return sorted(found["shard_counts"].items()), kinds


def check_keyword_names(energon, folder):
    torch = import_module("torch")
    tensors = [torch.ones(2), torch.ones(2)]
    return (
        list(energon.batch_stack(batch=tensors).shape),
        len(energon.batch_list(batch=tensors)),
        list(energon.batch_pad_stack(batch=[torch.ones(1), torch.ones(3)]).shape),
        energon.generic_batch(batch=["a", "b"]),
        raised(energon.reraise_exception, ValueError("x"), None) is not None,
        energon.log_exception(e=ValueError("x"), sample=None),
        energon.SampleDecoder().decode(fname="a.txt", raw=b"text"),
    )


def check_metadata_of_media(energon, folder):
    media = module("media.metadata")
    image = media.ImageMetadata(width=3, height=4, format="PNG", mode="RGB")
    data = image.to_dict()
    kind = media.ImageMetadata.metadata_type
    return sorted(data.items()), media.ImageMetadata.from_dict(data) == image, kind.value


def check_filters_of_media(energon, folder):
    extractor = module("media.extractor")
    parsed = extractor.MediaFilterConfig.parse("*.jpg,*.png", False, False)
    return (
        parsed.strategy.name,
        parsed.patterns,
        raised(extractor.MediaFilterConfig.parse, None, True, True),
        raised(extractor.MediaFilterConfig.parse, "", False, False),
        extractor.MediaFilterConfig.parse("", True, False).patterns == [],
        isinstance(extractor.MediaFilterStrategy.GLOB, str),
    )


def check_stores_of_programs(energon, folder):
    class Store(energon.FileStore[bytes]):
        def __getitem__(self, key):
            source = energon.SourceInfo(
                dataset_path="own", index=key, shard_name=None, file_names=(key,)
            )
            return f"of {key}".encode(), source

        def get_path(self):
            return "own"

    pool = energon.FileStoreCachePool(parent_cache_dir=Path(folder) / "stores")
    store = Store()
    decoded = energon.DecodeFileStore(store, decoder=energon.SampleDecoder())
    found = [
        store.get(key="a"),
        decoded.get("a.txt"),
        pool.get(store, "b"),
        pool.get_lazy(decoded, "c.txt").get(),
        pool.to_cache({"x": 1}, "name").get(),
        energon.NoCachePool().get_lazy(store, "d").get(),
        raised(store.get_media_metadata, "a") is not None,
    ]
    pool.close()
    return found


def check_mock_lazies(energon, folder):
    lazy = energon.MockLazy(fname="x", get_fn=lambda name: name * 2)
    return lazy.get(), lazy == energon.MockLazy("x", lazy.get_fn), hash(lazy) == hash(lazy)


def pool_dataset(energon):
    class LengthPoolSortDataset(energon.SavableDataset):
        def __init__(self, dataset, pool_size, worker_config):
            super().__init__(worker_config=worker_config)
            self.dataset, self.pool_size = dataset, pool_size

        def __len__(self):
            return len(self.dataset)

        def __iter__(self):
            pool = []
            for sample in self.dataset:
                pool.append(sample)
                if len(pool) == self.pool_size:
                    yield from sorted(pool, key=lambda each: each.__key__)
                    pool.clear()
            yield from sorted(pool, key=lambda each: each.__key__)

        def worker_has_samples(self):
            return self.dataset.worker_has_samples()

        def len_worker(self, worker_idx=None):
            return self.dataset.len_worker(worker_idx)

        def len_rank(self):
            return self.dataset.len_rank()

        def reset_state_own(self):
            pass

        def config(self):
            return {"type": "LengthPoolSortDataset", "dataset": self.dataset.config()}

        def assert_can_restore(self):
            pass

    return LengthPoolSortDataset


def check_a_dataset_of_the_program_around_others(energon, folder):
    kind = pool_dataset(energon)

    def build_train_datasets(self, **settings):
        dataset = super(type(self), self).build_train_datasets(**settings)
        return kind(dataset, 5, settings["worker_config"])

    task_encoder = encoder(energon, build_train_datasets=build_train_datasets)
    dataset = train(energon, Path(folder) / "texts", batch_size=None, task_encoder=task_encoder)
    found = [sample.text for sample in energon.get_loader(dataset)]
    pools = [found[i : i + 5] for i in range(0, len(found), 5)]
    return sorted(found), all(sorted(pool, key=lambda t: int(t[6:])) == pool for pool in pools)


def check_wrappers(energon, folder):
    settings = config(energon)
    inner = val(energon, Path(folder) / "texts", batch_size=None)
    mapped = energon.MapDataset(inner, lambda s: s.text, worker_config=settings)
    found = {
        "map": mapped,
        "filter": energon.FilterDataset(
            mapped, filter_fn=lambda t: t.endswith("5"), worker_config=settings
        ),
        "limit": energon.LimitDataset(mapped, 2, worker_config=settings),
        "repeat": energon.RepeatDataset(mapped, repeats=2, worker_config=settings),
        "batch": energon.BatchDataset(
            mapped, batch_size=4, batcher=list, drop_last=False, worker_config=settings
        ),
        "concat": energon.ConcatDataset(mapped, mapped, worker_config=settings),
        "epochize": energon.EpochizeDataset(mapped, length=3, worker_config=settings),
        "iter": energon.IterMapDataset(
            val(energon, Path(folder) / "texts", batch_size=None),
            lambda it: (each.text.upper() for each in it),
            worker_config=settings,
        ),
    }
    return {name: list(energon.get_loader(dataset)) for name, dataset in found.items()}


def check_names_of_commands(energon, folder):
    names = ["analyze_debug", "checkpoint", "info", "lint", "mount", "prepare", "preview"]
    main = module("cli.main")
    checkpoint = module("tools.checkpoint")
    return (
        [hasattr(main, f"{name}_command") for name in (*names, "prepare_media")],
        [callable(getattr(checkpoint, name)) for name in ("command_info", "command_redist")],
    )


def check_preparing_by_command(energon, folder):
    path = Path(folder) / "by-command"
    write_shards(path, "x")
    arguments = ["--non-interactive", "--split-ratio", "8,1,1", "--num-workers", "1"]
    code, printed = command("prepare", path, *arguments, "--sample-type", "CrudeWebdataset")
    return code, printed.rstrip().splitlines()[-1]


def check_preparing_with_answers(energon, folder):
    path = Path(folder) / "with-answers"
    write_shards(path, "x")
    names = sorted(
        name
        for name in dir(energon)
        if isinstance(getattr(energon, name), type)
        and issubclass(getattr(energon, name), energon.Sample)
    )
    number = names.index("TextSample")
    answers = f"8,1,1\ny\n{number}\ny\ntxt\n"
    code, printed = command("prepare", "--num-workers", "1", path, answers=answers)
    found = {}
    document = path / ".nv-meta" / "dataset.yaml"
    if document.exists():
        found = import_module("yaml").safe_load(document.read_text())
    return code, printed.rstrip().splitlines()[-1], found.get("field_map")


def check_preparing_jsonl_by_command(energon, folder):
    path = Path(folder) / "command.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    code, printed = command("prepare", path)
    return code, printed.rstrip().splitlines()[-1]


def check_preparing_media_by_command(energon, folder):
    path = Path(folder) / "pictures"
    path.mkdir()
    image = import_module("PIL.Image").new("RGB", (4, 3))
    image.save(path / "a.png")
    (path / "b.txt").write_text("no picture")
    code, printed = command("prepare-media", path, "--media-metadata-by-extension")
    store = energon.SystemFileStore(module("epathlib").EPath(path))
    found = store.get_media_metadata("a.png")
    return code, printed.rstrip().splitlines()[-1], found.width, found.height


def check_linting_by_command(energon, folder):
    arguments = ["--split-parts", "train,val", "--parallel", "1"]
    return command("lint", Path(folder) / "captions", *arguments)[0]


def check_a_preview(energon, folder):
    path = Path(folder) / "captions"
    code, printed = command("preview", path, "--split-parts", "val", answers="n\n")
    return code, "captions 24" in printed


def check_the_command_of_versions(energon, folder):
    return command("--version")[0]


def check_paths(energon, folder):
    epath = module("epathlib").EPath
    here = epath(folder)
    lines = here / "lines.jsonl"
    return (
        lines.name,
        lines.is_file(),
        here.is_dir(),
        lines.parent == here,
        sorted(each.name for each in here.glob("*.jsonl"))[:1],
        lines.read_text().count("\n"),
        epath("/a/b/../c").name,
    )


def check_states_of_buffers(energon, folder):
    flex = module("savable").FlexState
    state = flex(a=1, b=[2])
    return state["a"], sorted(state), isinstance(state, dict)


def check_counting_batches(energon, folder):
    dataset = train(energon, Path(folder) / "texts", batch_size=5)
    found = loader(energon, dataset)
    return len(dataset), len(found), len(texts(found)), len(list(islice(found, 2)))


def check_errors(energon, folder):
    errors = module("errors")
    sample = {"__key__": "a", "x": 1}
    return (
        issubclass(energon.SkipSample, errors.FatalSampleError),
        issubclass(errors.FatalSampleError, errors.SampleException),
        isinstance(errors.format_sample_compact(sample), str),
        isinstance(errors.format_sample_detailed(sample), str),
        len(errors.SYSTEM_EXCEPTIONS) > 0,
    )


def check_an_absolute_subset_of_a_blend(energon, folder):
    common = import_module("common")
    splits = {"train": {"blend": [{"path": "texts"}], "subset": {"range": [0, 5]}}}
    inner = {"train": {"path": "abs-inner.yaml", "subset": {"range": [0, 5]}}}
    refs = {"train": {"blend": [{"path": "texts"}]}}
    common.document(folder, "abs-inner", __class__="MetadatasetV2", splits=refs)
    found = []
    for n, each in enumerate((splits, inner)):
        path = common.document(folder, f"abs-{n}", __class__="MetadatasetV2", splits=each)
        try:
            train(energon, path)
        except Exception as error:
            pattern = "only (use absolute subset ranges|allowed) for a leaf dataset"
            found.append(bool(re.search(pattern, str(error))))
    return found


def check_copies_of_samples(energon, folder):
    sample = energon.TextSample(
        __key__="a", __restore_key__=(), __subflavors__={}, __sources__=(), text="x"
    )
    made = energon.CaptioningSample.derive_from(sample, image=1, caption="c")
    return made.__key__, made.caption


def check_sources_of_samples_that_nothing_cooks(energon, folder):
    """A program that builds its own pipeline, and one whose encoder leaves samples crude."""

    class Raw(energon.DefaultTaskEncoder):
        def build_cook_crude_sample(self, dataset, **settings):
            return dataset

    where = config(energon)
    path = Path(folder) / "texts"
    loaded = energon.load_dataset(path).get_dataset(
        training=False, split_part="val", worker_config=where
    )
    samples = [next(iter(loader(energon, loaded.build())))]
    dataset = val(energon, path, task_encoder=Raw(), batch_size=None)
    samples += [next(iter(loader(energon, dataset)))]
    batch = next(iter(loader(energon, val(energon, path, task_encoder=Raw(), batch_size=2))))
    sources = [source for sample in samples for source in sample["__sources__"]]
    sources += [source for sources in batch["__sources__"] for source in sources]
    return [
        (Path(str(each.dataset_path)).name, each.index, each.shard_name, list(each.file_names))
        for each in sources
    ]
