"""Random pipelines on random topologies, saved anywhere: every sample of every epoch once.

A case draws a pipeline (blend, epochs or one dataset; shuffle windows, packing, groups, whole
batches, balanced batches, planned packs, generators, skips) and leads it through several lives.
Each begins with the states of the one before, on other ranks and workers, perhaps with another mix,
and ends anywhere. The last one runs to the end of what it is limited to, where nothing may be
missing or have come twice.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from energon import (
    Balance,
    DefaultTaskEncoder,
    PlannedPacks,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon.packing import Selection
from tests.test_balanced_order import make_texts

SIZES = {"a": [1], "b": [3, 4], "c": [9, 8], "d": [14, 1, 16]}
LANES = (1, 2, 3, 4, 6, 12)


@dataclass(frozen=True)
class Life:
    """Who loads between two states, and for how long."""

    world_size: int
    num_workers: int
    workers: str
    steps: int | None
    """None: to the end."""
    extra_ranks: int = 0
    """How many ranks took a batch more, when the state is saved between two steps."""


@dataclass(frozen=True)
class Case:
    """A pipeline, the mixes that it goes through, and its lives."""

    kind: str
    names: tuple[str, ...]
    lanes: int
    settings: dict
    packs: bool
    carries: bool
    groups: bool
    yields: bool
    yields_batches: bool
    skips: bool
    mixes: list[dict] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)


def draw_case(random) -> Case:
    kind = random.choice(["blend"] * 4 + ["epochs", "single"])
    names = tuple(random.sample(sorted(SIZES), 1 if kind == "single" else random.randint(1, 4)))
    whole = kind == "blend" and random.random() < 0.15
    lanes = random.choice(LANES)
    balanced = {} if whole or random.random() < 0.5 else draw_balance(random, lanes)
    sized = whole or bool(balanced)
    packs = "pack" in balanced or (not sized and random.random() < 0.4)
    groups = not sized and random.random() < 0.3
    settings = {
        "batch_size": random.randint(1, 5),
        "max_samples_per_sequence": random.choice([None, 1, 2, 5]),
        "parallel_shard_iters": random.choice([None, 1, 3]),
        "blend_unit": "batch" if whole else None,
        "repeat": kind == "blend",
        **balanced,
    }
    if not whole and random.random() < 0.6:
        settings["shuffle_buffer_size"] = random.choice([2, 5, 20, 70])
    if packs and not balanced:
        settings["packing_buffer_size"] = random.randint(1, 12)
    case = Case(
        kind=kind,
        names=names,
        lanes=lanes,
        settings=settings,
        packs=packs,
        carries=random.random() < 0.5,
        groups=groups,
        yields=not balanced and random.random() < 0.3,
        yields_batches=not balanced and random.random() < 0.2,
        skips=random.random() < 0.4,
    )
    lives = [draw_life(random, lanes) for _ in range(random.randint(1, 4))]
    return replace(case, lives=lives)


def draw_balance(random, lanes) -> dict:
    """Settings by which lanes exchange samples."""
    count = random.choice([None, *(n for n in range(1, 25) if lanes % n == 0 or n % lanes == 0)])
    of_step = min(lanes, count or lanes)
    kind = random.choice(["balance", "balance", "pack", "batch_cost"])
    balance = Balance(
        cost="txt:bytes",
        window=random.choice(["step", 1, 3] if kind == "balance" else [1, 2, 5]),
        micro_batches=count,
        pool=random.choice([None, "all", *(n for n in range(1, 13) if of_step % n == 0)]),
    )
    room = random.choice([4000, 9000])
    match kind:
        case "balance":
            return {"balance": balance}
        case "pack":
            packs = PlannedPacks(length="txt:bytes", context=room)
            return {"pack": packs, "balance": random.choice([None, balance])}
        case _:
            balance = replace(balance, padded=random.random() < 0.5)
            return {"batch_cost": room, "balance": balance, "batch_size": None}


def draw_life(random, lanes) -> Life:
    world_size = random.choice([size for size in range(1, 7) if lanes % size == 0])
    hosts = random.choices(["inline", "thread", "process"], [60, 20, 1])[0]
    return Life(
        world_size=world_size,
        num_workers=0 if hosts == "inline" else random.randint(1, 3),
        workers="thread" if hosts == "inline" else hosts,
        steps=random.randint(0, 14),
        extra_ranks=random.choice([0, 0, random.randrange(world_size)]),
    )


def draw_mix(random, names) -> dict:
    """Weights, some of them schedules, and perhaps other limits than the end will have."""
    weights = {name: random.choice([0, 1, 1, 2, 5, 0.3]) for name in names}
    if not any(weights.values()):
        weights[names[0]] = 1
    mix = {name: {"weight": weight} for name, weight in weights.items()}
    if random.random() < 0.3:
        # At least one entry has a weight at any time.
        name = names[-1]
        low = 1 if sum(map(bool, weights.values())) == bool(weights[name]) else 0
        points = {0: max(low, 1), random.randint(1, 60): f"ramp to {random.randint(low, 6)}"}
        mix[name] = {"weight": points}
    return mix


class Tokens(DefaultTaskEncoder):
    """Delivers a token for every output: dataset, epoch, number, and number of the output."""

    decoder = None

    def __init__(self, case):
        super().__init__()
        self.case = case

    def tokens(self, sample):
        name = sample["__key__"]
        _, epoch, ordinal = sample["__restore_key__"][:3]
        return [[(name[0], epoch, ordinal, sub)] for sub in range(outputs(self.case, name))]

    def batch(self, samples):
        return {
            "number": self.current_batch_index,
            "tokens": [token for sample in samples for token in sample["tokens"]],
        }


class Plain(Tokens):
    def encode_sample(self, sample):
        found = self.tokens(sample)
        if not found:
            raise SkipSample
        return {**sample, "tokens": found[0]}


class Yields(Tokens):
    def encode_sample(self, sample):
        for tokens in self.tokens(sample):
            yield {**sample, "tokens": tokens}


class Packs:
    def select_samples_to_pack(self, samples):
        groups = [samples[at : at + 3] for at in range(0, len(samples), 3)]
        if not self.case.carries or len(groups) < 2:
            return groups
        return Selection(groups[:-1], carry=groups[-1])

    def pack_selected_samples(self, samples):
        tokens = [token for sample in samples for token in sample["tokens"]]
        return {**samples[0], "tokens": tokens}


class Groups:
    def batch_group_criterion(self, sample):
        return len(sample["tokens"]) + sample["tokens"][0][2] % 3, None


class YieldsBatches:
    def encode_batch(self, batch):
        tokens = batch["tokens"]
        for part in (tokens[:1], tokens[1:]):
            yield {"number": self.current_batch_index, "tokens": part}


def make_encoder(case):
    parts = [
        *([YieldsBatches] if case.yields_batches else []),
        *([Groups] if case.groups else []),
        *([Packs] if case.packs else []),
        Yields if case.yields else Plain,
    ]
    return type("Drilled", tuple(parts), {})(case)


def outputs(case, name) -> int:
    """How many outputs the hooks make of the sample with a key."""
    number = int(name[1:])
    if case.skips and number % 4 == 2:
        return 0
    return 1 + number % 3 if case.yields else 1


def document(case, folder, mix):
    entries = [{"path": str(folder / name)} for name in case.names]
    if case.kind == "epochs":
        for number, entry in enumerate(entries):
            entry["repetitions"] = repetitions(number)
        return {"splits": {"train": {"blend_epochized": entries}}}
    if case.kind == "single":
        return folder / case.names[0]
    for name, entry in zip(case.names, entries, strict=True):
        entry.update(mix[name])
    return {"splits": {"train": {"blend": entries}}}


def repetitions(number) -> int:
    return 1 + number % 2


class Run:
    """The ranks of one life."""

    def __init__(self, case, folder, mix, life, states, *, strict):
        self.case, self.life = case, life
        self.stack = ExitStack()
        self.loaders = []
        for rank in range(life.world_size):
            config = WorkerConfig(
                rank=rank,
                world_size=life.world_size,
                num_workers=life.num_workers,
                lanes=case.lanes if states is None else None,
                seed_offset=11,
            )
            dataset = get_train_dataset(
                document(case, folder, mix),
                worker_config=config,
                task_encoder=make_encoder(case),
                **case.settings,
            )
            loader = get_savable_loader(dataset, workers=life.workers)
            self.loaders.append(self.stack.enter_context(loader))
            if states is not None:
                loader.restore_state_global(json.loads(states), strict=strict)
        self.streams = [iter(loader) for loader in self.loaders]

    def batches(self, steps, extra_ranks=0):
        """Yield the batches of all ranks in turn, step by step; of None steps, all there are."""
        running = dict(enumerate(self.streams))
        for step in count():
            ranks = list(running)
            if step == steps:
                # A part of a step is the next batches of the run.
                ranks = sorted(ranks, key=self.next_number)[:extra_ranks]
            elif not ranks or (steps is not None and step > steps):
                return
            for rank in ranks:
                batch = next(running[rank], None)
                if batch is None:
                    del running[rank]
                else:
                    yield batch

    def next_number(self, rank):
        """The number in the run of the next batch of a rank."""
        lanes = self.loaders[rank].save_state_rank()["positions"].items()
        left = [at["batches"] * self.case.lanes + int(v) for v, at in lanes if not at.get("ended")]
        return min(left, default=float("inf"))

    def save(self):
        return json.dumps([loader.save_state_rank() for loader in self.loaders])

    def drawn(self):
        """How many samples of each dataset all ranks have drawn, as the reports have it."""
        found = Counter()
        for loader in self.loaders:
            for name, about in loader.report()["datasets"].items():
                found[name[0]] += about["samples"]
        return found


def check(case, folder, random):
    """Lead a case through its lives; check each resume, each report and the end."""
    delivered, states, mix, ended = Counter(), None, None, False
    strict = ["mix"] if case.kind == "blend" else True
    ahead = {}
    for life in case.lives:
        if ended:
            break
        before = mix
        if mix is None or random.random() < 0.6:
            mix = draw_mix(random, case.names)
        run = Run(case, folder, mix, life, states, strict=strict)
        with run.stack:
            for batch in run.batches(life.steps, life.extra_ranks):
                if mix is before and batch["number"] in ahead:
                    assert batch == ahead[batch["number"]], "resumed with another batch"
                delivered.update(map(tuple, batch["tokens"]))
            states = run.save()
            check_report(case, run, delivered)
            seen = states_ended(states)
            ended = seen
            # What this life would have gone on with.
            ahead = {} if ended else {b["number"]: b for b in run.batches(3)}
        assert_once(delivered)
    if ended:
        assert_complete(case, delivered, ends_of(case, delivered))
        return
    ends = ends_of(case, delivered)
    if case.kind == "blend":
        mix = {name: {"weight": random.randint(1, 4), "max_epochs": ends[name]} for name in ends}
    life = replace(draw_life(random, case.lanes), steps=None)
    run = Run(case, folder, mix, life, states, strict=strict)
    with run.stack:
        for batch in run.batches(None):
            delivered.update(map(tuple, batch["tokens"]))
        check_report(case, run, delivered)
    assert_once(delivered)
    assert_complete(case, delivered, ends)


def states_ended(states) -> bool:
    positions = [p for state in json.loads(states) for p in state["positions"].values()]
    return all(position.get("ended", False) for position in positions)


def ends_of(case, delivered) -> dict[str, int]:
    """After how many epochs each dataset ends: one more than have begun."""
    if case.kind != "blend":
        return {name: repetitions(n) for n, name in enumerate(case.names)}
    begun = {
        name: [epoch for other, epoch, *_ in delivered if other == name] for name in case.names
    }
    return {name: max(epochs, default=0) + 2 for name, epochs in begun.items()}


def assert_once(delivered):
    twice = {token: times for token, times in delivered.items() if times > 1}
    assert not twice, f"came twice: {sorted(twice)[:9]} ({len(twice)} in all)"


def assert_complete(case, delivered, ends):
    """Assert that all epochs but those beyond the end are whole."""
    for name, end in ends.items():
        size = sum(SIZES[name])
        expected = {
            (name, epoch, number, sub)
            for epoch in range(end)
            for number in range(size)
            for sub in range(outputs(case, f"{name}{number}"))
        }
        missing = expected - delivered.keys()
        assert not missing, f"missing: {sorted(missing)[:9]} ({len(missing)} of {len(expected)})"


def check_report(case, run, delivered):
    """Where nothing waits, is skipped or exchanged, the reports say what was delivered."""
    waits = (
        case.settings.get("balance")
        or case.packs
        or case.groups
        or case.yields
        or case.yields_batches
    )
    if case.kind == "blend" and not waits and not case.skips:
        counts = Counter(name for name, *_ in delivered)
        assert +run.drawn() == counts, "reports differ from what was delivered"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("drilled")
    for name, sizes in SIZES.items():
        make_texts(root / name, sizes, name)
    return root


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_every_sample_of_every_epoch_comes_once(folder, budget, monkeypatch, method):
    monkeypatch.setenv("ENERGON_START_METHOD", method)
    for number, random in enumerate(budget.rounds(at_least=3)):
        case = draw_case(random)
        try:
            check(case, folder, random)
        except Exception as error:
            error.add_note(f"DRILL_SEED={budget.seed}, round {number}: {case}")
            raise
