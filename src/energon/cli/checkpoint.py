"""`energon checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from energon.cli.command_group import echo, echo_lines
from energon.cli.options import ADDRESS
from energon.io.epath import AnyPath
from energon.messages import counted

_FILES = click.argument("files", nargs=-1, required=True, type=ADDRESS)


@click.group("checkpoint")
def command() -> None:
    """Inspect saved loader states, and redistribute them to other ranks.

    FILES are JSON or written by torch.save, with the state of a rank or of all, or folders of
    them. States load on any world size that divides their lanes without being dealt again; `redist`
    is for programs that give each rank a file, and for other world sizes.

    \b
    Example:
      energon checkpoint info checkpoints/data
      energon checkpoint redist --new-world-size 16 checkpoints/data checkpoints/data16
    """


@command.command("info")
@_FILES
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def info(files: tuple[AnyPath, ...], as_json: bool) -> None:
    """Show where a run was when it was saved."""
    from energon.loader.state_files import read_states

    state = read_states(files)
    if as_json:
        click.echo(json.dumps(state, indent=2))
        return
    echo_lines(_report(state))


@command.command("redist")
@_FILES
@click.argument("folder", type=ADDRESS)
@click.option("--new-world-size", type=click.IntRange(1), required=True, prompt="Number of ranks")
@click.option(
    "--lanes",
    type=click.IntRange(1),
    help="Give the run so many lanes, a multiple of the number of ranks. Without it, the run keeps "
    "its lanes and continues exactly.",
)
def redist(
    files: tuple[AnyPath, ...], folder: AnyPath, new_world_size: int, lanes: int | None
) -> None:
    """Redistribute the states in FILES to another number of ranks, one file each, in FOLDER.

    The new files are called and written like FILES, if these are numbered. If the number of ranks
    does not divide the lanes of the run, --lanes gives it others: the position in the data is
    kept and later epochs are exact, but some samples of the epochs in progress may come again or
    be left out. How many is printed.
    """
    from energon.loader.relane import relane
    from energon.loader.state_files import read_states, redistribute, write_states

    state = read_states(files)
    if lanes is not None and lanes != state["lanes"]:
        relaned = relane(state, lanes)
        echo(f"{counted(state['lanes'], 'lane')} became {relaned.describe()}")
        state = relaned.state
    paths = write_states(redistribute(state, new_world_size), folder, like=files)
    echo(f"{counted(len(paths), 'state')} in {folder}: {paths[0].name} to {paths[-1].name}")


@command.command("diff")
@click.argument("first", type=ADDRESS)
@click.argument("second", type=ADDRESS)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def diff(first: AnyPath, second: AnyPath, as_json: bool) -> None:
    """Show how two states differ, each a file or a folder with one file per rank."""
    from energon.inspect.saved_state import compare_states
    from energon.loader.state_files import read_states

    lines = list(compare_states(read_states([first]), read_states([second])))
    if as_json:
        click.echo(json.dumps({"differences": lines}, indent=2))
        return
    echo_lines(lines or ["the states are of the same position of the same run"])


@command.command("edit")
@_FILES
@click.argument("folder", type=ADDRESS)
@click.option("--world-size", type=click.IntRange(1), required=True, help="Ranks of the run.")
@click.option(
    "--skip-steps", type=click.IntRange(1), required=True, help="Number of steps to skip."
)
def edit(files: tuple[AnyPath, ...], folder: AnyPath, world_size: int, skip_steps: int) -> None:
    """Write states into FOLDER that continue from FILES some steps later.

    The samples of these steps are left out; all later ones come in the steps in which they would
    have come. Prints what changes, and refuses what would not be exact.

    \b
    Example:
      energon checkpoint edit --world-size 8 --skip-steps 20 checkpoints/data edited
    """
    from energon.inspect.saved_state import skip_steps as skip
    from energon.loader.state_files import read_states, redistribute, write_states

    state = read_states(files)
    edited = skip(state, skip_steps, world_size=world_size)
    echo_lines(edited.about)
    paths = write_states(redistribute(edited.state, world_size), folder, like=files)
    echo(f"{counted(len(paths), 'state')} in {folder}: {paths[0].name} to {paths[-1].name}")


def _positions(state: dict[str, Any]) -> Iterator[str]:
    """Yield lines that tell where in each dataset the run is, as far as the state tells."""
    from energon.errors import StateError
    from energon.inspect.saved_state import describe_position

    try:
        yield from list(describe_position(state))
    except StateError:  # of a pipeline of another kind
        for name, leaf in state["fingerprint"].get("leaves", {}).items():
            yield f"{name}: {counted(leaf.get('samples', 0), 'sample')}"


def _report(state: dict[str, Any]) -> Iterator[str]:
    saved, about = state["positions"], state["fingerprint"]
    batches = [position["batches"] for position in saved.values()]
    size = len(json.dumps(state))
    lanes = state["lanes"]
    done = counted(sum(batches), "batch")
    yield f"{len(saved)} of {counted(lanes, 'lane')}, {done}, {size:,} bytes"
    yield f"batches of a lane: {min(batches, default=0)} to {max(batches, default=0)}"
    yield f"seed {about.get('seed')}, batch size {about.get('batch_size')}"
    possible = [str(size) for size in range(1, lanes + 1) if lanes % size == 0]
    yield f"world sizes: {', '.join(possible)}"
    yield from _positions(state)
    skipped = sum(len(position.get("skip_rows", ())) for position in saved.values())
    if skipped:
        yield f"{skipped} rows left out because they killed workers"
