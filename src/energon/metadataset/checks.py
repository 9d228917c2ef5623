"""What the nodes of a document must keep to, besides the types of their values.

These are rules between values of one node, such as the weights of a blend. Each function yields
all problems of a node, with their places. What depends on other documents, or on how a split is
used, is checked where references are followed (`resolve.py`, `weights.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from energon.metadataset.grammar_nodes import Joiner, JoinReference, Node, Weighted

_OF_THE_JOIN = ("shuffle_over_epochs_multiplier",)


def blend_problems(node: Node, entries: Sequence[Weighted]) -> Iterator[str]:
    """Yield what does not fit together in the weights of a blend."""
    derived = [entry for entry in entries if entry.weight == "auto"]
    given = [entry for entry in entries if entry.weight != "auto"]
    if derived and given:
        yield (
            f"{derived[0].where('weight')}: weights from sizes cannot be compared with the number "
            f"in {given[0].where('weight')}; write `weight: auto` in all entries, or in none. "
            "Groups of both kinds can be nested"
        )
    if not derived and "temperature" in node.model_fields_set:
        yield (
            f"{node.where('temperature')}: a temperature is for weights that come from sizes; "
            "write `weight: auto` in the entries, or drop it"
        )
    yield from _token_problems(entries, is_derived=bool(derived))


def _token_problems(entries: Sequence[Weighted], *, is_derived: bool) -> Iterator[str]:
    sized = [entry for entry in entries if entry.tokens is not None]
    unsized = [entry for entry in entries if entry.tokens is None]
    if sized and not is_derived:
        yield (
            f"{sized[0].where('tokens')}: tokens only count for `weight: auto`; write that, or "
            "drop them"
        )
    elif sized and unsized:
        yield (
            f"{unsized[0].where()}: has no tokens, but {sized[0].where('tokens')} has; sizes are "
            "compared in tokens or in samples, so give them for all entries or for none"
        )


def join_problems(node: Node, members: Sequence[JoinReference], joiner: Joiner) -> Iterator[str]:
    """Yield why a join makes no sense."""
    if not members:
        yield f"{node.where('join')}: joins no datasets; wanted is one or more"
    if (joiner.class_ is None) == (joiner.function is None):
        yield (
            f"{node.where('joiner')}: wanted is a __module__, and a __class__ (a sample type) or "
            "a __function__"
        )
    if members and members[0].nonmatch != "error":
        yield (
            f"{members[0].where('nonmatch')}: the first dataset decides which samples there are, "
            "so it misses none; drop `nonmatch` here"
        )
    for member in members:
        yield from _member_problems(node, member)


def _member_problems(node: Node, member: JoinReference) -> Iterator[str]:
    for key in _OF_THE_JOIN:
        if key in member.model_fields_set:
            yield (
                f"{member.where(key)}: the samples of a join have one order; set {key} beside "
                f"`join` in {node.where()}"
            )
