"""Lists of shards with their sample counts, as JSON.

    {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": "coco", "base": "s3://b/coco",
     "shardlist": [{"url": "000.tar", "nsamples": 1000, "filesize": 1048576, "md5sum": "…"}]}

`datasets` may take the place of `shardlist`: a list of such lists, or of their addresses. Without
a list, samples are counted with the indexes of the shards, and the shards are not read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.formats.text import parse_json
from energon.io.address import is_remote, join_address, local_path, parent_address, redact
from energon.io.files import file_info, file_size, read_document, write_text
from energon.webdataset.gopen import open_url

_OFFSET_BYTES = 8


def count_samples(pipeline: Any) -> int:
    """Return how many samples the shards of a pipeline have.

    Raises:
        ConfigError: If its source is not a list of shards, or a shard has no index.
    """
    urls = getattr(pipeline.stages[0] if pipeline.stages else None, "urls", None)
    if urls is None:
        raise ConfigError(
            "the number of samples is unknown, because the pipeline does not begin with a list of "
            "shards; set it: with_length(n)"
        )
    return sum(shard_counts(urls))


def shard_counts(urls: Sequence[str]) -> list[int]:
    """Return how many samples each shard has.

    Uses the list of shards that `energon prepare` or `energon tar index` wrote into a folder,
    or the `.tar.idx` next to a shard.

    Raises:
        ConfigError: If the number is not recorded anywhere.
    """
    folders = {parent_address(url) for url in urls}
    counts: dict[str, int] = {}
    with ThreadPoolExecutor(16) as pool:
        for listed in pool.map(_folder_counts, sorted(folders)):
            counts |= listed
        missing = [url for url in urls if url not in counts]
        counts |= dict(zip(missing, pool.map(_index_count, missing), strict=True))
    return [counts[url] for url in urls]


def _folder_counts(folder: str) -> dict[str, int]:
    """Return the sample counts by address of shard, as listed in a folder or one above it."""
    for name in (".nv-meta/.info.json", "../.nv-meta/.info.json"):
        try:
            address = join_address(folder, name)
            info = parse_json(read_document(address), origin=redact(address))
            root = parent_address(parent_address(address))
            counts = info.get("shard_counts", {}).items()
            return {join_address(root, shard): int(count) for shard, count in counts}
        except (DatasetNotFoundError, ConfigError, ValueError, TypeError, AttributeError):
            continue
    return {}


def _index_count(url: str) -> int:
    stem = url.removesuffix(".tar")
    info = file_info(f"{stem}.tar.idx") if stem != url else None
    if info is None:
        raise ConfigError(
            f"{redact(url)}: its number of samples is unknown; write its index with "
            "`energon tar index`, or set the number: with_length(n)"
        )
    return info.size // _OFFSET_BYTES - 1


KIND = "wids-shard-index-v1"
VERSION = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardInfo:
    """A shard."""

    url: str
    nsamples: int
    filesize: int | None = None
    md5sum: str | None = None
    dataset: str | None = None
    """Name of the dataset that it belongs to."""

    def __getitem__(self, name: str) -> Any:
        """Return a value of the shard's entry by name."""
        return self.to_json()[name]

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a list."""
        return _given(asdict(self))


@dataclass(frozen=True)
class Descriptor:
    """A list of shards."""

    shards: tuple[ShardInfo, ...]
    name: str | None = None
    base: str | None = None
    """The base of relative addresses; None for the folder of the file."""
    info: Any = None
    """Further information."""
    weight: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        head = {"name": self.name, "base": self.base, "info": self.info, "weight": self.weight}
        shards = [shard.to_json() for shard in self.shards]
        return {"__kind__": KIND, "wids_version": VERSION, **_given(head), "shardlist": shards}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def load_descriptor(source: Any, *, base: str | None = None) -> Descriptor:
    """Return a list of shards, with absolute addresses.

    Args:
        source: Address of a JSON file, an open stream of it, its content, or a list of entries.
        base: The base of relative addresses, overriding that of the file.

    Raises:
        FormatError: If it is not a list of shards.
    """
    if isinstance(source, Descriptor):
        return source
    if isinstance(source, str | os.PathLike):
        address = os.fspath(source)
        folder = parent_address(address)
        content = parse_json(read_document(address), origin=redact(address))
        return _parse(content, redact(address), base, folder)
    if hasattr(source, "read"):
        content = parse_json(source.read(), origin="the stream")
        return _parse(content, "the stream", base, os.getcwd())
    if isinstance(source, Iterable) and not isinstance(source, Mapping | str | bytes):
        source = {"shardlist": source, "wids_version": VERSION}
    return _parse(source, "the list of shards", base, os.getcwd())


def save_descriptor(descriptor: Descriptor, address: str | os.PathLike[str]) -> None:
    """Write a list of shards atomically.

    Addresses below the folder of the file, or below `base`, are written relative to it.
    """
    base = descriptor.base or parent_address(address)
    shards = tuple(replace(shard, url=_relative(shard.url, base)) for shard in descriptor.shards)
    text = json.dumps(replace(descriptor, shards=shards).to_json(), indent=2)
    write_text(address, text + "\n")


def create_descriptor(
    urls: Sequence[str],
    *,
    name: str | None = None,
    base: str | None = None,
    info: Any = None,
    checksum: bool = False,
    progress: Callable[[], Any] = lambda: None,
) -> Descriptor:
    """Return a list of shards, with everything that can be detected about them.

    Args:
        urls: Addresses of the shards.
        name: Name of the dataset.
        base: The base of relative addresses.
        info: Further information to include.
        checksum: Whether to read the shards completely, for their MD5 checksums.
        progress: Called after each shard.

    """
    shards = []
    for url in urls:
        digest = _md5(url) if checksum else None
        shards.append(ShardInfo(url, _count(url), file_size(url), digest))
        progress()
    return Descriptor(tuple(shards), name, base, info)


def _count(url: str) -> int:
    if is_remote(url):
        with suppress(ConfigError):
            return shard_counts([url])[0]
    # Without an index, the headers are read.
    from energon.prepare.index import ShardFile

    return ShardFile(url if is_remote(url) else local_path(url)).scan().num_samples


def _md5(url: str) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with closing(open_url(url)) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _parse(document: Any, origin: str, base: str | None, folder: str, depth: int = 0) -> Descriptor:
    if not isinstance(document, Mapping) or not {"shardlist", "datasets"} & set(document):
        raise FormatError(f"{origin}: not a list of shards; expected JSON with a `shardlist`")
    if document.get("wids_version") != VERSION and depth == 0:
        raise FormatError(
            f"{origin}: wids_version is {document.get('wids_version')!r}, expected {VERSION}"
        )
    start = base or document.get("base") or folder
    name = document.get("name")
    shards = [_shard(entry, origin, start, name) for entry in document.get("shardlist", ())]
    for entry in document.get("datasets", ()):
        shards += _parse_part(entry, origin, base, start, depth).shards
    return Descriptor(
        tuple(shards), name, document.get("base"), document.get("info"), document.get("weight")
    )


def _parse_part(entry: Any, origin: str, base: str | None, start: str, depth: int) -> Descriptor:
    if not isinstance(entry, Mapping) or "source_url" not in entry:
        return _parse(entry, origin, base, start, depth + 1)
    if depth:
        raise FormatError(
            f"{origin}: this list is included by another one, so it cannot include others; "
            "list its shards"
        )
    address = join_address(start, str(entry["source_url"]))
    document = parse_json(read_document(address), origin=redact(address))
    return _parse(document, redact(address), base, parent_address(address), depth + 1)


def _shard(entry: Any, origin: str, start: str, name: str | None) -> ShardInfo:
    try:
        return ShardInfo(
            join_address(start, str(entry["url"])),
            int(entry["nsamples"]),
            entry.get("filesize"),
            entry.get("md5sum"),
            entry.get("dataset", name),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{origin}: {entry!r:.100} is not a shard: expected url and nsamples"
        ) from error


def _relative(url: str, base: str) -> str:
    folder = base.rstrip("/") + "/"
    if is_remote(url):
        return url.removeprefix(folder)
    return os.path.abspath(url).removeprefix(os.path.abspath(base).rstrip("/") + "/")
