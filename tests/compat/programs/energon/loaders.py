"""Loaders, their states, and what runs beside them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from common import config, encoder, flat, loader, raised, texts, train, val


def path(folder):
    return Path(folder) / "texts"


def check_batches_go_on_after_a_restore(energon, folder):
    found = []
    for workers in (0, 2):
        first = loader(energon, train(energon, path(folder), epoch=False, workers=workers))
        iterator = iter(first)
        texts(iterator, 5)
        state = first.save_state_rank()
        expected = texts(iterator, 6)
        second = loader(energon, train(energon, path(folder), epoch=False, workers=workers))
        second.restore_state_rank(state)
        found.append(texts(second, 6) == expected)
    return found


def check_a_state_after_the_last_batch_of_validation(energon, folder):
    found = []
    for workers in (0, 2):
        first = loader(energon, val(energon, path(folder), workers=workers))
        first_pass = texts(first)
        state = first.save_state_rank()
        second = loader(energon, val(energon, path(folder), workers=workers))
        second.restore_state_rank(state)
        found.append([len(first_pass), texts(second) == first_pass, texts(second) == first_pass])
    return found


def check_a_state_after_the_last_batch_of_an_epoch(energon, folder):
    found = []
    for workers in (0, 2):
        first = loader(energon, train(energon, path(folder), workers=workers))
        texts(first)
        state = first.save_state_rank()
        second = loader(energon, train(energon, path(folder), workers=workers))
        second.restore_state_rank(state)
        found.append(sorted(flat(texts(second))))
    return found


def check_virtual_epochs(energon, folder):
    dataset = train(energon, path(folder), epoch=False, virtual_epoch_length=3)
    found = loader(energon, dataset)
    lengths = [len(texts(found)), len(texts(found)), len(found)]
    state = found.save_state_rank()
    second = loader(energon, train(energon, path(folder), epoch=False, virtual_epoch_length=3))
    second.restore_state_rank(state)
    return [*lengths, len(texts(second))]


def check_smaller_batches_after_a_restore(energon, folder):
    first = loader(energon, train(energon, path(folder), epoch=False, batch_size=6, workers=1))
    iterator = iter(first)
    texts(iterator, 2)
    state = first.save_state_rank()
    second = loader(energon, train(energon, path(folder), epoch=False, batch_size=3, workers=1))
    second.restore_state_rank(state)
    found = [len(batch) for batch in texts(second, 8)]
    larger = loader(energon, train(energon, path(folder), epoch=False, batch_size=12, workers=1))
    return found, raised(larger.restore_state_rank, state)


def check_steps_of_smaller_batches_after_a_restore(energon, folder):
    """Two ranks, of which each takes 2 batches for a step, and later 4 smaller ones."""

    def open_ranks(size):
        configs = [
            energon.WorkerConfig(rank=rank, world_size=2, num_workers=2) for rank in range(2)
        ]
        return [
            loader(
                energon,
                train(energon, path(folder), epoch=False, batch_size=size, worker_config=each),
            )
            for each in configs
        ]

    def steps(loaders, batches_of_step):
        ranks = [texts(each, 3 * batches_of_step) for each in loaders]
        return [
            sorted(flat(flat(rank[at : at + batches_of_step] for rank in ranks)))
            for at in range(0, 3 * batches_of_step, batches_of_step)
        ]

    first = open_ranks(4)
    iterators = [iter(each) for each in first]
    for each in iterators:
        texts(each, 2)
    states = [each.save_state_rank() for each in first]
    expected = steps(iterators, 2)
    found = []
    for size in (2, 1):
        smaller = open_ranks(size)
        for each, state in zip(smaller, states, strict=True):
            each.restore_state_rank(state)
        found.append(steps(smaller, 8 // size) == expected)
    return found


def check_restoring_nothing(energon, folder):
    found = loader(energon, train(energon, path(folder), epoch=False))
    found.restore_state_rank(None)
    texts(found, 1)
    found.restore_state_rank(None)
    return len(texts(found, 2))


def check_loaders_of_torch(energon, folder):
    torch_loader = import_module("torch.utils.data").DataLoader
    dataset = train(energon, path(folder), epoch=False, workers=2)
    savable = energon.SavableDataLoader(
        dataset,
        checkpoint_every_sec=60,
        checkpoint_every_min_n_samples=10,
        n_checkpoints=5,
        gc_collect_every_n_steps=5,
        gc_freeze_at_start=True,
        prefetch_factor=2,
        cache_pool=None,
        watchdog_timeout_seconds=60,
        watchdog_initial_timeout_seconds=None,
        fail_on_timeout=False,
    )
    module = import_module("megatron.energon.savable_loader")
    basic = module.BasicDataLoader(train(energon, path(folder), epoch=False))
    state = savable.save_state_rank()
    texts(savable, 3)
    later = savable.save_state_rank()
    return (
        [isinstance(each, torch_loader) for each in (savable, basic)],
        [savable.num_workers, savable.batch_size, savable.prefetch_factor],
        [savable.persistent_workers, isinstance(savable.id, int)],
        basic.num_workers,
        isinstance(state, module.SavableDataLoaderState | None),
        isinstance(later, module.SavableDataLoaderState),
    )


def check_a_sample_is_made_again(energon, folder):
    found = []
    for workers in (0, 2):
        dataset = train(energon, path(folder), epoch=False, batch_size=None, workers=workers)
        first = loader(energon, dataset)
        iterator = iter(first)
        samples = [next(iterator) for _ in range(7)]
        again = loader(
            energon, train(energon, path(folder), epoch=False, batch_size=None, workers=workers)
        )
        key = samples[5].__restore_key__
        made = again.restore_sample(restore_key=key)
        found.append([again.can_restore_sample(), made.text == samples[5].text])
    return found


def check_a_sample_that_fails_again(energon, folder):
    calls = []

    def encode_sample(self, sample):
        if calls:
            raise ValueError("again")
        return sample

    def get():
        hooks = {"encode_sample": energon.stateless(encode_sample)}
        dataset = train(
            energon,
            path(folder),
            epoch=False,
            batch_size=None,
            task_encoder=encoder(energon, **hooks),
        )
        return loader(energon, dataset)

    key = next(iter(get())).__restore_key__
    calls.append(1)
    return raised(get().restore_sample, key) is not None


def check_handlers_of_errors(energon, folder):
    seen = []

    def handler(e, sample, sources=None):
        seen.append([type(e).__name__, type(sample).__name__])

    def encode_sample(self, sample):
        if sample.text.endswith("5"):
            raise ValueError(sample.text)
        return sample

    settings = config(energon, global_error_handler=handler)
    task_encoder = encoder(energon, encode_sample=energon.stateless(encode_sample))
    dataset = train(
        energon, path(folder), worker_config=settings, task_encoder=task_encoder, batch_size=None
    )
    found = [sample.text for sample in loader(energon, dataset)]
    return sorted(found), sorted(seen)


def check_logs_of_workers(energon, folder):
    logs = Path(folder) / "logs" / "of" / "workers"
    settings = config(
        energon, worker_debug_path=str(logs / "{worker_id}.jsonl"), worker_log_level=1
    )
    dataset = train(energon, path(folder), worker_config=settings)
    count = len(texts(loader(energon, dataset)))
    kinds = set()
    for file in logs.iterdir():
        for line in file.read_text().splitlines():
            kinds.add(json.loads(line)["t"].split(".")[0])
    return count, len(kinds) > 0


def check_worker_configs(energon, folder):
    first, second = config(energon, 2), config(energon, 2, seed_offset=7)
    first.seed_offset = 3
    other = energon.WorkerConfig(rank=1, world_size=2, num_workers=2)
    return (
        first == second,
        first == other,
        {"data_parallel_group", "num_workers", "rank", "world_size"} - first.config().keys()
        == set(),
        first.worker_seed(0) == config(energon, 2, seed_offset=3).worker_seed(0),
        first.worker_seed(0) == first.worker_seed(1),
        other.global_worker_id(1),
        energon.WorkerConfig.active_worker_config is None,
        first.global_error_handler.__name__,
        first.restore_error_handler.__name__,
        first.should_log(1),
        first.global_rank(),
    )


def check_hooks_ask_where_they_run(energon, folder):
    def encode_sample(self, sample):
        active = energon.WorkerConfig.active_worker_config
        seed = active.worker_seed()
        place = [active.rank_worker_id(), active.global_worker_id(), active.num_workers]
        sample.text = [*place, seed == active.worker_seed(place[0])]
        return sample

    hooks = {"encode_sample": energon.stateless(encode_sample)}
    found = []
    for workers in (1, 2):
        dataset = train(
            energon, path(folder), workers=workers, task_encoder=encoder(energon, **hooks)
        )
        found.append(sorted({json.dumps(each) for each in flat(texts(loader(energon, dataset)))}))
    return found
