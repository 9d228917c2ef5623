"""`energon plan`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from energon.arguments import load_named
from energon.cli.main import echo, echo_json, echo_lines
from energon.cli.options import (
    ADDRESS,
    allow_option,
    is_given,
    load_encoder,
    logging_to_terminal,
    option,
    options_object,
    refuse_options,
)
from energon.messages import counted, format_bytes

if TYPE_CHECKING:
    from energon.inspect.planned_run import PlannedRun, Sighting
    from energon.io.epath import AnyPath
    from energon.plan.balance import Balance

_AS_IN_TRAINING = "As in get_train_dataset."
BALANCE_POINTS = 24
"""Steps whose factors are drawn."""
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command, see its help."""

    split_part: str | None = option(
        "--split", "--split-part", metavar="NAME", help="Split to read.", show_default="train"
    )
    batch_size: int = option(
        type=click.IntRange(1), default=1, show_default=True, help="Samples per batch."
    )
    world_size: int = option(
        type=click.IntRange(1), default=1, show_default=True, help="Number of ranks."
    )
    workers_per_rank: int = option(
        "--workers-per-rank",
        type=click.IntRange(0),
        default=0,
        help="Number of workers of each rank.",
    )
    lanes: int | None = option(
        type=click.IntRange(1),
        help="Number of lanes, see WorkerConfig.",
        show_default="lcm of 24 and the workers",
    )
    seed: int = option(type=int, default=0, show_default=True, help="seed_offset of WorkerConfig.")
    batches: int | None = option(
        type=click.IntRange(1), help="Number of batches of all ranks.", show_default="one pass"
    )
    max_samples_per_sequence: int | None = option(type=click.IntRange(1), help=_AS_IN_TRAINING)
    parallel_shard_iters: int | None = option(type=click.IntRange(1), help=_AS_IN_TRAINING)
    shuffle_buffer_size: int | None = option(type=click.IntRange(0), help=_AS_IN_TRAINING)
    blend_unit: Literal["sample", "batch"] | None = option(
        type=click.Choice(["sample", "batch"]), help=_AS_IN_TRAINING
    )
    key: str | None = option(metavar="KEY", help="Show when the sample with this key is read.")
    step: int | None = option(
        type=click.IntRange(0), help="List the samples of a step, which is one batch per rank."
    )
    balance: str | None = option(
        metavar="MEASURE",
        help="Compare the costs and reads of steps with and without balancing by this measure.",
    )
    cost_function: str | None = option(
        "--with",
        metavar="MODULE:FUNCTION",
        help="With --balance: compute costs from measures with this function. With --state: "
        "the cost function of the run.",
    )
    window: str | None = option(
        metavar="K",
        help="With --balance: 'step', or the number of steps of a window.",
        show_default="step",
    )
    speeds: str | None = option(
        metavar="A,B,...", help="With --balance: the relative speeds of the ranks, such as 1,1,0.5."
    )
    states: tuple[AnyPath, ...] = option(
        "--state",
        metavar="FILE",
        multiple=True,
        type=ADDRESS,
        help="Take the settings of this state or checkpoint; may be repeated for files of ranks.",
    )
    exclude_from: str | None = option(
        metavar="PLACE", help="With --state: current location of the quarantine files of the run."
    )
    task_encoder: str | None = option(
        metavar="MODULE:CLASS",
        help="With --state, and --step or --key: run these hooks from the state on, if they "
        "pack or skip samples.",
    )
    as_json: bool = option("--json", is_flag=True, help="Print the result as JSON.")


@click.command("plan")
@click.argument("path", required=False)
@options_object(PlanOptions)
@allow_option
@click.pass_context
def command(context: click.Context, path: str | None, options: PlanOptions) -> None:
    """Show what a training run over the dataset or metadataset at PATH will read.

    Computes the order from indexes, without reading samples. Options are the arguments of
    get_train_dataset and WorkerConfig. --state takes them, and PATH, from a state of the run;
    pass PATH too if the data has moved. If hooks skip or pack samples, pass --task-encoder to run
    them from the state on.

    \b
    Example:
      energon plan blend.yaml --batch-size 32 --world-size 8 --workers-per-rank 4 --batches 100000
      energon plan blend.yaml --batch-size 32 --world-size 8 --key images/000123
      energon plan blend.yaml --batch-size 32 --world-size 8 --step 5000
      energon plan blend.yaml --batch-size 4 --world-size 8 --balance bytes --window 16
      energon plan --state checkpoints/data --step 5000
      energon plan --state checkpoints/data --step 5000 --task-encoder train:Encoder
    """
    if options.key is not None and options.step is not None:
        raise click.UsageError("pass --key or --step, not both")
    context.with_resource(logging_to_terminal())
    from energon.inspect.planned_run import describe_balance, open_run
    from energon.task_encoder.train_plan import TrainSettings
    from energon.worker import WorkerConfig

    if options.states:
        _show_saved(context, path, options)
        return
    if options.exclude_from is not None or options.task_encoder is not None:
        raise click.UsageError("--exclude-from and --task-encoder require --state")
    if path is None:
        raise click.UsageError("pass the PATH of a dataset or metadataset, or the --state of a run")
    settings = TrainSettings(
        balance=_balance(options),
        batch_size=options.batch_size,
        max_samples_per_sequence=options.max_samples_per_sequence,
        parallel_shard_iters=options.parallel_shard_iters,
        shuffle_buffer_size=options.shuffle_buffer_size,
        blend_unit=options.blend_unit,
    )
    workers = WorkerConfig(
        rank=0,
        world_size=options.world_size,
        num_workers=options.workers_per_rank,
        lanes=options.lanes,
        seed_offset=options.seed,
    )
    run = open_run(path, settings, workers, split_part=options.split_part or "train")
    if settings.balance is None:
        _show(run, options)
    elif options.as_json:
        echo_json(describe_balance(run, batches=options.batches))
    else:
        echo_lines(_balance_report(describe_balance(run, batches=options.batches)))


def _balance(options: PlanOptions) -> Balance | None:
    """Return the settings of `--balance`; None without it."""
    from energon.plan.balance import Balance

    if options.balance is None:
        more = options.window, options.speeds, options.cost_function
        if any(each is not None for each in more):
            raise click.UsageError("--window, --speeds and --with require --balance")
        return None
    if options.key is not None or options.step is not None:
        raise click.UsageError("pass --balance, or one of --key and --step")
    cost: Any = options.balance
    if options.cost_function is not None:
        cost = load_named("--with", options.cost_function)
    window = options.window or "step"
    if window != "step" and not window.isdecimal():
        raise click.UsageError(f"--window {window}: expected 'step' or a number of steps")
    speeds = None
    if options.speeds is not None:
        try:
            speeds = [float(speed) for speed in options.speeds.split(",")]
        except ValueError as error:
            raise click.UsageError(
                f"--speeds {options.speeds}: expected numbers, such as 1,1,0.5"
            ) from error
    return Balance(
        cost=cost,
        name=options.balance,
        window="step" if window == "step" else int(window),
        speeds=speeds,
    )


_OF_ANY_RUN = frozenset(
    {
        *("path", "split_part", "states", "exclude_from", "world_size", "key", "step", "batches"),
        *("cost_function", "task_encoder", "as_json"),
    }
)
"""Parameters that a state does not determine."""


def _show_saved(context: click.Context, path: str | None, options: PlanOptions) -> None:
    """Show the run of a state: its plan, or its batches if there is a task encoder."""
    from energon.inspect.saved_run import open_saved_run
    from energon.loader.state_files import read_states

    refuse_options(context, "--state contains the settings of its run", _OF_ANY_RUN)
    encoder, function = load_encoder(options.task_encoder), options.cost_function
    if encoder is not None and options.key is None and options.step is None:
        raise click.UsageError("--task-encoder requires --key or --step")
    saved = open_saved_run(
        read_states(options.states),
        path=path,
        split_part=options.split_part,
        exclude_from=options.exclude_from,
        world_size=options.world_size if is_given(context, "world_size") else None,
        may_pack=encoder is not None,
        cost=None if function is None else load_named("--with", function),
    )
    echo(f"The state was saved before step {saved.step}.", err=True)
    if encoder is not None:
        from energon.inspect.encoded_run import EncodedRun

        run = EncodedRun.of(saved, encoder)
        if options.key is not None:
            sightings = run.find_key(options.key, batches=options.batches)
        else:
            sightings = run.samples(options.step or 0)
        _show_sightings(sightings, options.as_json)
        return
    if saved.shifted:
        echo(
            f"By then, hooks had skipped {counted(saved.shifted, 'sample', grouped=True)}, so "
            "samples come earlier than shown here: by as many as their lane has skipped. Pass the "
            "--task-encoder of the run to run its hooks.",
            err=True,
        )
    _show(saved.run, options)


def _show(run: PlannedRun, options: PlanOptions) -> None:
    from energon.inspect.planned_run import describe_run, find_key, list_step

    batches = options.batches
    if batches is None:
        samples = sum(len(leaf.source) for leaf in run.leaves)
        batches = run.num_batches or -(-samples // run.batch_size)
    if options.key is not None:
        _show_sightings(find_key(run, options.key, batches=batches), options.as_json)
    elif options.step is not None:
        _show_sightings(list_step(run, options.step), options.as_json)
    elif options.as_json:
        echo_json(describe_run(run, batches=batches))
    else:
        echo_lines(_report(describe_run(run, batches=batches)))


def _show_sightings(sightings: Sequence[Sighting], as_json: bool) -> None:
    if as_json:
        rows = [{**each._asdict(), **each.moment._asdict()} for each in sightings]
        echo_json([{n: value for n, value in row.items() if n != "moment"} for row in rows])
        return
    if not sightings:
        echo("not read in these batches; pass a larger --batches to look further")
    for each in sightings:
        step, rank, batch, position = each.moment
        echo(
            f"step {step}  rank {rank}  batch {batch}  position {position}  {each.leaf}  epoch "
            f"{each.epoch}  sample {each.ordinal}  {each.key}  {each.shard}"
        )


def _report(plan: Mapping[str, Any]) -> list[str]:
    rank, topology = plan["rank"], plan["topology"]
    ends = plan["ends_after_batches"]
    samples = counted(plan["samples"], "sample", grouped=True)
    batches = counted(plan["batches"], "batch", grouped=True)
    steps = counted(plan["steps"], "step", grouped=True)
    lines = [
        f"{samples} in {batches} of {plan['batch_size']}, {steps} of "
        f"{counted(topology['world_size'], 'rank')} with "
        f"{counted(topology['num_workers'], 'worker')}, {counted(topology['lanes'], 'lane')}",
        "The data ends then." if ends == plan["batches"] else "The data continues after that.",
        f"Each rank reads {counted(rank['samples'], 'sample', grouped=True)}, about "
        f"{format_bytes(rank['bytes'])} with {counted(rank['requests'], 'request', grouped=True)}.",
        "",
    ]
    lines += _table(plan)
    for shared in plan["shared_samples"]:
        one, other = shared["leaves"]
        samples = counted(shared["samples"], "sample", grouped=True)
        lines.append(f"{one} and {other} have {samples} in common.")
    return lines


def _balance_report(plan: Mapping[str, Any]) -> list[str]:
    times = [plan["unbalanced"], *plan["pools"].values()]
    steps, worst = plan["steps"], max(max(each["steps"]) for each in times)
    batches = counted(plan["micro_batches"], "micro-batch", "micro-batches")
    rows = [["window", "pool", "slowest/mean", "over time", "padding", "bytes", "requests"]]
    names = [("unbalanced", "-"), *((str(plan["window"]), pool) for pool in plan["pools"])]
    for (window, pool), each in zip(names, times, strict=True):
        points = min(steps, BALANCE_POINTS)
        shown = [each["steps"][at * steps // points] for at in range(points)]
        rows.append(
            [
                window,
                f"{pool} (chosen)" if pool == str(plan["pool"]) else pool,
                f"{each['slowest_over_mean']:.2f}",
                sparkline([(factor - 1) / max(worst - 1, 1e-9) for factor in shown]),
                f"{each['padding']:.0%}",
                format_bytes(each["bytes_per_sample"]),
                f"{each['requests_per_sample']:.3f}",
            ]
        )
    by = f"the cost {plan['cost']!r}"
    if plan["speeds"]:
        by += " over the speed of each rank"
    return [
        f"{counted(steps, 'step')} of {batches} of {plan['batch_size']}, by {by}: the slowest "
        f"rank over the mean (bars: up to {worst:.1f}), the padding to the largest cost of a "
        "micro-batch, and the bytes and requests of a sample.",
        "",
        *_aligned(rows, left=(0, 1, 3)),
    ]


def _table(plan: Mapping[str, Any]) -> list[str]:
    rows = [["dataset", "samples", "drawn", "epochs", "share", "over time", "request", "mixing"]]
    for name, leaf in plan["leaves"].items():
        shares = plan["shares"][name]
        mixing = leaf["shuffle"]["neighbor_distance"] if leaf["shuffle"] else None
        per_request = leaf["bytes_per_request"]
        rows.append(
            [
                name,
                f"{leaf['samples']:,}",
                f"{leaf['drawn']:,}",
                f"{leaf['epochs']:.2f}",
                f"{leaf['drawn'] / max(1, plan['samples']):.1%}",
                sparkline(shares),
                "-" if per_request is None else format_bytes(per_request),
                "-" if mixing is None else f"{mixing:.2f}",
            ]
        )
    used_up = [
        f"{name} is exhausted in batch {leaf['used_up_with_batch']:,}."
        for name, leaf in plan["leaves"].items()
        if "used_up_with_batch" in leaf
    ]
    return [*_aligned(rows, left=(0, 5)), "", *used_up]


def _aligned(rows: Sequence[Sequence[str]], *, left: Collection[int]) -> list[str]:
    """Return the lines of a table; columns are aligned to the right, except for some."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def sparkline(shares: Sequence[float]) -> str:
    """Return shares as a line of bars: a full bar is a whole batch."""
    return "".join(_BARS[0 if not share else max(1, round(share * 8))] for share in shares)
