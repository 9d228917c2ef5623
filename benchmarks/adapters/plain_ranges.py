"""What a thread pool gets that fetches slices of 64 samples and does nothing else with them."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import obstore
from obstore.store import S3Store

from energon.formats.tar.scan import parse_tar_index
from energon.io.epath import EPath

VERSION = obstore.__version__
THREADS = 16
SLICE = 64


def batches(path: str, num_workers: int, batch_size: int, shuffle: int) -> Iterator[list[Any]]:
    bucket, _, folder = path.removeprefix("s3://").partition("/")
    store = S3Store(bucket, client_options={"allow_http": True})

    def slices_of(index: EPath) -> list[tuple[str, list[int]]]:
        offsets = parse_tar_index(index.read_bytes(), origin=str(index)).tolist()
        shard = f"{folder}/{index.name.removesuffix('.idx')}"
        return [(shard, offsets[at : at + SLICE + 1]) for at in range(0, len(offsets) - 1, SLICE)]

    def fetch(shard: str, offsets: list[int]) -> list[Any]:
        start = offsets[0]
        data = obstore.get_range(store, shard, start=start, end=offsets[-1])
        return [data[a - start : b - start] for a, b in itertools.pairwise(offsets)]

    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(slices_of, EPath(path).glob("*.tar.idx"))
        slices = list(itertools.chain.from_iterable(found))
        waiting: deque[Future[list[Any]]] = deque()
        samples: list[Any] = []
        while True:
            random.shuffle(slices)
            for each in slices:
                waiting.append(threads.submit(fetch, *each))
                if len(waiting) < THREADS:
                    continue
                samples += waiting.popleft().result()
                while len(samples) >= batch_size:
                    yield samples[:batch_size]
                    samples = samples[batch_size:]
