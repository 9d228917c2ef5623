"""Hooks that skip, fail and multiply numbers."""

from __future__ import annotations

from energon.errors import SkipSample


def ids(samples):
    return [sample["n"] for sample in samples]


def drop_threes(sample):
    if sample["n"] % 3 == 0:
        raise SkipSample
    return sample


def fail_fives(sample):
    if sample["n"] % 5 == 0:
        raise ValueError(f"no fives, got {sample['n']}")
    return sample


def repeat_by_rest(sample):
    for copy in range(sample["n"] % 3):
        yield {**sample, "copy": copy}
