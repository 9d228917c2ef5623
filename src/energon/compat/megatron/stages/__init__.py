"""Stages behind the wrappers: they blend, repeat, limit and shuffle items, not numbers."""
