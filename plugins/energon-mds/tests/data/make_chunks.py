"""Write the other datasets beside this script that have known content, with the real libraries.

Needs mosaicml-streaming and litdata, which tests do not. What they write is kept as it is:
`mds_arrays` and `litdata_arrays` have 40 samples with arrays in every form, `litdata_tokens` and
`litdata_tensors` 40 single tensors, as texts for language models and as any items. The plain values
of `litdata_tables` are in Arrow tables, if pyarrow is installed; those of `litdata_nested` are not,
because samples also have a tensor.
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


def values(n):
    return {
        "text": f"text {n} ä",
        "turns": [{"role": "user", "text": None if n % 2 else "", "n": n, "x": n / 2}] * (n % 3),
        "meta": {"id": n, "tags": ["a"] * (n % 4), "flags": [True, False], "shares": [n / 4]},
        "rows": [[n], [n, -n]],
        "raw": b"\0" * n,
    }


def values_and_tensor(n):
    return values(n) | {"tensor": torch.full((1, 2), n)}


def tokens(n):
    return torch.arange(n, 2 * n + 1, dtype=torch.int32)


def write_litdata(name, sample, **settings):
    from litdata.streaming.cache import Cache

    cache = Cache(str(HERE / name), **settings)
    for n in range(N):
        cache[n] = sample(n)
    cache.done()
    cache.merge()


def main():
    from litdata.streaming.item_loader import TokensLoader

    write_litdata("litdata_arrays", litdata_sample, chunk_size=16)
    write_litdata("litdata_tensors", tokens, chunk_size=16)
    write_litdata("litdata_tokens", tokens, chunk_size=160, item_loader=TokensLoader())
    write_litdata("litdata_tables", values, chunk_size=16)
    write_litdata("litdata_nested", values_and_tensor, chunk_size=16)
    write_mds()


def write_mds():
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


if __name__ == "__main__":
    main()
