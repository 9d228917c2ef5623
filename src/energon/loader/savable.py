"""A loader whose position can be saved and restored, on any topology."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from energon.counting import counted
from energon.errors import StateError
from energon.loader.distributed import gather_states, scatter_states
from energon.loader.loader import BasicDataLoader
from energon.loader.log import log
from energon.loader.pipeline import Continues
from energon.loader.state import (
    build_state,
    check_fingerprint,
    check_steps,
    flatten,
    merge_states,
    read_positions,
)
from energon.stages.base import State


class SavableDataLoader(BasicDataLoader):
    """A `BasicDataLoader` with a state.

    Saving counts exactly what the trainer has received and waits for nothing. States are JSON.
    They can be restored on a fresh loader of any world size that divides their number of
    lanes, and of any number of workers, in-line, threads or processes.
    """

    def save_state_rank(self) -> State:
        """Return where the lanes of this rank are."""
        return build_state(
            self._current_positions(),
            lanes=self._lanes,
            fingerprint=self.dataset.fingerprint(self._lanes),
        )

    def restore_state_rank(
        self, state: State | Sequence[State] | None, *, strict: bool | Collection[str] = True
    ) -> None:
        """Go to where `state` was saved; it has to cover the lanes of this rank.

        Args:
            state: State of this rank, of all ranks, or a list of rank states. None, where there
                is none yet, stays at the beginning.
            strict: Which differences between saved and present configuration are errors; see
                `restore_state_global`.
        """
        if state is None:
            self._check_fresh()
        else:
            self._restore(_merged(state, strict), strict)

    def save_state_global(
        self, global_dst_rank: int = 0, *, dst_rank: int | None = None
    ) -> State | None:
        """Return where the lanes of all ranks are, or None if this is not `global_dst_rank`.

        All ranks of the data-parallel group have to call this after the same number of steps.

        Args:
            global_dst_rank: Which process gets the state, counted in the whole job.
            dst_rank: Another name of the same.
        """
        target = global_dst_rank if dst_rank is None else dst_rank
        states = gather_states(self.save_state_rank(), self.worker_config, dst_rank=target)
        if states is None:
            return None
        merged = merge_states(states)
        if ahead := check_steps(states, merged, strict=False):
            log.warning("%s; restoring this state will be refused", ahead)
        return merged

    def restore_state_global(
        self,
        state: State | Sequence[State] | None,
        *,
        src_rank: int | None = None,
        strict: bool | Collection[str] = True,
    ) -> None:
        """Go to where a global state was saved.

        Args:
            state: A global state, or a list of rank states that together cover all lanes.
            src_rank: Which rank of the data-parallel group has it and hands it to the others,
                where `state` is ignored; all of them have to call this. None means that each
                rank was given the state.
            strict: True raises if configuration or data differ from what was saved; False
                goes on from the same rows whatever differs; a collection of names, like
                `["batch_size", "data.train"]`, lets only these differ; "steps" lets ranks be
                after different numbers of batches, from where each goes on.

        Raises:
            StateError: If the loader has started, lanes are missing or doubled, ranks were ahead
                of others, or the configuration differs.
        """
        self._check_fresh()
        if src_rank is None:
            merged = _complete(state, strict)
        else:
            merged = scatter_states(
                lambda: _deal(_complete(state, strict), self.worker_config.world_size),
                self.worker_config,
                src_rank=src_rank,
            )
        self._restore(merged, strict)

    def save_state(self, dst_rank: int = 0) -> State | None:
        """Do what `save_state_global` does, under its former name."""
        return self.save_state_global(dst_rank)

    def restore_state(self, state: State | Sequence[State]) -> None:
        """Do what `restore_state_global` does, under its former name."""
        self.restore_state_global(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the content of `save_state_rank` as a flat dict of strings.

        The keys name the lanes, so torch.distributed.checkpoint can store the states of all
        ranks side by side and load them on other ranks.
        """
        return dict(flatten(self.save_state_rank()))

    def load_state_dict(
        self, state: State | Sequence[State], *, strict: bool | Collection[str] = True
    ) -> None:
        """Go to where a state was saved that covers the lanes of this rank, of whatever kind.

        Takes what `state_dict`, `save_state_rank` or `save_state_global` returned, or a list of
        these from all ranks.
        """
        self._restore(_merged(state, strict), strict)

    def _restore(self, state: State, strict: bool | Collection[str]) -> None:
        """Go to the merged `state`."""
        self._check_fresh()
        lanes = state["lanes"]
        if self.worker_config.lanes not in (None, lanes):
            raise StateError(
                f"the state was saved with {counted(lanes, 'lane')}, this loader has "
                f"WorkerConfig(lanes={self.worker_config.lanes}); leave lanes out to take them "
                "from the state"
            )
        wanted = self.worker_config.rank_lanes(lanes)
        positions = read_positions(state, wanted)
        saved, present = state["fingerprint"], self.dataset.fingerprint(lanes)
        for difference in check_fingerprint(saved, present, strict=strict):
            log.warning("restored although the configuration differs: %s", difference)
        if isinstance(self.dataset, Continues):
            self.dataset = self.dataset.continuing(saved)
        if saved.get("mix") != present.get("mix"):
            # Whether the data end there, too, is for the new mix to say.
            positions = {v: replace(position, ended=False) for v, position in positions.items()}
        self._others_go_on = not all(each.get("ended") for each in state["positions"].values())
        self._lanes = lanes
        self._positions = positions

    def _check_fresh(self) -> None:
        if self._stream is not None or self._delivered:
            raise StateError(
                f"this loader has delivered {counted(self._delivered, 'batch')}; restore a state "
                "before the first batch, on a new loader"
            )


def _merged(state: State | Sequence[State] | None, strict: bool | Collection[str]) -> State:
    """Return `state` merged, and checked to be of one step of the run."""
    merged = merge_states(state)
    if ahead := check_steps(state, merged, strict=strict):
        log.warning("%s; each lane goes on from where it was", ahead)
    return merged


def _complete(state: State | Sequence[State] | None, strict: bool | Collection[str]) -> State:
    """Return `state` merged, and checked to cover all lanes."""
    merged = _merged(state, strict)
    read_positions(merged, range(merged["lanes"]))
    return merged


def _deal(state: State, world_size: int) -> list[State]:
    """Return for each rank the part of `state` that it needs."""
    ranks: list[State] = [{**state, "positions": {}} for _ in range(world_size)]
    for lane, position in state["positions"].items():
        ranks[int(lane) % world_size]["positions"][lane] = position
    return ranks
