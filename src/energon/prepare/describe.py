"""What `dataset.yaml` says of the samples of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon.errors import ConfigError

CRUDE = "CrudeWebdataset"
LOADER_FILE = "sample_loader.py"


def describe_samples(
    sample_type: str | None,
    field_map: Mapping[str, str] | None = None,
    *,
    with_loader: bool = False,
) -> dict[str, Any] | None:
    """Return the content of `dataset.yaml`; None for no such file.

    Args:
        sample_type: "CrudeWebdataset", or the name of a sample type; None for no description.
        field_map: How parts become the fields of the sample type.
        with_loader: Whether the code in `sample_loader.py` makes them instead.

    Raises:
        ConfigError: If there is no such type, or the field map does not fit it.
    """
    if sample_type is None:
        if field_map:
            raise ConfigError("a field_map needs a sample_type whose fields it maps to")
        if with_loader:
            raise ConfigError("a sample_loader needs a sample_type whose fields it makes")
        return None
    if sample_type == CRUDE:
        if field_map:
            raise ConfigError(f"{CRUDE} takes no field_map: cookers make its samples")
        if with_loader:
            raise ConfigError(f"{CRUDE} takes no sample_loader: cookers make its samples")
        return {"__module__": "megatron.energon", "__class__": CRUDE}
    # Crude datasets need no sample types, and the time to import them.
    from energon.samples.field_map import FieldMap
    from energon.samples.registry import resolve_class

    resolved = resolve_class("megatron.energon", sample_type)
    kind = {"__module__": "megatron.energon", "__class__": resolved.__name__}
    if with_loader:
        if field_map:
            raise ConfigError("choose one of field_map and sample_loader")
        return {
            "sample_type": kind,
            "part_filter": f"{LOADER_FILE}:part_filter",
            "sample_loader": f"{LOADER_FILE}:sample_loader",
        }
    FieldMap.parse(field_map or {}).check(resolved)
    return {"sample_type": kind, "field_map": dict(field_map or {})}
