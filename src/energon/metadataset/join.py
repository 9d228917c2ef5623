"""What a join says, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from energon.errors import ConfigError

if TYPE_CHECKING:
    from energon.metadataset.grammar import Join, JoinReference

_OF_THE_JOIN = ("shuffle_over_epochs_multiplier",)


def check_join(node: Join) -> None:
    """Raise ConfigError if a join makes no sense."""
    members = list(node.join.values() if isinstance(node.join, dict) else node.join)
    if len(members) < 2:
        raise ConfigError(
            f"{node.where('join')}: joins {len(members)} datasets; wanted are two or more, and a "
            "single one is just a `path`"
        )
    joiner = node.joiner
    if (joiner.class_ is None) == (joiner.function is None):
        raise ConfigError(
            f"{node.where('joiner')}: wanted is a __module__, and a __class__ (a sample type) or "
            "a __function__"
        )
    if members[0].nonmatch != "error":
        raise ConfigError(
            f"{members[0].where('nonmatch')}: the first dataset decides which samples there are, "
            "so it misses none; drop `nonmatch` here"
        )
    for member in members:
        _check_member(node, member)


def _check_member(node: Join, member: JoinReference) -> None:
    for key in _OF_THE_JOIN:
        if key in member.model_fields_set:
            raise ConfigError(
                f"{member.where(key)}: the samples of a join have one order; set {key} beside "
                f"`join` in {node.where()}"
            )
