"""Write the datasets `mds_arrays` and `litdata_arrays` beside this script, with the real libraries.

Needs mosaicml-streaming and litdata, which tests do not. What they write is kept as it is: 40
samples with arrays in every form, of known content.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
N = 40


def mds_sample(n):
    return {
        "any": np.arange(n + 1, dtype=np.int16).reshape(1, -1),
        "fixed": np.full((2, 3), n, np.float32),
        "n": n,
        "typed": np.full((1, 2), n, np.uint8),
    }


def litdata_sample(n):
    return {
        "flat": torch.arange(n, n + 3, dtype=torch.int64),
        "image": torch.full((2, 2), n, dtype=torch.float32),
        "n": n,
        "row": np.array([n, n + 1], np.int32),
        "table": np.full((2, 2), n, np.float64),
    }


def main():
    from litdata.streaming.cache import Cache
    from streaming import MDSWriter

    columns = {
        "any": "ndarray",
        "fixed": "ndarray:float32:2,3",
        "n": "int",
        "typed": "ndarray:uint8",
    }
    with MDSWriter(out=str(HERE / "mds_arrays"), columns=columns, size_limit=1500) as writer:
        for n in range(N):
            writer.write(mds_sample(n))
    cache = Cache(str(HERE / "litdata_arrays"), chunk_size=16)
    for n in range(N):
        cache[n] = litdata_sample(n)
    cache.done()
    cache.merge()


if __name__ == "__main__":
    main()
