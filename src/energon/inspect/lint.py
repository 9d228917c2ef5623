"""Decode the samples of a dataset or metadataset, and report those that fail."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from energon.errors import EnergonError
from energon.inspect.leaves import find_leaves
from energon.inspect.lint_batch import BatchReport, Finding, lint_batch
from energon.metadataset.leaf import Leaf
from energon.prepare.engines import Engine, run_batches
from energon.prepare.quarantine import write_quarantine
from energon.stages.quarantine import quarantine_file
from energon.task_encoder.leaves import open_leaves

BATCH_SAMPLES = 256


@dataclass
class LintReport:
    """What came out of decoding samples.

    Args:
        path: What was looked at.
        num_samples: How many samples, by split.
        findings: What is wrong.
        unchecked: How many parts of which name were not decoded since the user must allow it.
    """

    path: str
    num_samples: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unchecked: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "path": self.path,
            "ok": self.ok,
            "samples": self.num_samples,
            "problems": [
                {name: value for name, value in each._asdict().items() if value is not None}
                for each in self.findings
            ],
            "unchecked": self.unchecked,
        }


def lint_dataset(
    path: str | os.PathLike[str],
    *,
    splits: Sequence[str] = (),
    max_samples: int | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    allow: Sequence[str] = (),
    engine: Engine | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LintReport:
    """Decode samples as training would, and return which fail and why. Changes nothing.

    Args:
        path: A prepared dataset or a metadataset.
        splits: Which splits; none for all.
        max_samples: How many of each dataset in each split, spread over all; None for all.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: The same for splits; None for split.yaml.
        allow: What may be done with data, as unpickling them: "pickle", "code".
        engine: Where it is done; None for processes of this machine.
        progress: Called with the number of samples that are done, and of all.

    Raises:
        DatasetNotFoundError: If there is nothing at the path.
        ConfigError: If an argument makes no sense.
    """
    found = find_leaves(
        path, splits=splits, dataset_config=dataset_config, split_config=split_config
    )
    report = LintReport(os.fspath(path))
    report.findings += [Finding(report.path, split, line) for split, line in found.problems]
    leaves = [leaf for some in found.splits.values() for leaf in some]
    counted = [
        (leaf, count) for leaf in leaves if (count := _count(leaf, report, allow)) is not None
    ]
    run = secrets.token_hex(8)
    batches = [
        (run, pickle.dumps(leaf), ordinals, tuple(allow))
        for leaf, count in counted
        for ordinals in _batches(count, max_samples)
    ]
    total, done = sum(len(ordinals) for _, _, ordinals, _ in batches), 0
    places = [pickle.loads(leaf).split_part for _, leaf, _, _ in batches]
    results: dict[int, BatchReport] = {}
    for number, result in run_batches(engine or Engine(), lint_batch, batches):
        results[number] = result
        done += result.num_samples
        progress(done, total)
    for number in sorted(results):
        _add(report, places[number], results[number])
    return report


def quarantine(report: LintReport, path: str | os.PathLike[str]) -> None:
    """List the samples and shards that fail, for `energon prepare --exclude-from`.

    Args:
        report: What was found.
        path: A file; for several datasets, a folder, in which each gets a file.
    """
    by_dataset: dict[str, list[tuple[str, str | None, str]]] = {}
    for each in report.findings:
        if each.shard is not None:
            by_dataset.setdefault(each.dataset, []).append((each.shard, each.key, each.reason))
    for dataset, entries in by_dataset.items():
        file = Path(path)
        if len(by_dataset) > 1:
            os.makedirs(path, exist_ok=True)
            file = quarantine_file(path, dataset)
        unique = {(shard, key): reason for shard, key, reason in reversed(entries)}
        write_quarantine(file, [(*place, reason) for place, reason in reversed(unique.items())])


def _count(leaf: Leaf, report: LintReport, allow: Sequence[str]) -> int | None:
    try:
        return len(open_leaves([leaf], None, allow=allow)[0].source)
    except EnergonError as error:
        report.findings.append(Finding(leaf.path, leaf.split_part, str(error)))
        return None


def _batches(count: int, max_samples: int | None) -> Iterator[range]:
    step = 1 if max_samples is None else max(1, -(-count // max_samples))
    every = range(0, count, step)
    for start in range(0, len(every), BATCH_SAMPLES):
        yield every[start : start + BATCH_SAMPLES]


def _add(report: LintReport, split: str, result: BatchReport) -> None:
    report.num_samples[split] = report.num_samples.get(split, 0) + result.num_samples
    # A shard that cannot be opened is found by each of its batches.
    known = {each for each in report.findings if each.key is None}
    report.findings += [each for each in dict.fromkeys(result.findings) if each not in known]
    for part, count in result.unchecked:
        report.unchecked[part] = report.unchecked.get(part, 0) + count
