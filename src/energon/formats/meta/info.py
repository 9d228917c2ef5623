"""The shards of a dataset, `.nv-meta/.info.json`, and how they are split, `.nv-meta/split.yaml`.

The order of the shards matters: their positions are the `tar_file_id`s of `index.sqlite`.
Datasets prepared by early releases have `.info.yaml` with the same content. Those without a
`split.yaml` are split by the names of their files, or by a ratio.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from energon.errors import ConfigError, DatasetNotFoundError, FormatError, SecurityError
from energon.formats.meta import yaml
from energon.formats.meta.braces import collapse_braces, expand_all
from energon.formats.text import parse_json
from energon.limits import is_allowed, read_local_document, refusal
from energon.local_file import decode_utf8
from energon.messages import counted, nearest, shell_word, warn_once

META = ".nv-meta"
INFO_FILES = (".info.yaml", ".info.json")
PACK_RECORD = f"{META}/pack.json"
"""What `energon pack` writes first: an interrupted run continues only if it packs the same. Where
it is and `.info.json` is not, shards are missing."""
MAX_SAMPLES = (1 << 53) - 1
"""Far more than there are, and what numbers of samples are computed with holds it."""
_ELSEWHERE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*://|pipe:")


@dataclass(frozen=True)
class DatasetInfo:
    """The result of preparing a dataset.

    Args:
        shard_counts: Number of samples by path of the shard below the dataset folder.
        energon_version: The release that prepared it; None if unknown.
    """

    shard_counts: Mapping[str, int]
    energon_version: str | None = None

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(self.shard_counts.values())

    def to_json(self) -> str:
        """Return the content of `.info.json`."""
        document = {
            "energon_version": self.energon_version,
            "shard_counts": dict(self.shard_counts),
        }
        return json.dumps(document, indent=2)


def load_info(dataset: str | os.PathLike[str], allow: Collection[str] = ()) -> DatasetInfo:
    """Read `.info.json`, or the older `.info.yaml`, of a dataset.

    Args:
        dataset: Its folder.
        allow: "outside" permits shards outside its folder.

    Raises:
        DatasetNotFoundError: If the folder is not a prepared dataset.
        FormatError: If the file is damaged.
        SecurityError: If it has shards elsewhere, which is not allowed.
    """
    root = as_path(dataset)
    folder = root / META
    parse_info = partial(parse_json, hint="run `energon prepare` again")
    for name, parse in ((".info.json", parse_info), (".info.yaml", yaml.load)):
        path = folder / name
        text = read_if_present(path)
        if text is not None:
            info = _check(parse(text, origin=str(path)), str(path))
            check_inside(info.shard_counts, origin=str(path), allow=allow)
            return info
    if root.is_file():
        raise DatasetNotFoundError(f"{root}: is a file; expected the folder of a prepared dataset")
    if not root.is_dir():
        raise DatasetNotFoundError(f"{root} does not exist; expected a folder of tar shards")
    raise DatasetNotFoundError(
        f"{root} is not a prepared dataset: there is no {META}/.info.json; run `energon prepare "
        f"{shell_word(root)}`"
    )


def check_inside(names: Iterable[str], *, origin: str, allow: Collection[str] = ()) -> None:
    """Raise SecurityError unless names of files stay in the folder of their dataset.

    Symbolic links may lead anywhere: the owner of the folder made them.

    Args:
        names: Paths relative to the folder.
        origin: The document that contains them.
        allow: "outside" permits paths out of the folder.
    """
    for name in names:
        if "\0" in name:
            raise FormatError(f"{origin}: {name!r} is not a file name")
        # Most names have none of these, and there may be a million of them.
        if name.startswith("pipe:"):
            raise SecurityError(
                f"{origin}: {name!r} is a command for the shell, expected the path of a file; "
                "write its output to a shard in the folder, or stream it with `energon.webdataset`"
            )
        if (name[:1] == "/" or ":" in name or ".." in name) and leads_out(name):
            if is_allowed("outside", allow):
                return
            raise refusal(
                "outside", f"{origin}: {name!r} is not in the folder of the dataset; move it there"
            )


def leads_out(name: str) -> bool:
    """Return whether a name is an address, or a path out of the folder that it is relative to."""
    within = posixpath.normpath(name)
    return bool(_ELSEWHERE.match(name)) or within == ".." or within.startswith("../")


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a `pathlib.Path`, or an object with its methods unchanged."""
    return path if hasattr(path, "read_text") else Path(path)  # type: ignore[return-value]


def read_if_present(path: Path) -> str | None:
    """Return the text of a file; None if there is none.

    Raises:
        FormatError: If it is not text in UTF-8, too large, or a folder.
    """
    try:
        # A path in a store knows how to do it.
        read = getattr(path, "read_document", partial(read_local_document, path))
        return decode_utf8(read(), origin=str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as error:
        raise FormatError(f"{path}: is a folder, expected a file") from error


def _check(document: Any, origin: str) -> DatasetInfo:
    counts = document.get("shard_counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict) or not all(
        isinstance(shard, str) and isinstance(count, int) and 0 <= count <= MAX_SAMPLES
        for shard, count in counts.items()
    ):
        raise FormatError(
            f"{origin}: expected `shard_counts` with a number of samples for each shard; run "
            "`energon prepare` again"
        )
    if sum(counts.values()) > MAX_SAMPLES:
        raise FormatError(
            f"{origin}: claims {sum(counts.values())} samples, more than {MAX_SAMPLES}; the file "
            "is damaged, run `energon prepare` again"
        )
    return DatasetInfo(dict(counts), document.get("energon_version"))


logger = logging.getLogger("energon")

VALIDATION = ("val", "validation", "valid", "dev")
"""Synonymous names of splits."""
MAX_PROPOSED_SHARDS = 5
"""How many unknown entries get a suggestion."""
_ENDINGS = (".tar/", ".tgz/")


@dataclass(frozen=True)
class Split:
    """The splits of a dataset.

    Args:
        split_parts: Paths of shards, or patterns with braces, by name of the split.
        exclude: Excluded shards by path, excluded samples as `shard/key`; braces allowed.
        origin: The file, for messages.
        sample_ranges: By split and shard, the range of samples that belong to the split, start
            inclusive and stop exclusive. Shards that are not listed belong to it entirely.
        allow: "outside" permits shards outside the folder of the dataset.
    """

    split_parts: Mapping[str, Sequence[str]]
    exclude: Sequence[str] = ()
    origin: str = "split.yaml"
    sample_ranges: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    allow: Collection[str] = ()

    def shards(self, split_part: str) -> list[str]:
        """Return the shards of a split, in order, without those that are excluded.

        Raises:
            ConfigError: If there is no such split.
            SecurityError: If one is outside the dataset, which is not allowed.
        """
        name = find_split(split_part, self.split_parts)
        if name is None:
            near = nearest(split_part, self.split_parts)
            more = "; name one with split_part, or make others with `energon prepare --split-ratio`"
            hint = f"; did you mean {near!r}?" if near else more
            raise ConfigError(
                f"{self.origin}: there is no split {split_part!r}, only "
                f"{', '.join(map(repr, self.split_parts)) or 'none at all'}{hint}"
            )
        excluded = set(expand_all(self.exclude))
        listed = expand_all(self.split_parts[name])
        check_inside(listed, origin=self.origin, allow=self.allow)
        return [shard for shard in listed if shard not in excluded]

    def sample_range(self, split_part: str, shard: str, num_samples: int) -> tuple[int, int]:
        """Return the range of a shard's samples that belong to a split.

        Raises:
            ConfigError: If the shard has fewer than the range needs.
        """
        if not self.sample_ranges:
            return 0, num_samples
        name = find_split(split_part, self.split_parts) or split_part
        start, stop = self.sample_ranges.get(name, {}).get(shard, (0, num_samples))
        if stop > num_samples:
            raise ConfigError(
                f"{self.origin}: split {split_part!r} has samples {start} to {stop} of {shard}, "
                f"which has only {num_samples}; split the dataset again with `energon prepare`"
            )
        return start, stop

    @property
    def excluded_samples(self) -> list[tuple[str, str]]:
        """Excluded pairs of shard and sample key.

        An entry is such a pair if the name of a shard of any split begins it; keys may contain
        slashes.
        """
        pairs = []
        for entry in expand_all(self.exclude):
            shard = _shard_of(entry)
            if shard is not None:
                pairs.append((shard, entry[len(shard) + 1 :]))
        return pairs

    def unmatched(self, shards: Collection[str]) -> list[str]:
        """Return in words which entries of `exclude` match none of some shards."""
        return describe_unmatched(self.exclude, shards)

    def to_yaml(self) -> str:
        """Return the content of `split.yaml`, with runs of shards written as patterns."""
        # Reading a dataset needs no writer, and starts sooner without.
        from energon.formats.meta.yaml import dump_yaml

        parts = {name: collapse_braces(list(shards)) for name, shards in self.split_parts.items()}
        document: dict[str, Any] = {"split_parts": parts, "exclude": list(self.exclude)}
        if self.sample_ranges:
            document["sample_ranges"] = {
                name: {shard: list(numbers) for shard, numbers in ranges.items()}
                for name, ranges in self.sample_ranges.items()
            }
        return dump_yaml(document)


def find_split(requested: str, names: Iterable[str]) -> str | None:
    """Return the split with a name, or the only one with a synonymous name, or None.

    Example:
        >>> find_split("val", ["train", "validation"]), find_split("val", ["dev", "validation"])
        ('validation', None)
    """
    splits = list(names)
    if requested in splits or requested not in VALIDATION:
        return requested if requested in splits else None
    same = [name for name in splits if name.lower() in VALIDATION]
    return same[0] if len(same) == 1 else None


def chosen_split(split_part: str, splits: Collection[str], *, origin: str, by: str) -> str:
    """Return which of the splits of a dataset a program asks for, see `find_split`.

    Args:
        split_part: The split.
        splits: The splits; "" is one that holds everything, of which a ratio selects a part.
        origin: The dataset, for messages.
        by: Where its splits are written, for messages.

    Raises:
        ConfigError: If there is no such split.
    """
    name = "" if "" in splits else find_split(split_part, splits)
    if name is None:
        raise ConfigError(
            f"{origin}: there is no split {split_part!r}, only {', '.join(splits)}, according to "
            f"{by}"
        )
    return name


BY_NAMES = "the names of its files and folders"

MAX_KEY_DIGITS = 18
"""Of a key that is a number."""


def numbers_in(text: str) -> list[int]:
    """Return the number that a text is, written as keys are, as a list of one; else none.

    Example:
        >>> numbers_in("100"), numbers_in("00100"), numbers_in("a/100")
        ([100], [], [])
    """
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_KEY_DIGITS
    return [int(text)] if is_number and text == str(int(text)) else []


def excludes_any(entry: str, shards: Collection[str]) -> bool:
    """Return whether an entry of `exclude` is one of some shards, or a sample in one.

    Example:
        >>> [excludes_any(entry, {"0.tar"}) for entry in ("0.tar", "{0,1}.tar/key", "2.tar")]
        [True, True, False]
    """
    return any(name in shards or _shard_of(name) in shards for name in expand_all((entry,)))


def describe_unmatched(entries: Sequence[str], shards: Collection[str]) -> list[str]:
    """Return in words which of the entries of an `exclude` list match none of some shards."""
    unmatched = [entry for entry in entries if not excludes_any(entry, shards)]
    lines = []
    for number, entry in enumerate(unmatched):
        name = _shard_of(entry) or entry
        near = nearest(name, shards) if number < MAX_PROPOSED_SHARDS else None
        hint = f"; did you mean {near!r}?" if near else ""
        lines.append(f"{entry!r} is excluded, but matches no shard{hint}")
    return lines


def _shard_of(entry: str) -> str | None:
    """Return the shard that an entry for a sample names; None for other entries."""
    for ending in _ENDINGS:
        shard, separator, key = entry.partition(ending)
        if separator and key:
            return shard + ending[:-1]
    return None


def load_split(
    dataset: str | os.PathLike[str], name: str = "split.yaml", allow: Collection[str] = ()
) -> Split:
    """Read the splits of a dataset.

    Args:
        dataset: Its folder.
        name: File below `.nv-meta`; `split.yaml` may also be there as `split.json`.
        allow: "outside" permits shards outside the folder.

    Raises:
        ConfigError: If there is no such file, it is not YAML or JSON, or it has unknown keys.
    """
    root = as_path(dataset)
    for filename in (name, "split.json") if name == "split.yaml" else (name,):
        path = root / META / filename
        with yaml.as_configuration():
            text = read_if_present(path)
            if text is not None:
                return replace(_check_split(_parse_split(text, path), str(path)), allow=allow)
    raise ConfigError(
        f"{root / META / name}: no such file; run `energon prepare {shell_word(root)}`, or name "
        "another with split_config"
    )


def _parse_split(text: str, path: Path) -> Any:
    if path.name.endswith(".json"):
        return parse_json(text, origin=str(path))
    return yaml.load(text, origin=str(path), repeated_keys=True)


def _check_split(document: Any, origin: str) -> Split:
    if not isinstance(document, dict) or "split_parts" not in document:
        raise ConfigError(f"{origin}: expected `split_parts` with lists of shards by split")
    unknown = set(document) - {"split_parts", "exclude", "sample_ranges"}
    if unknown:
        raise ConfigError(
            f"{origin}: unknown keys {sorted(unknown)}; allowed are split_parts, exclude and "
            "sample_ranges"
        )
    parts = document["split_parts"] or {}
    exclude = document.get("exclude") or []
    lists = [*parts.values(), exclude] if isinstance(parts, dict) else [None]
    for entries in lists:
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise ConfigError(f"{origin}: expected lists of paths, found {entries!r}")
    ranges = _check_ranges(document.get("sample_ranges") or {}, parts, origin)
    splits = {name: list(shards) for name, shards in parts.items()}
    return Split(splits, list(exclude), origin, ranges)


def _check_ranges(
    document: Any, parts: Mapping[str, Any], origin: str
) -> dict[str, dict[str, tuple[int, int]]]:
    expected = f"{origin}: expected `sample_ranges` with SPLIT: {{SHARD: [START, STOP]}}"
    if not isinstance(document, dict) or not all(isinstance(v, dict) for v in document.values()):
        raise ConfigError(f"{expected}, found {document!r}")
    ranges: dict[str, dict[str, tuple[int, int]]] = {}
    for name, shards in document.items():
        if name not in parts:
            raise ConfigError(f"{origin}: sample_ranges has {name!r}, which is not a split")
        ranges[name] = {}
        for shard, numbers in shards.items():
            match numbers:
                case [int(start), int(stop)] if 0 <= start < stop:
                    ranges[name][shard] = (start, stop)
                case _:
                    raise ConfigError(f"{expected}, found {shard}: {numbers!r}")
    return ranges


SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the names of folders and files that identify a split, as for Hugging Face `datasets`."""

RATIO_SPLITS = ("train", "val", "test")
"""The splits of a ratio such as "99,1,0"."""

_WORDS = "|".join(sorted(SPLIT_WORDS, key=len, reverse=True))
_WORD_ALONE = re.compile(rf"[-._ 0-9]*({_WORDS})[-._ 0-9]*", re.IGNORECASE)
_WORD_AMONG_OTHERS = re.compile(rf"(?:^|[-._ 0-9])({_WORDS})(?:[-._ 0-9]|$)", re.IGNORECASE)
_NUMBERED_FILE = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?(?:\.\w+)+")
"""What `datasets` calls the files of a split, whatever the name of the split."""


def guess_splits(names: Sequence[str], *, by_file: bool, origin: str) -> dict[str, list[str]]:
    """Assign the files of a dataset to splits by their paths, and log the result once.

    Args:
        names: See `splits_by_name`.
        by_file: See `splits_by_name`.
        origin: The dataset, for messages.
    """
    splits = splits_by_name(names, by_file=by_file)
    if "" in splits:
        return splits
    message = f"{origin}: splits by {BY_NAMES}: " + ", ".join(
        f"{split} ({counted(len(own), 'file')} like {own[0]})" for split, own in splits.items()
    )
    left_out = sorted(set(names).difference(*splits.values()))
    if left_out:
        message += f"; left out {counted(len(left_out), 'file')} of no split like {left_out[0]}"
    level = logging.WARNING if left_out else logging.INFO
    warn_once(logger, message, "%s", message, level=level)
    return splits


def splits_by_name(names: Sequence[str], *, by_file: bool) -> dict[str, list[str]]:
    """Assign files to splits by their paths.

    A name tells a split if it contains one of `SPLIT_WORDS` alone or between `-`, `.`, `_`, spaces
    and digits. Folders count before files, names that consist of the word and digits before others,
    and outer folders before inner ones.

    If only some paths tell a split, and one of them tells val or test, the others are left out;
    they belong to train if no path tells that.

    Args:
        names: Paths of files.
        by_file: Whether single file names count, as those of tables do. Those of images and other
            media count only if each of them tells a split, and no folder does.

    Returns:
        Names of files by split; a single split "" if nothing tells one, or only train.

    Example:
        >>> splits_by_name(["train2017/a.jpg", "val2017/b.jpg"], by_file=False)
        {'train': ['train2017/a.jpg'], 'val': ['val2017/b.jpg']}
        >>> splits_by_name(["my_train.parquet", "x-validation.parquet"], by_file=True)
        {'train': ['my_train.parquet'], 'val': ['x-validation.parquet']}
        >>> splits_by_name(["train/a.jpg", "bus/b.jpg"], by_file=False)
        {'': ['train/a.jpg', 'bus/b.jpg']}
    """
    if by_file and (numbered := _numbered_splits(names)):
        return numbered
    told = [split_of_folders(name) for name in names]
    if by_file:
        told = [split or _split_of_name(name) for split, name in zip(told, names, strict=True)]
    elif not any(told):
        told = [_split_of_name(name) for name in names]
        if None in told or len(set(told)) < 2:
            return {"": list(names)}
    if None in told and "train" not in told and not by_file:
        # A word among others may be a class, such as test_tube beside petri_dish.
        told = [split_of_folders(name, alone=True) for name in names]
    if set(told) <= {"train", None}:
        return {"": list(names)}
    if "train" not in told:
        told = [split or "train" for split in told]
    splits: dict[str, list[str]] = {split: [] for split in RATIO_SPLITS if split in told}
    for split, name in zip(told, names, strict=True):
        if split is not None:
            splits[split].append(name)
    return splits


def split_of_folders(path: str, *, alone: bool = False) -> str | None:
    """Return the split that the folders of a path tell, or None.

    Args:
        path: The path of a file.
        alone: Whether only names count that consist of the word and digits.

    Example:
        >>> split_of_folders("my_train/val2017/0.jpg"), split_of_folders("bullet_train/0.jpg")
        ('val', 'train')
        >>> split_of_folders("bullet_train/0.jpg", alone=True)
    """
    folders = path.split("/")[:-1]
    words = [word[1] for folder in folders if (word := _WORD_ALONE.fullmatch(folder))]
    if not words and not alone:
        words = [word[1] for folder in folders if (word := _WORD_AMONG_OTHERS.search(folder))]
    return SPLIT_WORDS[words[0].lower()] if words else None


def _split_of_name(path: str) -> str | None:
    word = _WORD_AMONG_OTHERS.search(path.rpartition("/")[2])
    return SPLIT_WORDS[word[1].lower()] if word else None


def _numbered_splits(names: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the splits of files such as `train_sft-00000-of-00003.parquet`, if they have others.

    None if a file has another name, or if all splits have usual names.
    """
    splits: dict[str, list[str]] = {}
    for name in names:
        match = _NUMBERED_FILE.fullmatch(name.rpartition("/")[2])
        if match is None:
            return None
        splits.setdefault(match[1], []).append(name)
    is_usual = all(split.lower() in SPLIT_WORDS for split in splits)
    return None if is_usual or len(splits) < 2 else splits


def parse_shares(ratio: Any, *, origin: str) -> list[float]:
    """Return the shares of train, val and test for a ratio; they sum to 1.

    Raises:
        ConfigError: If it is not text such as "99,1,0".

    Example:
        >>> parse_shares("3,1", origin="")
        [0.75, 0.25]
    """
    try:
        numbers = [float(number) for number in ratio.split(",")]
    except (AttributeError, ValueError):
        numbers = []
    are_shares = 1 <= len(numbers) <= len(RATIO_SPLITS) and not min(numbers) < 0
    if not are_shares or not 0 < sum(numbers) < 1e18:
        raise ConfigError(
            f"{origin}: read: split is {ratio!r}; expected up to three numbers, the shares of "
            f'{", ".join(RATIO_SPLITS)}, like "99,1,0"'
        )
    return [number / sum(numbers) for number in numbers]


def ratio_names(ratio: str | None, *, origin: str) -> list[str]:
    """Return the splits with a share in a ratio; without a ratio, everything is train."""
    if ratio is None:
        return ["train"]
    shares = zip(RATIO_SPLITS, parse_shares(ratio, origin=origin), strict=False)
    return [name for name, share in shares if share]


def ratio_range(
    ratio: str | None, split_part: str, count: int, *, what: str, origin: str
) -> tuple[int, int]:
    """Return start and stop of a split among `count` items.

    Args:
        ratio: The shares, such as "99,1,0"; None if everything is train.
        split_part: The split.
        count: Number of items.
        what: Their name in messages.
        origin: Where the ratio was written, for messages.

    Raises:
        ConfigError: If there is no such split.
    """
    names = ratio_names(ratio, origin=origin)
    name = find_split(split_part, names)
    if name is None:
        hint = (
            f"say which {what} it has in a metadataset (YAML), beside the path: "
            '`read: {split: "99,1,0"}`'
            if ratio is None
            else f"the ratio {ratio!r} gives it no {what}"
        )
        raise ConfigError(
            f"{origin}: there is no split {split_part!r}, only {', '.join(names)}; {hint}"
        )
    if ratio is None:
        return 0, count
    number = RATIO_SPLITS.index(name)
    edges = [0.0, *accumulate(parse_shares(ratio, origin=origin))]
    return round(edges[number] * count), round(edges[number + 1] * count)
