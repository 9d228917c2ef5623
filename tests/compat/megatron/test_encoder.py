"""Pipelines that users put together of wrappers."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import pytest
import yaml

from energon.compat.megatron.encoder import BUILDERS
from energon.packing import Packer
from megatron.energon import (
    AugmentTaskEncoder,
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    ConfigError,
    Cooker,
    DefaultTaskEncoder,
    EpochizeDataset,
    FilterDataset,
    GcDataset,
    LimitDataset,
    LogSampleDataset,
    MapDataset,
    MixBatchDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
    StateError,
    TextSample,
    WatchdogDataset,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from megatron.energon.epathlib import EPath
from tests.datasets import make_crude
from tests.effort import mixed, some
from tests.task_encoder.runs import config, val


def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=f"{sample['txt']} {random.random():.4f}")


class Texts(DefaultTaskEncoder):
    cookers = (Cooker(cook),)

    def encode_sample(self, sample):
        return TextSample.derive_from(sample, text=f"{sample.text} {random.random():.4f}")

    def batch(self, samples):
        return {
            "texts": [sample.text for sample in samples],
            "keys": [sample.__key__ for sample in samples],
            "draw": random.random(),
            "__restore_key__": (),
        }


class Standard(Texts):
    """As the default implementation builds it."""

    def build_train_datasets(self, **arguments):
        return super().build_train_datasets(**arguments)

    def build_val_datasets(self, **arguments):
        return super().build_val_datasets(**arguments)


def calls_super(name):
    def builder(self, *args, **arguments):
        self.built.add(name)
        return getattr(super(type(self), self), name)(*args, **arguments)

    return builder


def that_calls_super(kind, names):
    """An encoder of some kind whose builders of these names only call `super()`."""
    changed = type(f"{kind.__name__}Super", (kind,), {name: calls_super(name) for name in names})
    changed.built = set()
    return changed


class BatchesOfOneDataset(Texts):
    def build_train_datasets(self, *, datasets, worker_config, batch_size, **ignored):
        batches = [
            (
                self.build_batch(
                    self.build_encode_sample(
                        ShuffleBufferDataset(
                            RepeatDataset(loaded.dataset.build(), worker_config=worker_config),
                            size=6,
                            worker_config=worker_config,
                        ),
                        worker_config=worker_config,
                    ),
                    batch_size=batch_size,
                    worker_config=worker_config,
                ),
                loaded.weight,
            )
            for loaded in datasets
        ]
        dataset = BlendDataset(*batches, worker_config=worker_config)
        dataset = EpochizeDataset(dataset, length=5, worker_config=worker_config)
        dataset = LogSampleDataset(dataset, mode="train", worker_config=worker_config)
        return GcDataset(
            WatchdogDataset(dataset, worker_config=worker_config), worker_config=worker_config
        )


class PacksOfEverything(Texts):
    packer = Packer(40, lambda sample: len(sample.text))

    def build_train_datasets(self, *, datasets, worker_config, batch_size, **ignored):
        samples = ConcatDataset(
            *(loaded.dataset.build() for loaded in datasets), worker_config=worker_config
        )
        samples = FilterDataset(
            RepeatDataset(samples, worker_config=worker_config),
            filter_fn=lambda sample: not sample.__key__.endswith("3"),
            worker_config=worker_config,
        )
        packs = PackingDataset(samples, 12, self.packer, self.batch, worker_config=worker_config)
        return BatchDataset(packs, batch_size, list, worker_config=worker_config)


ENCODERS = [Standard, BatchesOfOneDataset, PacksOfEverything]


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    make_crude(folder / "a", [15, 6], prefix="a")
    make_crude(folder / "b", [9], prefix="b")
    splits = {
        part: {"blend": [{"weight": 3, "path": "a"}, {"weight": 1, "path": "b"}]}
        for part in ("train", "val")
    }
    path = folder / "blend.yaml"
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    path.write_text(json.dumps(document))
    return path


def loader(path, encoder, *, rank=0, world_size=1, num_workers=0, workers="process", **settings):
    worker_config = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=num_workers, lanes=4, seed_offset=1
    )
    dataset = get_train_dataset(
        path, worker_config=worker_config, task_encoder=encoder, batch_size=3, **settings
    )
    return get_savable_loader(dataset, workers=workers)


def endless(batches):
    while True:
        yield from batches


@pytest.mark.slow
@pytest.mark.parametrize("encoder", some(ENCODERS))
def test_custom_pipelines_continue_anywhere(blend, encoder):
    with loader(blend, encoder()) as batches:
        expected = list(islice(endless(batches), 20))
    for at in (1, 6, 11):
        # Processes once: their start is what takes the time.
        with loader(blend, encoder(), num_workers=2 if at == 6 else 0) as first:
            assert list(islice(endless(first), at)) == expected[:at]
            state = json.loads(json.dumps(first.save_state_rank()))
        with loader(blend, encoder(), num_workers=1, workers="thread") as second:
            second.restore_state_rank(state)
            assert list(islice(endless(second), 20 - at)) == expected[at:]


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ENCODERS)
def test_custom_pipelines_have_one_order_on_any_number_of_ranks(blend, encoder):
    with loader(blend, encoder()) as batches:
        expected = list(islice(endless(batches), 12))
    found = {}
    for rank in range(2):
        with loader(blend, encoder(), rank=rank, world_size=2) as half:
            for number, batch in enumerate(islice(endless(half), 6)):
                found[2 * number + rank] = batch
    assert [found[number] for number in range(12)] == expected


@pytest.mark.parametrize("encoder", [BatchesOfOneDataset])
def test_batches_of_custom_pipelines_are_made_again_by_their_keys(blend, encoder):
    with loader(blend, encoder()) as batches:
        for batch in islice(endless(batches), 12):
            key = json.loads(json.dumps(batch["__restore_key__"]))
            assert batches.restore_sample(key) == batch


class Packed(Texts):
    packer = Packer(40, lambda sample: len(sample.text))

    def select_samples_to_pack(self, samples):
        return self.packer(samples)

    def pack_selected_samples(self, samples):
        return TextSample.derive_from(samples[0], text=" ".join(each.text for each in samples))


class Grouped(Texts):
    def batch_group_criterion(self, sample):
        return len(sample.text) % 2, None


class Yielding(Texts):
    def encode_sample(self, sample):
        for number in range(int(sample.__key__[1:]) % 3):
            yield TextSample.derive_from(sample, text=f"{sample.text} {number} {random.random()}")


class WithoutCookers(DefaultTaskEncoder):
    def batch(self, samples):
        return [(sample["__key__"], random.random()) for sample in samples]


KINDS = [
    (Texts, {}),
    (Texts, {"shuffle_buffer_size": 7, "batch_drop_last": True, "virtual_epoch_length": 4}),
    (Texts, {"blend_unit": "batch"}),
    (Packed, {"packing_buffer_size": 10}),
    (Grouped, {}),
    (Yielding, {"shuffle_over_epochs_multiplier": -1}),
    (WithoutCookers, {"max_samples_per_sequence": 1}),
]


@pytest.fixture(scope="module")
def documents(blend):
    """What may be loaded: a dataset, and blends of every kind."""

    def written(name, node):
        path = blend.with_name(f"{name}.yaml")
        header = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
        path.write_text(yaml.safe_dump({**header, "splits": {"train": node, "val": node}}))
        return path

    return [
        blend.parent / "a",
        blend,
        written(
            "epochized", {"blend_epochized": [{"path": "a"}, {"path": "b", "repetitions": 1.5}]}
        ),
        written(
            "scheduled",
            {"blend": [{"path": "a", "weight": {0: 1, 20: 9}}, {"path": "b", "weight": 2}]},
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "overridden"),
    [
        *((encoder, BUILDERS) for encoder in KINDS),
        *mixed(KINDS, [[name] for name in BUILDERS]),
    ],
)
def test_builders_that_only_call_super_change_nothing(documents, encoder, overridden):
    kind, settings = encoder
    changed = that_calls_super(kind, overridden)
    # Documents take turns: each meets every encoder and every builder in some test.
    turn = KINDS.index((kind, settings)) + BUILDERS.index(overridden[-1])
    document = documents[1 if "blend_unit" in settings else turn % len(documents)]
    plain, built = (
        get_train_dataset(
            document,
            worker_config=config(lanes=4, seed_offset=1),
            task_encoder=encoder,
            **{"batch_size": 3, **settings},
        )
        for encoder in (kind(), changed())
    )
    assert built.fingerprint(4) == plain.fingerprint(4)
    with get_savable_loader(plain) as one, get_savable_loader(built) as other:
        assert list(islice(endless(other), 9)) == list(islice(endless(one), 9))
        assert other.state_dict() == one.state_dict()
    assert changed.built <= set(overridden)
    assert changed.built or overridden == ["build_val_datasets"]


@pytest.mark.slow
@pytest.mark.parametrize("overridden", [*([name] for name in BUILDERS), BUILDERS])
def test_validation_is_the_same_where_builders_only_call_super(documents, overridden):
    for document in documents:
        plain, built = (
            val(document, kind(), batch_size=4, limit=3)
            for kind in (Texts, that_calls_super(Texts, overridden))
        )
        with get_savable_loader(plain) as one, get_savable_loader(built) as other:
            for _ in range(2):
                assert list(other) == list(one)


def test_a_wrapper_around_what_super_builds_sees_the_order_of_the_plan(blend):
    class Marked(Texts):
        def build_encode_sample(self, dataset, *, worker_config):
            encoded = super().build_encode_sample(dataset, worker_config=worker_config)
            return MapDataset(encoded, lambda sample: sample, worker_config=worker_config)

    with loader(blend, Texts()) as plain, loader(blend, Marked()) as marked:
        for one, other in zip(islice(plain, 12), marked, strict=False):
            assert other["keys"] == one["keys"]


def test_datasets_that_a_program_leaves_out_are_not_read(blend):
    class OnlyOne(Texts):
        def build_train_datasets(self, *, datasets, **arguments):
            return super().build_train_datasets(datasets=datasets[1:], **arguments)

    with loader(blend, OnlyOne()) as batches:
        drawn = {key for batch in islice(batches, 6) for key in batch["keys"]}
    assert drawn == {f"b{n}" for n in range(9)}


def test_builders_outside_of_a_getter_say_where_they_run(blend):
    with pytest.raises(ConfigError, match="call get_train_dataset"):
        Texts().build_batch([], batch_size=2, worker_config=config())


def test_batches_of_one_dataset_hold_one_dataset(blend):
    with loader(blend, BatchesOfOneDataset()) as batches:
        kinds = [{key[0] for key in batch["keys"]} for batch in islice(endless(batches), 40)]
    assert all(len(kind) == 1 for kind in kinds)
    drawn = Counter(kind.pop() for kind in kinds)
    assert drawn["a"] == pytest.approx(30, abs=4), "within one of the share in each lane"


def test_an_epoch_around_a_pipeline_ends_the_loops_and_goes_on(blend):
    with loader(blend, BatchesOfOneDataset()) as batches:
        assert len(batches) == 5
        loops = [[batch["keys"] for batch in batches] for _ in range(2)]
    assert [len(loop) for loop in loops] == [5, 5]
    assert loops[0] != loops[1]


def test_datasets_say_what_they_are(blend):
    seen = []

    class Looking(Standard):
        def build_train_datasets(self, *, datasets, **arguments):
            seen.extend(
                (
                    loaded.dataset.name,
                    loaded.dataset.paths,
                    len(loaded.dataset),
                    loaded.dataset.as_file_store().get("a3.txt" if not seen else "b3.txt"),
                )
                for loaded in datasets
            )
            return super().build_train_datasets(datasets=datasets, **arguments)

    loader(blend, Looking())
    assert seen[0] == ("a", [EPath(blend.parent / "a")], 21, b"text 3")


def test_an_augmented_encoder_builds_what_the_inner_one_does_with_its_own_hooks(blend):
    class Louder(AugmentTaskEncoder):
        def encode_sample(self, sample):
            sample = super().encode_sample(sample)
            return TextSample.derive_from(sample, text=sample.text.upper())

    with (
        loader(blend, BatchesOfOneDataset()) as plain,
        loader(blend, Louder(BatchesOfOneDataset())) as loud,
    ):
        for soft, hard in zip(plain, loud, strict=True):
            assert hard["keys"] == soft["keys"]
            assert hard["texts"] == [text.upper() for text in soft["texts"]]


class PartsOfItsOwn(Texts):
    """Builds parts of the pipeline, and leaves it to the library to join them."""

    def _load_dataset(self, dataset, *args, **arguments):
        samples = super()._load_dataset(dataset, *args, **arguments)
        return self._marked(samples, "load")

    def build_cook_crude_sample(self, dataset, *, worker_config, subflavors, aux, **others):
        assert others["get_primary_aux"]() is not None
        dataset = super().build_cook_crude_sample(
            dataset, worker_config=worker_config, subflavors=subflavors, aux=aux, **others
        )
        return self._marked(dataset, "cook")

    def build_encode_sample(self, dataset, *, worker_config):
        dataset = super().build_encode_sample(dataset, worker_config=worker_config)
        return self._marked(dataset, "encode")

    def build_batch(self, dataset, **arguments):
        worker_config = arguments["worker_config"]
        batches = super().build_batch(dataset, **arguments)
        return MapDataset(batches, lambda batch: batch["texts"], worker_config=worker_config)

    @staticmethod
    def _marked(dataset, mark):
        return MapDataset(
            dataset,
            lambda sample: TextSample.derive_from(sample, text=f"{sample.text} {mark}"),
            worker_config=dataset.worker_config,
        )


class ThroughAnother(AugmentTaskEncoder):
    def build_batch(self, dataset, **arguments):
        batches = super().build_batch(dataset, **arguments)
        return MapDataset(
            batches,
            lambda texts: [text.upper() for text in texts],
            worker_config=arguments["worker_config"],
        )


def test_parts_that_an_encoder_builds_itself_are_in_what_the_getters_return(blend):
    with loader(blend, PartsOfItsOwn()) as batches:
        trained = [text for batch in islice(batches, 9) for text in batch]
    validated = [text for batch in val(blend, PartsOfItsOwn(), batch_size=3) for text in batch]
    assert len(validated) == 30
    for text in (*trained, *validated):
        assert "cook load " in text
        assert text.endswith(" encode")


def test_an_augmented_encoder_keeps_the_parts_of_the_inner_one_and_can_change_them(blend):
    inner = PartsOfItsOwn()
    for encoder, change in (
        (AugmentTaskEncoder(inner), str),
        (ThroughAnother(inner), str.upper),
        (AugmentTaskEncoder(ThroughAnother(inner)), str.upper),
    ):
        with loader(blend, inner) as plain, loader(blend, encoder) as changed:
            for one, other in zip(islice(plain, 5), changed, strict=False):
                assert other == [change(text) for text in one]


def test_wrappers_go_around_what_the_getters_return(blend):
    worker_config = config()
    dataset = get_val_dataset(
        blend, worker_config=worker_config, task_encoder=Texts(), batch_size=None
    )
    pairs = BatchDataset(dataset, 2, list, worker_config=worker_config)
    keys = MapDataset(pairs, lambda pair: [s.__key__ for s in pair], worker_config=worker_config)
    with get_savable_loader(keys) as batches:
        assert len(batches) == 15
        assert sorted(key for pair in batches for key in pair) == sorted(
            [*(f"a{n}" for n in range(21)), *(f"b{n}" for n in range(9))]
        )


def test_batches_mixed_of_datasets_keep_their_shares(blend):
    worker_config = config()

    def texts(name):
        dataset = get_train_dataset(
            blend.parent / name,
            worker_config=worker_config,
            task_encoder=Texts(),
            batch_size=None,
        )
        return dataset

    parts = [(texts("a"), 3), (texts("b"), 1)]
    for mix in ({}, {"batch_mix_fn": DefaultTaskEncoder().batch}):
        mixed = MixBatchDataset(*parts, batch_size=8, worker_config=worker_config, **mix)
        with get_savable_loader(mixed) as batches:
            for batch in islice(batches, 5):
                keys = batch.__key__ if mix else [sample.__key__ for sample in batch]
                assert Counter(key[0] for key in keys) == {"a": 6, "b": 2}


def test_a_log_names_the_keys_of_every_batch(blend, tmp_path):
    worker_config = config(worker_debug_path=str(tmp_path / "log-{worker_id}.jsonl"))
    dataset = get_val_dataset(
        blend.parent / "b", worker_config=worker_config, task_encoder=Texts(), batch_size=4
    )
    logged = LogSampleDataset(
        dataset, "val", worker_config, get_keys_fn=lambda batch: batch["keys"]
    )
    with get_savable_loader(logged) as batches:
        expected = [batch["keys"] for batch in batches]
    lines = [json.loads(line) for line in (tmp_path / "log-0.jsonl").read_text().splitlines()]
    assert [line["keys"] for line in lines] == expected
    assert lines[1]["m"] == "val"
    assert lines[1]["idx"] == 1


def test_an_epoch_within_a_pipeline_is_refused(blend):
    worker_config = config()
    dataset = LimitDataset(val(blend, Texts(), batch_size=None), 5, worker_config=worker_config)
    epochs = EpochizeDataset(dataset, 3, worker_config)
    with pytest.raises(ConfigError, match="has to be around BatchDataset, not within"):
        BatchDataset(epochs, 2, list, worker_config=worker_config)


def test_what_is_no_pipeline_is_refused(blend):
    class Nothing(Texts):
        def build_train_datasets(self, **arguments):
            return []

    with pytest.raises(ConfigError, match="return a wrapper like BatchDataset, found list"):
        loader(blend, Nothing())


def test_a_state_of_another_pipeline_is_refused(blend):
    with loader(blend, Standard()) as saved:
        next(iter(saved))
        state = saved.save_state_rank()
    with pytest.raises(StateError, match="differ"):
        loader(blend, BatchesOfOneDataset()).restore_state_rank(state)


class BranchesOfTheirOwn(Texts):
    """Each dataset passes a function of its own before they are blended."""

    def build_train_datasets(self, *, datasets, worker_config, batch_size, **ignored):
        def mark(name):
            return lambda sample: TextSample.extend(sample, text=f"{name}: {sample.text}")

        branches = [
            MapDataset(
                RepeatDataset(loaded.dataset.build(), worker_config=worker_config),
                mark(loaded.dataset.name),
                worker_config=worker_config,
            )
            for loaded in datasets
        ]
        blend = BlendDataset(*((branch, 1) for branch in branches), worker_config=worker_config)
        return BatchDataset(blend, batch_size, self.batch, worker_config=worker_config)


def test_samples_are_made_again_by_the_functions_of_their_own_branch(blend):
    with loader(blend, BranchesOfTheirOwn()) as batches:
        for batch in islice(batches, 6):
            assert batches.restore_sample(batch["__restore_key__"]) == batch
            texts, keys = batch["texts"], batch["keys"]
            assert [text[0] for text in texts] == [key[0] for key in keys]


def test_a_batch_hook_counts_as_overridden_only_where_a_program_has_its_own():
    class Collates(DefaultTaskEncoder):
        def _batch(self, samples, *arguments):
            return len(samples)

    assert not DefaultTaskEncoder()._hook_method("batch").overridden
    assert DefaultTaskEncoder(raw_batch_type=dict)._hook_method("batch").overridden
    own = Collates()._hook_method("batch")
    assert own.overridden
    assert own.function(["a", "b"]) == 2
