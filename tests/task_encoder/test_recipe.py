from __future__ import annotations

from types import SimpleNamespace

import pytest

from energon import (
    ConfigError,
    Cooker,
    DefaultTaskEncoder,
    FatalSampleError,
    TextSample,
    basic_sample_keys,
    get_savable_loader,
    reraise_exception,
)
from energon.prepare.dataset import prepare_dataset
from tests.datasets import make_captions, make_crude, write_shard
from tests.task_encoder.runs import config, flat, one_lane, resumable, train, val


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Two crude datasets with a typed one between them."""
    folder = tmp_path_factory.mktemp("mixed")
    make_crude(folder / "a", [4], prefix="a")
    make_captions(folder / "b", [3], prefix="b")
    make_crude(folder / "c", [2], prefix="c")
    blend = [{"path": str(folder / name), "subflavors": {"of": name}} for name in "abc"]
    return {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {part: {"blend": blend} for part in ("train", "val")},
    }


def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Everything(DefaultTaskEncoder):
    """Overrides all hooks that do not exclude one another; notes which hook saw what."""

    cookers = (Cooker(cook),)

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, hook, *samples):
        self.seen.append((hook, *(sample.__key__ for sample in samples)))

    def cook_crude_sample(self, sample, cooker, aux):
        cooked = super().cook_crude_sample(sample, cooker, aux)
        self.note("cook", cooked)
        return cooked

    def encode_sample(self, sample):
        self.note("encode", sample)
        return sample

    def postencode_sample(self, sample):
        self.note("postencode", sample)
        return sample

    def batch(self, samples):
        self.note("batch", *samples)
        return SimpleNamespace(keys=[sample.__key__ for sample in samples])

    def encode_batch(self, batch):
        self.seen.append(("encode_batch", *batch.keys))
        return batch.keys


def test_a_sample_passes_all_hooks_before_the_next_one_and_then_the_batch(root):
    encoder = Everything()
    assert one_lane(val(root, encoder, batch_size=2), 1)[0] == [["s0", "s1"]]
    of_each = ["cook", "encode", "postencode"]
    assert encoder.seen == [
        *[(hook, "s0") for hook in of_each],
        *[(hook, "s1") for hook in of_each],
        ("batch", "s0", "s1"),
        ("encode_batch", "s0", "s1"),
    ]


def test_no_sample_is_read_before_it_is_data_file(root):
    encoder = Everything()
    one_lane(val(root, encoder, batch_size=None), 3)
    assert [seen for seen in encoder.seen if seen[0] == "cook"] == [
        ("cook", f"s{n}") for n in range(3)
    ]


def test_crude_and_typed_leaves_take_their_own_ways(mixed):
    class Encoder(Everything):
        def batch(self, samples):
            return [getattr(sample, "text", None) or sample.caption for sample in samples]

        def encode_batch(self, batch):
            return batch

    encoder = Encoder()
    batches, _ = one_lane(val(mixed, encoder, batch_size=3))
    texts = [f"text {n}" for n in range(4)]
    assert flat(batches) == [*texts, "caption 0", "caption 1", "caption 2", *texts[:2]]
    cooked = [key for hook, key in encoder.seen if hook == "cook"]
    assert cooked == ["a0", "a1", "a2", "a3", "c0", "c1"]
    resumable(val(mixed, Encoder(), batch_size=3))


def test_the_same_pipeline_runs_in_other_processes(mixed):
    def batches(num_workers):
        dataset = train(mixed, Everything(), worker_config=config(num_workers=num_workers, lanes=4))
        with get_savable_loader(dataset) as loader:
            return [batch for batch, _ in zip(loader, range(24), strict=False)]

    assert batches(2) == batches(0)


def test_excluding_hooks_may_not_both_be_overridden(root):
    class Encoder(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return sample

        def preencode_sample(self, sample):
            return sample

    with pytest.raises(ConfigError, match="Encoder overrides encode_sample and preencode_sample"):
        val(root, Encoder())


def test_the_hook_of_an_encoder_that_converts_counts_as_overridden(root):
    class Encoder(DefaultTaskEncoder):
        def preencode_sample(self, sample):
            return sample

    with pytest.raises(ConfigError, match="encode_sample and preencode_sample"):
        val(root, Encoder(encoded_sample_type=dict))
    assert len(one_lane(val(root, Encoder()))[0]) == 5


def test_packing_needs_hooks_that_say_which_and_how(root):
    Encoder = type("Encoder", (DefaultTaskEncoder,), {"pack_selected_samples": lambda *_: 0})
    with pytest.raises(ConfigError, match="Encoder does not override select_samples_to_pack"):
        train(root, Encoder(), packing_buffer_size=8)


def test_every_failure_goes_to_the_handler_of_the_configuration(root):
    handled = []

    class Encoder(DefaultTaskEncoder):
        def encode_sample(self, sample):
            if sample["txt"] in ("text 3", "text 9"):
                raise ValueError(sample["txt"])
            return sample

        def batch(self, samples):
            return [sample["txt"] for sample in samples]

        def encode_batch(self, batch):
            if "text 12" in batch:
                raise ValueError("no twelves")
            return batch

    def handler(error, argument, sources):
        handled.append((str(error), type(argument), [source.key for source in sources or ()]))

    worker_config = config(global_error_handler=handler)
    batches, counts = one_lane(val(root, Encoder(), worker_config=worker_config, batch_size=3))
    assert [error for error, _, _ in handled] == ["text 3", "text 9", "no twelves"]
    assert handled[1][2] == ["s9"]
    assert handled[2][1:] == (list, [])
    assert counts["failed"] == 3
    assert len(flat(batches)) == 20 - 2 - 3


def test_a_handler_may_end_the_run_at_the_first_failure(root):
    class Encoder(DefaultTaskEncoder):
        def encode_sample(self, sample):
            raise ValueError("this is broken")

    worker_config = config(global_error_handler=reraise_exception)
    with pytest.raises(FatalSampleError, match=r"sample 's0' of .*: this is broken"):
        one_lane(val(root, Encoder(), worker_config=worker_config))


def test_a_damaged_part_is_left_out_where_it_is_decoded_with_its_place(tmp_path, caplog):
    samples = [(f"s{n}", {"json": b"{}" if n != 1 else b"{"}) for n in range(3)]
    write_shard(tmp_path / "0.tar", samples)
    prepare_dataset(tmp_path, split_parts=["val:.*"], sample_type="CrudeWebdataset")
    (batch,), counts = one_lane(val(tmp_path))
    assert batch["__key__"] == ["s0", "s2"]
    assert counts["failed"] == 1
    assert "s1.json: 1 byte, b" in caplog.text
    assert "0.tar at byte 1024" in caplog.text
