"""`energon view`."""

from __future__ import annotations

import errno
import secrets
import socket
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from energon.arguments import load_named
from energon.cli.main import echo
from energon.cli.options import (
    ADDRESS,
    allow_option,
    load_encoder,
    logging_to_terminal,
    option,
    options_object,
)
from energon.errors import ConfigError

if TYPE_CHECKING:
    from energon.inspect.saved_run import SavedRun
    from energon.io.epath import AnyPath
    from energon.viewer.guard import Guard
    from energon.viewer.run import ShownRun


@dataclass(frozen=True)
class ViewOptions:
    """The options of the command, see its help."""

    host: str = option(default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
    port: int = option(
        default=8710, type=click.IntRange(0, 65535), help="Port to listen on; 0 picks a free one."
    )
    server_names: tuple[str, ...] = option(
        "--server-name",
        metavar="NAME",
        multiple=True,
        help="Name of this server in browsers, such as that of a proxy; may be repeated.",
    )
    quarantine: str | None = option(
        metavar="FOLDER",
        help="Let users exclude and flag samples: one file per dataset in FOLDER, for "
        "exclude_from and `energon prepare --exclude-from`.",
    )
    states: tuple[AnyPath, ...] = option(
        "--state",
        metavar="FILE",
        multiple=True,
        type=ADDRESS,
        help="Show the steps of the run of this state or checkpoint; may be repeated for "
        "files of ranks.",
    )
    world_size: int | None = option(
        type=click.IntRange(1), help="With --state: number of ranks of the run."
    )
    split_part: str | None = option(
        "--split",
        "--split-part",
        metavar="NAME",
        help="With --state: split to read.",
        show_default="that of the run",
    )
    task_encoder: str | None = option(
        metavar="MODULE:CLASS",
        help="Show batches as this task encoder makes them, in this process.",
    )
    tokenizer: str | None = option(
        metavar="MODULE:FUNCTION",
        help="Function that turns a list of token numbers into text.",
    )
    open_browser: bool = option("--open", is_flag=True, help="Open the page in a browser.")


@click.command("view")
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@options_object(ViewOptions)
@allow_option
def command(paths: tuple[str, ...], options: ViewOptions) -> None:
    """Browse the datasets and metadatasets at PATH: a gallery of samples, and every part of each.

    Prints the address of the page, and serves it until Ctrl-C. Other machines can connect only
    with --host; browsers then need the token in the printed address.

    With --state, pass at most one PATH: the current location of the data, if it has moved.

    \b
    Example:
      energon view ./coco
      energon view ./coco ./laion s3://bucket/blend.yaml
      energon view s3://bucket/blend.yaml --open
      energon view --state checkpoints/data --quarantine bad
      ssh -L 8710:localhost:8710 machine energon view /data/coco
    """
    from energon.viewer.app import warm_up
    from energon.viewer.guard import is_loopback

    with logging_to_terminal():
        token = None if is_loopback(options.host) else secrets.token_urlsafe(16)
        app, addresses = _make_app(paths, options, token)
        with listen(options.host, options.port) as listening:
            warm_up(app)
            page = _address(options.host, listening.getsockname()[1], token)
            echo(f"{page} shows {', '.join(addresses)}; press Ctrl-C to stop")
            if options.open_browser:
                webbrowser.open(page)
            _serve(app, listening)


def _make_app(
    paths: Sequence[str], options: ViewOptions, token: str | None
) -> tuple[Guard, list[str]]:
    """Return the application, and the addresses of what it shows."""
    from energon.viewer.app import make_app
    from energon.viewer.guard import server_names
    from energon.viewer.notes import Notes
    from energon.viewer.run import show_saved_run
    from energon.viewer.shown import Shown

    saved = _saved_run(paths, options) if options.states else None
    if saved is not None:
        shown = Shown(saved.read_from.path)
    elif paths:
        shown = Shown(*dict.fromkeys(paths))
    else:
        raise click.UsageError("pass a PATH, or the --state of a run")
    run: ShownRun | None = None
    if saved is not None:
        names = [split.name for split in shown.splits]
        run = show_saved_run(names.index(saved.read_from.split_part), saved)
    tokenizer = options.tokenizer
    app = make_app(
        shown,
        server_names=server_names(options.host, options.server_names),
        token=token,
        notes=None if options.quarantine is None else Notes(options.quarantine),
        saved=run,
        encoder=load_encoder(options.task_encoder),
        tokenizer=None if tokenizer is None else load_named("--tokenizer", tokenizer),
    )
    return app, [path.address for path in shown.paths]


def _saved_run(paths: Sequence[str], options: ViewOptions) -> SavedRun:
    from energon.inspect.saved_run import open_saved_run
    from energon.loader.state_files import read_states

    if len(paths) > 1:
        raise click.UsageError("a run reads a single PATH: pass only one with --state")
    return open_saved_run(
        read_states(options.states),
        path=next(iter(paths), None),
        split_part=options.split_part,
        world_size=options.world_size,
        may_pack=True,
    )


def _serve(app: object, listening: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        return  # this is how it ends


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        ConfigError: If the address is taken or invalid.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        # Python appends the address to what the system says.
        reason = (error.strerror or str(error)).partition(" (while ")[0]
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        next_step = (
            "--port 0 picks a free port" if is_port else "pass an address of this machine as --host"
        )
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; {next_step}") from error
    # Connections inherit it. Without it, the content of each answer waits for the browser to
    # acknowledge the headers, up to 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _address(host: str, port: int, token: str | None) -> str:
    name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
