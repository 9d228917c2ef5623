"""The seed that a pipeline has if the program names none."""

from __future__ import annotations

import os

from energon.errors import ConfigError


def default_seed(seed: int | str | None = None) -> int:
    """Return a seed as a number: `seed`, or WDS_SEED of the environment, or 0.

    Raises:
        ConfigError: If it is no whole number.
    """
    found = os.environ.get("WDS_SEED", "0") if seed is None else seed
    try:
        return int(found)
    except (TypeError, ValueError) as error:
        where = "WDS_SEED" if seed is None else "seed"
        raise ConfigError(f"{where}={found!r}: wanted is a whole number") from error
