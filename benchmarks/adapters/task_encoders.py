"""The programs that have a task encoder: the same text for energon and for Megatron-Energon.

The adapter of a library says in `BENCHMARKED_ENERGON` which package these are imported from.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from adapters.programs import PACK, encode, pass_on
from adapters.thumbnail import with_thumbnail

energon = import_module(os.environ["BENCHMARKED_ENERGON"])
stateless = energon.stateless


@stateless
def cook(sample: Any) -> Any:
    """Pass a sample on."""
    return pass_on(sample)


@stateless
def cook_text(sample: Any) -> Any:
    """Make a typed sample of a crude one."""
    return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["txt"])


class Plain(energon.DefaultTaskEncoder):
    """Makes lists of undecoded samples."""

    decoder = None

    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


class Cooking(Plain):
    cookers = [energon.Cooker(cook)]  # noqa: RUF012 - as the documentation of both has it


class Encoding(Cooking):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return encode(sample)


class Thumbnails(Cooking):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return with_thumbnail(sample)


class Packing(Plain):
    cookers = [energon.Cooker(cook_text)]  # noqa: RUF012

    @stateless
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + PACK] for at in range(0, len(samples), PACK)]

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        texts = [sample.text for sample in samples]
        return energon.TextSample.derive_from(samples[0], text=texts)


ENCODERS = {
    "plain": Plain,
    "cooker": Cooking,
    "encode": Encoding,
    "thumbnail": Thumbnails,
    "packed": Packing,
    "typed": energon.DefaultTaskEncoder,
}


def loader(path: str, num_workers: int, batch_size: int, shuffle: int, program: str) -> Any:
    """Return the loader of a program."""
    settings: dict[str, Any] = {"batch_size": batch_size}
    if program == "packed":
        settings = {"batch_size": batch_size // PACK, "packing_buffer_size": 8 * PACK}
    lanes = {}
    if "BENCHMARKED_LANES" in os.environ:
        lanes["lanes"] = int(os.environ["BENCHMARKED_LANES"])
    dataset = energon.get_train_dataset(
        path,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=num_workers, **lanes),
        shuffle_buffer_size=shuffle,
        max_samples_per_sequence=100,
        task_encoder=ENCODERS[program](),
        **settings,
    )
    return energon.get_savable_loader(dataset)
