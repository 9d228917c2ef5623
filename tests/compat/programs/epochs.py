"""Count epochs in workers: each worker counts for itself, a loader for all of its workers."""

from __future__ import annotations

from collections import Counter

from common import plain, shards

WORKERS = (0, 1, 2)


def number(sample):
    return int(sample["__key__"])


def numbers(wds, folder, **kw):
    return plain(wds, folder, **kw).map(number)


def loader(wds, dataset, workers, **kw):
    kw.setdefault("batch_size", None)
    return wds.WebLoader(dataset, num_workers=workers, **kw)


def loops(loader, count=2):
    """What several loops yield, tensors as lists, each loop in one string: it is much."""
    found = [list(loader) for _ in range(count)]
    plain = [[x.tolist() if hasattr(x, "tolist") else x for x in loop] for loop in found]
    return [" ".join(map(str, loop)) for loop in plain]


def lengths(loader, count=2):
    return [len(list(loader)) for _ in range(count)]


def check_epochs_of_a_dataset_in_workers(wds, folder):
    return [loops(loader(wds, numbers(wds, folder).with_epoch(7), n)) for n in WORKERS]


def check_epochs_of_a_dataset_in_persistent_workers(wds, folder):
    dataset = numbers(wds, folder).with_epoch(7)
    return loops(loader(wds, dataset, 2, persistent_workers=True))


def check_epochs_of_a_loader(wds, folder):
    return [loops(loader(wds, numbers(wds, folder), n).with_epoch(7)) for n in WORKERS]


def check_epochs_longer_than_the_data(wds, folder):
    return [
        [loops(loader(wds, numbers(wds, folder).with_epoch(25), n)) for n in WORKERS],
        [loops(loader(wds, numbers(wds, folder), n).with_epoch(25)) for n in WORKERS],
    ]


def check_epochs_of_a_shuffled_dataset_in_workers(wds, folder):
    found = []
    for n in WORKERS:
        dataset = wds.WebDataset(shards(folder), shardshuffle=10).map(number).shuffle(5)
        found.append(lengths(loader(wds, dataset.with_epoch(7), n)))
    return found


def check_epochs_of_a_shuffled_loader(wds, folder):
    found = []
    for n in WORKERS:
        dataset = wds.WebDataset(shards(folder), shardshuffle=10).to_tuple("__key__").batched(4)
        batches = loader(wds, dataset, n).unbatched().shuffle(10).batched(3).with_epoch(3)
        found.append([[len(keys) for (keys,) in batches] for _ in range(2)])
    return found


def check_epochs_of_resampled_shards_in_workers(wds, folder):
    found = []
    for n in WORKERS:
        dataset = wds.WebDataset(shards(folder), resampled=True).shuffle(5).to_tuple("__key__")
        found.append(lengths(loader(wds, dataset.batched(2).with_epoch(9), n)))
    return found


def check_epochs_batched_by_the_loader(wds, folder):
    found = []
    for drop_last in (False, True):
        for n in WORKERS:
            dataset = numbers(wds, folder).with_epoch(7)
            found.append(loops(loader(wds, dataset, n, batch_size=3, drop_last=drop_last)))
    return found


def check_shuffled_epochs_batched_by_the_loader(wds, folder):
    found = []
    for drop_last in (False, True):
        for n in WORKERS:
            dataset = numbers(wds, folder).shuffle(5).with_epoch(7)
            batches = loader(wds, dataset, n, batch_size=3, drop_last=drop_last)
            found.append([[len(batch) for batch in batches] for _ in range(2)])
    return found


def check_epochs_batched_in_workers(wds, folder):
    found = []
    for partial in (False, True):
        for n in WORKERS:
            dataset = plain(wds, folder).to_tuple("__key__").batched(4, partial=partial)
            found.append(loops(loader(wds, dataset, n)))
            found.append(loops(loader(wds, dataset.with_epoch(3), n)))
    return found


def check_repetitions_in_workers(wds, folder):
    found = []
    for repeated in [(2,), (2, 7), (-1, 7), (3, 100)]:
        for n in WORKERS:
            found.append(loops(loader(wds, numbers(wds, folder).repeat(*repeated), n)))
    return found


def check_repetitions_of_a_loader(wds, folder):
    found = []
    for repeated in [(2,), (2, 27)]:
        for n in WORKERS:
            found.append(loops(loader(wds, numbers(wds, folder), n).repeat(*repeated)))
    return found


def check_slices_in_workers(wds, folder):
    dataset = numbers(wds, folder)
    found = [loops(loader(wds, dataset.slice(3), n)) for n in WORKERS]
    return found + [loops(loader(wds, dataset, n).slice(1, 9, 3)) for n in WORKERS]


def check_lengths_in_workers(wds, folder):
    found = []
    for n in WORKERS:
        dataset = numbers(wds, folder).with_length(4, silent=True)
        inner = loader(wds, dataset, n)
        outer = inner.with_length(9, silent=True)
        found.append([len(dataset), len(outer), lengths(outer)])
    return found


def check_mixtures_in_workers(wds, folder):
    found = []
    for longest in (False, True):
        for n in WORKERS:
            one, two = numbers(wds, folder).slice(2), numbers(wds, folder).map(lambda n: 100 + n)
            robin = wds.RoundRobin([one, two], longest=longest)
            found.append(loops(loader(wds, robin, n)))
            mix = wds.DataPipeline(wds.RandomMix([one, two], longest=longest)).with_epoch(6)
            found.append(lengths(loader(wds, mix, n)))
    return found


def check_drained_mixtures_in_workers(wds, folder):
    found = []
    for n in WORKERS:
        one, two = numbers(wds, folder), numbers(wds, folder).map(lambda n: 100 + n)
        mix = wds.DataPipeline(wds.RandomMix([one, two], [1, 3], longest=True))
        found.append([sorted(loop.split()) for loop in loops(loader(wds, mix, n))])
    return found


def check_shards_of_workers(wds, folder):
    """Which worker reads which shard, and which samples there are in one pass."""
    found = []
    for n in WORKERS:
        dataset = plain(wds, folder).map(lambda sample: (sample["__url__"], int(sample["__key__"])))
        found.append([f"{url} {key}" for url, key in loader(wds, dataset, n)])
    return found


def check_shuffled_shards_of_workers(wds, folder):
    found = []
    for n in WORKERS:
        dataset = wds.WebDataset(shards(folder), shardshuffle=10).map(number)
        found.append([sorted(loop.split()) for loop in loops(loader(wds, dataset, n))])
    return found


def check_no_splitting_by_worker(wds, folder):
    dataset = numbers(wds, folder, workersplitter=None)
    return [str(sorted(Counter(map(int, loader(wds, dataset, n))).items())) for n in WORKERS]


def check_nested_epochs_in_workers(wds, folder):
    inner = numbers(wds, folder).with_epoch(3)
    return [
        loops(loader(wds, wds.DataPipeline(inner, wds.map(lambda n: -n)).with_epoch(5), n))
        for n in WORKERS
    ]


def check_epochs_set_again(wds, folder):
    dataset = numbers(wds, folder).with_epoch(4)
    first = loops(dataset, 1)
    dataset.with_epoch(6)
    second = loops(dataset, 1)
    dataset.repeat(2)
    return [first, second, loops(dataset, 1), [dataset.nsamples, dataset.repetitions]]
