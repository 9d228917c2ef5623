"""Read many files that lie in shards: neighbours at once, those of distant shards in parallel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from energon.io.range_file import RangeFile
from energon.io.threads import WaitingThreads
from energon.sources.file_store_locate import FilePlace
from energon.sources.spans import read_spans

MAX_PARALLEL = 32
"""Shards that are asked at a time; each may be asked for several ranges."""


def read_places(places: Sequence[FilePlace]) -> list[bytes]:
    """Return the content of each of `places`, in their order."""
    by_file: defaultdict[RangeFile, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        by_file[place.file].append(number)
    contents = [b""] * len(places)

    def read(file: RangeFile, numbers: list[int]) -> None:
        chosen = [places[number] for number in numbers]
        for number, content in zip(numbers, _read_file(file, chosen), strict=True):
            contents[number] = content

    if len(by_file) > 1 and places[0].file.is_remote:  # as are all of a dataset
        _together(read, by_file.items())
    else:
        for file, numbers in by_file.items():
            read(file, numbers)
    return contents


def _together(
    read: Callable[[RangeFile, list[int]], None], work: Collection[tuple[RangeFile, list[int]]]
) -> None:
    """Call `read` for each item of `work`, in threads that wait for answers."""
    threads = WaitingThreads(min(MAX_PARALLEL, len(work)), "energon-files")
    futures = [threads.submit(read, *item) for item in work]
    threads.close()
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()


def _read_file(file: RangeFile, places: Sequence[FilePlace]) -> Iterable[bytes]:
    """Return the contents of `places`, which lie in one file."""
    if len(places) == 1:  # as for names at random, where planning costs more than reading
        return [file.pread(places[0].offset, places[0].size)]
    order = sorted(range(len(places)), key=lambda number: places[number].offset)
    low = np.array([places[number].offset for number in order], np.int64)
    size = np.array([places[number].size for number in order], np.int64)
    buffers, begin = read_spans(file, low, low + size)
    found = [b""] * len(places)
    bounds = zip(order, buffers, (low - begin).tolist(), size.tolist(), strict=True)
    for number, buffer, start, count in bounds:
        found[number] = buffer[start : start + count]
    return found
