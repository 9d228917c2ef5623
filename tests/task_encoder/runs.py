"""Pipelines over crude datasets of texts: sample n has the key `s<n>` and the text `text <n>`."""

from __future__ import annotations

from itertools import chain, islice

from energon import WorkerConfig, get_train_dataset, get_val_dataset
from energon.stages.lane import Lane
from energon.testing import check_resume


def config(**settings):
    return WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **settings})


def train(path, encoder=None, *, batch_size=4, worker_config=None, **settings):
    return get_train_dataset(
        path,
        worker_config=worker_config or config(),
        batch_size=batch_size,
        task_encoder=encoder,
        **settings,
    )


def val(path, encoder=None, *, batch_size=4, worker_config=None, **settings):
    return get_val_dataset(
        path,
        worker_config=worker_config or config(),
        batch_size=batch_size,
        task_encoder=encoder,
        **settings,
    )


def one_lane(dataset, count=None):
    """All that the only lane of a run yields, and its statistics."""
    lane = Lane(0, 1)
    return list(islice(dataset.open_lane(lane), count)), lane.counts


def resumable(dataset, **settings):
    """Check that the pipeline resumes anywhere; return what its first lane yields."""
    return check_resume(dataset.stage, **settings)


def flat(batches):
    """The items of all batches."""
    return list(chain.from_iterable(batches))
