"""Find the datasets of a path split by split, and describe them as plain data or lines of text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from energon.errors import ConfigError, EmptyDatasetError, EnergonError
from energon.formats.meta.info import find_split
from energon.io.address import address_name, is_remote, local_path, redact
from energon.messages import counted, nearest, short_number
from energon.metadataset.document import read_metadataset
from energon.metadataset.kind import check_shard_list, dataset_kind, kind_entry
from energon.metadataset.leaf import BlendMode, Leaf, LeafList
from energon.metadataset.resolve import resolve
from energon.sources.files.open import describe_folder, folder_of
from energon.sources.join import JoinedSource
from energon.sources.kinds import kind_named
from energon.sources.measures import describe_measures
from energon.sources.shards import ShardPool
from energon.sources.source import OpenRequest, Source
from energon.task_encoder.open_join import find_index, join_digest


@dataclass(frozen=True)
class DatasetContents:
    """The datasets of a dataset or metadataset.

    Args:
        kind: The kind of dataset there.
        splits: Datasets by split; members of joins are separate.
        mixes: How datasets are mixed, by split; members of joins are together.
        problems: By split, why it has no datasets, each as one line.
    """

    kind: str
    splits: dict[str, list[Leaf]] = field(default_factory=dict)
    mixes: dict[str, LeafList] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)


def find_leaves(
    path: str | os.PathLike[str],
    *,
    splits: Sequence[str] = (),
    dataset_config: str | None = None,
    split_config: str | None = None,
    training: bool = False,
) -> DatasetContents:
    """Return the datasets of a dataset or metadataset.

    Args:
        path: Where it is.
        splits: Which of its splits; none means all.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        training: Whether weights and repetitions count, which validation ignores.

    Raises:
        DatasetNotFoundError: If there is no dataset.
        ConfigError: If there is no such split, or the document is invalid.
    """
    address = os.fspath(path)
    if not is_remote(address):
        address = os.path.abspath(local_path(address))
    contents = DatasetContents(dataset_kind(address))
    if contents.kind == "metadataset":
        names = list(read_metadataset(address).content.splits)
    else:
        names = kind_named(contents.kind).split_names(address, split_config)
    for requested in splits or names:
        name = find_split(requested, names)
        if name is None:
            close = nearest(requested, names)
            did_you_mean = f"; did you mean {close!r}?" if close else ""
            raise ConfigError(
                f"{redact(address)}: there is no split {requested!r}, only "
                f"{', '.join(map(repr, names)) or 'none'}{did_you_mean}"
            )
        try:
            mix = resolve(
                address,
                split_part=name,
                training=training,
                dataset_config=dataset_config,
                split_config=split_config,
            )
        except EnergonError as error:
            contents.problems.extend((name, line) for line in str(error).splitlines())
        else:
            contents.mixes[name] = mix
            contents.splits[name] = _single(mix.leaves)
    return contents


def _single(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return leaves with the members of joins as leaves of their own, each once."""
    single: list[Leaf] = []
    for member in (member for leaf in leaves for member, _ in leaf.datasets):
        if member not in single:
            single.append(member)
    return single


MAX_CLASSES = 10
"""How many classes are shown."""
BAR_LETTERS = 32
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def info_lines(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result of `energon.inspect.info.describe` as Markdown."""
    if description["kind"] == "metadataset":
        yield from _metadataset(description)
        for path, dataset in description["datasets"].items():
            yield ""
            yield f"## {path}"
            yield from _dataset(dataset)
    else:
        yield f"# {description['name']}"
        yield f"- path: {description['path']}"
        yield from _dataset(description)


def _metadataset(description: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {description['name']}"
    yield f"- path: {description['path']}"
    for name, split in description["splits"].items():
        line = f"- split {name}: {_samples(split['samples'])}"
        if "samples_per_epoch" in split:
            line += f", {split['samples_per_epoch']} with repetitions"
        yield line
        for leaf in split["leaves"]:
            yield f"  - {_leaf(leaf)}"
    yield from (f"- problem: {problem}" for problem in description.get("problems", ()))


def has_problems(description: Mapping[str, Any]) -> bool:
    """Return whether a description, or a file that it names, cannot be used."""
    documents = (description, *description.get("datasets", {}).values())
    return any(document.get("problems") for document in documents)


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


def _dataset(description: Mapping[str, Any]) -> Iterator[str]:
    yield from (_contents if kind_entry(description["kind"]).has_samples else _files)(description)
    for name, media in description.get("media", {}).items():
        yield f"- {name}: {_medium(name, media)}"


def _contents(description: Mapping[str, Any]) -> Iterator[str]:
    for title in ("sample_type", "samples", "tokens", "shards", "bytes", "energon_version"):
        if description.get(title) is not None:
            yield f"- {title.replace('_', ' ')}: {description[title]}"
    if description.get("columns"):
        columns = (f"{name} ({kind})" for name, kind in description["columns"].items())
        yield f"- columns: {', '.join(columns)}"
    if description.get("classes"):
        classes = [f"{number} {name}" for name, number in description["classes"].items()]
        more = [f"… {len(classes)} in all"] if len(classes) > MAX_CLASSES else []
        yield f"- classes: {', '.join([*classes[:MAX_CLASSES], *more])}"
    if description.get("missing_shards"):
        yield f"- missing shards: {', '.join(description['missing_shards'])}"
    for reason in description.get("unreadable_shards", ()):
        yield f"- cannot be read: {reason}"
    yield from (f"- problem: {problem}" for problem in description.get("problems", ()))
    for name, split in description.get("splits", {}).items():
        text = ", ".join(_split(split, description["samples"]))
        yield f"- split {name}: {text}" if text else f"- split {name}"
    for name, part in description.get("parts", {}).items():
        yield f"- part {name}: {part['count']} with {part['bytes']} bytes, {_spread(part)}"
    yield from _sizes("sample", description.get("sample_sizes", {}))
    for name, measure in description.get("measures", {}).items():
        yield from _measure(name, measure)
    if "hint" in description:
        yield f"- note: {description['hint']}"


def _split(split: Mapping[str, Any], total: int) -> Iterator[str]:
    """Yield the lines about a split: kinds of other packages may tell less."""
    if "samples" in split:
        share = 100 * split["samples"] / max(1, total)
        yield f"{counted(split['samples'], 'sample')} ({share:.1f} %)"
    if "shards" in split:
        yield counted(split["shards"], "shard")
    if split.get("excluded"):
        yield f"{split['excluded']} excluded"


def _files(description: Mapping[str, Any]) -> Iterator[str]:
    for title in ("files", "bytes"):
        if title in description:
            yield f"- {title}: {description[title]}"
    for name, part in description.get("extensions", {}).items():
        yield f"- extension {name}: {part['count']} with {part['bytes']} bytes, {_spread(part)}"
    yield from _sizes("file", description.get("file_sizes", {}))


def _sizes(noun: str, sizes: Mapping[str, Any]) -> Iterator[str]:
    if sizes.get("count"):
        yield f"- bytes of a {noun}: {_spread(sizes)}"
        yield from _histogram(sizes["histogram"], _size)


def _measure(name: str, measure: Mapping[str, Any]) -> Iterator[str]:
    if "problem" in measure:
        yield f"- measure {name} cannot be used: {measure['problem']}"
        return
    facts = [f"{each} {short_number(measure[each])}" for each in ("min", "median", "p99", "max")]
    if measure["measured"] < measure["samples"]:
        facts.append(f"of {measure['measured']:,} evenly spread samples")
    yield f"- measure {name}: {', '.join(facts)}"
    yield from _histogram(measure["histogram"], short_number)


def _spread(sizes: Mapping[str, Any]) -> str:
    return f"{sizes['mean']:.0f} on average, from {sizes['min']} to {sizes['max']}"


def _histogram(buckets: list[Mapping[str, Any]], shown: Callable[[Any], str]) -> Iterator[str]:
    """Yield a bar for each bucket, whose bound is formatted by `shown`."""
    most = max(bucket["count"] for bucket in buckets)
    bounds = [f"below {shown(bucket['below'])}" for bucket in buckets]
    width = max(map(len, bounds))
    digits = len(str(most))
    for bound, bucket in zip(bounds, buckets, strict=True):
        bar = "#" * -(-BAR_LETTERS * bucket["count"] // most)
        yield f"    {bound:>{width}} {bucket['count']:>{digits}} {bar}".rstrip()


def _size(power_of_two: int) -> str:
    unit = min((power_of_two.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{power_of_two >> 10 * unit} {_UNITS[unit]}"


def _medium(name: str, media: Mapping[str, Any]) -> str:
    if name == "images":
        width, height = media["width"], media["height"]
        return (
            f"{media['count']} ({', '.join(media['formats'])}), {width['min']} to "
            f"{width['max']} by {height['min']} to {height['max']} pixels"
        )
    if name == "unreadable":
        return f"metadata of {counted(media['count'], 'file')}; run `energon prepare-media` again"
    if media["longest"] is None:
        return f"{media['count']} of unknown length"
    return (
        f"{media['count']} of {media['seconds']} s in all, from "
        f"{media['shortest']} to {media['longest']} s"
    )


def describe_mix(mix: LeafList) -> dict[str, Any]:
    """Return the datasets of a split of a metadataset.

    `samples` is None if it depends on the index of a join which does not exist yet.
    """
    pool = ShardPool()
    leaves = [_described_leaf(leaf, mix, pool) for leaf in mix.leaves]
    is_counted = all(leaf["samples"] is not None for leaf in leaves)
    described = {
        "samples": sum(leaf["samples"] for leaf in leaves) if is_counted else None,
        "blend": mix.blend_mode.value,
        "leaves": leaves,
    }
    if mix.blend_mode is BlendMode.SAMPLE_REPETITIONS and is_counted:
        described["samples_per_epoch"] = round(
            sum(leaf["samples"] * leaf["repetitions"] for leaf in leaves)
        )
    return described


def _described_leaf(leaf: Leaf, mix: LeafList, pool: ShardPool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "path": redact(leaf.path),
        "split_part": leaf.split_part,
        "samples": _count(leaf, pool),
        "weight": leaf.weight if mix.blend_mode is BlendMode.DATASET_WEIGHT else None,
        "repetitions": leaf.repetitions,
        "subflavors": dict(leaf.subflavors),
        "aux": {name: redact(path) for name, path in leaf.aux.items()},
    }
    if leaf.join:
        described["join"] = [
            {
                "path": redact(member.leaf.path),
                "split_part": member.leaf.split_part,
                "nonmatch": member.nonmatch,
            }
            for member in leaf.join
        ]
    return described


def _count(leaf: Leaf, pool: ShardPool) -> int | None:
    """Return the number of samples of a leaf; None for a join without an index."""
    try:
        if not leaf.join:
            return len(_open(leaf, pool))
        members = [_open(member.leaf, pool) for member in leaf.join]
        digest = join_digest(leaf, members)
        index = find_index(leaf, digest)
        if index is None:
            return None
        return len(JoinedSource(members, index, digest=digest, subsets=leaf.subsets))
    except EmptyDatasetError:
        return 0


def _open(leaf: Leaf, pool: ShardPool) -> Any:
    kind = kind_named(leaf.kind)
    return kind.open(OpenRequest(leaf, kind.config(leaf), pool=pool))


def describe(
    path: str | os.PathLike[str],
    *,
    split_config: str = "split.yaml",
    dataset_config: str = "dataset.yaml",
    parts: bool = True,
) -> dict[str, Any]:
    """Return the content of a dataset or metadataset.

    Args:
        path: Where it is.
        split_config: File below `.nv-meta` that lists the splits.
        dataset_config: File below `.nv-meta` that describes samples.
        parts: Whether to count parts and their sizes, which reads all indexes.

    Raises:
        DatasetNotFoundError: If there is no dataset.
        ConfigError: If a document is invalid.
    """
    address = os.fspath(path) if is_remote(path) else local_path(path)
    folder = folder_of(address)
    if folder is not None:
        described = {"name": _name(folder), "path": redact(address), "kind": "filesystem"}
        return {**described, **describe_folder(folder, parts)}
    kind = dataset_kind(address)
    described = {"name": _name(address), "path": redact(address), "kind": kind}
    if kind == "metadataset":
        return {**described, **_described_metadataset(address, split_config, dataset_config, parts)}
    entry = kind_named(kind)
    if not kind_entry(kind).has_samples:
        check_shard_list(address)
    of_kind = entry.describe(
        address, split_config=split_config, dataset_config=dataset_config, parts=parts
    )
    hint = {"hint": entry.hint} if entry.hint else {}
    measures = _measures(address, split_config, dataset_config) if parts else {}
    return {**described, **of_kind, **({"measures": measures} if measures else {}), **hint}


def _measures(address: str, split_config: str, dataset_config: str) -> dict[str, Any]:
    """Return the distributions of the measures of all splits of a dataset that can be opened.

    Other descriptions say why a split cannot.
    """
    pool = ShardPool()
    sources: list[Source] = []
    with suppress(EnergonError):
        contents = find_leaves(address, split_config=split_config, dataset_config=dataset_config)
        for leaf in (leaf for leaves in contents.splits.values() for leaf in leaves):
            with suppress(EnergonError):
                source = _open(leaf, pool)
                if source.ranges() not in [other.ranges() for other in sources]:
                    sources.append(source)
        return describe_measures(sources)
    return {}


def _name(address: str) -> str:
    return address_name(address if is_remote(address) else os.path.realpath(address))


def _described_metadataset(
    address: str, split_config: str, dataset_config: str, parts: bool
) -> dict[str, Any]:
    contents = find_leaves(
        address, split_config=split_config, dataset_config=dataset_config, training=True
    )
    datasets: dict[str, Any] = {}
    for leaves in contents.splits.values():
        for leaf in leaves:
            if leaf.path not in datasets:
                datasets[leaf.path] = describe(
                    leaf.path,
                    split_config=leaf.split_config,
                    dataset_config=leaf.dataset_config,
                    parts=parts,
                )
    return {
        "splits": {name: describe_mix(mix) for name, mix in contents.mixes.items()},
        "datasets": {redact(path): dataset for path, dataset in datasets.items()},
        "problems": [f"split {name!r}: {line}" for name, line in contents.problems],
    }
