from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError, SampleError
from energon.packing import cu_seqlens, merge_cu_seqlens, pack_sequences, position_ids

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(LENGTHS, st.integers(0, 5))
def test_sequences_are_found_again_by_their_bounds(lengths, padding):
    sequences = [np.arange(length) + 100 * n for n, length in enumerate(lengths)]
    packed = pack_sequences(sequences, pad_to=sum(lengths) + padding, pad_value=-1)
    bounds = packed.cu_seqlens
    assert bounds.dtype == np.int32
    for n, sequence in enumerate(sequences):
        assert packed.values[bounds[n] : bounds[n + 1]].tolist() == sequence.tolist()
        assert packed.position_ids[bounds[n] : bounds[n + 1]].tolist() == list(range(len(sequence)))
    assert packed.values[packed.num_values :].tolist() == [-1] * padding
    assert len(packed.values) == len(packed.position_ids) == bounds[-1]
    assert packed.max_seqlen == np.diff(bounds).max()


def test_tensors_give_tensors_with_the_types_that_attention_takes():
    packed = pack_sequences([torch.ones(3, 2), torch.zeros(1, 2)], pad_to=6)
    assert packed.values.shape == (6, 2)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packed.position_ids.dtype == torch.int64


@pytest.mark.slow
def test_attention_within_the_bounds_is_attention_of_each_sequence_alone():
    drawn = [torch.randn(1, length, 4) for length in (5, 2, 7)]
    packed = pack_sequences([sequence[0] for sequence in drawn])
    starts = packed.cu_seqlens.tolist()
    segment = torch.repeat_interleave(torch.arange(3), torch.diff(packed.cu_seqlens).long())
    mask = segment[:, None] == segment[None, :]
    attend = torch.nn.functional.scaled_dot_product_attention
    joint = attend(packed.values, packed.values, packed.values, attn_mask=mask)
    for n, sequence in enumerate(drawn):
        alone = attend(sequence, sequence, sequence)[0]
        torch.testing.assert_close(joint[starts[n] : starts[n + 1]], alone)


def test_lists_of_numbers_are_sequences_too():
    assert pack_sequences([[1, 2], [3]], pad_to=4).values.tolist() == [1, 2, 3, 0]


def test_sequences_longer_than_the_context_are_refused():
    with pytest.raises(SampleError, match="2 sequences have 9 values, the context is 8.*number 1"):
        pack_sequences([np.zeros(2), np.zeros(7)], pad_to=8)


def test_nothing_cannot_be_packed():
    with pytest.raises(ConfigError, match="no sequences"):
        pack_sequences([])


@given(st.lists(LENGTHS, min_size=1, max_size=5))
def test_the_bounds_of_joined_packs_are_those_of_all_their_sequences(packs):
    joined = [length for lengths in packs for length in lengths]
    merged = merge_cu_seqlens([cu_seqlens(lengths) for lengths in packs])
    assert merged.tolist() == cu_seqlens(joined).tolist()
    assert merge_cu_seqlens([torch.from_numpy(cu_seqlens(packs[0]))]).dtype == torch.int32


@given(LENGTHS)
def test_position_ids_count_within_each_sequence(lengths):
    assert position_ids(lengths).tolist() == [n for length in lengths for n in range(length)]


@given(LENGTHS, st.integers(1, 5), st.integers(0, 9))
def test_each_sequence_can_be_padded_to_a_multiple(lengths, multiple, more):
    sequences = [np.arange(length) + 100 * n for n, length in enumerate(lengths)]
    padded = [-(-length // multiple) * multiple for length in lengths]
    packed = pack_sequences(
        sequences, pad_to=sum(padded) + more, pad_value=-1, multiple_of=multiple
    )
    starts, bounds = packed.cu_seqlens_padded, packed.cu_seqlens
    assert len(starts) == len(bounds)
    assert all(start % multiple == 0 for start in starts[: len(lengths)])
    for n, sequence in enumerate(sequences):
        assert bounds[n + 1] - bounds[n] == len(sequence)
        within = packed.values[starts[n] : starts[n + 1]].tolist()
        assert within == sequence.tolist() + [-1] * (padded[n] - len(sequence))
        assert packed.position_ids[starts[n] : starts[n + 1]].tolist() == list(range(padded[n]))
    assert len(packed.values) == len(packed.position_ids) == starts[-1] == sum(padded) + more
    assert packed.num_values == sum(lengths)
    as_tensors = pack_sequences(
        [torch.from_numpy(each) for each in sequences],
        pad_to=sum(padded) + more,
        pad_value=-1,
        multiple_of=multiple,
    )
    assert as_tensors.values.tolist() == packed.values.tolist()
    assert as_tensors.cu_seqlens_padded.dtype == torch.int32


def test_a_multiple_below_one_is_refused():
    with pytest.raises(ConfigError, match="multiple_of"):
        pack_sequences([np.zeros(2)], multiple_of=0)
