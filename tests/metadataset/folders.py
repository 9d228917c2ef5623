"""Folders that look like prepared datasets, and documents beside them."""

from __future__ import annotations

import re
from pathlib import Path


def make_datasets(root: Path, *names: str) -> None:
    for name in names:
        meta = root / name / ".nv-meta"
        meta.mkdir(parents=True)
        (meta / ".info.json").write_text('{"shard_counts": {}}')


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def without_columns(text: str) -> str:
    """Messages with `file:line: `, for tests that are about what they say."""
    return re.sub(r"(:\d+|^\d+):\d+(?=: )", r"\1", text, flags=re.MULTILINE)
