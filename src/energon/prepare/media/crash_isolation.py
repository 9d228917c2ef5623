"""Look at media files in processes that may die: what kills them is left out like what fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from energon.formats.meta.info import load_info
from energon.formats.meta.media import MediaMetadata
from energon.formats.tables.media_table import MediaJob
from energon.prepare.crash_isolation import Death, IsolatedCall, run_surviving
from energon.prepare.files import file_state
from energon.prepare.media.filter import MediaFilter
from energon.prepare.media.probe import (
    Probed,
    media_parts,
    probe_parts,
    probe_samples,
    probe_some_files,
)

SAMPLES_PER_JOB = 4096
"""What is looked at once more if a process dies."""
FILES_PER_JOB = 200
DIED = "the process that read it died: a codec has crashed, or memory ran out"
_PRELOAD = "energon.prepare.media.probe"


def surviving_files(
    folder: Path, names: Sequence[str], chosen: MediaFilter, num_processes: int
) -> Iterator[list[Probed]]:
    """Yield what some files in a folder say, as it becomes ready.

    Args:
        folder: The folder.
        names: Paths below it.
        chosen: Which files are media files.
        num_processes: How many processes.
    """
    batches = [names[at : at + FILES_PER_JOB] for at in range(0, len(names), FILES_PER_JOB)]
    jobs = [
        IsolatedCall(number, (str(folder), batch, chosen), range(len(batch)))
        for number, batch in enumerate(batches)
    ]
    for number, result in run_surviving(probe_some_files, jobs, num_processes, _PRELOAD):
        if isinstance(result, Death):
            name = batches[number][result.ordinal]
            state = file_state(folder / name)
            yield [Probed(MediaJob(name, *state), [], [(name, DIED)])]
        else:
            yield result


def surviving_shards(
    folder: Path,
    shards: Sequence[str],
    chosen: MediaFilter,
    contents: str | None,
    num_processes: int,
) -> Iterator[list[Probed]]:
    """Yield what the media files in each of some shards say, as it becomes ready.

    Args:
        folder: The dataset.
        shards: Paths below it.
        chosen: Which parts are media files.
        contents: Where the shards are, if the folder only stands for a remote one.
        num_processes: How many processes.
    """
    counts = load_info(folder).shard_counts
    open_shards = [_ProbedShard(name, max(1, counts[name])) for name in shards]
    jobs: list[IsolatedCall] = []
    owners: list[_ProbedShard] = []
    for shard in open_shards:
        for start in range(0, shard.left, SAMPLES_PER_JOB):
            stop = min(shard.left, start + SAMPLES_PER_JOB)
            arguments = (str(folder), shard.name, shard.left, chosen, contents)
            jobs.append(IsolatedCall(len(jobs), arguments, range(start, stop)))
            owners.append(shard)
    for number, result in run_surviving(probe_samples, jobs, num_processes, _PRELOAD):
        shard = owners[number]
        if isinstance(result, Death):
            shard.deadly.append(result.ordinal)
            shard.left -= 1
        else:
            shard.add(result[0])
            shard.left -= result[1]
        if not shard.left:
            _look_again(folder, shard, chosen, contents)
            yield [shard.probed(folder)]


@dataclass
class _ProbedShard:
    """What is known of a shard so far.

    Args:
        name: Its path below the dataset.
        left: How many samples are not done.
    """

    name: str
    left: int
    deadly: list[int] = field(default_factory=list)
    job: MediaJob | None = None
    found: list[tuple[str, MediaMetadata]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def add(self, probed: Probed) -> None:
        """Add what was found in some of its samples."""
        self.job = self.job or probed.job
        self.found += probed.found
        self.failed += probed.failed

    def probed(self, folder: Path) -> Probed:
        """Return what was found in all of them."""
        job = self.job or MediaJob(self.name, *file_state(folder / self.name))
        return Probed(job, self.found, self.failed)


def _look_again(
    folder: Path, shard: _ProbedShard, chosen: MediaFilter, contents: str | None
) -> None:
    """Find out which parts of the samples are deadly at which processes died."""
    jobs: list[IsolatedCall] = []
    names: list[list[str]] = []
    for sample in shard.deadly:
        parts = media_parts(folder, shard.name, chosen, range(sample, sample + 1))
        names.append([name for name, _, _ in parts])
        arguments = (str(folder), shard.name, chosen, contents, sample)
        jobs.append(IsolatedCall(len(jobs), arguments, range(len(parts))))
    for number, result in run_surviving(probe_parts, jobs, 1, _PRELOAD):
        if isinstance(result, Death):
            shard.failed.append((names[number][result.ordinal], DIED))
        else:
            shard.add(result)
