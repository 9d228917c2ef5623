"""Task encoders whose batches are lists of keys, so that tests can compare orders."""

from __future__ import annotations

from energon import DefaultTaskEncoder, SkipSample, stateless


class Keys(DefaultTaskEncoder):
    """Batches are lists of keys."""

    decoder = None

    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


class Packs(Keys):
    """Packs samples of a window in pairs, the last of them alone."""

    def select_samples_to_pack(self, samples):
        return [samples[i : i + 2] for i in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, samples):
        return {**samples[0], "__key__": "+".join(sample["__key__"] for sample in samples)}


class SkipsSome(Keys):
    """Skips the samples whose keys end with 1."""

    def encode_sample(self, sample):
        if sample["__key__"].endswith("1"):
            raise SkipSample
        return sample
