"""Packing and grouping end to end: hooks, loaders, states, single batches made again."""

from __future__ import annotations

import json
import os
import random
from itertools import islice

import pytest

from energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SkipSample,
    StateError,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon.packing import Packer
from megatron.energon import (
    AugmentTaskEncoder,
)
from tests.datasets import make_crude
from tests.effort import some
from tests.task_encoder.runs import config, resumable, train, val


@edataclass
class Words(Sample):
    words: list[str]
    draw: float = 0.0


@edataclass
class WordsBatch(Batch):
    words: list
    draw: float = 0.0


def cook(sample):
    """Yield a sample twice for some, so that positions lie between outputs, too."""
    number = int(sample["txt"].split()[1])
    if number % 7 == 3:
        raise SkipSample
    words = [sample["txt"]] * (1 + number % 4)
    for copy in range(1 + (number % 5 == 0)):
        key = basic_sample_keys(sample)
        yield TextSample(**key, text=f"{' '.join(words)} {copy} {random.random():.3f}")


class Packing(DefaultTaskEncoder):
    cookers = (Cooker(cook),)
    packer = Packer(12, lambda sample: len(sample.words) // 3)

    def preencode_sample(self, sample: TextSample) -> Words:
        return Words.derive_from(sample, words=sample.text.split())

    def select_samples_to_pack(self, samples):
        return self.packer(samples)

    def postencode_sample(self, sample: Words) -> Words:
        return Words.extend(sample, draw=random.random())

    def pack_selected_samples(self, samples):
        words = [word for sample in samples for word in sample.words]
        return Words.derive_from(samples[0], words=words, draw=sum(s.draw for s in samples))

    def batch(self, samples) -> WordsBatch:
        return WordsBatch.from_samples(samples, draw=sum(s.draw for s in samples) + random.random())


class Halves(Packing):
    """A pack, and a batch, may become several."""

    def pack_selected_samples(self, samples):
        for part in (samples[::2], samples[1::2]):
            if part:
                yield super().pack_selected_samples(part)

    def encode_batch(self, batch):
        for number in range(2):
            yield WordsBatch.extend(batch, draw=batch.draw + number + random.random())


class Grouping(Packing):
    def batch_group_criterion(self, sample):
        rest = len(sample.words) % 3
        return ("rest", rest), rest + 1


class GroupingOnly(DefaultTaskEncoder):
    cookers = (Cooker(cook),)

    def encode_sample(self, sample: TextSample) -> Words:
        return Words.derive_from(sample, words=sample.text.split(), draw=random.random())

    def batch_group_criterion(self, sample):
        return len(sample.words), None

    def batch(self, samples) -> WordsBatch:
        return WordsBatch.from_samples(samples, draw=random.random())


KINDS = {
    "packing": (Packing, {"batch_size": 2, "packing_buffer_size": 7}),
    "packs one by one": (Packing, {"batch_size": None, "packing_buffer_size": 7}),
    "several packs and batches": (Halves, {"batch_size": 3, "packing_buffer_size": 7}),
    "packs in groups": (Grouping, {"batch_size": None, "packing_buffer_size": 7}),
    "groups": (GroupingOnly, {"batch_size": 3}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("crude") / "ds", [15, 28, 17])


@pytest.fixture(params=some(list(KINDS), 2))
def kind(request):
    return KINDS[request.param]


def seen(batch):
    return batch.words, batch.draw, batch.__restore_key__


def loader(root, kind, *, rank=0, world_size=1, num_workers=0, workers="process", **settings):
    encoder, arguments = kind
    worker_config = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=num_workers, lanes=4, seed_offset=3
    )
    dataset = get_train_dataset(
        root,
        worker_config=worker_config,
        task_encoder=encoder(),
        **{**arguments, **settings},
    )
    return get_savable_loader(dataset, workers=workers)


@pytest.mark.slow
def test_a_lane_resumes_at_every_batch(root, kind):
    encoder, arguments = kind
    items = resumable(train(root, encoder(), **arguments), limit=15)
    assert len(items) == 15


def test_every_sample_is_in_one_pack_of_a_pass(root):
    dataset = val(root, Packing(), batch_size=None, packing_buffer_size=7)
    with get_savable_loader(dataset) as packs:
        numbers = [pack_number for pack in packs for pack_number in numbers_in(pack)]
    expected = [n for n in range(60) if n % 7 != 3 for _ in range(1 + (n % 5 == 0))]
    assert sorted(numbers) == expected


def numbers_in(pack):
    """The numbers of the samples of a pack; each says it as often as its copies of the text."""
    words, found = list(pack.words), []
    while words:
        number = int(words[1])
        found.append(number)
        del words[: 2 * (1 + number % 4) + 2]
    return found


@pytest.mark.slow
def test_every_batch_is_made_again_by_its_key(root, kind):
    with loader(root, kind) as batches:
        for batch in islice(batches, 20):
            key = json.loads(json.dumps(batch.__restore_key__))
            again = batches.restore_sample(key)
            assert seen(again) == seen(batch)


def test_a_sample_within_a_pack_is_made_again_as_it_was_before_packing(root):
    with loader(root, KINDS["packing"]) as batches:
        batch = next(iter(batches))
        _, packs, _ = batch.__restore_key__
        kind, samples = packs[0]
        assert kind == "pack"
        again = batches.restore_sample(samples[0])
        assert again.words == batch.words[0][: len(again.words)]


@pytest.mark.parametrize("key", [(), (0, 0), ("pack", ()), (7, 0, 0), (0, 0, 10**9), "key", 5])
def test_keys_of_nothing_are_refused(root, key):
    with loader(root, KINDS["packing"]) as batches, pytest.raises(StateError):
        batches.restore_sample(key)


def test_packs_are_counted_apart_from_samples(root):
    with loader(root, KINDS["packing"]) as batches:
        for _ in islice(batches, 8):
            pass
        stats = batches.stats()
    assert stats["packs"] == 16
    assert stats["samples"] > 16


def test_another_packing_buffer_is_another_configuration(root):
    with loader(root, KINDS["packing"]) as saved:
        next(iter(saved))
        state = saved.save_state_rank()
    other = loader(root, KINDS["packing"], packing_buffer_size=8)
    with pytest.raises(StateError, match="packing_buffer_size"):
        other.restore_state_rank(state)


class Indices(GroupingOnly):
    def encode_sample(self, sample):
        return Words.derive_from(sample, words=[self.current_sample_index, sample.__key__])

    def batch_group_criterion(self, sample):
        return 0, 2

    def batch(self, samples):
        return WordsBatch.from_samples(samples, draw=self.current_batch_index)


def test_hooks_know_the_numbers_of_their_sample_and_batch_on_any_topology(root):
    kind = (Indices, {"batch_size": None})
    with loader(root, kind) as batches:
        expected = [seen(batch)[:2] for batch in islice(batches, 12)]
    assert [number for _, number in expected] == list(range(12))
    found = {}
    for rank in range(2):
        with loader(root, kind, rank=rank, world_size=2, num_workers=1, workers="thread") as half:
            found |= {batch.draw: seen(batch)[:2] for batch in islice(half, 6)}
    assert [found[number] for number in range(12)] == expected


class Louder(AugmentTaskEncoder):
    def postencode_sample(self, sample):
        sample = super().postencode_sample(sample)
        return Words.extend(sample, words=[word.upper() for word in sample.words])


def test_an_augmented_encoder_does_all_that_the_inner_one_does(root):
    def packs(encoder):
        dataset = val(root, encoder, batch_size=2, packing_buffer_size=7)
        with get_savable_loader(dataset) as batches:
            return [seen(batch) for batch in batches]

    plain, loud = packs(Packing()), packs(Louder(Packing()))
    assert packs(AugmentTaskEncoder(Packing())) == plain
    assert [
        ([[word.upper() for word in pack] for pack in words], *rest) for words, *rest in plain
    ] == [([list(pack) for pack in words], *rest) for words, *rest in loud]


def test_an_augmented_hook_keeps_its_marks(root):
    class Marked(DefaultTaskEncoder):
        @stateless(restore_seeds=True, failure_tolerance=3)
        def encode_sample(self, sample):
            return random.random()

        def batch(self, samples):
            return samples

    class Around(AugmentTaskEncoder):
        def encode_sample(self, sample):
            return super().encode_sample(sample)

    def drawn(encoder, batch_size):
        dataset = val(root, encoder, batch_size=batch_size, worker_config=config(seed_offset=2))
        with get_savable_loader(dataset) as batches:
            return [value for batch in batches for value in batch]

    assert drawn(Around(Marked()), 3) == drawn(Marked(), 5)


def test_asking_for_the_present_sample_outside_of_hooks_is_an_error():
    with pytest.raises(ValueError, match="no hook is running"):
        _ = Packing().current_sample_index


class DeadlyAfterSelection(Packing):
    packer = Packer(12, lambda sample: len(sample.words) // 3, carry=False)

    def postencode_sample(self, sample):
        if sample.__key__ == "s18":
            os._exit(1)
        return super().postencode_sample(sample)


@pytest.mark.slow
def test_a_sample_that_kills_workers_leaves_its_pack_and_no_other(root, caplog):
    def packs(encoder):
        settings = {"batch_size": None, "packing_buffer_size": 7}
        worker_config = config(num_workers=1, lanes=1)
        dataset = val(root, encoder, worker_config=worker_config, **settings)
        with get_savable_loader(dataset) as loader:
            return [pack.words for pack in loader]

    class Harmless(DeadlyAfterSelection):
        def postencode_sample(self, sample):
            return Packing.postencode_sample(self, sample)

    alive, left = packs(Harmless()), packs(DeadlyAfterSelection())
    assert sorted(numbers_of(left)) == sorted(n for n in numbers_of(alive) if n != 18)
    same = [words for words in alive if words in left]
    assert len(same) >= len(alive) - 1
    assert "sample 's18'" in caplog.text


def numbers_of(packs):
    return [number for words in packs for number in numbers_in(Words(__key__="", words=words))]
