"""The samples that a process of a job with accelerate reads, as JSON; `test_places` runs two."""

from __future__ import annotations

import json
import os
import sys

import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader

import energon.webdataset as wds


def number(sample):
    return int(sample["__key__"])


def numbers(loader):
    return [int(number) for batch in loader for number in batch]


def main(urls):
    read = {}
    for name, dispatches, workers, method in [
        ("forked", None, 2, "fork"),
        ("started", None, 1, "forkserver"),
        ("sharded", False, 0, None),
    ]:
        config = DataLoaderConfiguration(dispatch_batches=dispatches)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        dataset = wds.WebDataset(urls, shardshuffle=True).map(number).shuffle(9)
        loader = DataLoader(dataset, 5, num_workers=workers, multiprocessing_context=method)
        loader = accelerator.prepare(loader)
        read[name] = [numbers(loader) for _ in range(2)]
    loader = wds.WebLoader(wds.WebDataset(urls).map(number), 5)
    assert accelerator.prepare(loader) is loader
    read["stream"] = [numbers(loader)]
    read["skipped"] = [numbers(skip_first_batches(loader, 1))]
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, read)
    if accelerator.is_main_process:
        print(json.dumps(ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.dup2(1, 2)  # what is logged, too
    main(sys.argv[1:])
