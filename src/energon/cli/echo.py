"""Print what commands have to say, with names from data made safe for terminals."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

from energon.printable import escape_line


def echo(line: str, *, err: bool = False) -> None:
    """Print one line; what would begin another one or steer the terminal is escaped."""
    click.echo(escape_line(line), err=err)


def echo_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Print lines, each as `echo` does."""
    for line in lines:
        echo(line, err=err)


def echo_json(about: Any) -> None:
    """Print plain data as JSON, whose escapes make names safe."""
    click.echo(json.dumps(about, indent=2))
