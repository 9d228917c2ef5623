"""Runs of trainers: their states, several ranks, epochs, watchdogs, logs, builders and wrappers."""

from __future__ import annotations

import json
import time
from importlib import import_module
from itertools import islice
from pathlib import Path

from common import (
    command,
    config,
    cooked,
    document,
    encoder,
    flat,
    loader,
    raised,
    texts,
    train,
    val,
)


def path(folder):
    return Path(folder) / "texts"


def ranks(energon, folder, *, world=2, workers=1, get=None, **settings):
    """Return a loader for each rank."""
    made = []
    for rank in range(world):
        where = energon.WorkerConfig(rank=rank, world_size=world, num_workers=workers)
        dataset = train(energon, path(folder), worker_config=where, **settings)
        made.append(loader(energon, dataset))
    return made


def check_ranks_share_the_samples(energon, folder):
    found = [flat(texts(each)) for each in ranks(energon, folder, batch_size=2)]
    return sorted(flat(found)), [len(each) for each in found]


def check_validation_on_ranks(energon, folder):
    found = []
    for rank in range(2):
        where = energon.WorkerConfig(rank=rank, world_size=2, num_workers=0)
        dataset = energon.get_val_dataset(
            path(folder), worker_config=where, batch_size=1, task_encoder=encoder(energon)
        )
        found.append(flat(texts(loader(energon, dataset))))
    return sorted(flat(found)), [len(each) for each in found]


def check_lengths_on_ranks(energon, folder):
    made = ranks(energon, folder, batch_size=2)
    return [len(each) for each in made]


def check_states_of_ranks_go_on(energon, folder):
    first = ranks(energon, folder, batch_size=2, epoch=False)
    iterators = [iter(each) for each in first]
    for each in iterators:
        texts(each, 3)
    states = [each.save_state_rank() for each in first]
    expected = [texts(each, 4) for each in iterators]
    second = ranks(energon, folder, batch_size=2, epoch=False)
    for each, state in zip(second, states, strict=True):
        each.restore_state_rank(state)
    return [texts(each, 4) for each in second] == expected


def check_states_of_all_ranks_are_given_to_each(energon, folder):
    first = ranks(energon, folder, batch_size=2, epoch=False)
    iterators = [iter(each) for each in first]
    for each in iterators:
        texts(each, 2)
    states = [each.save_state_rank() for each in first]
    expected = [texts(each, 3) for each in iterators]
    second = ranks(energon, folder, batch_size=2, epoch=False)
    for each in second:
        each.restore_state_global(states, src_rank=None)
    return [texts(each, 3) for each in second] == expected


def check_states_of_one_rank_in_a_list(energon, folder):
    first = loader(energon, train(energon, path(folder), epoch=False, workers=1))
    iterator = iter(first)
    texts(iterator, 2)
    state = first.save_state_global(global_dst_rank=0)
    expected = texts(iterator, 3)
    second = loader(energon, train(energon, path(folder), epoch=False, workers=1))
    second.restore_state_global(state)
    return len(state), texts(second, 3) == expected


def check_a_state_before_the_first_batch(energon, folder):
    found = loader(energon, train(energon, path(folder), epoch=False, workers=1))
    state = found.save_state_rank()
    second = loader(energon, train(energon, path(folder), epoch=False, workers=1))
    second.restore_state_rank(state)
    return texts(second, 3) == texts(found, 3)


def check_states_saved_with_torch(energon, folder):
    torch = import_module("torch")
    first = loader(energon, train(energon, path(folder), epoch=False, workers=1))
    iterator = iter(first)
    texts(iterator, 4)
    file = Path(folder) / "state.pt"
    torch.save({"dataloader_state_dict": first.save_state_rank()}, file)
    expected = texts(iterator, 3)
    state = torch.load(file, weights_only=False)["dataloader_state_dict"]
    second = loader(energon, train(energon, path(folder), epoch=False, workers=1))
    second.restore_state_rank(state)
    return texts(second, 3) == expected


def check_a_state_is_saved_twice(energon, folder):
    first = loader(energon, train(energon, path(folder), epoch=False, workers=2))
    iterator = iter(first)
    texts(iterator, 5)
    for _ in range(3):
        state = first.save_state_rank()
        expected = texts(iterator, 2)
        second = loader(energon, train(energon, path(folder), epoch=False, workers=2))
        second.restore_state_rank(state)
        iterator = iter(second)
        if texts(iterator, 2) != expected:
            return False
        first = second
    return True


def check_packing_goes_on_after_a_restore(energon, folder):
    @energon.stateless
    def pack_selected_samples(self, samples):
        return energon.TextSample.derive_from(samples[0], text=[s.text for s in samples])

    def select_samples_to_pack(self, samples):
        return [samples[::2], samples[1::2]]

    hooks = {
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": pack_selected_samples,
    }

    def get():
        dataset = train(
            energon,
            path(folder),
            epoch=False,
            batch_size=1,
            packing_buffer_size=5,
            workers=1,
            task_encoder=encoder(energon, **hooks),
        )
        return loader(energon, dataset)

    first = get()
    iterator = iter(first)
    texts(iterator, 3)
    state = first.save_state_rank()
    expected = texts(iterator, 5)
    second = get()
    second.restore_state_rank(state)
    return texts(second, 5) == expected


def check_groups_go_on_after_a_restore(energon, folder):
    def batch_group_criterion(self, sample):
        return int(sample.__key__) % 2, None

    hooks = {"batch_group_criterion": batch_group_criterion}

    def get():
        task_encoder = encoder(energon, **hooks)
        return loader(
            energon,
            train(energon, path(folder), epoch=False, batch_size=3, task_encoder=task_encoder),
        )

    first = get()
    iterator = iter(first)
    texts(iterator, 3)
    state = first.save_state_rank()
    expected = texts(iterator, 4)
    second = get()
    second.restore_state_rank(state)
    return texts(second, 4) == expected


def check_blends_go_on_after_a_restore(energon, folder):
    refs = [{"path": "texts", "weight": 2}, {"path": "more", "weight": 1}]
    mixed = document(folder, "go-on", __class__="MetadatasetV2", splits={"train": {"blend": refs}})

    def get():
        dataset = energon.get_train_dataset(
            mixed,
            worker_config=config(energon, 2),
            batch_size=2,
            shuffle_buffer_size=5,
            max_samples_per_sequence=3,
            virtual_epoch_length=6,
            task_encoder=encoder(energon),
        )
        return loader(energon, dataset)

    first = get()
    texts(first)
    iterator = iter(first)
    texts(iterator, 2)
    state = first.save_state_rank()
    expected = texts(iterator)
    second = get()
    second.restore_state_rank(state)
    return texts(second) == expected, len(expected)


def check_batches_are_made_again(energon, folder):
    found = []
    for settings in ({}, {"workers": 2}):

        def get(settings=settings):
            return loader(energon, train(energon, path(folder), epoch=False, **settings))

        batches = list(islice(get(), 4))
        again = get().restore_sample(batches[2].__restore_key__)
        found.append([again.text == batches[2].text, again.__key__ == batches[2].__key__])
    return found


def check_packs_are_made_again(energon, folder):
    @energon.stateless
    def pack_selected_samples(self, samples):
        return energon.TextSample.derive_from(
            samples[0],
            text=[s.text for s in samples],
            __restore_key__=(),
            __key__=",".join(s.__key__ for s in samples),
        )

    def select_samples_to_pack(self, samples):
        return [samples[i : i + 2] for i in range(0, len(samples), 2)]

    hooks = {
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": pack_selected_samples,
    }

    def get():
        dataset = train(
            energon,
            path(folder),
            epoch=False,
            batch_size=2,
            packing_buffer_size=6,
            task_encoder=encoder(energon, **hooks),
        )
        return loader(energon, dataset)

    batches = list(islice(get(), 4))
    again = get().restore_sample(batches[3].__restore_key__)
    return again.text == batches[3].text


def check_plain_loaders(energon, folder):
    dataset = train(energon, path(folder), workers=1)
    found = energon.get_loader(dataset)
    first = sorted(flat(texts(found)))
    again = sorted(flat(texts(found)))
    return first == again, len(found), len(first), isinstance(found.config(), dict)


def check_old_names_of_states(energon, folder):
    first = loader(energon, train(energon, path(folder), epoch=False, workers=1))
    iterator = iter(first)
    texts(iterator, 2)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = first.save_state(0)
        expected = texts(iterator, 2)
        second = loader(energon, train(energon, path(folder), epoch=False, workers=1))
        second.restore_state(state)
    return texts(second, 2) == expected


def check_loops_that_are_left(energon, folder):
    found = loader(energon, train(energon, path(folder), epoch=False, workers=1))
    first = [batch.text for batch in islice(found, 3)]
    second = [batch.text for batch in islice(found, 3)]
    return len(set(map(str, first + second)))


def check_epochs_that_are_left(energon, folder):
    dataset = train(energon, path(folder), epoch=False, workers=1, virtual_epoch_length=4)
    found = loader(energon, dataset)
    lengths = []
    for batches in (2, 10, 10):
        lengths.append(len(list(islice(found, batches))))
    return lengths


def check_a_watchdog_in_line(energon, folder):
    def encode_sample(self, sample):
        time.sleep(1.5)
        return sample

    task_encoder = encoder(energon, encode_sample=energon.stateless(encode_sample))
    dataset = val(energon, path(folder), batch_size=1, task_encoder=task_encoder)
    found = energon.get_loader(dataset, watchdog_timeout_seconds=0.5)
    return len(list(islice(found, 1)))


def check_the_old_argument_of_loaders(energon, folder):
    import warnings

    where = config(energon, 1)
    dataset = train(energon, path(folder), worker_config=where)
    other = energon.WorkerConfig(rank=1, world_size=2, num_workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = energon.get_loader(dataset, worker_config=where)
        count = len(flat(texts(found)))
        dataset = train(energon, path(folder), worker_config=where)
        return count, raised(energon.get_loader, dataset, worker_config=other) is not None


def check_default_worker_configs(energon, folder):
    made = energon.WorkerConfig.default_worker_config(3)
    none = energon.WorkerConfig.default_worker_config(num_workers=0)
    return (
        [made.rank, made.world_size, made.num_workers, made.data_parallel_group],
        [none.num_workers, made.seed_offset, made.worker_log_level, made.worker_debug_path],
        raised(energon.WorkerConfig, 0, 1, 0),
        raised(energon.WorkerConfig, rank=0),
    )


def check_configurations_of_loaders(energon, folder):
    found = loader(energon, train(energon, path(folder), workers=1))
    made = found.config()
    return isinstance(made, dict), json.dumps(made, default=str) != ""


def check_seeds_change_the_order(energon, folder):
    found = []
    for seed in (0, 0, 5):
        where = config(energon, seed_offset=seed)
        dataset = energon.get_train_dataset(
            path(folder),
            worker_config=where,
            batch_size=4,
            shuffle_buffer_size=10,
            max_samples_per_sequence=3,
            task_encoder=encoder(energon),
        )
        found.append(texts(loader(energon, dataset), 6))
    return found[0] == found[1], found[0] == found[2]


def builder(energon, build, **hooks):
    return encoder(energon, build_train_datasets=build, **hooks)


def check_a_builder_that_blends(energon, folder):
    def build(
        self,
        *,
        datasets,
        worker_config,
        batch_size,
        batch_drop_last=False,
        packing_buffer_size=None,
        virtual_epoch_length=0,
        shuffle_buffer_size=None,
        blend_mode=None,
        repeat=True,
    ):
        inner = [
            (
                energon.RepeatDataset(
                    each.dataset.build(),
                    worker_config=worker_config,
                ),
                each.weight or 1,
            )
            for each in datasets
        ]
        dataset = energon.BlendDataset(*inner, worker_config=worker_config)
        dataset = energon.ShuffleBufferDataset(dataset, size=5, worker_config=worker_config)
        dataset = energon.MapDataset(
            dataset, lambda sample: sample["txt"], worker_config=worker_config
        )
        dataset = energon.BatchDataset(dataset, 4, batcher=sorted, worker_config=worker_config)
        return energon.EpochizeDataset(dataset, length=5, worker_config=worker_config)

    refs = [{"path": "texts", "weight": 2}, {"path": "more", "weight": 1}]
    mixed = document(folder, "built", __class__="MetadatasetV2", splits={"train": {"blend": refs}})
    dataset = train(energon, mixed, epoch=False, task_encoder=builder(energon, build, cookers=[]))
    found = energon.get_loader(dataset)
    epochs = [list(found) for _ in range(2)]
    return [[len(each) for each in epoch] for epoch in epochs], len(found)


def check_a_builder_that_adds_a_step(energon, folder):
    def build(self, *, batch_size, **settings):
        dataset = energon.DefaultTaskEncoder.build_train_datasets(self, batch_size=None, **settings)
        dataset = energon.FilterDataset(
            dataset,
            filter_fn=lambda sample: int(sample.__key__) % 2 == 0,
            worker_config=settings["worker_config"],
        )
        return energon.BatchDataset(
            dataset,
            batch_size,
            batcher=lambda samples: [sample.text for sample in samples],
            batcher_stateless=True,
            worker_config=settings["worker_config"],
        )

    dataset = train(energon, path(folder), batch_size=4, task_encoder=builder(energon, build))
    found = list(energon.get_loader(dataset))
    return sorted(flat(found)), sorted(len(each) for each in found)


def check_builders_of_parts(energon, folder):
    def build_encode_sample(self, dataset, *, worker_config):
        return energon.MapDataset(
            dataset,
            lambda sample: energon.TextSample.derive_from(sample, text=sample.text.upper()),
            worker_config=worker_config,
            stateless_map_fn=True,
        )

    def build_batch(self, dataset, *, worker_config, batch_size, **settings):
        return energon.BatchDataset(
            dataset,
            batch_size,
            batcher=lambda samples: sorted(sample.text for sample in samples),
            worker_config=worker_config,
        )

    hooks = {"build_encode_sample": build_encode_sample, "build_batch": build_batch}
    dataset = val(energon, path(folder), batch_size=4, task_encoder=encoder(energon, **hooks))
    return list(energon.get_loader(dataset))


def check_a_builder_for_validation(energon, folder):
    def build(self, *, datasets, worker_config, batch_size, **settings):
        inner = [each.dataset.build() for each in datasets]
        dataset = energon.ConcatDataset(*inner, worker_config=worker_config)
        dataset = energon.MapDataset(
            dataset, lambda sample: sample["txt"], worker_config=worker_config
        )
        dataset = energon.LimitDataset(
            dataset, length=4, reset_after_epoch=True, worker_config=worker_config
        )
        return energon.LogSampleDataset(dataset, mode="val", worker_config=worker_config)

    hooks = {"build_val_datasets": build, "cookers": []}
    dataset = val(energon, path(folder), batch_size=4, task_encoder=encoder(energon, **hooks))
    found = energon.get_loader(dataset)
    return list(found), list(found)


def check_mixed_batches(energon, folder):
    where = config(energon)

    def texts_of(name):
        inner = val(energon, Path(folder) / name, batch_size=None)
        return energon.MapDataset(inner, lambda s: s.text, worker_config=where)

    dataset = energon.MixBatchDataset(
        (texts_of("texts"), 1),
        (texts_of("more"), 1),
        batch_size=4,
        batch_mix_fn=list,
        worker_config=where,
    )
    found = list(energon.get_loader(dataset))
    return sorted(str(each) for each in flat(found))[:12] != [], sum(len(each) for each in found)


def check_more_wrappers(energon, folder):
    where = config(energon)

    def inner(batch=None):
        dataset = val(energon, path(folder), batch_size=None)
        return energon.MapDataset(dataset, lambda s: s.text, worker_config=where)

    watched = import_module("megatron.energon.wrappers.watchdog_dataset")

    def yielding(text):
        yield text
        yield text[::-1]

    made = {
        "yields": energon.MapDataset(inner(), yielding, worker_config=where),
        "groups": energon.GroupBatchDataset(
            inner(),
            fixed_batch_size=2,
            sample_group_key=lambda text: (int(text[6:]) % 2, None),
            batcher=list,
            drop_last=False,
            worker_config=where,
        ),
        "packs": energon.PackingDataset(
            inner(),
            buffer_size=4,
            pre_packer=lambda samples: [samples[:3], samples[3:]],
            final_packer=lambda samples: "+".join(samples),
            final_packer_stateless=True,
            worker_config=where,
        ),
        "shuffled": energon.ShuffleBufferDataset(inner(), size=3, worker_config=where),
        "dropped": energon.BatchDataset(
            inner(), 4, batcher=list, drop_last=True, worker_config=where
        ),
        "half": energon.RepeatDataset(inner(), repeats=1.5, worker_config=where),
        "gc": energon.GcDataset(inner(), worker_config=where, every_n_iter=2),
        "watched": watched.WatchdogDataset(inner(), worker_config=where, timeout_seconds=60),
        "logged": energon.LogSampleDataset(inner(), mode="train", worker_config=where),
        "blend": energon.BlendDataset((inner(), 1), (inner(), 1), worker_config=where),
    }
    found = {name: list(energon.get_loader(dataset)) for name, dataset in made.items()}
    found["shuffled"].sort()
    found["blend"].sort()
    lengths = {
        name: len(made[name]) for name in ("groups", "dropped", "shuffled", "blend", "gc", "half")
    }
    return found, lengths


def check_errors_in_wrappers(energon, folder):
    seen = []

    def handler(exception, sample, sources):
        seen.append([type(exception).__name__, sample.__key__])

    where = config(energon, global_error_handler=handler)
    inner = energon.get_val_dataset(
        path(folder), worker_config=where, batch_size=None, task_encoder=encoder(energon)
    )

    def fail(sample):
        if sample.__key__ == "025":
            raise ValueError("x")
        if sample.__key__ == "026":
            raise energon.SkipSample
        return sample.text

    dataset = energon.MapDataset(inner, fail, worker_config=where)
    return list(energon.get_loader(dataset)), seen


def check_datasets_without_a_loader(energon, folder):
    dataset = val(energon, path(folder))
    return (
        isinstance(dataset, energon.SavableDataset),
        dataset.can_restore_sample(),
        isinstance(dataset.config(), dict),
        len(dataset),
        dataset.worker_has_samples(),
        dataset.len_worker(0),
        dataset.len_rank(),
    )


def check_redistributed_states(energon, folder):
    torch = import_module("torch")
    out = Path(folder) / "redist"
    source = Path(folder) / "checkpoints"
    source.mkdir()
    out.mkdir()
    first = ranks(energon, folder, batch_size=2, epoch=False)
    iterators = [iter(each) for each in first]
    for each in iterators:
        texts(each, 2)
    for rank, each in enumerate(first):
        torch.save(each.save_state_rank(), source / f"rank-{rank:03}.pt")
    files = sorted(source.glob("*.pt"))
    code, _ = command("checkpoint", "redist", *files, out, "--new-world-size", "1")
    written = sorted(each.name for each in out.iterdir()) if out.exists() else []
    where = energon.WorkerConfig(rank=0, world_size=1, num_workers=2)
    found = loader(
        energon, train(energon, path(folder), worker_config=where, batch_size=2, epoch=False)
    )
    found.restore_state_rank(torch.load(out / written[0], weights_only=False))
    expected = [texts(each, 2) for each in iterators]
    return code, written, sorted(flat(texts(found, 4))) == sorted(flat(flat(expected)))


def check_info_on_states(energon, folder):
    torch = import_module("torch")
    source = Path(folder) / "states-of-info"
    source.mkdir()
    for rank, each in enumerate(ranks(energon, folder, batch_size=2, epoch=False)):
        texts(each, 1)
        torch.save(each.save_state_rank(), source / f"rank-{rank:03}.pt")
    code, _ = command("checkpoint", "info", *sorted(source.glob("*.pt")))
    return code


def check_what_commands_say_of_a_dataset(energon, folder):
    code, printed = command("info", Path(folder) / "captions")
    lines = " ".join(printed.split())
    return code, "30" in lines, "CaptioningSample" in lines, "val" in lines


def check_cookers_with_all_they_ask_for(energon, folder):
    refs = {"path": "texts", "aux": {"media": "filesystem://media"}}
    mixed = document(folder, "all-of-it", __class__="MetadatasetV2", splits={"val": refs})
    pool = energon.FileStoreCachePool(parent_cache_dir=Path(folder) / "all-cache")

    @energon.stateless
    @energon.cooker(need_primary=True, need_cache=True)
    def cook(sample, primary, cache, media):
        found = [
            cache.get(media, f"{sample['__key__']}.txt", sample),
            cache.get_lazy(media, f"{sample['__key__']}.txt"),
            cache.to_cache({"n": sample["json"]["n"]}, sample["__key__"]),
            primary.get(".json", sample),
        ]
        made = cooked(energon, sample)
        made.text = found
        return made

    @energon.stateless
    def preencode_sample(self, sample):
        return sample

    @energon.stateless
    def postencode_sample(self, sample):
        sample.text = [
            sample.text[0],
            sample.text[1].get(sample),
            sample.text[2].get(),
            sample.text[3],
        ]
        return sample

    def select_samples_to_pack(self, samples):
        return [[each] for each in samples]

    @energon.stateless
    def pack_selected_samples(self, samples):
        return samples[0]

    hooks = {
        "cookers": [energon.Cooker(cook)],
        "preencode_sample": preencode_sample,
        "postencode_sample": postencode_sample,
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": pack_selected_samples,
    }
    found = []
    for workers in (0, 1):
        dataset = val(
            energon,
            mixed,
            batch_size=None,
            packing_buffer_size=3,
            workers=workers,
            task_encoder=encoder(energon, **hooks),
        )
        samples = list(loader(energon, dataset, cache_pool=pool))
        found.append([[s.text, len(s.__sources__)] for s in samples])
    return found


def check_cookers_without_the_pool_they_ask_for(energon, folder):
    @energon.stateless
    @energon.cooker(need_cache=True)
    def cook(sample, cache):
        return energon.TextSample(**energon.basic_sample_keys(sample), text=type(cache).__name__)

    task_encoder = encoder(energon, cookers=[energon.Cooker(cook)])
    dataset = val(energon, path(folder), batch_size=None, task_encoder=task_encoder)
    pool = energon.NoCachePool()
    return sorted({sample.text for sample in loader(energon, dataset, cache_pool=pool)})


def check_sources_are_added(energon, folder):
    source = energon.SourceInfo(dataset_path="own", index=3, shard_name=None, file_names=("a",))
    made = []
    info = import_module("megatron.energon.source_info")

    @energon.stateless
    def cook(sample):
        keys = energon.basic_sample_keys(sample, additional_source_info=[source])
        return energon.TextSample(**keys, text="x")

    task_encoder = encoder(energon, cookers=[energon.Cooker(cook)])
    for sample in loader(
        energon, val(energon, path(folder), batch_size=None, task_encoder=task_encoder)
    ):
        info.add_source_info(sample, source)
        made.append([len(sample.__sources__), len(info.get_source_info(sample))])
    return made


def check_stores_of_files(energon, folder):
    epath = import_module("megatron.energon.epathlib").EPath
    media = energon.SystemFileStore(epath(Path(folder) / "media"))
    anywhere = energon.SystemFileStore()
    data, source = media["002.txt"]
    return (
        data,
        list(source.file_names),
        source.index,
        anywhere.get(str(Path(folder) / "media" / "003.txt")),
        raised(media.get, "nothing") is not None,
        Path(str(media.get_path())).name,
    )


def check_media_metadata_by_name(energon, folder):
    folder = Path(folder) / "images-with-metadata"
    folder.mkdir()
    import_module("PIL.Image").new("RGB", (5, 3)).save(folder / "a.png")
    extractor = import_module("megatron.energon.media.extractor")
    prepare = import_module("megatron.energon.media.filesystem_prepare")
    epath = import_module("megatron.energon.epathlib").EPath
    wanted = extractor.MediaFilterConfig(strategy=extractor.MediaFilterStrategy.EXTENSION)
    count = prepare.prepare_filesystem_dataset(epath(folder), wanted, progress=False)
    found = energon.SystemFileStore(epath(folder)).get_media_metadata("a.png")
    return count, found.width, found.height, found.format, found.mode
