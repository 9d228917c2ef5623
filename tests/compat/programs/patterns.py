"""Patterns of programs that pin webdataset 0.2.86 and 0.2.111, in-line, with workers, on ranks.

Recorded with these two releases and the newest one. Results are sorted, or facts about the order.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
from collections import Counter
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import torch.distributed as dist
from common import keys, module, shards, write_tar
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FORK = get_context("fork")


class SharedEpoch:
    """An epoch that the training loop sets and workers see."""

    def __init__(self):
        self.value = FORK.Value("i", 0)

    def set(self, epoch):
        self.value.value = epoch

    def get(self):
        return self.value.value


def ungrouped_ends(data, handler=None):
    """A grouping function of a program: it reads `fname` and `data` of every file."""
    current = None
    for file in data:
        name, content = file["fname"], file["data"]
        stem, _, field = Path(name).name.partition(".")
        key = str(Path(name).parent / stem)
        if current is None or key != current["__key__"] or field in current:
            if current is not None:
                yield current
            current = {"__key__": key, "__url__": file["__url__"]}
        current[field.lower()] = content
    if current is not None:
        yield current


def expanded(wds, src):
    iterators = module(wds, "tariterators")
    streams = iterators.url_opener(src, handler=wds.warn_and_continue)
    return iterators.tar_file_expander(streams, wds.warn_and_continue)


class EpochShuffledShards(IterableDataset):
    """Shards in an order drawn from the shared epoch, alike in all processes."""

    def __init__(self, urls, epoch):
        self.urls, self.epoch = urls, epoch

    def __iter__(self):
        urls = list(self.urls)
        random.Random(self.epoch.get()).shuffle(urls)
        yield from ({"url": url} for url in urls)


class DrawnShards(IterableDataset):
    """Shards drawn with replacement, by the seed that torch gives the worker."""

    def __init__(self, urls, count):
        self.urls, self.count = urls, count

    def __iter__(self):
        info = get_worker_info()
        draws = random.Random(0 if info is None else info.seed)
        yield from ({"url": draws.choice(self.urls)} for _ in range(self.count))


def split_by_group(src, group=None):
    """A splitter of a program that asks the process group, in the worker."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for number, item in enumerate(src):
        if number % size == rank:
            yield item


def split_by_info(src):
    info = get_worker_info()
    for number, item in enumerate(src):
        if info is None or number % info.num_workers == info.id:
            yield item


def with_loaders(wds, make):
    """What a pipeline yields in-line, and with both loaders and 2 workers, sorted."""
    found = [sorted(keys(make()))]
    for loader in (DataLoader, wds.WebLoader):
        found.append(sorted(keys(loader(make(), batch_size=None, num_workers=2))))
    return found


def on_ranks(program, wds, folder):
    """Run a program of this module on 2 ranks with gloo; return the results in order of rank."""
    address = f"file://{folder}/ranks-{program.__name__}"
    command = [sys.executable, __file__, wds.__name__, program.__name__, str(folder), address]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(2)]
    return [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]


def run_rank(package, program, folder, address, rank):
    dist.init_process_group("gloo", address, rank=int(rank), world_size=2)
    results = globals()[program](import_module(package), folder)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(results))


def urls_of(folder):
    return [f"{folder}/shard-{number:06}.tar" for number in range(4)]


def check_a_shared_epoch(wds, folder):
    """Workers see the epoch that the training loop sets, though they were started before."""
    epoch = SharedEpoch()
    pipeline = wds.DataPipeline(
        EpochShuffledShards(urls_of(folder), epoch),
        split_by_info,
        wds.tarfile_to_samples(),
        wds.map(lambda sample: (epoch.get(), sample["__key__"])),
    )
    found = []
    for loader in (DataLoader, wds.WebLoader):
        for number in (3, 4):
            epoch.set(number)
            rows = list(loader(pipeline, batch_size=None, num_workers=2))
            found.append((sorted({seen for seen, _ in rows}), sorted(key for _, key in rows)))
    return found


def check_a_grouping_of_the_program(wds, folder):
    def make():
        return wds.DataPipeline(
            wds.SimpleShardList(urls_of(folder)),
            split_by_info,
            lambda src: ungrouped_ends(expanded(wds, src)),
            wds.to_tuple("__key__", "txt"),
            wds.map(lambda row: {"__key__": row[0], "txt": row[1]}),
        )

    return with_loaders(wds, make)


def check_files_without_a_marker(wds, folder):
    files = list(expanded(wds, [{"url": url} for url in urls_of(folder)]))
    return len(files), all("fname" in file for file in files)


def split_by_the_program(wds, folder):
    stages = split_by_group, split_by_info, wds.tarfile_to_samples()
    shards = wds.SimpleShardList(urls_of(folder))
    return with_loaders(wds, lambda: wds.DataPipeline(shards, *stages))


def split_by_the_library(wds, folder):
    stages = wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples()
    shards = wds.SimpleShardList(urls_of(folder))
    return with_loaders(wds, lambda: wds.DataPipeline(shards, *stages))


def check_splitters_that_ask_the_process_group(wds, folder):
    """Each rank and each of its workers reads its own shards."""
    return on_ranks(split_by_the_program, wds, folder)


def check_shards_split_by_the_library_on_ranks(wds, folder):
    return on_ranks(split_by_the_library, wds, folder)


def check_shards_drawn_by_the_seed_of_the_worker(wds, folder):
    """The workers of one loop draw differently, and so do two loops."""

    def drawn(loader):
        pipeline = wds.DataPipeline(
            DrawnShards([f"{number}" for number in range(1000)], 20),
            wds.map(lambda shard: (get_worker_info().id, shard["url"])),
        )
        rows = list(loader(pipeline, batch_size=None, num_workers=2))
        return tuple(tuple(url for worker, url in rows if worker == n) for n in range(2))

    found = []
    for loader in (DataLoader, wds.WebLoader):
        one, other = drawn(loader), drawn(loader)
        found.append((one[0] != one[1], one != other, [len(each) for each in one]))
    return found


class Nested(IterableDataset):
    """A dataset of the program that yields from a stream of its own."""

    def __init__(self, wds, urls):
        self.wds, self.urls = wds, urls

    def __iter__(self):
        inner = self.wds.DataPipeline(
            self.wds.SimpleShardList(self.urls), self.wds.tarfile_to_samples()
        )
        yield from inner


def check_a_nested_stream(wds, folder):
    nested = Nested(wds, urls_of(folder))
    rows = keys(DataLoader(nested, batch_size=None, num_workers=2))
    return keys(nested), sorted(Counter(rows).values())


def check_a_stream_within_a_stage(wds, folder):
    """Each sample is merged with the sample of the same number of another stream."""
    other = [f"{folder}/other-{number}.tar" for number in range(4)]
    for number, url in enumerate(other):
        write_tar(url, [(f"{n:04}.oth", b"%d" % n) for n in range(5 * number, 5 * number + 5)])

    def merged(samples):
        for sample in samples:
            number = Path(sample["__url__"]).stem[-1]
            inner = wds.DataPipeline(
                wds.SimpleShardList([f"{folder}/other-{number}.tar"]), wds.tarfile_to_samples()
            )
            match = {each["__key__"]: each["oth"] for each in inner}
            yield {**sample, "oth": match[sample["__key__"]]}

    def make():
        return wds.DataPipeline(
            wds.SimpleShardList(urls_of(folder)), split_by_info, wds.tarfile_to_samples(), merged
        )

    rows = list(DataLoader(make(), batch_size=None, num_workers=2))
    return with_loaders(wds, make), all(int(row["oth"]) == int(row["__key__"]) for row in rows)


def check_a_replaced_opener(wds, folder):
    """Addresses that only the program can open."""
    iterators = module(wds, "tariterators")
    original = iterators.url_opener

    def opener(data, handler=None, **options):
        for shard in data:
            path = f"{folder}/shard-{int(shard['url'].partition(':')[2]):06}.tar"
            yield {**shard, "stream": io.BytesIO(Path(path).read_bytes())}

    iterators.url_opener = opener
    try:

        def make():
            return wds.DataPipeline(
                wds.SimpleShardList([f"mine:{number}" for number in range(4)]),
                split_by_info,
                wds.tarfile_to_samples(),
            )

        return with_loaders(wds, make)
    finally:
        iterators.url_opener = original


def check_resampled_shards_with_an_epoch(wds, folder):
    dataset = wds.WebDataset(shards(folder), resampled=True).with_epoch(7)
    found = [len(keys(dataset)), len(keys(dataset))]
    for loader in (DataLoader, wds.WebLoader):
        opened = loader(dataset, batch_size=None, num_workers=2)
        found += [len(keys(opened)), len(keys(opened))]
    return found


def check_sources_mixed_by_weight(wds, folder):
    """The share of each source is near its weight."""
    small, large = urls_of(folder)[:2], urls_of(folder)[2:]
    mixed = wds.RandomMix(
        [
            wds.WebDataset(small, resampled=True),
            wds.WebDataset(large, resampled=True),
        ],
        probs=[0.8, 0.2],
    )
    dataset = wds.DataPipeline(mixed).with_epoch(500)
    share = sum(int(key) < 10 for key in keys(dataset)) / 500
    return 0.7 < share < 0.9


def check_batches_across_workers(wds, folder):
    """Batches of workers are taken apart, shuffled, and batched again."""
    dataset = wds.WebDataset(shards(folder), shardshuffle=False).to_tuple("__key__", "txt")
    loader = wds.WebLoader(dataset.batched(5), batch_size=None, num_workers=2)
    loader = loader.unbatched().shuffle(10).batched(4).with_epoch(5)
    batches = list(loader)
    rows = sorted(key for batch in batches for key in batch[0])
    return len(batches), sorted({len(batch[0]) for batch in batches}), rows


def check_a_decoder_of_bytes(wds, folder):
    """Decode the text only; the rest stays as it is stored."""
    dataset = wds.WebDataset(shards(folder), shardshuffle=False)
    dataset = dataset.map_dict(txt=lambda data: data.decode()).to_tuple("txt", "cls")
    return [list(row) for row in dataset][:3]


def check_a_damaged_shard_is_skipped(wds, folder):
    damaged = f"{folder}/damaged-pattern.tar"
    with tarfile.open(damaged, "w"):
        pass
    os.truncate(damaged, 0)
    with open(damaged, "wb") as file:
        file.write(b"no archive" * 100)
    dataset = wds.DataPipeline(
        wds.SimpleShardList([urls_of(folder)[0], damaged, urls_of(folder)[1]]),
        wds.tarfile_to_samples(handler=wds.warn_and_continue),
    )
    return keys(dataset)


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
