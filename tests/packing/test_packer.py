from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, FatalSampleError
from energon.packing import Packer


@dataclass(frozen=True, eq=False)
class Text:
    __key__: str
    tokens: int
    number: int = 0


def tokens(sample):
    return sample.tokens


def texts(lengths, *, start=0):
    return [Text(f"t{start + n}", length, start + n) for n, length in enumerate(lengths)]


def drawn_texts(count, *, seed, start=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(700), 0.9, count)
    return texts(np.clip(drawn, 1, 8192).astype(int).tolist(), start=start)


def run(packer, *, windows, window=512):
    """Offer windows as the pipeline does; return the packs, and how long samples waited."""
    packs, carried, number, waits = [], [], 0, [0]
    for seed in range(windows):
        new = drawn_texts(window - len(carried), seed=seed, start=number)
        number += len(new)
        selection = packer(carried + new)
        packs += selection.groups
        carried = list(selection.carry)
        waits += [number - sample.number for sample in carried]
    return packs, max(waits)


def padding(packs):
    return 1 - sum(sample.tokens for pack in packs for sample in pack) / (len(packs) * 8192)


@given(
    lengths=st.lists(st.integers(0, 30), max_size=60),
    method=st.sampled_from(["fill", "first_fit"]),
    carry=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_every_sample_is_packed_or_carried_and_every_pack_fits(lengths, method, carry):
    samples = texts(lengths)
    selection = Packer(30, tokens, method=method, carry=carry)(samples)
    found = [*selection.carry, *(sample for pack in selection.groups for sample in pack)]
    assert sorted(sample.number for sample in found) == list(range(len(samples)))
    assert all(sum(map(tokens, pack)) <= 30 for pack in selection.groups)
    assert carry or not selection.carry


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60))
@settings(deadline=None, max_examples=60)
def test_the_oldest_sample_always_leaves(lengths):
    samples = texts(lengths)
    groups = Packer(30, tokens)(samples).groups
    assert samples[0] in [sample for pack in groups for sample in pack]


@pytest.mark.slow
@pytest.mark.parametrize("balance", [False, True])
def test_padding_of_closed_windows_is_below_a_hundredth(balance):
    packs, _ = run(Packer(8192, tokens, carry=False, balance=balance), windows=20)
    assert padding(packs) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("balance", [False, True])
def test_carrying_over_leaves_next_to_no_padding_and_nobody_waits_long(balance):
    packs, longest_wait = run(Packer(8192, tokens, balance=balance), windows=20)
    assert padding(packs) < 0.001
    assert longest_wait < 5 * 512


def test_samples_stand_in_the_order_of_the_stream_and_packs_in_that_of_their_largest():
    groups = Packer(10, tokens, carry=False)(texts([2, 9, 3, 4, 1, 8])).groups
    numbers = [[sample.number for sample in pack] for pack in groups]
    assert numbers == [[1, 4], [2, 3], [0, 5]]


def test_packs_come_in_no_order_of_size():
    sizes = [len(pack) for pack in run(Packer(8192, tokens), windows=4)[0]]
    positions = np.arange(len(sizes))
    assert abs(np.corrcoef(positions, sizes)[0, 1]) < 0.3


def test_several_dimensions_are_kept():
    samples = drawn_texts(200, seed=1)
    packer = Packer((8192, 40), lambda sample: (sample.tokens, sample.number % 13))
    for pack in packer(samples).groups:
        assert sum(sample.tokens for sample in pack) <= 8192
        assert sum(sample.number % 13 for sample in pack) <= 40


def test_a_sample_longer_than_the_context_is_an_error_that_names_it():
    with pytest.raises(FatalSampleError, match="sample 't1' has the length 9000, the context"):
        Packer(8192, tokens)(texts([5, 9000]))
    with pytest.raises(FatalSampleError, match=r"'t0' has the length \[5, 41\]"):
        Packer((8192, 40), lambda sample: (5, 41))(texts([5]))


def test_samples_longer_than_the_context_can_be_left_out():
    selection = Packer(10, tokens, too_long="leave_out", carry=False)(texts([11, 4, 12, 6]))
    assert [[sample.number for sample in pack] for pack in selection.groups] == [[1, 3]]


def test_nothing_but_samples_too_long_makes_no_pack():
    assert Packer(10, tokens, too_long="leave_out")(texts([11])).groups == []


@pytest.mark.parametrize("length", [None, "7", -1, (3, 4), 5.5])
def test_a_length_that_is_none_ends_the_run(length):
    with pytest.raises(FatalSampleError, match="the length of sample 't0' is"):
        Packer(10, lambda sample: length)(texts([5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 0}, "at least 1 in every dimension, got 0"),
        ({"context": (5, 0)}, "at least 1 in every dimension"),
        ({"context": ()}, "at least 1 in every dimension"),
        ({"method": "magic"}, "got 'magic'"),
        ({"too_long": "cut"}, "got 'cut'"),
        ({"method": "first_fit", "balance": True}, "needs method='fill'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Packer(**{"context": 5, "length": tokens, **arguments})


@pytest.mark.parametrize("lengths", [[3000], [576, 577], [4097]])
def test_lengths_that_fill_no_pack_are_not_packed_again_for_every_pack(lengths, monkeypatch):
    divided = []
    divide = Packer.divide

    def record(self, lengths):
        divided.append(len(lengths))
        return divide(self, lengths)

    monkeypatch.setattr(Packer, "divide", record)
    packer, window, carried, packed = Packer(8192, tokens), 256, [], 0
    for _ in range(8):
        new = texts([lengths[n % len(lengths)] for n in range(window - len(carried))])
        selection = packer(carried + new)
        packed += sum(map(len, selection.groups))
        carried = list(selection.carry)
    assert sum(divided) < 1.2 * packed
