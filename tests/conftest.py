"""Data that tests build for themselves."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_shard(path: Path, samples: Sequence[tuple[str, Mapping[str, bytes]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, parts in samples:
            for part, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{part}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
