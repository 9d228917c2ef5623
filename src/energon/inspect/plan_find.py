"""Find samples in a planned run: when a key is seen, and what a step consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from energon.errors import ConfigError
from energon.inspect.planned_run import Moment, PlannedRun


class Sighting(NamedTuple):
    """A sample at some moment of a run."""

    moment: Moment
    lane: int
    row: int
    leaf: str
    epoch: int
    ordinal: int
    key: str
    shard: str


def find_key(run: PlannedRun, key: str, *, batches: int) -> list[Sighting]:
    """Return when the samples with a key are seen in the first `batches` of a run.

    Costs the same for the first epoch and for the millionth: nothing is gone through.

    Raises:
        ConfigError: If no dataset of the run has such a key, or one that has it is drawn from
            with replacement.
    """
    known = False
    found: list[Sighting] = []
    for leaf, opened in enumerate(run.leaves):
        for ordinal in opened.source.find(key):
            known = True
            found += _sightings(run, leaf, ordinal, batches)
    if not known:
        raise ConfigError(
            f"no dataset has a sample {key!r}; keys are the paths of files in a shard up to the "
            f"first dot of their names. There are {', '.join(run.names)}"
        )
    return sorted(found)


def list_step(run: PlannedRun, step: int) -> list[Sighting]:
    """Return the samples of a step: of one batch for each rank.

    Raises:
        ConfigError: If the run ends before.
    """
    world_size = run.workers.world_size
    found: list[Sighting] = []
    for batch in range(step * world_size, (step + 1) * world_size):
        turn, lane = divmod(batch, run.lanes)
        turn -= run.first_turn
        if turn < 0:
            raise ConfigError(
                f"the run had other lanes before step {run.first_turn * run.lanes // world_size}; "
                "give a state that was saved before it was given these"
            )
        rows = run.plan.rows(lane, turn * run.batch_size, run.batch_size)
        triples = zip(*(column.tolist() for column in rows), strict=True)
        for position, (leaf, epoch, ordinal) in enumerate(triples):
            found.append(
                _sighting(run, lane, turn * run.batch_size + position, leaf, epoch, ordinal)
            )
    if not found:
        raise ConfigError(f"there is no step {step}: the run ends before")
    return found


def _sightings(run: PlannedRun, leaf: int, ordinal: int, batches: int) -> Iterator[Sighting]:
    misses = epoch = 0
    # Lanes are not in lockstep, so an epoch may come a little after the next one.
    while misses < 2:
        place = run.plan.find(leaf, epoch, ordinal)
        if place is None or run.moment(*place).batch >= batches:
            misses += 1
        else:
            misses = 0
            yield _sighting(run, *place, leaf, epoch, ordinal)
        epoch += 1


def _sighting(
    run: PlannedRun, lane: int, row: int, leaf: int, epoch: int, ordinal: int
) -> Sighting:
    if leaf >= len(run.leaves):
        raise ConfigError(
            f"at that time the run has read {run.recipe.leaves[leaf].uid}, which it has left out "
            "since then; give a state that was saved before"
        )
    where = run.leaves[leaf].source.locate(ordinal)
    moment = run.moment(lane, row)
    return Sighting(moment, lane, row, run.names[leaf], epoch, ordinal, where.key, where.shard)
