"""Decode the samples of a dataset or metadataset, and report those that fail."""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from energon.errors import ConfigError, EmptyDatasetError, EnergonError, SecurityError
from energon.inspect.info import DatasetContents, find_leaves
from energon.inspect.lint_batch import (
    LINTED_SPLIT,
    BatchReport,
    Finding,
    Group,
    folder_jobs,
    group_findings,
    lint_batch,
    lint_files,
    mean_bytes,
    pack_leaf,
    report_death,
    report_file_death,
    spread,
)
from energon.io.address import is_remote, local_path, redact
from energon.io.atomic import temporary_folder
from energon.limits import allowed_by_environment
from energon.metadataset.kind import check_shard_list, dataset_kind, kind_entry
from energon.metadataset.leaf import Leaf
from energon.prepare.engines import Engine, IsolatedCall, run_isolated
from energon.prepare.verify.quarantine import Exclusions, QuarantineEntry, write_quarantine
from energon.sources.files.open import folder_of
from energon.sources.kinds import kind_of
from energon.sources.shards import ShardPool
from energon.stages.hooks.failures import quarantine_file
from energon.task_encoder.leaves import OpenedLeaf, find_exclusions, open_leaves, open_members
from energon.task_encoder.load import find_joiner
from energon.task_encoder.open_join import check_join

NOT_TRAINED = ("val", "test")
"""Splits whose weights do not matter, since they are not trained on."""


def _mix_problems(
    path: str, contents: DatasetContents, find: Callable[..., DatasetContents]
) -> Iterator[Finding]:
    """Yield the problems of the weights and joins of a metadataset.

    Args:
        path: The metadataset, not one of its datasets.
        contents: Its datasets.
        find: Finds them again, as they are trained with.
    """
    if contents.kind != "metadataset":
        return
    trained = [split for split in contents.splits if split not in NOT_TRAINED]
    if trained:
        for split, problem in find(splits=trained, training=True).problems:
            yield Finding(path, split, problem)
    for split, mix in contents.mixes.items():
        for leaf in mix.leaves:
            yield from (Finding(leaf.path, split, line) for line in _join_problems(leaf))


def _join_problems(leaf: Leaf) -> Iterator[str]:
    if leaf.joiner is None:
        return
    try:
        find_joiner(leaf.joiner)
    except SecurityError:
        pass  # it may not be opened here, so nothing is known about it
    except EnergonError as error:
        yield str(error)
    try:
        members = open_members(leaf, ShardPool())
        with temporary_folder("lint") as folder:
            check_join(leaf, members, folder)
    except EnergonError as error:
        yield f"{leaf.origin}: {error}"


logger = logging.getLogger("energon")

MAX_BATCH_SAMPLES = 256
BATCH_BYTES = 64 << 20
"""Roughly how many bytes a process checks before it is given more."""
MIN_BATCHES = 64
"""How many batches a dataset is cut into at least, so that no process is idle."""


@dataclass
class LintReport:
    """The result of decoding samples.

    Args:
        path: What was checked.
        kind: The kind of dataset there.
        num_samples: Number of samples, by split.
        findings: The problems.
        unchecked: By name, how many parts were not decoded because the user must allow it.
        lacking: For datasets whose samples are batched with the names of their parts: how many of
            the samples lack each part that others have.
    """

    path: str
    kind: str = "webdataset"
    num_samples: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unchecked: Counter[str] = field(default_factory=Counter)
    lacking: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no problems were found."""
        return not self.findings

    def groups(self) -> list[Group]:
        """Return the findings, with those that say the same about several samples grouped."""
        return group_findings(self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "path": self.path,
            "ok": self.ok,
            "samples": self.num_samples,
            "groups": [group.to_json() for group in self.groups()],
            "problems": [
                {name: value for name, value in each._asdict().items() if value is not None}
                for each in self.findings
            ],
            "unchecked": self.unchecked,
            "lacking": self.lacking,
        }


def lint_dataset(
    path: str | os.PathLike[str],
    *,
    splits: Sequence[str] = (),
    max_samples: int | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    exclude_from: str | os.PathLike[str] | None = None,
    task_encoder: type[Any] | None = None,
    engine: Engine | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LintReport:
    """Decode samples as training would, and return which fail and why. Changes nothing.

    Pickled parts are decoded if the environment allows it.

    Args:
        path: A prepared dataset, a metadataset, or `filesystem://` and a folder of files.
        splits: Which splits; none means all.
        max_samples: How many of each dataset, spread over all of its splits; None for all.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        exclude_from: Quarantine files whose samples are skipped, see `get_train_dataset`.
        task_encoder: Class whose hooks run on the samples that can be decoded; None runs none.
        engine: Where to decode; None for processes of this machine.
        progress: Called with the number of samples done, and the total.

    Raises:
        DatasetNotFoundError: If there is nothing at the path.
        EmptyDatasetError: If there are no samples and no other problems.
        ConfigError: If an argument is invalid.
    """
    engine = engine or Engine()
    allow = tuple(sorted(allowed_by_environment()))  # clusters have environments of their own
    folder = _folder_of(path)
    if folder is not None:
        report = LintReport(os.fspath(path), kind="filesystem", num_samples={LINTED_SPLIT: 0})
        files = folder_jobs(folder, max_samples, allow)
        runs = run_isolated(engine, lint_files, files, report_file_death)
        _collect(report, [(LINTED_SPLIT, job) for job in files], runs, progress)
        return report
    find = partial(find_leaves, path, dataset_config=dataset_config, split_config=split_config)
    contents = find(splits=splits)
    report = LintReport(os.fspath(path), kind=contents.kind)
    report.findings += [Finding(report.path, split, line) for split, line in contents.problems]
    report.findings += _mix_problems(report.path, contents, find)
    report.findings += _exclude_problems(contents)
    leaves = [leaf for of_split in contents.splits.values() for leaf in of_split]
    exclusions = find_exclusions(leaves, exclude_from)
    with _hide_warnings_of(report.findings):
        work, empty = _work(contents, report, max_samples, exclusions, task_encoder, allow)
    if not work and not report.findings:
        looked_in = ", ".join(f"split {name!r}" for name in report.num_samples) or "any split"
        nothing = f"{redact(path)}: there is no sample to check in {looked_in}"
        raise EmptyDatasetError("\n".join(each.reason for each in empty) or nothing)
    report.findings += empty
    runs = run_isolated(engine, lint_batch, [job for _, job in work], report_death)
    _collect(report, work, runs, progress)
    return report


@contextmanager
def _hide_warnings_of(findings: Sequence[Finding]) -> Iterator[None]:
    """Drop log messages of sources about what these findings already say."""
    reasons = {each.reason.rpartition(": ")[2] for each in findings}

    def is_new(record: logging.LogRecord) -> bool:
        args = record.args
        text = str(args[-1]) if isinstance(args, tuple) and args else ""
        return not any(reason in text for reason in reasons)  # a message may list several

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _folder_of(path: str | os.PathLike[str]) -> str | None:
    """Return the folder of files at a path; None for a dataset or metadataset."""
    address = os.fspath(path)
    folder = folder_of(address)
    if folder is None and not is_remote(address):
        address = local_path(address)
    if folder is None and not kind_entry(dataset_kind(address)).has_samples:
        check_shard_list(address)
        folder = address
    return folder if folder is None or is_remote(folder) else os.path.abspath(folder)


def quarantine(report: LintReport, path: str | os.PathLike[str]) -> None:
    """List the samples and shards that fail, for `energon prepare --exclude-from`.

    Args:
        report: The report.
        path: A file; for a metadataset, a folder in which each dataset gets a file.

    Raises:
        ConfigError: If it is not on this machine, or the folder cannot be made.
        StorageError: If a file cannot be written.
    """
    path = Path(local_path(path))
    several = report.kind == "metadataset"
    by_file: dict[Path, dict[tuple[str, str, str | None], str]] = {} if several else {path: {}}
    for each in report.findings:
        if each.shard is not None:
            file = quarantine_file(path, each.dataset) if several else path
            reasons = by_file.setdefault(file, {})
            reasons.setdefault((each.dataset, each.shard, each.key), each.reason)
    for file, entries in by_file.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{file.parent}: cannot write lists of samples here: {error}"
            ) from error
        write_quarantine(file, [QuarantineEntry(*sample, why) for sample, why in entries.items()])


def _work(
    contents: DatasetContents,
    report: LintReport,
    max_samples: int | None,
    exclusions: Exclusions | None,
    encoder: type[Any] | None,
    allow: tuple[str, ...],
) -> tuple[list[tuple[str, IsolatedCall]], list[Finding]]:
    """Return splits and what is to be looked at in them, and which have no samples left."""
    empty: list[Finding] = []
    by_path: dict[str, list[tuple[str, Leaf, OpenedLeaf]]] = {}
    for split, leaves in contents.splits.items():
        report.num_samples[split] = 0
        for leaf in leaves:
            try:
                opened = open_leaves([leaf], None, exclusions, allow=allow)[0]
            except EnergonError as error:
                # A dataset may have splits that list nothing, but no metadataset may refer to them.
                on_purpose = isinstance(error, EmptyDatasetError) and contents.kind != "metadataset"
                if not (on_purpose and kind_of(leaf.path).lists_nothing(leaf)):
                    findings = empty if isinstance(error, EmptyDatasetError) else report.findings
                    findings.append(Finding(leaf.path, split, str(error)))
                continue
            by_path.setdefault(leaf.path, []).append((split, leaf, opened))
    run = secrets.token_hex(8)
    work: list[tuple[str, IsolatedCall]] = []
    for together in by_path.values():
        chosen = _spread_over([len(opened.source) for *_, opened in together], max_samples)
        for (split, leaf, opened), ordinals in zip(together, chosen, strict=True):
            arguments = (run, pack_leaf(leaf, opened, encoder), allow)
            for batch in _batches(ordinals, mean_bytes(opened.source)):
                work.append((split, IsolatedCall(len(work), arguments, batch)))
    return work, empty


def _spread_over(counts: Sequence[int], most: int | None) -> list[Sequence[int]]:
    """Return `most` sample numbers, spread over several sources laid end to end."""
    if most is None or most >= sum(counts):
        return [range(count) for count in counts]
    chosen = np.array(spread(sum(counts), most))
    ends = np.cumsum(counts)
    return [
        (chosen[(chosen >= end - count) & (chosen < end)] - (end - count)).tolist()
        for count, end in zip(counts, ends, strict=True)
    ]


def _exclude_problems(contents: DatasetContents) -> Iterator[Finding]:
    """Yield which entries of exclude lists match nothing, once for each dataset."""
    seen = set()
    for split, leaves in contents.splits.items():
        for leaf in leaves:
            if (leaf.path, leaf.split_config) in seen:
                continue
            seen.add((leaf.path, leaf.split_config))
            try:
                lines = kind_of(leaf.path).unmatched(leaf)
            except EnergonError:
                continue  # opening it reports that
            yield from (Finding(leaf.path, split, line) for line in lines)


def _collect(
    report: LintReport,
    work: Sequence[tuple[str, IsolatedCall]],
    runs: Iterable[tuple[int, BatchReport]],
    progress: Callable[[int, int], None],
) -> None:
    """Put the results of batches into a report, in the order of the data."""
    total, done = sum(len(job.ordinals) for _, job in work), 0
    results: dict[int, list[BatchReport]] = {}
    for number, result in runs:
        results.setdefault(number, []).append(result)
        done += result.num_samples
        progress(done, total)
    reported = {each._replace(split="") for each in report.findings}
    names: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number in sorted(results):
        split = work[number][0]
        for result in sorted(results[number], key=lambda each: each.first):
            report.num_samples[split] += result.num_samples
            report.unchecked.update(result.unchecked)
            if result.crude is not None:
                names[result.crude].update(result.names)
            for finding in result.findings:
                # A shard that cannot be opened is reported by each of its batches.
                if finding.key is not None or finding._replace(split="") not in reported:
                    reported.add(finding._replace(split=""))
                    report.findings.append(finding._replace(split=split))
    for dataset, counts in names.items():
        # Every sample has a key.
        lacking = {
            name: counts["__key__"] - count
            for name, count in counts.items()
            if count < counts["__key__"] and not name.startswith("__")
        }
        if lacking:
            report.lacking[dataset] = lacking


def _batches(ordinals: Sequence[int], mean_bytes: float) -> Iterator[Sequence[int]]:
    most = min(MAX_BATCH_SAMPLES, int(BATCH_BYTES / max(1.0, mean_bytes)))
    size = max(1, min(most, len(ordinals) // MIN_BATCHES))
    for start in range(0, len(ordinals), size):
        yield ordinals[start : start + size]
