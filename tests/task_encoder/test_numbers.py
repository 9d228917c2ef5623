"""Hooks know the numbers of their sample and batch: ahead, again, and between two outputs."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from energon import (
    DefaultTaskEncoder,
    FatalSampleError,
    SkipSample,
    StateError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon.packing import Selection
from tests.datasets import make_crude
from tests.effort import mixed, some
from tests.task_encoder.runs import config, train, val

LANES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("numbers")
    for name, sizes in {"a": [9, 8], "b": [11, 12]}.items():
        make_crude(root / name, sizes, prefix=name)
    return root


class Numbers(DefaultTaskEncoder):
    """Delivers for each hook that made a batch the numbers that it was told."""

    decoder = None

    def told(self, name):
        return name, self.current_batch_index, self.current_sample_index

    def encode_sample(self, sample):
        return self.note(sample, "encode")

    def note(self, sample, name):
        return {
            "key": sample["__key__"],
            "told": [*sample.get("told", ()), self.told(name)],
            "__restore_key__": sample["__restore_key__"],
            "__key__": sample["__key__"],
        }

    def batch(self, samples):
        told = [sample["told"] for sample in samples]
        return {"told": [told, self.told("batch")], "__restore_key__": ()}

    def encode_batch(self, batch):
        told = [*batch["told"], self.told("encode batch")]
        return {"told": told, "__restore_key__": batch["__restore_key__"]}


class YieldsSamples(Numbers):
    def encode_sample(self, sample):
        for copy in range(int(sample["__key__"][1:]) % 4):
            yield self.note(sample, f"encode {copy}")


class YieldsBatches(Numbers):
    def batch(self, samples):
        for part in (samples[:1], samples[1:]):
            yield super().batch(part)


class YieldsEverywhere(YieldsSamples, YieldsBatches):
    def encode_batch(self, batch):
        for _ in range(2):
            yield super().encode_batch(batch)


class Skips(Numbers):
    def encode_sample(self, sample):
        if int(sample["__key__"][1:]) % 3 == 1:
            raise SkipSample
        return super().encode_sample(sample)


class Packs(YieldsSamples):
    def preencode_sample(self, sample):
        yield from super().encode_sample(sample)

    encode_sample = DefaultTaskEncoder.encode_sample

    def select_samples_to_pack(self, samples):
        for sample in samples:
            sample["told"].append(self.told("select"))
        return Selection([samples[:2], samples[2:4]], carry=samples[5:6])

    def postencode_sample(self, sample):
        return self.note(sample, "postencode")

    def pack_selected_samples(self, samples):
        for part in (samples[:1], samples[1:]):
            told = [self.told("pack"), *(sample["told"] for sample in part)]
            yield {"told": told, "__restore_key__": (), "__key__": "pack"}


class Groups(YieldsSamples):
    def batch_group_criterion(self, sample):
        sample["told"].append(self.told("group"))
        return sample["key"][-1] > "5", None


class PacksInGroups(Packs):
    def batch_group_criterion(self, pack):
        pack["told"].append(self.told("group"))
        return len(pack["told"]) % 2, None


KINDS = {
    "plain": (Numbers, {}),
    "windows": (Numbers, {"shuffle_buffer_size": 7}),
    "yields samples": (YieldsSamples, {}),
    "yields batches": (YieldsBatches, {}),
    "yields everywhere": (YieldsEverywhere, {}),
    "skips": (Skips, {}),
    "whole batches": (Skips, {"blend_unit": "batch"}),
    "packs": (Packs, {"packing_buffer_size": 7}),
    "groups": (Groups, {}),
    "packs in groups": (PacksInGroups, {"packing_buffer_size": 7}),
}


def document(folder, *weights):
    names = zip("ab", weights, strict=True)
    entries = [{"path": str(folder / name), "weight": weight} for name, weight in names]
    return {"splits": {"train": {"blend": entries}}}


def open_dataset(folder, kind, weights=(2, 1), **settings):
    encoder, arguments = KINDS[kind]
    worker_config = WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **settings})
    return get_train_dataset(
        document(folder, *weights),
        worker_config=worker_config,
        batch_size=3,
        task_encoder=encoder(),
        **arguments,
    )


def open_loader(*arguments, **settings):
    return get_savable_loader(open_dataset(*arguments, **settings), workers="thread")


def told(batches):
    return [json.dumps(batch["told"]) for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(list(KINDS), 2))
def test_numbers_are_the_same_after_every_restore_on_any_topology(folder, kind):
    total, states, expected = 12, [], []
    with open_loader(folder, kind, lanes=LANES) as loader:
        for _ in range(total):
            states.append(json.dumps(loader.save_state_rank()))
            expected += told(islice(loader, 1))
    dataset = open_dataset(folder, kind)
    for at in some(range(0, total, 3), 2):
        with get_savable_loader(dataset) as loader:
            loader.restore_state_rank(json.loads(states[at]))
            assert told(islice(loader, total - at)) == expected[at:]
    for rank in range(2):
        topology = {"rank": rank, "world_size": 2, "num_workers": rank}
        dataset = open_dataset(folder, kind, lanes=LANES, **topology)
        for at in some((0, 5, 6)):
            with get_savable_loader(dataset, workers="thread") as loader:
                loader.restore_state_global(json.loads(states[at]))
                wanted = [g for g in range(at, total) if g % 2 == rank]
                found = told(islice(loader, len(wanted)))
                assert found == [expected[number] for number in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_know_their_own_numbers(folder, kind):
    with open_loader(folder, kind, lanes=LANES) as loader:
        batches = [batch["told"] for batch in islice(loader, 12)]
    # The hooks of a batch work for it; an output of `encode_batch` is one on its own.
    assert [batch[-1][1] for batch in batches] == list(range(12))


@pytest.mark.parametrize("kind", some(sorted(set(KINDS) - {"yields everywhere"}), 2))
def test_a_batch_is_made_again_with_the_numbers_that_it_had(folder, kind):
    ahead = kind.startswith("packs") or kind in ("yields samples", "groups", "whole batches")
    with open_loader(folder, kind, lanes=LANES) as loader:
        for batch in some([*islice(loader, 4)]):
            key = json.loads(json.dumps(batch["__restore_key__"]))
            again = loader.restore_sample(key)["told"]
            if ahead:
                # Only the run knows for which batches it made the samples.
                assert numbers_of_samples(again) == numbers_of_samples(batch["told"])
                assert again[1:] == batch["told"][1:]
            else:
                assert again == batch["told"]


def numbers_of_samples(value):
    """The numbers of samples in what hooks were told, but for windows, which are not made again."""
    if isinstance(value, tuple):
        return value[0], value[2]
    kept = [each for each in value if not (isinstance(each, tuple) and each[0] in OF_MANY)]
    return [numbers_of_samples(each) for each in kept]


OF_MANY = ("select", "group")


def test_a_batch_is_made_again_with_its_numbers_after_the_mix_has_changed(folder):
    with open_loader(folder, "windows", lanes=LANES) as loader:
        for _ in islice(loader, 10):
            pass
        state = loader.save_state_rank()
    with open_loader(folder, "windows", weights=(1, 9)) as loader:
        loader.restore_state_rank(state, strict=["mix"])
        for batch in islice(loader, 12):
            assert loader.restore_sample(batch["__restore_key__"])["told"] == batch["told"]


class TwoEach(DefaultTaskEncoder):
    def encode_sample(self, sample):
        for _ in range(2):
            yield self.current_sample_index

    def batch(self, samples):
        return samples


def test_all_outputs_of_a_sample_have_its_number(folder):
    worker_config = config()
    with get_savable_loader(
        val(folder / "a", TwoEach(), batch_size=3, worker_config=worker_config)
    ) as loader:
        assert list(islice(loader, 4)) == [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]


class Counted(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        return {**sample, "number": self.current_sample_index}

    def batch(self, samples):
        return samples


@pytest.mark.parametrize(
    ("topology", "lanes"), mixed([(1, 0), (2, 0), (1, 2), (2, 0)], [None, LANES])
)
def test_samples_are_numbered_in_the_order_of_the_batches(folder, topology, lanes):
    world_size, num_workers = topology

    def open_rank(rank, batch_size):
        config = WorkerConfig(
            rank=rank, world_size=world_size, num_workers=num_workers, lanes=lanes
        )
        dataset = train(folder / "a", Counted(), batch_size=batch_size, worker_config=config)
        return get_savable_loader(dataset, workers="thread")

    def numbers(loader, batches):
        found = [list(batch) for batch in islice(loader, batches)]
        for batch in some(found):
            again = [loader.restore_sample(sample["__restore_key__"]) for sample in batch]
            assert [each["number"] for each in again] == [each["number"] for each in batch]
        return [[sample["number"] for sample in batch] for batch in found]

    for rank in range(world_size):
        with open_rank(rank, 6) as loader:
            found = numbers(loader, 5)
            assert found == [
                [*range(6 * g, 6 * g + 6)] for g in range(rank, 5 * world_size, world_size)
            ]
            state = loader.save_state_rank()
        if lanes is None:  # in smaller batches, samples keep their numbers
            with open_rank(rank, 2) as loader:
                loader.restore_state_rank(state, strict=["batch_size"])
                first = 5 * 3 * world_size + rank
                assert numbers(loader, 4) == [
                    [2 * g, 2 * g + 1] for g in range(first, first + 4 * world_size, world_size)
                ]


def test_a_single_sample_knows_its_batch_where_all_take_equally_many(folder):
    class Samples(Numbers):
        def batch(self, samples):
            return samples

        encode_batch = DefaultTaskEncoder.encode_batch

    with get_savable_loader(train(folder / "a", Samples(), batch_size=3)) as loader:
        for batch in islice(loader, 5):
            for sample in batch:
                assert loader.restore_sample(sample["__restore_key__"])["told"] == sample["told"]
    packed = train(folder / "a", Packs(), batch_size=3, packing_buffer_size=7)
    with (
        get_savable_loader(packed) as loader,
        pytest.raises(FatalSampleError, match="the number of the batch is not known"),
    ):
        loader.restore_sample((0, 0, 3, 0))


def test_with_replacement_only_the_run_knows_numbers(folder):
    dataset = train(folder / "a", Numbers(), shuffle_over_epochs_multiplier=-1, batch_size=2)
    with get_savable_loader(dataset) as loader:
        batch = next(iter(loader))
        assert batch["told"][1:] == [("batch", 0, 0), ("encode batch", 0, 0)]
        with pytest.raises(FatalSampleError, match="draws with replacement"):
            loader.restore_sample(batch["__restore_key__"])


def test_a_key_with_a_wrong_number_is_refused(folder):
    with open_loader(folder, "plain") as loader:
        _, keys, _ = next(iter(loader))["__restore_key__"]
        for number in ("x", -1, 2.5):
            with pytest.raises(StateError, match="where batches have their number"):
                loader.restore_sample(("batch", keys, number))
