"""Shards that tests write for themselves, with the tar library of Python."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

Samples = Iterable[tuple[str, Mapping[str, bytes]]]


def tar_bytes(members: Iterable[tuple[str, bytes]], *, format: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def members_of(samples: Samples) -> list[tuple[str, bytes]]:
    return [(f"{key}.{part}", data) for key, parts in samples for part, data in parts.items()]


def numbered(numbers: Iterable[int]) -> Samples:
    """Sample n has the key n in six digits, and the fields txt and json."""
    return [
        (f"{n:06}", {"json": json.dumps({"n": n}).encode(), "txt": f"text {n}".encode()})
        for n in numbers
    ]


def make_shards(folder: Path, counts: Iterable[int], *, name: str = "shard") -> list[str]:
    """Shards of numbered samples, counted through all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, start = [], 0
    for number, count in enumerate(counts):
        path = folder / f"{name}-{number:06}.tar"
        path.write_bytes(tar_bytes(members_of(numbered(range(start, start + count)))))
        paths.append(str(path))
        start += count
    return paths


def keys(samples: Iterable[Mapping[str, object]]) -> list[int]:
    return [int(str(sample["__key__"])) for sample in samples]
