"""Decode some samples of a dataset, and report which fail and why. Runs in worker processes.

Files of folders are decoded the same way. Findings that say the same about different samples are
grouped.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from energon.decode.av import AVDecoder
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import (
    EmptyDatasetError,
    EnergonError,
    NoSuchFileError,
    SecurityError,
    StateError,
    reason_of,
)
from energon.formats.meta.info import META
from energon.inspect.where import part_extension, part_kind
from energon.io.address import redact
from energon.io.files import list_files
from energon.messages import counted, describe_error
from energon.metadataset.leaf import Leaf
from energon.plan.leaves.leaf import choose_slice_samples
from energon.prepare.engines import IsolatedCall, note
from energon.samples.crude import PART_FILES, UnreadableSample
from energon.samples.provenance import sources_of
from energon.sources.files.open import SystemFileStore
from energon.sources.files.store import FileStore
from energon.sources.source import Source
from energon.sources.webdataset import WebdatasetSource
from energon.stages.hooks.hook import HOOK_NOTE
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.leaves import OpenedLeaf
from energon.task_encoder.load import LoadSample
from energon.task_encoder.recipe import validation_recipe
from energon.task_encoder.train_plan import ValidationSettings
from energon.worker import WorkerConfig

MAX_READ_TOGETHER = 32
DECODING_DIED = "the process that decoded it died: a decoder has crashed, or memory ran out"


class Finding(NamedTuple):
    """A problem with a sample, a shard, a dataset or a document."""

    dataset: str
    split: str
    reason: str
    shard: str | None = None
    """None if it concerns more than a shard."""
    key: str | None = None
    """None if it concerns more than a sample."""
    part: str | None = None
    """None if it concerns more than a part."""
    hook: str | None = None
    """The hook of the task encoder that fails; None if it is not about hooks."""


@dataclass(frozen=True)
class BatchReport:
    """The result of checking a batch.

    Args:
        first: Number of the first sample.
        num_samples: How many were checked.
        findings: The problems.
        unchecked: By extension, how many parts were not decoded because the user must allow it.
        crude: The dataset, if its samples are batched with the names of their parts.
        names: Then, by name, how many of the samples that could be read have such a value.
    """

    first: int
    num_samples: int
    findings: Sequence[Finding] = ()
    unchecked: Counter[str] = field(default_factory=Counter)
    crude: str | None = None
    names: Counter[str] = field(default_factory=Counter)


def lint_batch(
    run: str, leaf: bytes, allow: tuple[str, ...], ordinals: Sequence[int]
) -> BatchReport:
    """Decode the samples of a dataset that have these numbers.

    Args:
        run: The run it belongs to: a leaf is unpacked once for each.
        leaf: The result of `pack_leaf`.
        allow: What the user allows.
        ordinals: Numbers of samples.
    """
    check = _Check(*_unpacked(run, leaf), SampleDecoder("rgb8", allow=allow))
    findings: list[Finding] = []
    together = min(MAX_READ_TOGETHER, choose_slice_samples(mean_bytes(check.opened.source)))
    for start in range(0, len(ordinals), together):
        findings += check(ordinals[start : start + together])
    findings += check.missing_files()
    loading = check.opened.loading
    samples = loading.samples
    is_crude = samples.load is None and samples.sample_type is None and loading.join is None
    return BatchReport(
        ordinals[0],
        len(ordinals),
        findings,
        check.unchecked,
        check.leaf.path if is_crude else None,
        check.names,
    )


def spread(count: int, most: int | None) -> Sequence[int]:
    """Return `most` of the numbers below `count`, at equal distances; None for all.

    Example:
        >>> list(spread(10, 4)), len(spread(300, 200))
        ([0, 2, 5, 7], 200)
    """
    if most is None or most >= count:
        return range(count)
    return [number * count // most for number in range(most)]


def mean_bytes(source: Source) -> float:
    """Return roughly how large a sample is, or 0 if the shards that would tell are missing."""
    try:
        return source.mean_sample_bytes
    except EnergonError:
        return 0.0


def report_death(run: str, leaf: bytes, allow: tuple[str, ...], ordinal: int) -> BatchReport:
    """Return the report on a sample whose decoding ended the process."""
    check = _Check(*_unpacked(run, leaf), SampleDecoder("rgb8", allow=allow))
    return BatchReport(ordinal, 1, [check.failed(ordinal, DECODING_DIED)])


def decode_wholly(decoder: SampleDecoder, name: str, data: bytes) -> Any:
    """Return the value in `data`, with audio and video decoded to their end.

    Raises:
        DecodeError: If they are damaged.
        SecurityError: If they are only decoded with the user's permission.
    """
    decoded = decoder.decode(name, data)
    if isinstance(decoded, AVDecoder):
        decoded.check()
    return decoded


def pack_leaf(leaf: Leaf, opened: OpenedLeaf, encoder: type[Any] | None) -> bytes:
    """Return a leaf for other processes, with the classes that this program has registered.

    They import the modules of these classes, as workers of a loader do; if they opened the leaf
    themselves, they could only find classes already imported there.
    """
    packed: bytes = cloudpickle.dumps((leaf, opened, encoder))
    return packed


@lru_cache(maxsize=8)
def _unpacked(run: str, leaf: bytes) -> tuple[Leaf, OpenedLeaf, SavableDataset | None]:
    entry, opened, encoder = pickle.loads(leaf)
    return entry, opened, None if encoder is None else _hooks(opened, encoder())


def _hooks(opened: OpenedLeaf, encoder: Any) -> SavableDataset:
    """Return a dataset whose samples have passed all hooks that take single samples."""
    settings = ValidationSettings(
        batch_size=None, batch_drop_last=False, packing_buffer_size=None, limit=None
    )
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
    recipe = validation_recipe([opened], encoder, settings, workers)
    return recipe.savable(recipe.encoded(recipe.samples()))


class _Check:
    """Checks samples of a leaf."""

    def __init__(
        self,
        leaf: Leaf,
        opened: OpenedLeaf,
        hooks: SavableDataset | None,
        decoder: SampleDecoder,
    ) -> None:
        self.leaf = leaf
        self.opened = opened
        self.hooks = hooks
        self.decoder = decoder
        self.unchecked: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self._file_fields: set[str] = set()
        self._missing: list[tuple[str, Finding]] = []

    def __call__(self, ordinals: Sequence[int]) -> Iterator[Finding]:
        """Yield problems of some samples, which are read together if possible."""
        note(None)
        try:
            keys = [(0, 0, ordinal) for ordinal in ordinals]
            block = self.opened.source.read(np.array(ordinals), restore_keys=keys)
            samples = block.samples(0, len(ordinals))
        except EnergonError as error:
            if len(ordinals) > 1:
                for ordinal in ordinals:
                    yield from self(range(ordinal, ordinal + 1))
            else:
                yield self.failed(ordinals[0], str(error))
            return
        for ordinal, sample in zip(ordinals, samples, strict=True):
            note(ordinal)
            if not isinstance(sample, UnreadableSample):
                self.names.update(sample.keys())
            findings = list(self._sample(sample))
            yield from findings
            if self.hooks is not None and not findings:
                yield from self._run_hooks(self.hooks, ordinal)

    def _run_hooks(self, hooks: SavableDataset, ordinal: int) -> Iterator[Finding]:
        """Yield the failure of a hook; of a generator, only the first output is made."""
        try:
            hooks.restore_sample((0, 0, ordinal, *[0] * MAX_GENERATORS))
        except StateError:
            return  # a hook skips the sample
        except Exception as error:  # hooks are programs of the user
            cause, hook = error, _hook_of(error)
            while hook is None and isinstance(cause.__cause__, Exception):
                cause, hook = cause.__cause__, _hook_of(cause.__cause__)
            problem = describe_error(error if hook is None else cause)
            yield self.failed(ordinal, f"{hook} failed: {problem}" if hook else problem, hook)

    def failed(self, ordinal: int, reason: str, hook: str | None = None) -> Finding:
        """Return the finding that a sample fails, with its place as far as it can be determined."""
        source = self.opened.source
        try:
            location = source.locate(ordinal)
        except EnergonError:
            shard = source.shard_of(ordinal) if isinstance(source, WebdatasetSource) else None
            return self._finding(reason, shard=shard, hook=hook)
        return self._finding(reason, shard=location.shard, key=location.key, hook=hook)

    def _sample(self, sample: Any) -> Iterator[Finding]:
        origin = {"shard": sample["__shard__"], "key": sample["__key__"]}
        if isinstance(sample, UnreadableSample):
            yield self._finding(str(sample.error), **origin)
            return
        decoded = dict(sample)
        failed = False
        for part, data in sample.items():
            file = sample.get(PART_FILES, {}).get(part, part)
            if isinstance(data, bytes) and not part.startswith("__"):
                contents = [(file, data)]
            elif isinstance(data, list) and isinstance(file, list):
                pairs = zip(file, data, strict=True)
                contents = [(name or part, content) for name, content in pairs if content]
            else:
                continue
            try:
                pieces = [
                    decode_wholly(self.decoder, f"{sample['__key__']}.{name}", content)
                    for name, content in contents
                ]
                decoded[part] = pieces if isinstance(data, list) else pieces[0]
            except SecurityError:
                self.unchecked[part] += 1
            except (EnergonError, ImportError, MemoryError) as error:
                failed = True
                yield self._finding(reason_of(error), part=part, **origin)
        if self.opened.loading.aux:
            self._look_up_files(decoded, origin)
        path, loading = self.opened.loading.dataset_path, self.opened.loading.samples
        if failed or loading.sample_type is None or loading.field_map is None:
            return
        try:
            sample = type(sample)(decoded)
            sample["__sources__"] = sources_of(path, sample)
            LoadSample(loading.sample_type, loading.field_map, None)(sample)
        except Exception as error:
            yield self._finding(reason_of(error), **origin)

    def _look_up_files(self, sample: dict[str, Any], origin: dict[str, str]) -> None:
        """Note which media files a sample names that no store has, nor its own dataset."""
        for part, value in sample.items():
            for path, name in () if part.startswith("__") else _file_names(part, value):
                if any(_has(store, name) for store in self._stores):
                    self._file_fields.add(path)
                else:
                    reason = (
                        f"names the file {name!r}, which is in none of the aux stores: "
                        f"{', '.join(self.opened.loading.aux)}; add it, correct the name, or "
                        "exclude the sample"
                    )
                    self._missing.append((path, self._finding(reason, part=part, **origin)))

    @cached_property
    def _stores(self) -> list[FileStore[Any]]:
        """The aux stores of the dataset, and its own files."""
        loading = self.opened.loading
        return [*loading.aux.values(), *([loading.primary()] if loading.primary else [])]

    def missing_files(self) -> Iterator[Finding]:
        """Yield the media files that are named and missing.

        A field names files if it is called "image" or the like, or if any file that it names
        exists. Others may hold the name that a part had elsewhere.
        """
        for path, finding in self._missing:
            if path in self._file_fields or path.rpartition(".")[2].removesuffix("s") in _MEDIA:
                yield finding

    def _finding(self, reason: str, **location: Any) -> Finding:
        return Finding(self.leaf.path, self.leaf.split_part, reason, **location)


MAX_GENERATORS = 4
"""Up to this many hooks of a task encoder may be generators."""
MAX_FILE_NAME = 1000
_MEDIA = ("image", "audio", "video")


def _hook_of(error: BaseException | None) -> str | None:
    """Return the hook that raised an error; None if no hook did."""
    notes = getattr(error, "__notes__", ())
    return next((each.removeprefix(HOOK_NOTE) for each in notes if HOOK_NOTE in each), None)


def _file_names(field: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value that are names of images, sounds or videos, with their fields."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _file_names(f"{field}.{key}", each)
    elif isinstance(value, list):
        for each in value:
            yield from _file_names(field, each)
    elif isinstance(value, str) and len(value) <= MAX_FILE_NAME:
        is_name = "." in value and "://" not in value and not value.startswith("data:")
        if is_name and not re.search(r"\s", value) and part_kind(part_extension(value)) in _MEDIA:
            yield field, value


def _has(store: FileStore[Any], name: str) -> bool:
    with suppress(NoSuchFileError):
        store.get_size(name)
        return True
    return False


LINTED_SPLIT = "files"
"""Stands for the split of data without splits."""
BATCH_FILES = 64


def folder_jobs(folder: str, max_files: int | None, allow: tuple[str, ...]) -> list[IsolatedCall]:
    """Return the calls that check a folder, here or in an object store.

    Args:
        folder: Where it is.
        max_files: How many files, spread over all of them; None for all.
        allow: What the user allows.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        EmptyDatasetError: If it has no files.
    """
    SystemFileStore(folder)
    names = [info.key for info in list_files(folder) if not info.key.startswith(f"{META}/")]
    if not names:
        raise EmptyDatasetError(f"{redact(folder)}: contains no files")
    names = [names[chosen] for chosen in spread(len(names), max_files)]
    jobs: list[IsolatedCall] = []
    for start in range(0, len(names), BATCH_FILES):
        batch = tuple(names[start : start + BATCH_FILES])
        ordinals = range(start, start + len(batch))
        jobs.append(IsolatedCall(len(jobs), (folder, start, batch, allow), ordinals))
    return jobs


def lint_files(
    folder: str, start: int, names: Sequence[str], allow: tuple[str, ...], ordinals: Sequence[int]
) -> BatchReport:
    """Decode some files.

    Args:
        folder: Where they are.
        start: Number of the first of `names`.
        names: Their paths below it.
        allow: What the user allows.
        ordinals: Numbers of files.
    """
    unchecked: Counter[str] = Counter()
    store, decoder = SystemFileStore(folder), SampleDecoder("rgb8", allow=allow)
    findings: list[Finding] = []
    for ordinal in ordinals:
        note(ordinal)
        name = names[ordinal - start]
        try:
            decode_wholly(decoder, name, store.get_raw(name)[0])
        except SecurityError:
            unchecked[name.rpartition(".")[2]] += 1
        except (EnergonError, ImportError, MemoryError) as error:
            findings.append(_file_finding(folder, name, reason_of(error)))
    return BatchReport(ordinals[0], len(ordinals), findings, unchecked)


def report_file_death(
    folder: str, start: int, names: Sequence[str], allow: tuple[str, ...], ordinal: int
) -> BatchReport:
    """Return the report on a file whose decoding ended the process."""
    return BatchReport(ordinal, 1, [_file_finding(folder, names[ordinal - start], DECODING_DIED)])


def _file_finding(folder: str, name: str, reason: str) -> Finding:
    return Finding(redact(folder), LINTED_SPLIT, reason, key=name)


MAX_NAMED_SAMPLES = 3
"""How many samples of a group are named."""

_BYTES = re.compile(r"""b'(?:[^'\\]|\\.)*'|b"(?:[^"\\]|\\.)*\"""")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Group:
    """Findings of one dataset that say the same.

    Args:
        dataset: The dataset.
        reason: The problem, without what differs between samples.
        count: How many findings there are.
        samples: The first ones, as `SHARD/KEY`.
    """

    dataset: str
    reason: str
    count: int
    samples: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "dataset": self.dataset,
            "reason": self.reason,
            "count": self.count,
            "first": list(self.samples),
        }

    def line(self, noun: str = "sample") -> str:
        """Return it as a line of text; `noun` is the kind of thing checked."""
        if self.count == 1:
            path = "/".join([self.dataset, *self.samples])
            # Some reasons begin with the file that they refer to.
            return self.reason if self.reason.startswith(path) else f"{path}: {self.reason}"
        shown = ", ".join(self.samples)
        return f"{self.dataset}: {counted(self.count, noun)}: {self.reason} (first: {shown})"


def group_findings(findings: Sequence[Finding]) -> list[Group]:
    """Return findings in groups, in the order of the first of each.

    Splits of a dataset share samples, so a sample counts once, however many splits have it.
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in dict.fromkeys(finding._replace(split="") for finding in findings):
        # A finding that is not about a sample stands alone.
        kind = _kind(each) if each.key is not None else f"{each.shard}: {each.reason}"
        groups.setdefault((each.dataset, kind), []).append(each)
    return [
        Group(
            dataset,
            members[0].reason if len(members) == 1 else _common_reason(members[0]),
            len(members),
            tuple(
                "/".join(step for step in (each.shard, each.key) if step)
                for each in members[:MAX_NAMED_SAMPLES]
                if each.shard or each.key
            ),
        )
        for (dataset, _), members in groups.items()
    ]


def _kind(finding: Finding) -> str:
    """Return the text that findings about different samples share."""
    reason = _BYTES.sub("…", _common_reason(finding))
    return f"{finding.part}: {_NUMBER.sub('0', reason)}"


def _common_reason(finding: Finding) -> str:
    """Return a reason without the key of the sample."""
    key = finding.key or ""
    reason = finding.reason.removeprefix(f"sample {key!r}: ")
    if finding.part is not None:
        reason = reason.replace(f"{key}.{finding.part}", finding.part)
    return reason
