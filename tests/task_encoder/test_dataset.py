from __future__ import annotations

import json
import os
from itertools import chain, islice

import pytest

from energon import (
    DefaultTaskEncoder,
    SkipSample,
    WorkerError,
    get_savable_loader,
)
from energon.prepare.dataset import prepare_dataset
from energon.samples.crude import sample_keys
from energon.stages.lane import Lane
from tests.datasets import make_captions, make_crude, write_shard
from tests.encoders import Keys
from tests.task_encoder.runs import config, train, val


class ExitAt7(Keys):
    def encode_sample(self, sample):
        if sample["__key__"] == "s7":
            os._exit(1)
        return sample


class ExitInBatch(Keys):
    def batch(self, samples):
        if any(sample["__key__"] == "s7" for sample in samples):
            os._exit(1)
        return super().batch(samples)


@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer_size": 6}, {"repeat": False}])
def test_a_row_is_described_by_the_sample_that_comes_there(root, settings):
    dataset = train(root, batch_size=None, **settings)
    for lane in range(2):
        samples = islice(dataset.open_lane(Lane(lane, 2)), 10)
        for row, sample in enumerate(samples):
            description = dataset.describe_row(lane, 2, row)
            _, epoch, ordinal = sample["__restore_key__"]
            for wanted in (
                repr(sample["__key__"]),
                sample["__shard__"],
                f"number {ordinal};",
                f"epoch {epoch}",
            ):
                assert wanted in description


def test_the_description_of_a_row_says_at_which_byte_it_begins(root):
    shard = (root / "001.tar").read_bytes()
    text = val(root).describe_row(0, 1, 7)
    offset = int(text.partition("at byte ")[2].partition(")")[0])
    assert shard[offset:].startswith(b"s7.txt\0")


def test_a_row_is_described_even_where_its_shard_is_gone(tmp_path):
    root = make_crude(tmp_path / "ds", [5, 8])
    dataset = val(root)
    (root / "001.tar").unlink()
    text = dataset.describe_row(0, 1, 7)
    assert dataset.quarantine_entry(0, 1, 7) is None
    assert text.startswith(f"sample number 7 of {root}, not located: ")
    assert "001.tar: no such file" in text
    assert text.endswith("epoch 0")


@pytest.mark.slow
def test_the_log_of_a_row_that_kills_workers_names_its_sample(root, caplog):
    loader = get_savable_loader(val(root, ExitAt7(), worker_config=config(num_workers=1)))
    with loader:
        batches = list(loader)
    assert [key for batch in batches for key in batch] == [f"s{n}" for n in range(20) if n != 7]
    assert "lane 0 row 7 killed 3 workers and is skipped" in caplog.text
    line = json.dumps({"dataset": str(root), "shard": "001.tar", "key": "s7"})
    assert f"add the line {line} to a file and pass that file as exclude_from" in caplog.text
    deaths = [text for text in caplog.messages if "exited with code 1" in text]
    assert f"sample 's7' of {root} (number 7; 001.tar at byte" in deaths[0]


def test_a_batch_that_kills_workers_ends_the_run_and_takes_no_blameless_sample_with_it(root):
    loader = get_savable_loader(val(root, ExitInBatch(), worker_config=config(num_workers=1)))
    with loader, pytest.raises(WorkerError, match="batch or pack that begins at lane 0 row 4"):
        list(loader)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world_size", "lanes"), [(1, 1), (1, 3), (4, 4)])
def test_the_length_is_the_number_of_batches_that_come(root, drop_last, world_size, lanes):
    for rank in range(world_size):
        worker_config = config(rank=rank, world_size=world_size, lanes=lanes)
        dataset = val(root, batch_size=3, worker_config=worker_config, batch_drop_last=drop_last)
        loader = get_savable_loader(dataset)
        assert len(dataset) == len(loader) == len(list(loader))


def test_the_length_of_endless_data_is_that_of_one_pass(root):
    assert len(train(root, batch_size=3)) == 7
    assert len(train(root, batch_size=3, batch_drop_last=True)) == 6
    half = config(rank=1, world_size=2)
    assert len(train(root, batch_size=3, worker_config=half)) == 4
    assert len(train(root, batch_size=None)) == 20


def test_the_fingerprint_is_json_and_changes_with_whatever_decides_the_order(root, tmp_path):
    def fingerprint(**settings):
        encoder = settings.pop("encoder", Keys())
        dataset = train(settings.pop("path", root), encoder, **settings)
        return json.loads(json.dumps(dataset.fingerprint(2)))

    plain = fingerprint()
    assert fingerprint() == plain
    assert fingerprint(encoder=DefaultTaskEncoder()) == plain
    others = [
        fingerprint(batch_size=5),
        fingerprint(shuffle_buffer_size=9),
        fingerprint(max_samples_per_sequence=2),
        fingerprint(parallel_shard_iters=3),
        fingerprint(shuffle_over_epochs_multiplier=-1),
        fingerprint(worker_config=config(seed_offset=1)),
        fingerprint(split_part="val"),
        fingerprint(repeat=False),
        fingerprint(path=make_crude(tmp_path / "ds", [5, 8, 8])),
        train(root).fingerprint(3),
    ]
    assert plain not in others
    assert len({json.dumps(other) for other in others}) == len(others)


def test_moving_the_data_does_not_change_the_fingerprint(tmp_path):
    before = train(make_crude(tmp_path / "here/ds", [5, 8])).fingerprint(2)
    os.rename(tmp_path / "here", tmp_path / "there")
    after = train(tmp_path / "there/ds").fingerprint(2)
    assert after.pop("run") != before.pop("run")  # which is told, and not compared
    assert after == before


def test_the_configuration_is_that_of_the_default_lanes(root):
    dataset = train(root, worker_config=config(lanes=6))
    assert {**dataset.fingerprint(6), **dataset.config()} == dataset.fingerprint(6)


def test_another_batch_size_is_one_difference_unless_it_changes_the_order(root):
    def differences(lanes=None, **settings):
        settings["worker_config"] = config(lanes=lanes)
        before, after = (train(root, batch_size=size, **settings) for size in (4, 5))
        saved = before.fingerprint(2)
        now = after.continuing(saved).fingerprint(2)
        return [name for name in saved | now if saved.get(name) != now.get(name)]

    assert differences() == ["batch_size"]
    assert differences(repeat=False) == ["batch_size"]
    in_order = {"repeat": False, "shuffle_over_epochs_multiplier": None}
    assert differences(lanes=2, **in_order) == ["stripe", "batch_size"]
    # Lanes that share a stream continue with the stripes that they had.
    assert differences(**in_order) == ["batch_size"]


@pytest.mark.parametrize("decoded", [False, True])
def test_batches_of_crude_samples_have_the_parts_of_all_and_are_counted_exactly(tmp_path, decoded):
    root = tmp_path / "mixed"
    samples = [(f"s{n}", {"json": b"1", "txt" if n % 5 else "cls": b"2"}) for n in range(44)]
    write_shard(root / "0.tar", samples)
    prepare_dataset(root, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    encoder = DefaultTaskEncoder()
    if not decoded:
        encoder.decoder = None
    dataset = train(root, encoder, batch_size=8, repeat=False)
    loader = get_savable_loader(dataset)
    batches = [*loader]
    keys = [key for batch in batches for key in batch["__key__"]]
    assert sorted(keys) == sorted(key for key, _ in samples)
    assert loader.stats()["samples"] == 44
    for batch in batches:
        for key, text, label in zip(batch["__key__"], batch["txt"], batch["cls"], strict=True):
            assert ((text is None), (label is None)) == (
                (int(key[1:]) % 5 == 0),
                (int(key[1:]) % 5 != 0),
            )


def test_batches_that_hooks_drop_are_not_counted_as_samples(tmp_path):
    class DropsBatches(DefaultTaskEncoder):
        def encode_batch(self, batch):
            if "s3" in batch.__key__:
                raise SkipSample
            return batch

    class DropsPacks(DropsBatches):
        def select_samples_to_pack(self, samples):
            return [samples[:3], samples[3:]]

        def pack_selected_samples(self, samples):
            if samples[0].__key__ == "s0":
                raise SkipSample
            return samples[0]

    root = make_captions(tmp_path / "ds", [20])
    for encoder, options in [(DropsBatches(), {}), (DropsPacks(), {"packing_buffer_size": 5})]:
        dataset = train(root, encoder, batch_size=2, repeat=False, **options)
        loader = get_savable_loader(dataset)
        delivered = [*chain.from_iterable(sample_keys(each.__restore_key__) for each in loader)]
        assert loader.stats()["samples"] == len(delivered) < 20
