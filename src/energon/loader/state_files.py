"""Saved states as files: read whatever programs made of them, deal them to other ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from energon.errors import StateError
from energon.extra import needs_extra
from energon.io.atomic import write_atomic
from energon.loader.state import merge_states
from energon.stages.base import State
from energon.worker import check_lanes

WRAPPED = "dataloader_state_dict"
"""Where Megatron puts the state of a loader into what it saves."""


def read_states(paths: Sequence[str | os.PathLike[str]]) -> State:
    """Return the states in some files, merged to one.

    Args:
        paths: Files of JSON or of `torch.save`, with a rank state, a global state or a list of
            rank states each; or folders of such files.

    Raises:
        StateError: If a file has no state, or the states do not belong together.
    """
    files = [file for path in paths for file in _files(Path(path))]
    found: list[Any] = []
    for file in files:
        content = _read(file)
        if isinstance(content, Mapping) and WRAPPED in content:
            content = content[WRAPPED]
        found += content if isinstance(content, list) else [content]
    return merge_states(found)


def redistribute(state: State, world_size: int) -> list[State]:
    """Return the states of the ranks of a run of `world_size`, which go on where `state` was.

    Raises:
        ConfigError: If the lanes of the state cannot be dealt to so many ranks.
    """
    lanes = state["lanes"]
    check_lanes(lanes, world_size)
    return [
        {
            **state,
            "positions": {
                lane: state["positions"][lane]
                for lane in map(str, range(rank, lanes, world_size))
                if lane in state["positions"]
            },
        }
        for rank in range(world_size)
    ]


def write_states(states: Sequence[State], folder: str | os.PathLike[str]) -> list[Path]:
    """Write the state of each rank into a folder, as JSON; return where they are."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    width = len(str(len(states) - 1))
    paths = [target / f"rank_{rank:0{width}}.json" for rank in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        write_atomic(path, json.dumps(state).encode())
    return paths


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix in (".json", ".pt", ".pth"))
    if not files:
        raise StateError(f"{path}: there are no .json or .pt files")
    return files


def _read(file: Path) -> Any:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError(f"{file}: {error.strerror or error}") from error
    if data[:1] in (b"{", b"["):
        try:
            return json.loads(data)
        except ValueError as error:
            raise StateError(f"{file}: the JSON is damaged: {error}") from error
    return _read_torch(file)


def _read_torch(file: Path) -> Any:
    with needs_extra("torch", f"{file} is no JSON, and reading what torch has saved needs it"):
        import torch
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(
            f"{file}: neither JSON nor plain data of torch.save ({type(error).__name__}); states "
            "of other loaders, which are pickled objects, are not read"
        ) from error
