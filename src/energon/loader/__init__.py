"""Batches from lanes that are hosted in-line, in threads or in processes.

A loader asks each worker for the next batch of the lane whose turn it is, so the order never
depends on which worker is faster. Every batch carries the state of its lane after it, unless that
only counts one batch more; the last state delivered for each lane, with the batches counted since,
is the checkpoint. Only `pipeline.Pipeline` knows what is hosted.
"""

from energon.loader.lane_worker import Pipeline
from energon.loader.loader import BasicDataLoader
from energon.loader.memory import to_device
from energon.loader.options import LoaderOptions
from energon.loader.savable import SavableDataLoader, get_loader, get_savable_loader

__all__ = [
    "BasicDataLoader",
    "LoaderOptions",
    "Pipeline",
    "SavableDataLoader",
    "get_loader",
    "get_savable_loader",
    "to_device",
]
