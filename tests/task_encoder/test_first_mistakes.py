"""Mistakes of first programs: what is misspelled, forgotten or of another type is named."""

from __future__ import annotations

import inspect
import json
import re

import numpy as np
import pytest

from energon import (
    Cooker,
    DefaultTaskEncoder,
    SampleDecoder,
    UnknownArgumentError,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon.arguments import ARGUMENT_HOMES
from energon.errors import ConfigError, DatasetNotFoundError
from tests.datasets import make_captions, write_shard

ALONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture
def captions(tmp_path):
    return make_captions(tmp_path / "ds", [4])


def opened(path, **settings):
    return get_train_dataset(path, **{"worker_config": ALONE, "batch_size": 2, **settings})


class Misspelled(DefaultTaskEncoder):
    def encode_smaple(self, sample):
        raise AssertionError("never called")

    def encode_batchs_of_words(self):
        """A helper."""


class Helped(DefaultTaskEncoder):
    def encode_sample(self, sample):
        return sample

    def encode_samples(self, samples):
        """A helper."""


class WithoutSuper(DefaultTaskEncoder):
    def __init__(self):
        self.size = 3


def test_a_misspelled_hook_is_said(captions, caplog):
    opened(captions, task_encoder=Misspelled())
    assert "Misspelled.encode_smaple is not a hook, did you mean encode_sample?" in caplog.messages
    assert len(caplog.messages) == 1


def test_helpers_are_not_taken_for_misspelled_hooks(captions, caplog):
    opened(captions, task_encoder=Helped())
    assert caplog.messages == []


def test_a_constructor_need_not_call_that_of_the_encoder(captions):
    batch = next(iter(get_loader(opened(captions, task_encoder=WithoutSuper()))))
    assert len(batch.__key__) == 2


def test_numbers_in_place_of_a_worker_config_are_refused(captions):
    with pytest.raises(TypeError, match=r"expected a WorkerConfig, as WorkerConfig\.default"):
        opened(captions, worker_config=2)


@pytest.mark.parametrize(
    ("getter", "arguments", "advice"),
    [
        (get_train_dataset, {"num_workers": 2}, r"worker_config=WorkerConfig\(.*num_workers=2\)"),
        (get_val_dataset, {"prefetch_factor": 2}, "pass it to get_savable_loader or get_loader"),
        (get_val_datasets, {"shufle_buffer_size": 9, "split": "x"}, "it has path, split_part"),
        (get_train_dataset, {"shufle_buffer_size": 9}, "did you mean 'shuffle_buffer_size'"),
        (get_savable_loader, {"num_workers": 2}, r"worker_config=WorkerConfig\(.*num_workers=2\)"),
        (get_loader, {"batch_size": 2}, "pass it to get_train_dataset"),
    ],
)
def test_where_an_argument_belongs_is_said(getter, arguments, advice):
    name = next(iter(arguments))
    with pytest.raises(UnknownArgumentError, match=f"has no argument '{name}'.*{advice}") as caught:
        getter("photos", **arguments)
    assert isinstance(caught.value, TypeError)


def test_all_arguments_that_are_proposed_exist():
    functions = (get_train_dataset, get_val_dataset, get_savable_loader, WorkerConfig)
    known = {name for each in functions for name in inspect.signature(each).parameters}
    proposed = {name for text in ARGUMENT_HOMES.values() for name in re.findall(r"\w+_\w+", text)}
    assert proposed - known <= {
        "get_train_dataset",
        "get_val_dataset",
        "get_savable_loader",
        "get_loader",
    }


def test_settings_of_workers_that_are_no_numbers_are_refused():
    with pytest.raises(TypeError, match="seed_offset='a'"):
        WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset="a")
    with pytest.raises(TypeError, match=r"num_workers='2'.*a whole number, found str"):
        WorkerConfig(rank=0, world_size=1, num_workers="2")
    with pytest.raises(TypeError, match=r"rank=0\.5"):
        WorkerConfig(rank=0.5, world_size=1, num_workers=2)
    with pytest.raises(TypeError, match="lanes='8'"):
        WorkerConfig(rank=0, world_size=1, num_workers=0, lanes="8")
    with pytest.raises(ConfigError, match="lanes must be 1 or more, got 0"):
        WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=0)


@pytest.mark.parametrize("name", ["repeat", "batch_drop_last"])
@pytest.mark.parametrize("value", ["no", "False", "", 2, None])
def test_text_in_place_of_true_or_false_is_refused(captions, name, value):
    with pytest.raises(ConfigError, match=f"{name} must be True or False, got {value!r}"):
        opened(captions, **{name: value})


def test_numbers_of_numpy_leave_states_plain(captions):
    numbers = dict.fromkeys(("batch_size", "virtual_epoch_length"), np.int64(2))
    buffers = dict.fromkeys(("shuffle_buffer_size", "parallel_shard_iters"), np.int32(3))
    config = WorkerConfig(rank=np.int64(0), world_size=np.int8(1), num_workers=np.int64(0))
    dataset = opened(captions, worker_config=config, repeat=np.bool_(True), **numbers, **buffers)
    with get_savable_loader(dataset) as loader:
        assert json.loads(json.dumps(loader.save_state_rank())) == loader.save_state_rank()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"blend_unit": "samples"}, "blend_unit must be 'sample', 'batch' or None, got 'samples'"),
        ({"subflavors": "web"}, "subflavors='web': expected a dict of labels"),
        ({"exclude_from": 3}, "exclude_from=3: expected the folder of quarantine files"),
        ({"allow": True}, r"allow=True: expected some of code, pickle, .*, in a tuple"),
        ({"allow": "cod"}, "allow='cod' is not one of .*; did you mean 'code'"),
    ],
)
def test_arguments_of_another_type_are_refused(captions, arguments, found):
    with pytest.raises(ConfigError, match=found):
        opened(captions, **arguments)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="global_error_handler='log': expected a function"):
        WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler="log")
    with pytest.raises(ConfigError, match="decoders='csv': expected a dict of functions"):
        SampleDecoder(decoders="csv")


def test_numbers_from_the_command_line_are_no_numbers_of_batches(captions):
    dataset = opened(captions, repeat=np.bool_(True), batch_drop_last=0)
    for name in ("prefetch_factor", "watchdog_timeout_seconds", "restart_patience_seconds"):
        with pytest.raises(ConfigError, match=f"{name} must be .*, got '2'"):
            get_loader(dataset, **{name: "2"})
    with pytest.raises(ConfigError, match="pin_memory must be True or False, got 'no'"):
        get_loader(dataset, pin_memory="no")


@pytest.mark.parametrize("field_map", ["{imge: jpg}", "{image: 'jpg['}", "{image: jpg}"])
def test_a_wrong_field_map_is_said_with_its_file(captions, field_map):
    file = captions / ".nv-meta/dataset.yaml"
    kind = "{__module__: energon, __class__: CaptioningSample}"
    file.write_text(f"sample_type: {kind}\nfield_map: {field_map}\n")
    with pytest.raises(ConfigError, match=rf"^{file}: "):
        opened(captions)


def test_a_decoder_and_a_cooker_have_to_be_callable(captions):
    encoder = DefaultTaskEncoder()
    encoder.decoder = "rgb8"
    with pytest.raises(ConfigError, match="decoder: expected a SampleDecoder, or None .* 'rgb8'"):
        opened(captions, task_encoder=encoder)
    with pytest.raises(ConfigError, match="expected a function of the sample, found 'txt'"):
        Cooker("txt")


@pytest.mark.parametrize("pattern", ["*.tar", "{000..003}.tar", "00?.tar"])
def test_patterns_of_shards_are_answered_with_what_to_name(captions, tmp_path, pattern):
    with pytest.raises(DatasetNotFoundError, match=f"name their dataset, {captions}$"):
        opened(captions / "shards" / pattern)
    write_shard(tmp_path / "raw/0.tar", [("a", {"txt": b""})])
    with pytest.raises(DatasetNotFoundError, match=f"`energon prepare {tmp_path}/raw` makes a"):
        opened(tmp_path / "raw" / pattern)
