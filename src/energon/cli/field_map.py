"""The option --field-map of several commands."""

from __future__ import annotations

import json

from energon.errors import ConfigError


def parse_field_map(text: str | None) -> dict[str, str] | None:
    """Return what the option says; None if it is not given.

    Raises:
        ConfigError: If it is no JSON object.
    """
    if text is None:
        return None
    try:
        mapping = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--field-map {text}: {error}; expected JSON") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f'--field-map {text}: expected {{"FIELD": "PART"}}')
    return mapping
