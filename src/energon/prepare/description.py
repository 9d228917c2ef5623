"""How the samples of a dataset are described: `dataset.yaml`, and the code that it may name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError
from energon.formats.meta.yaml_writer import dump_yaml
from energon.samples.field_map import FieldMap

CRUDE = "CrudeWebdataset"
LOADER_FILE = "sample_loader.py"


def describe_samples(
    sample_type: str | None,
    field_map: Mapping[str, str] | None = None,
    *,
    with_loader: bool = False,
) -> dict[str, Any] | None:
    """Return the content of `dataset.yaml`; None if there is to be no such file.

    Args:
        sample_type: "CrudeWebdataset", or the name of a sample type; None for no description.
        field_map: How parts become fields of the sample type.
        with_loader: Whether code in `sample_loader.py` makes them instead.

    Raises:
        ConfigError: If there is no such type, or the field map does not fit it.
    """
    if sample_type is None:
        if field_map:
            raise ConfigError("a field_map requires the sample_type that it maps to")
        if with_loader:
            raise ConfigError("a sample_loader requires the sample_type that it makes")
        return None
    if sample_type == CRUDE:
        if field_map:
            raise ConfigError(f"{CRUDE} takes no field_map: cookers make its samples")
        if with_loader:
            raise ConfigError(f"{CRUDE} takes no sample_loader: cookers make its samples")
        return {"__module__": "megatron.energon", "__class__": CRUDE}
    # Crude datasets need neither sample types nor the time to import them.
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


@dataclass(frozen=True)
class Description:
    """How the samples of a dataset are described.

    Args:
        sample_type: "CrudeWebdataset", or the name of a sample type; None writes no dataset.yaml.
        field_map: How parts become the fields of the sample type.
        sample_loader: The code that makes samples, instead of a field map.
        yaml_name: Name of the description below `.nv-meta`.

    Raises:
        ConfigError: If there is no such type, the field map does not fit it, or the name cannot
            be that of a description.
    """

    sample_type: str | None = None
    field_map: Mapping[str, str] | None = None
    sample_loader: str | None = None
    yaml_name: str = "dataset.yaml"

    def __post_init__(self) -> None:
        _check_yaml_name(self.yaml_name)
        self._content()

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield the names and the contents of its files."""
        content = self._content()
        if content is not None:
            yield self.yaml_name, dump_yaml(content)
        if self.sample_loader is not None:
            yield LOADER_FILE, self.sample_loader

    def _content(self) -> dict[str, Any] | None:
        with_loader = self.sample_loader is not None
        return describe_samples(self.sample_type, self.field_map, with_loader=with_loader)


def _check_yaml_name(name: str) -> None:
    is_ours = name == "split.yaml" or name.startswith(".")
    if name != os.path.basename(name) or is_ours or not name.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"dataset_yaml_name {name!r}: expected the name of a file in .nv-meta, like "
            "dataset.yaml or dataset_crude.yaml"
        )
