"""`energon checkpoint`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from energon.cli.main import echo, echo_json, echo_lines
from energon.cli.options import (
    ADDRESS,
    allow_option,
    json_option,
    load_encoder,
    option,
    options_object,
)
from energon.errors import StateError
from energon.io.address import redact
from energon.io.epath import AnyPath
from energon.messages import counted

_FILES = click.argument("files", nargs=-1, required=True, type=ADDRESS)


def _ask_for_ranks(context: click.Context) -> int:
    try:
        return int(click.prompt("Number of ranks", type=click.IntRange(1)))
    except click.Abort:
        if sys.stdin.isatty():
            raise
        (option,) = (each for each in context.command.params if each.name == "new_world_size")
        raise click.MissingParameter(ctx=context, param=option) from None


@click.group("checkpoint")
def command() -> None:
    """Inspect, compare and edit saved loader states, and redistribute them to other ranks.

    FILES are states of one rank or of all ranks, as JSON or from torch.save, or folders of them.
    States load without conversion if the world size divides their number of lanes; use `redist`
    for other world sizes, and for programs that expect one file per rank.

    \b
    Example:
      energon checkpoint info checkpoints/data
      energon checkpoint redist --new-world-size 16 checkpoints/data checkpoints/data16
    """


@command.command("info")
@_FILES
@json_option
def info(files: tuple[AnyPath, ...], as_json: bool) -> None:
    """Show where a run was when it was saved.

    \b
    Example:
      energon checkpoint info checkpoints/data
      energon checkpoint info --json checkpoints/data
    """
    from energon.loader.state_files import read_states

    state = read_states(files)
    if as_json:
        echo_json(state)
        return
    echo_lines(_report(state))


@command.command("redist")
@_FILES
@click.argument("folder", type=ADDRESS)
@click.option(
    "--new-world-size",
    type=click.IntRange(1),
    help="New number of ranks; unchanged with --lanes alone.",
)
@click.option(
    "--lanes",
    type=click.IntRange(1),
    help="New number of lanes, a multiple of the number of ranks. Without it, the run keeps its "
    "lanes and continues exactly.",
)
@json_option
@click.pass_context
def redist(
    context: click.Context,
    files: tuple[AnyPath, ...],
    folder: AnyPath,
    new_world_size: int | None,
    lanes: int | None,
    as_json: bool,
) -> None:
    """Redistribute the states in FILES to another number of ranks, one file each, in FOLDER.

    If FILES are numbered, the new files have the same names and format. If the number of ranks
    does not divide the number of lanes, pass --lanes. Later epochs are then exact, but some
    samples of the epochs in progress may be repeated or skipped; the command prints how many.

    \b
    Example:
      energon checkpoint redist --new-world-size 16 checkpoints/data checkpoints/data16
      energon checkpoint redist --new-world-size 10 --lanes 40 checkpoints/data checkpoints/data10
    """
    from energon.loader.relane import relane
    from energon.loader.state_files import read_states, redistribute, world_size_of, write_states

    if new_world_size is None and lanes is None:
        new_world_size = _ask_for_ranks(context)
    state = read_states(files)
    lines: list[str] = []
    if lanes is not None and lanes != state["lanes"]:
        relaned = relane(state, lanes)
        lines.append(f"{counted(state['lanes'], 'lane')} became {relaned.describe()}")
        state = relaned.state
    ranks = world_size_of(state) if new_world_size is None else new_world_size
    paths = write_states(redistribute(state, ranks), folder, like=files)
    _show_written(lines, paths, folder, as_json)


@command.command("diff")
@click.argument("first", type=ADDRESS)
@click.argument("second", type=ADDRESS)
@json_option
def diff(first: AnyPath, second: AnyPath, as_json: bool) -> None:
    """Show how two states differ, each a file or a folder with one file per rank.

    \b
    Example:
      energon checkpoint diff checkpoints/step1000 checkpoints/step2000
    """
    from energon.inspect.saved_state import compare_states
    from energon.loader.state_files import read_states

    lines = list(compare_states(read_states([first]), read_states([second])))
    if as_json:
        echo_json({"differences": lines})
        return
    echo_lines(lines or ["both states are at the same position of the same run"])


class _Named(click.ParamType):  # type: ignore[type-arg]
    """NAME=NUMBER, where the name may itself contain equals signs."""

    name = "NAME=NUMBER"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, float]:
        """Return the name and the number."""
        name, equals, number = str(value).rpartition("=")
        try:
            parsed = self.kind(number.replace("_", ""))
        except ValueError:
            parsed = -1
        if not name or not equals or parsed < 0:
            self.fail(f"{value!r} is not {self.name} with a number of 0 or more", param, ctx)
        return name, parsed


@dataclass(frozen=True)
class EditOptions:
    """The options of the command, see its help."""

    skip_steps: int | None = option(type=click.IntRange(1), help="Number of steps to skip.")
    weights: tuple[tuple[str, float], ...] = option(
        "--weight",
        metavar="NAME=WEIGHT",
        multiple=True,
        type=_Named(float),
        help="New weight of a dataset of the blend; may be repeated.",
    )
    positions: tuple[tuple[str, int], ...] = option(
        "--position",
        metavar="NAME=SAMPLES",
        multiple=True,
        type=_Named(int),
        help="Continue a dataset of the blend after this many samples, over all epochs; may "
        "be repeated.",
    )
    keys: tuple[str, ...] = option(
        "--leave-out",
        metavar="KEY",
        multiple=True,
        help="Skip the samples with this key; may be repeated.",
    )
    epochs: int = option(
        type=click.IntRange(1),
        default=100,
        show_default=True,
        help="Number of epochs to which --leave-out applies.",
    )
    path: str | None = option(
        metavar="PATH",
        help="With --leave-out or --task-encoder: the current location of the data.",
    )
    task_encoder: str | None = option(
        metavar="MODULE:CLASS",
        help="With --skip-steps: run these hooks, if they pack or skip samples.",
    )
    world_size: int | None = option(
        type=click.IntRange(1), help="Number of ranks, if it is not in the state."
    )
    as_json: bool = option("--json", is_flag=True, help="Print the result as JSON.")


@command.command("edit")
@_FILES
@click.argument("folder", type=ADDRESS)
@options_object(EditOptions)
@allow_option
def edit(files: tuple[AnyPath, ...], folder: AnyPath, options: EditOptions) -> None:
    """Write edited copies of the states in FILES to FOLDER.

    Skips steps first, then changes weights and positions, then leaves out samples. Prints the
    changes, and refuses inexact edits. FOLDER must be new or empty.

    \b
    Example:
      energon checkpoint edit --skip-steps 20 checkpoints/data edited
      energon checkpoint edit --skip-steps 20 --task-encoder train:Encoder checkpoints/data edited
      energon checkpoint edit --weight code/train=0.3 --position web/train=0 checkpoints/data edited
      energon checkpoint edit --leave-out images/000123 checkpoints/data edited
    """
    from energon.inspect import saved_state
    from energon.inspect.encoded_run import EncodedRun
    from energon.inspect.saved_run import num_ranks, open_saved_run
    from energon.loader.state_files import read_states, redistribute, write_states

    if not (options.skip_steps or options.weights or options.positions or options.keys):
        raise click.UsageError("pass --skip-steps, --weight, --position or --leave-out")
    if options.task_encoder is not None and not options.skip_steps:
        raise click.UsageError("--task-encoder requires --skip-steps")
    state = read_states(files)
    ranks = num_ranks(state, options.world_size)
    run_of = partial(open_saved_run, path=options.path, world_size=ranks, may_pack=True)
    changes: list[str] = []
    if options.skip_steps:
        encoder = load_encoder(options.task_encoder)
        encoded = None if encoder is None else EncodedRun.of(run_of(state), encoder)
        state, lines = saved_state.skip_steps(
            state, options.skip_steps, world_size=ranks, encoded=encoded
        )
        changes += lines
    if options.weights or options.positions:
        state, lines = saved_state.change_mix(
            state, weights=dict(options.weights), positions=dict(options.positions)
        )
        changes += lines
    if options.keys:
        run = run_of(state)
        state, lines = saved_state.leave_out(state, run, options.keys, epochs=options.epochs)
        changes += lines
    paths = write_states(redistribute(state, ranks), folder, like=files, new=True)
    _show_written(changes, paths, folder, options.as_json)


def _show_written(
    changes: Sequence[str], paths: Sequence[AnyPath], folder: AnyPath, as_json: bool
) -> None:
    """Print the changes to states, and their new files."""
    if as_json:
        echo_json({"changes": [*changes], "files": [redact(path) for path in paths]})
        return
    echo_lines(changes)
    names = " to ".join(dict.fromkeys((paths[0].name, paths[-1].name)))
    echo(f"{counted(len(paths), 'state')} in {folder}: {names}")


def _report(state: dict[str, Any]) -> Iterator[str]:
    from energon.inspect.saved_state import describe_position

    saved, fingerprint = state["positions"], state["fingerprint"]
    batches = [position["batches"] for position in saved.values()]
    size = len(json.dumps(state))
    lanes = state["lanes"]
    done = counted(sum(batches), "batch")
    yield f"{len(saved)} of {counted(lanes, 'lane')}, {done}, {size:,} bytes"
    least, most = min(batches, default=0), max(batches, default=0)
    yield f"batches per lane: {least if least == most else f'{least} to {most}'}"
    match fingerprint.get("run"):
        case {"path": path, "split": split, "world_size": ranks}:
            yield f"split {split} of {path}, read by {counted(ranks, 'rank')}"
    yield f"seed {fingerprint.get('seed')}, batch size {fingerprint.get('batch_size')}"
    possible = [str(size) for size in range(1, lanes + 1) if lanes % size == 0]
    yield f"world sizes: {', '.join(possible)}"
    try:
        yield from list(describe_position(state))
    except StateError:  # of a pipeline of another kind
        for name, leaf in fingerprint.get("leaves", {}).items():
            yield f"{name}: {counted(leaf.get('samples', 0), 'sample')}"
    skipped = sum(len(position.get("skip_rows", ())) for position in saved.values())
    if skipped:
        yield f"{counted(skipped, 'row')} skipped after crashing workers or by an edit"
