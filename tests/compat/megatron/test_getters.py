from __future__ import annotations

import pytest

from energon import DefaultTaskEncoder, SampleDecoder, UnknownArgumentError, WorkerConfig
from energon.compat.megatron.getters import get_train_dataset, with_legacy_arguments
from tests.datasets import make_crude


def test_decoder_arguments_set_up_a_copy_of_the_task_encoder():
    encoder = DefaultTaskEncoder()
    with pytest.warns(FutureWarning, match="image_decode"):
        changed = with_legacy_arguments(encoder, {"image_decode": "pil"})
    assert changed.decoder == SampleDecoder(image_decode="pil")
    assert encoder.decoder == SampleDecoder()


def test_auto_decode_false_leaves_bytes():
    with pytest.warns(FutureWarning, match="auto_decode"):
        assert with_legacy_arguments(DefaultTaskEncoder(), {"auto_decode": False}).decoder is None


@pytest.mark.parametrize("name", ["handler", "ignore_decoder_errors"])
def test_what_has_no_effect_says_what_has_taken_its_place(name):
    encoder = DefaultTaskEncoder()
    with pytest.warns(FutureWarning, match=f"{name}.*use"):
        assert with_legacy_arguments(encoder, {name: True}) is encoder


@pytest.mark.parametrize(
    ("given", "meant"),
    [("image_decoder", "image_decode"), ("shufle_buffer_size", "shuffle_buffer_size")],
)
def test_getters_name_the_argument_that_was_meant(tmp_path, given, meant):
    with pytest.raises(UnknownArgumentError, match=f"did you mean {meant!r}") as caught:
        get_train_dataset(
            make_crude(tmp_path / "ds", [2]),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=2,
            **{given: 8},
        )
    assert isinstance(caught.value, TypeError)


def test_getters_say_where_workers_are_configured():
    with pytest.raises(UnknownArgumentError, match=r"worker_config=WorkerConfig\(.*num_workers="):
        get_train_dataset("photos", num_workers=2)
