from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from energon import (
    ConfigError,
    EmptyDatasetError,
    SkipSample,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon.formats.meta import yaml
from energon.formats.meta.yaml import dump_yaml
from tests.datasets import make_captions, make_crude
from tests.effort import mixed
from tests.encoders import Keys
from tests.task_encoder.runs import config, flat, one_lane, resumable, train, val

ALL = [f"s{n}" for n in range(20)]


def document(*leaves, part="train", kind="blend"):
    return {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {part: {kind: list(leaves)}},
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two datasets, of 6 samples and of 10."""
    folder = tmp_path_factory.mktemp("pair")
    make_crude(folder / "a", [6], prefix="a")
    make_crude(folder / "b", [4, 6], prefix="b")
    return [{"path": str(folder / "a")}, {"path": str(folder / "b")}]


def keys(dataset, count=None):
    return flat(one_lane(dataset, count)[0])


def all_ranks(get, *, lanes, world_size, **settings):
    """The batches of a whole job in their global order."""
    ranks = []
    for rank in range(world_size):
        worker_config = config(rank=rank, world_size=world_size, lanes=lanes)
        ranks.append(list(get_loader(get(worker_config=worker_config, **settings))))
    return [ranks[g % world_size][g // world_size] for g in range(sum(map(len, ranks)))]


# Training


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_samples_per_sequence": 1},
        {"max_samples_per_sequence": 3, "parallel_shard_iters": 2},
        {"shuffle_over_epochs_multiplier": None},
        {"shuffle_buffer_size": 5},
    ],
    ids=str,
)
def test_every_epoch_has_every_sample_once(root, settings):
    drawn = keys(train(root, Keys(), **settings), 15)
    epochs = [drawn[start : start + 20] for start in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(ALL)] * 3
    if settings.get("shuffle_over_epochs_multiplier", 1) is not None:
        assert len({tuple(epoch) for epoch in epochs}) == 3
    resumable(train(root, Keys(), **settings))


def test_data_that_are_not_shuffled_keep_their_order(root):
    assert keys(train(root, Keys(), shuffle_over_epochs_multiplier=None), 10) == ALL * 2


def test_several_epochs_may_be_shuffled_together(root):
    drawn = keys(train(root, Keys(), shuffle_over_epochs_multiplier=3), 15)
    assert Counter(drawn) == dict.fromkeys(ALL, 3)
    assert sorted(drawn[:20]) != sorted(ALL)


def test_samples_may_be_drawn_with_replacement(root):
    drawn = Counter(keys(train(root, Keys(), shuffle_over_epochs_multiplier=-1), 500))
    assert set(drawn) == set(ALL)
    assert len(set(drawn.values())) > 1


def test_the_order_is_a_function_of_the_seed(root):
    def drawn(seed):
        return keys(train(root, Keys(), worker_config=config(seed_offset=seed)), 5)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_another_window_of_blended_rows_is_another_order_of_the_same_samples(pair):
    def windows(size):
        drawn = keys(train(document(*pair), Keys(), shuffle_buffer_size=size), 16)
        return [drawn[start : start + 16] for start in range(0, 64, 16)]

    plain, shuffled = windows(None), windows(16)
    assert windows(0) == windows(1) == plain
    assert shuffled != plain
    assert [sorted(window) for window in shuffled] == [sorted(window) for window in plain]


@pytest.mark.parametrize(("world_size", "shuffle"), mixed([1, 2, 4], [None, 1]))
def test_data_that_do_not_repeat_come_once_and_end(root, world_size, shuffle):
    batches = all_ranks(
        get_train_dataset,
        lanes=4,
        world_size=world_size,
        path=root,
        batch_size=3,
        repeat=False,
        shuffle_over_epochs_multiplier=shuffle,
        task_encoder=Keys(),
    )
    assert sorted(flat(batches)) == sorted(ALL)


def test_the_end_of_data_that_do_not_repeat_is_resumed_exactly(root):
    dataset = train(root, Keys(), repeat=False, batch_size=3)
    assert len(one_lane(dataset)[0]) == 7
    resumable(dataset)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [6, 6, 6, 2]), (True, [6, 6, 6])])
def test_a_last_smaller_batch_may_be_dropped(root, drop_last, sizes):
    for get in (train, val):
        settings = {"repeat": False} if get is train else {}
        dataset = get(root, Keys(), batch_size=6, batch_drop_last=drop_last, **settings)
        assert [len(batch) for batch in one_lane(dataset)[0]] == sizes
        assert len(dataset) == len(sizes)


@pytest.mark.parametrize("repeat", [False, True])
def test_an_epochized_blend_has_every_sample_as_often_as_it_says(pair, repeat):
    twice = document({**pair[0], "repetitions": 2}, pair[1], kind="blend_epochized")
    dataset = train(twice, Keys(), batch_size=11, repeat=repeat)
    assert len(dataset) == 2
    drawn = keys(dataset, 2)
    expected = {**{f"a{n}": 2 for n in range(6)}, **{f"b{n}": 1 for n in range(10)}}
    assert Counter(drawn) == expected
    assert len(one_lane(dataset, 5)[0]) == (5 if repeat else 2)
    resumable(dataset, limit=8)


def test_the_same_dataset_twice_is_drawn_from_independently(pair):
    twice = document({**pair[1], "subflavors": {"at": 0}}, {**pair[1], "subflavors": {"at": 1}})

    class Both(Keys):
        def batch(self, samples):
            return [(sample["__subflavors__"]["at"], sample["__key__"]) for sample in samples]

    drawn = keys(train(twice, Both()), 20)
    first, second = ([key for at, key in drawn if at == number] for number in (0, 1))
    assert first != second
    assert sorted(set(first)) == sorted(set(second))


@pytest.mark.parametrize(("level", "modes"), [(0, []), (1, ["train"]), (2, ["train", "val"])])
def test_the_keys_of_batches_are_logged_from_the_level_on_that_was_asked_for(
    root, tmp_path, level, modes
):
    quiet = config(lanes=2)
    logging = config(
        lanes=2,
        worker_log_level=level,
        # The folder is made with the first line.
        worker_debug_path=str(tmp_path / "logs" / "log-{worker_id}.jsonl"),
    )
    states, keys = [], {}
    for mode, make in (("train", train), ("val", val)):
        loaders = [get_savable_loader(make(root, worker_config=each)) for each in (quiet, logging)]
        plain, keys[mode] = ([batch["__key__"] for batch in islice(each, 4)] for each in loaders)
        assert plain == keys[mode]
        states += [each.save_state_rank() for each in loaders]
    assert states[0] == states[1]
    assert states[2] == states[3]
    lines = [
        json.loads(line)
        for path in sorted(tmp_path.glob("logs/log-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert sorted({line["m"] for line in lines}) == modes
    for mode in modes:
        written = [line["keys"] for line in lines if line["m"] == mode]
        assert all(batch in written for batch in keys[mode])


@pytest.mark.parametrize(("workers", "files"), [(0, ["1"]), (2, ["4", "5"])])
def test_each_worker_has_a_log(root, tmp_path, workers, files):
    logged = config(
        rank=1,
        world_size=2,
        num_workers=workers,
        worker_log_level=1,
        worker_debug_path=str(tmp_path / "{worker_id}"),
    )
    with get_loader(train(root, worker_config=logged), workers="thread") as loader:
        for _ in zip(range(4), loader, strict=False):
            pass
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == files


def test_a_virtual_epoch_ends_a_loop_and_the_next_one_goes_on(root):
    straight = one_lane(train(root, Keys()), 9)[0]
    loader = get_savable_loader(train(root, Keys(), virtual_epoch_length=3))
    assert len(loader) == 3
    assert [batch for _ in range(3) for batch in loader] == straight


def test_a_virtual_epoch_is_counted_in_batches_of_a_rank(root):
    for rank in range(2):
        worker_config = config(rank=rank, world_size=2, lanes=4)
        dataset = train(root, Keys(), worker_config=worker_config, virtual_epoch_length=3)
        assert len(list(get_loader(dataset))) == 3


def test_a_virtual_epoch_beyond_the_end_of_the_data_ends_there(root):
    dataset = train(root, Keys(), repeat=False, virtual_epoch_length=100)
    loader = get_loader(dataset)
    assert len(list(loader)) == 5
    assert len(dataset) == len(loader) == 5


def test_samples_that_are_skipped_do_not_end_a_virtual_epoch(root):
    class Odd(Keys):
        def encode_sample(self, sample):
            if sample["__key__"][-1] in "02468":
                raise SkipSample
            return sample

    dataset = train(root, Odd(), virtual_epoch_length=8)
    assert [len(batch) for batch in get_loader(dataset)] == [4] * 8


def test_what_dataset_yaml_says_goes_over_the_arguments(tmp_path):
    root = make_crude(tmp_path / "ds", [20])
    path = root / ".nv-meta/dataset.yaml"
    about = yaml.load(path.read_text(), origin=str(path))
    about.update(max_samples_per_sequence=2, parallel_shard_iters=3, shuffle_over_epochs=4)
    path.write_text(dump_yaml(about))
    (leaf,) = train(root, Keys(), max_samples_per_sequence=7, parallel_shard_iters=8).plan.leaves
    assert (leaf.slice_samples, leaf.parallel_slices, leaf.shuffle_over_epochs) == (2, 3, 4)


def test_the_length_of_slices_is_chosen_by_the_size_of_samples(root):
    (leaf,) = train(root, Keys()).plan.leaves
    assert 1 <= leaf.slice_samples <= 1_024
    (leaf,) = train(root, Keys(), max_samples_per_sequence=5).plan.leaves
    assert leaf.slice_samples == 5


# Validation


@pytest.mark.parametrize(("world_size", "lanes"), mixed([1, 2, 4], [4, 8]))
def test_validation_has_every_sample_once_and_in_order(root, world_size, lanes):
    batches = all_ranks(
        get_val_dataset,
        lanes=lanes,
        world_size=world_size,
        path=root,
        batch_size=2,
        task_encoder=Keys(),
    )
    assert flat(batches) == ALL


def test_validation_passes_over_leaves_one_after_the_other_whatever_their_weights(pair):
    blend = document({**pair[1], "weight": 0.1}, {**pair[0], "weight": 9}, part="val")
    expected = [f"b{n}" for n in range(10)] + [f"a{n}" for n in range(6)]
    assert keys(val(blend, Keys(), batch_size=7)) == expected
    resumable(val(blend, Keys(), batch_size=7))


def test_each_pass_of_validation_starts_afresh(root):
    loader = get_savable_loader(val(root, Keys()))
    assert flat(islice(loader, 2)) == ALL[:8]
    assert [flat(loader), flat(loader)] == [ALL, ALL]


@pytest.mark.parametrize(("limit", "batches"), [(None, 5), (0, 5), (3, 3), (5, 5), (99, 5)])
def test_a_limit_bounds_the_batches_of_each_pass(root, limit, batches):
    dataset = val(root, Keys(), limit=limit)
    loader = get_savable_loader(dataset)
    passes = [list(loader) for _ in range(3)]
    assert passes == [[ALL[at : at + 4] for at in range(0, 4 * batches, 4)]] * 3
    assert len(dataset) == len(loader) == batches


def test_a_limit_is_for_each_rank(root):
    batches = all_ranks(
        get_val_dataset,
        lanes=4,
        world_size=2,
        path=root,
        batch_size=2,
        limit=3,
        task_encoder=Keys(),
    )
    assert flat(batches) == ALL[:12]


def test_validation_datasets_come_one_by_one_with_their_names(pair):
    leaves = [{**leaf, "subflavors": {"n": number}} for number, leaf in enumerate(pair)]
    found = get_val_datasets(
        document(*leaves, part="val"),
        worker_config=config(),
        batch_size=4,
        task_encoder=Keys(),
        subflavors={"more": True},
    )
    assert [about.name for _, about in found] == ["a", "b"]
    assert [about.paths for _, about in found] == [[leaf["path"]] for leaf in pair]
    assert [dict(about.subflavors) for _, about in found] == [
        {"n": 0, "more": True},
        {"n": 1, "more": True},
    ]
    assert [keys(dataset) for dataset, _ in found] == [
        [f"a{n}" for n in range(6)],
        [f"b{n}" for n in range(10)],
    ]
    for dataset, _ in found:
        resumable(dataset)


def test_validation_datasets_have_their_own_limit_and_start_afresh(pair):
    found = get_val_datasets(
        document(*pair, part="val"),
        worker_config=config(),
        batch_size=4,
        limit=2,
        task_encoder=Keys(),
    )
    for (dataset, _), name in zip(found, "ab", strict=True):
        loader = get_loader(dataset)
        expected = [f"{name}{n}" for n in range(min(8, 6 if name == "a" else 10))]
        assert [flat(loader), flat(loader)] == [expected] * 2


# What is read


def test_another_split_and_other_files_may_be_named(tmp_path):
    root = make_captions(tmp_path / "ds", [3, 4])
    (root / ".nv-meta/mine.yaml").write_text("split_parts: {held_out: [shards/001.tar]}\n")
    (root / ".nv-meta/raw.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    settings = {
        "split_part": "held_out",
        "split_config": "mine.yaml",
        "dataset_config": "raw.yaml",
    }
    (batch,) = one_lane(val(root, **settings))[0]
    assert batch["__key__"] == ["s3", "s4", "s5", "s6"]
    assert batch["json"] == {"n": [3, 4, 5, 6]}
    drawn = keys(train(root, Keys(), batch_size=1, **settings), 4)
    assert sorted(drawn) == ["s3", "s4", "s5", "s6"]


def test_subflavors_of_the_call_go_over_those_of_the_data(tmp_path):
    root = make_crude(tmp_path / "ds", [2])
    path = root / ".nv-meta/dataset.yaml"
    about = yaml.load(path.read_text(), origin=str(path))
    path.write_text(dump_yaml({**about, "subflavors": {"a": 1, "b": 1, "c": 1}}))
    leaf = {"path": str(root), "subflavors": {"b": 2, "c": 2}}
    dataset = val(document(leaf, part="val"), batch_size=None, subflavors={"c": 3})
    assert [sample["__subflavors__"] for sample in one_lane(dataset)[0]] == [
        {"a": 1, "b": 2, "c": 3}
    ] * 2


def test_without_a_task_encoder_samples_are_batched_field_by_field(tmp_path):
    root = make_captions(tmp_path / "ds", [4])
    for get in (get_train_dataset, get_val_dataset):
        (batch, *_) = islice(get_loader(get(root, worker_config=config(), batch_size=4)), 1)
        assert batch.image.shape == (4, 3, 8, 12)
        assert sorted(batch.caption) == [f"caption {n}" for n in range(4)]


def test_default_configurations_load(root):
    worker_config = WorkerConfig.default_worker_config(num_workers=0)
    assert len(flat(get_loader(val(root, Keys(), worker_config=worker_config)))) == 20


# What makes no sense

OF_BOTH = [
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"batch_size": True}, "batch_size must be a whole number or None, got True"),
    ({"batch_size": "8"}, "batch_size must be a whole number or None, got '8'"),
    ({"batch_size": -2}, "batch_size must be at least 1, got -2"),
    ({"packing_buffer_size": 8}, "does not override select_samples_to_pack"),
    ({"packing_buffer_size": "8"}, "packing_buffer_size must be a whole number or None, got '8'"),
    ({"packing_buffer_size": 0}, "packing_buffer_size must be at least 1, or None, got 0"),
    ({"split_part": "tarin"}, "did you mean 'train'"),
    ({"split_config": "nothing.yaml"}, "nothing.yaml: no such file"),
    ({"dataset_config": "nothing.yaml"}, "nothing.yaml"),
    ({"encoder": Keys}, "Keys is a class.*Keys()"),
    ({"encoder": "Keys"}, "expected a TaskEncoder, found 'Keys'"),
]
OF_TRAINING = [
    ({"virtual_epoch_length": -1}, r"virtual_epoch_length must be .* 0 \(no end\) or more, got -1"),
    ({"virtual_epoch_length": 1.5}, "virtual_epoch_length must be a whole number.*, got 1.5"),
    ({"virtual_epoch_length": None}, "virtual_epoch_length must be a whole number.*, got None"),
    ({"shuffle_buffer_size": -1}, "shuffle_buffer_size.*-1"),
    ({"max_samples_per_sequence": -1}, "-1"),
    ({"max_samples_per_sequence": 0}, "max_samples_per_sequence.*0"),
    ({"parallel_shard_iters": -1}, "-1"),
    ({"parallel_shard_iters": 0}, "parallel_shard_iters.*0"),
    ({"shuffle_over_epochs_multiplier": 0}, "shuffle_over_epochs_multiplier must be.*got 0"),
    ({"shuffle_over_epochs_multiplier": -2}, "shuffle_over_epochs_multiplier must be.*got -2"),
    ({"shuffle_over_epochs_multiplier": 1.5}, "shuffle_over_epochs_multiplier must.*got 1.5"),
]


@pytest.mark.parametrize(
    ("get", "settings", "message"),
    [
        *((get, *case) for get in (train, val) for case in OF_BOTH),
        *((train, *case) for case in OF_TRAINING),
        (val, {"limit": -1}, "limit.*-1"),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_arguments_that_make_no_sense_are_refused(root, get, settings, message):
    with pytest.raises(ConfigError, match=message):
        get(root, **{"encoder": Keys(), **settings})


def test_a_leaf_without_samples_is_refused(pair):
    nothing = {**pair[0], "subset": {"range": [2, 2]}}
    with pytest.raises(EmptyDatasetError, match="no samples"):
        train(document(nothing, pair[1]), Keys())
