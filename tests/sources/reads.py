"""Read samples of a source."""

from __future__ import annotations


def read_samples(source, ordinals, **settings) -> list:
    """Return samples of a source, all of them made."""
    return source.read(ordinals, **settings).samples(0, len(ordinals))
