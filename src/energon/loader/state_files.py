"""Saved states as files: read what programs wrote, and deal the states to other ranks."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

from energon.errors import FormatError, StateError, needs_extra
from energon.formats.text import parse_json
from energon.io.atomic import publish, write_atomic
from energon.io.epath import AnyPath, EPath, any_path
from energon.loader.relane import is_at_row
from energon.loader.state import (
    COVERS,
    FORMAT,
    RUN,
    batches_of_lanes,
    check_steps,
    merge_states,
    reports_damage,
)
from energon.stages.base import State
from energon.worker import COMMON_LANES, check_lanes

if TYPE_CHECKING:
    from energon.loader.savable import SavableDataLoader

WRAPPED = "dataloader_state_dict"
"""Where Megatron puts the loader's state in what it saves."""

_RANK_FILE = "train_dataloader_dprank{}.pt"
"""The name that trainers of Megatron give the file of a data-parallel rank."""

_NUMBERED = re.compile(r"(.*?)(?<!\d)(\d+)(\.json|\.pt|\.pth)$")


def read_states(paths: Sequence[str | os.PathLike[str]]) -> State:
    """Return the states in some files, merged into one.

    Args:
        paths: Files of JSON or of `torch.save`, each with a rank state, a global state or a list of
            rank states, at any depth in the checkpoint of a trainer; or folders of such files. All
            of them may be in remote stores.

    Raises:
        StateError: If a file has no state, or the states do not belong together.
    """
    files = [file for path in paths for file in _files(any_path(path))]
    every: list[Any] = []
    for file in files:
        content = _read(file)
        states = list(_states_in(content))
        if not states:
            raise StateError(
                f"{file}: contains no state of an energon loader, as save_state_global(), "
                "save_state_rank() and state_dict() return them"
            )
        every += states
    return merge_states(every)


def save_rank_file(loader: SavableDataLoader[Any], folder: str | os.PathLike[str]) -> AnyPath:
    """Write the state of this rank as `train_dataloader_dprank003.pt`; return the path.

    Name and content are those that trainers of Megatron write: a dict with the state as
    `dataloader_state_dict`, which `torch.load` reads with `weights_only=True`. Every data-parallel
    rank calls this after the same step, with the same folder.

    Args:
        loader: The loader of this rank.
        folder: The folder of a checkpoint, local or remote. Created if it is missing.

    Example:
        >>> from energon import WorkerConfig, get_savable_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4)
        >>> loader = get_savable_loader(dataset)
        >>> print(save_rank_file(loader, "step_0"))
        step_0/train_dataloader_dprank000.pt
    """
    name = _RANK_FILE.format(f"{loader.worker_config.rank:03}")
    target = any_path(folder)
    _write({name: _bytes({WRAPPED: loader.save_state_rank()}, ".pt")}, target)
    return target / name


def load_rank_files(folder: str | os.PathLike[str]) -> State:
    """Return the state in the files that all ranks of a run have written with `save_rank_file`.

    It has the lanes of all ranks, so loaders of any number of ranks restore it, with
    `restore_state_rank`, `restore_state_global` or `load_state_dict`. Files of other names in the
    folder are left alone.

    Raises:
        StateError: If there are no such files, or they do not belong together.

    Example:
        >>> from energon import WorkerConfig, get_savable_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4)
        >>> with get_savable_loader(dataset) as loader:
        ...     _, path = next(iter(loader)), save_rank_file(loader, "step_1")
        ...     second = next(iter(loader))
        >>> resumed = get_savable_loader(dataset)
        >>> resumed.restore_state_rank(load_rank_files("step_1"))
        >>> next(iter(resumed)).__key__ == second.__key__
        True
    """
    files = sorted(any_path(folder).glob(_RANK_FILE.format("*")), key=str)
    if not files:
        raise StateError(
            f"{folder} contains no files like {_RANK_FILE.format('000')}; pass the folder that "
            "save_rank_file() wrote to"
        )
    try:
        return read_states(files)
    except StateError as error:
        raise StateError(
            f"the files of ranks in {folder} do not belong together: {error}. Use a folder for "
            "each checkpoint, so that files of a run with more ranks are not left there"
        ) from error


def _states_in(content: Any) -> Iterator[State]:
    """Yield the states within what a trainer has saved, as Lightning and Megatron nest them."""
    if isinstance(content, Mapping):
        if content.get("format") == FORMAT or _is_flat(content):
            yield dict(content)
        else:
            for value in content.values():
                yield from _states_in(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _states_in(value)


def _is_flat(content: Mapping[str, Any]) -> bool:
    """Return whether a loader's `state_dict` returned this."""
    match content.get("header"):
        case [{"format": str(name)}]:
            return name == FORMAT
    return False


@reports_damage()
def world_size_of(state: State) -> int:
    """Return how many ranks saved a state; 1 if it does not say."""
    run = state["fingerprint"].get(RUN) or {}
    return int(run.get("world_size", 1))


@reports_damage()
def redistribute(state: State, world_size: int) -> list[State]:
    """Return the states of the ranks of a run of `world_size`, which continue where `state` was.

    Raises:
        ConfigError: If the lanes of the state cannot be dealt to this number of ranks.
        StateError: If some ranks were ahead of others.
    """
    lanes = state["lanes"]
    other = lcm(world_size, COMMON_LANES)
    hint = (
        f"or change the number of lanes, for instance with --lanes {other}, which keeps the "
        "position"
    )
    check_lanes(lanes, world_size, hint=hint)
    check_steps(state, state)
    run = state["fingerprint"].get(RUN)
    fingerprint = {**state["fingerprint"], RUN: {**run, "world_size": world_size}} if run else None
    states = [
        {
            **state,
            "fingerprint": fingerprint or state["fingerprint"],
            "positions": {
                lane: state["positions"][lane]
                for lane in map(str, range(rank, lanes, world_size))
                if lane in state["positions"]
            },
        }
        for rank in range(world_size)
    ]
    if world_size == 1:
        return states
    alone = all(_follows(state, each, rank) for rank, each in enumerate(states))
    return [
        {**each, COVERS: {"rank": rank, "world_size": world_size, "alone": alone}}
        for rank, each in enumerate(states)
    ]


def _follows(state: State, of_rank: State, rank: int) -> bool:
    """Return whether a state of all lanes follows from that of one rank."""
    world_size = state["lanes"] // len(of_rank["positions"])
    batches = batches_of_lanes(of_rank, rank, world_size)
    size = state["fingerprint"]["batch_size"] or 1
    return all(
        position["batches"] == batches[int(lane)]
        and not position.get("ended")
        and not position.get("skip_rows")
        and is_at_row(position["state"], batches[int(lane)] * size)
        and not (position["state"] or {}).get("changes")
        for lane, position in state["positions"].items()
    )


def write_states(
    states: Sequence[State],
    folder: str | os.PathLike[str],
    *,
    like: Sequence[str | os.PathLike[str]] = (),
    new: bool = False,
) -> list[AnyPath]:
    """Write the state of each rank into a folder; return the paths.

    Args:
        states: States of ranks 0, 1, …
        folder: Created if it is missing.
        like: The files, or folders of files, that the states came from. If their names end in the
            number of the rank, the new files are named and written in the same way: programs that
            look for `train_dataloader_dprank003.pt` find it. Otherwise they become `rank_3.json`.
        new: Whether the folder must be new or empty, or already hold exactly these files, as after
            a command that was killed at its end. On a local disk, it appears once all are complete.

    Raises:
        StateError: If the folder does not meet that condition.
    """
    target = any_path(folder)
    contents = _contents(states, like)
    present = {path.name for path in target.glob("*")} if new and target.is_dir() else set()
    if new and (target.is_file() or any(_is_other(target / name, contents) for name in present)):
        raise StateError(f"{folder} is not empty; pass a new folder for the states")
    if new and not present and not isinstance(target, EPath):
        # A command killed earlier left the same folder, not another one with a different name.
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        _write(contents, partial)
        publish(partial, target)
    else:
        _write({name: contents[name] for name in contents if name not in present}, target)
    return [target / name for name in contents]


def _contents(states: Sequence[State], like: Sequence[str | os.PathLike[str]]) -> dict[str, bytes]:
    """Return the files of states by their names, see `write_states`."""
    files = [file for path in like for file in _files(any_path(path))]
    if _are_of_ranks(files):
        stem, digits, suffix = _NUMBERED.findall(files[0].name)[0]
        width, content = len(digits), _read(files[0])
        wrapped = isinstance(content, Mapping) and WRAPPED in content
    else:
        stem, width, suffix, wrapped = "rank_", len(str(len(states) - 1)), ".json", False
    return {
        f"{stem}{rank:0{width}}{suffix}": _bytes({WRAPPED: state} if wrapped else state, suffix)
        for rank, state in enumerate(states)
    }


def _is_other(path: AnyPath, contents: Mapping[str, bytes]) -> bool:
    """Return whether anything would be lost, or mixed up with the contents."""
    return path.is_dir() or path.read_bytes() != contents.get(path.name)


def _write(contents: Mapping[str, bytes], folder: AnyPath) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = folder / name
        if isinstance(path, EPath):
            path.write_bytes(content)
        else:
            write_atomic(path, content)


def _are_of_ranks(files: Sequence[AnyPath]) -> bool:
    """Return whether names differ only in a number, which counts from 0."""
    names = [_NUMBERED.fullmatch(file.name) for file in files]
    stems = {(name[1], name[3]) for name in names if name is not None}
    numbers = sorted(int(name[2]) for name in names if name is not None)
    return len(stems) == 1 and numbers == list(range(len(files)))


def _bytes(content: State, suffix: str) -> bytes:
    if suffix == ".json":
        return json.dumps(content).encode()
    with needs_extra("torch", f"writing {suffix} files needs torch"):
        import torch
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _files(path: AnyPath) -> list[AnyPath]:
    if path.is_file() or not path.is_dir():
        return [path]
    files = [each for each in path.glob("*") if each.suffix in (".json", ".pt", ".pth")]
    files.sort(key=str)
    if not files and any(path.glob("*.distcp")):
        raise StateError(
            f"{path} was written by torch.distributed.checkpoint; convert it to a file with "
            f"`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} state.pt`"
        )
    if not files:
        error = FileNotFoundError(path)
        raise StateError(f"{path}: there are no .json or .pt files") from error
    return files


def _read(file: AnyPath) -> Any:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError(f"{file}: {error.strerror or error}") from error
    if data[:1] in (b"{", b"["):
        try:
            return parse_json(data, origin=str(file))
        except FormatError as error:
            raise StateError(f"{error}; the JSON is damaged, or not a state") from error
    return _read_torch(data, file)


def _read_torch(data: bytes, file: AnyPath) -> Any:
    with needs_extra("torch", f"{file} is not JSON, and reading files of torch.save needs torch"):
        import torch
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(
            f"{file}: neither JSON nor plain data of torch.save ({type(error).__name__}); states "
            "of other loaders, which are pickled objects, are not read"
        ) from error
