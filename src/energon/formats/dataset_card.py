"""The card of a dataset on the Hugging Face Hub: which of its files make up which split.

`README.md` begins with YAML between two lines `---`, in which `configs` may list configurations:

    configs:
    - config_name: en
      default: true
      data_files:
      - split: train
        path: en/train-*.parquet
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from energon.errors import FormatError
from energon.formats.meta import yaml

CARD = "README.md"


class CardConfig(NamedTuple):
    """A configuration: a dataset among those of a repository."""

    name: str
    is_default: bool
    splits: Mapping[str, Sequence[str]]
    """The patterns of the files of each split."""


def parse_card(text: str, *, origin: str) -> list[CardConfig]:
    """Return the configurations that a card lists; none if it says nothing of them.

    Raises:
        FormatError: If its YAML is damaged, or says something else of them.
    """
    head, _, rest = text.partition("---")
    front, mark, _ = rest.partition("\n---")
    if head.strip() or not mark:
        return []
    document = yaml.load(front, origin=origin)
    listed = document.get("configs") if isinstance(document, Mapping) else None
    if listed is None:
        return []
    try:
        found = [_config(each) for each in listed]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{origin}: configs: expected a list of {{config_name, data_files}}: {error!r}"
        ) from error
    return [each for each in found if each.splits]


def _config(about: Mapping[str, Any]) -> CardConfig:
    name = str(about["config_name"])
    folder = str(about.get("data_dir") or "").strip("/")
    files = about.get("data_files")
    if files is None:
        splits = {"": [f"{folder}/**".lstrip("/")]} if folder else {}
    elif isinstance(files, str):
        splits = {"train": [files]}
    elif all(isinstance(each, str) for each in files):
        splits = {"train": list(files)}
    else:
        splits = {}
        for each in files:
            paths = each["path"]
            own = [paths] if isinstance(paths, str) else [str(path) for path in paths]
            splits.setdefault(str(each["split"]), []).extend(own)
    below = f"{folder}/" if folder and files is not None else ""
    return CardConfig(
        name,
        about.get("default") is True or name == "default",
        {split: [f"{below}{path}" for path in paths] for split, paths in splits.items()},
    )
