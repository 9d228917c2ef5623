"""How two states of loaders differ: in what their runs were, value by value."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from energon.errors import ConfigError, StateError
from energon.messages import nearest
from energon.plan.recipe import own_unit

PAST = ("mix_before", "eras", "pass")
"""Parts of a fingerprint about how data was mixed and dealt to lanes, and how often it was read,
earlier in the run."""


RUN = "run"
"""Part of a fingerprint with the source of the data and the number of ranks, which may change."""


def check_fingerprint(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, strict: bool | Collection[str] = True
) -> list[str]:
    """Compare a saved run with the present one, and return the permitted differences.

    Args:
        saved: Fingerprint in the state.
        current: Fingerprint of this run.
        strict: True permits none, False all; a collection of names (dotted for nested ones, such
            as "data.train") permits differences in these and anything below them.

    Raises:
        ConfigError: If `strict` names what no state has.
        StateError: If anything else differs.
    """
    _check_names(strict, {*saved, *current})
    waived: list[str] = []
    refused: list[str] = []
    names: list[str] = []
    names_apart = _taken_over(saved, current)
    compared = {**saved, "unit": own_unit(saved)} if "unit" in saved else saved
    for path, text in differences(
        without_parts(compared, names_apart), without_parts(current, names_apart)
    ):
        if may_differ(path, strict):
            waived.append(text)
        else:
            refused.append(text)
            names.append(path.partition(".")[0])
    if refused:
        together = _are_parts(saved, current) and "batch_size" in names
        raise StateError(
            "the state was saved by another run:\n  "
            + "\n  ".join(refused)
            + "\nRestore it with the configuration and data it was saved with, or continue from "
            f"the same rows despite the differences: strict={sorted(set(names))}"
            + (", which can keep the samples of each global batch together" if together else "")
            + ", or strict=False for all"
        )
    return waived


_OF_SOME_RUNS = ("steps", "mix", "unit", "streams", "parts", "stripe", "balance", RUN, *PAST)
"""What `strict` may name although the run at hand has none."""


def _check_names(strict: bool | Collection[str], parts: Collection[str]) -> None:
    """Refuse names of differences that cannot be."""
    if isinstance(strict, bool):
        return
    known = {*parts, *_OF_SOME_RUNS}
    for name in [strict] if isinstance(strict, str) else strict:
        if not isinstance(name, str) or name.partition(".")[0] not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"strict={strict!r}: {name!r} is not part of a state; expected True, False or some "
                f"of {', '.join(sorted(known))}{hint}"
            )


def _are_parts(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Return whether batches of a saved run can become several of this run."""
    match saved.get("batch_size"), current.get("batch_size"):
        case int(before), int(now):
            return before % now == 0 and not current.get("packing_buffer_size")
    return False


def _taken_over(saved: Mapping[str, Any], current: Mapping[str, Any]) -> set[str]:
    """Return the parts of a fingerprint that a run takes over from the state.

    These are the run's history, and how lanes share the rows of streams.
    """
    shared = "streams" in saved or "parts" in saved
    shared = shared or "stripe" not in saved or "stripe" not in current
    taken = ("streams", "parts", "micro_batches", "window_rows")
    return {*PAST, RUN, *taken, *(["stripe"] if shared else [])}


def without_parts(fingerprint: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a fingerprint without some of its parts."""
    return {name: value for name, value in fingerprint.items() if name not in names}


_short = reprlib.Repr()
_short.maxdict = _short.maxlist = _short.maxtuple = 10
_short.maxstring = _short.maxother = _short.maxlong = 100


def shown(value: Any) -> str:
    """Return a value for a message, shortened only if it is larger than any state is."""
    return _short.repr(value)


def differences(saved: Any, current: Any, path: str = "") -> list[tuple[str, str]]:
    """List (dotted path, text) of every leaf in which two JSON values differ."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        return [
            difference
            for key in sorted({*saved, *current}, key=str)
            for difference in differences(
                saved.get(key, _ABSENT), current.get(key, _ABSENT), f"{path}.{key}" if path else key
            )
        ]
    if saved == current:
        return []
    return [(path, f"{path}: saved {shown(saved)}, now {shown(current)}")]


def may_differ(path: str, strict: bool | Collection[str]) -> bool:
    """Return whether the part of a fingerprint at a dotted path may differ."""
    if isinstance(strict, bool):
        return not strict
    names = [strict] if isinstance(strict, str) else strict
    return any(path == name or path.startswith(f"{name}.") for name in names)


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()
