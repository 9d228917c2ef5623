"""What one node of a job does; `test_nodes` runs several. Prints JSON."""

from __future__ import annotations

import json
import pickle
import sys
from itertools import islice
from pathlib import Path

import energon.webdataset as wds


def number(sample):
    return int(sample["__key__"])


def epochs(urls):
    """Loops of torch's DataLoader over the usual pipelines."""
    from torch.utils.data import DataLoader

    def load(dataset, count, *, persistent=False):
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=2,
            persistent_workers=persistent,
            multiprocessing_context="fork",
        )
        return [[int(n) for n in loader] for _ in range(count)]

    shuffled = wds.WebDataset(urls, shardshuffle=True).map(number)
    copied = pickle.loads(pickle.dumps(shuffled))
    return {
        "whole": load(shuffled, 2),
        "persistent": load(copied, 2, persistent=True),
        "resampled": load(wds.WebDataset(urls, resampled=True).map(number).with_epoch(5), 3),
        "counted": load(shuffled.with_epoch(21, scope="job"), 3),
    }


def run(urls, first, workers, states):
    """A `WebLoader`, left after `first` samples, or from `states` to its end and once more."""
    dataset = wds.WebDataset(urls, shardshuffle=True).map(number).shuffle(5)
    with wds.WebLoader(dataset, batch_size=None, num_workers=workers) as loader:
        if states:
            loader.load_state_dict(states)
        loop = iter(loader)
        given = list(islice(loop, first))
        state = loader.state_dict()
        return {"first": given, "state": state, "rest": list(loop), "next": list(loader)}


if __name__ == "__main__":
    task, arguments = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps({"epochs": epochs, "run": run}[task](**arguments)))
