"""What is known about a dataset or metadataset, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from energon.counting import counted

BAR_LETTERS = 32
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def info_lines(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `energon.inspect.info.describe` has found, as Markdown."""
    if about["kind"] == "metadataset":
        yield from _metadataset(about)
        for path, dataset in about["datasets"].items():
            yield ""
            yield f"## {path}"
            yield from _dataset(dataset)
    else:
        yield f"# {about['name']}"
        yield f"- path: {about['path']}"
        yield from _dataset(about)


def _metadataset(about: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {about['name']}"
    yield f"- path: {about['path']}"
    for name, split in about["splits"].items():
        line = f"- split {name}: {_samples(split['samples'])}"
        if "samples_per_epoch" in split:
            line += f", {split['samples_per_epoch']} with repetitions"
        yield line
        for leaf in split["leaves"]:
            yield f"  - {_leaf(leaf)}"
    for problem in about["problems"]:
        yield f"- problem: {problem}"


def _leaf(leaf: Mapping[str, Any]) -> str:
    share = ""
    if leaf["weight"] is not None:
        share = f"{100 * leaf['weight']:.1f} % "
    elif leaf["repetitions"] != 1:
        share = f"{leaf['repetitions']:g} times "
    datasets = [f"{each['path']} ({each['split_part']})" for each in leaf.get("join", [leaf])]
    line = f"{share}{' joined with '.join(datasets)}: {_samples(leaf['samples'])}"
    for title in ("subflavors", "aux"):
        if leaf[title]:
            pairs = ", ".join(f"{name}: {value}" for name, value in leaf[title].items())
            line += f"; {title} {pairs}"
    return line


def _samples(count: int | None) -> str:
    if count is None:
        return "not counted before `energon prepare` or training builds the index of the join"
    return counted(count, "sample")


def _dataset(about: Mapping[str, Any]) -> Iterator[str]:
    yield from _files(about) if about["kind"] == "filesystem" else _contents(about)
    for name, found in about.get("media", {}).items():
        yield f"- {name}: {_medium(name, found)}"


def _contents(about: Mapping[str, Any]) -> Iterator[str]:
    for title in ("sample_type", "samples", "tokens", "shards", "bytes", "energon_version"):
        if about.get(title) is not None:
            yield f"- {title.replace('_', ' ')}: {about[title]}"
    if about.get("columns"):
        columns = (f"{name} ({kind})" for name, kind in about["columns"].items())
        yield f"- columns: {', '.join(columns)}"
    if about["missing_shards"]:
        yield f"- missing shards: {', '.join(about['missing_shards'])}"
    for reason in about.get("unreadable_shards", ()):
        yield f"- cannot be read: {reason}"
    for name, split in about["splits"].items():
        share = 100 * split["samples"] / max(1, about["samples"])
        excluded = f", {split['excluded']} left out" if split["excluded"] else ""
        yield (
            f"- split {name}: {counted(split['samples'], 'sample')} ({share:.1f} %), "
            f"{counted(split['shards'], 'shard')}{excluded}"
        )
    for name, part in about.get("parts", {}).items():
        yield f"- part {name}: {part['count']} with {part['bytes']} bytes, {_spread(part)}"
    yield from _sizes("sample", about.get("sample_sizes", {}))


def _files(about: Mapping[str, Any]) -> Iterator[str]:
    for title in ("files", "bytes"):
        if title in about:
            yield f"- {title}: {about[title]}"
    for name, part in about.get("extensions", {}).items():
        yield f"- extension {name}: {part['count']} with {part['bytes']} bytes, {_spread(part)}"
    yield from _sizes("file", about.get("file_sizes", {}))


def _sizes(what: str, sizes: Mapping[str, Any]) -> Iterator[str]:
    if sizes.get("count"):
        yield f"- bytes of a {what}: {_spread(sizes)}"
        yield from _histogram(sizes["histogram"])


def _spread(sizes: Mapping[str, Any]) -> str:
    return f"{sizes['mean']:.0f} on average, from {sizes['min']} to {sizes['max']}"


def _histogram(buckets: list[Mapping[str, int]]) -> Iterator[str]:
    most = max(bucket["count"] for bucket in buckets)
    bounds = [f"below {_size(bucket['below'])}" for bucket in buckets]
    width = max(map(len, bounds))
    digits = len(str(most))
    for bound, bucket in zip(bounds, buckets, strict=True):
        bar = "#" * -(-BAR_LETTERS * bucket["count"] // most)
        yield f"    {bound:>{width}} {bucket['count']:>{digits}} {bar}".rstrip()


def _size(power_of_two: int) -> str:
    unit = min((power_of_two.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{power_of_two >> 10 * unit} {_UNITS[unit]}"


def _medium(name: str, found: Mapping[str, Any]) -> str:
    if name == "images":
        width, height = found["width"], found["height"]
        return (
            f"{found['count']} ({', '.join(found['formats'])}), {width['min']} to "
            f"{width['max']} by {height['min']} to {height['max']} pixels"
        )
    return (
        f"{found['count']} of {found['seconds']} s in all, from "
        f"{found['shortest']} to {found['longest']} s"
    )
