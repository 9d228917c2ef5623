"""Shuffle samples before they are packed, in memory that does not grow with their contents.

Samples are written to a temporary file as they come, and read back in the order of a hash of
their keys. So the order depends on keys and seed alone. Files that samples name stay where they
are; other contents take space on disk until all is packed.
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from energon.prepare.importers.draw import hash_key


def shuffled(
    samples: Iterator[Mapping[str, Any]], seed: int, folder: Path
) -> Iterator[Mapping[str, Any]]:
    """Yield the samples in an order that is drawn by their keys.

    Args:
        samples: The samples.
        seed: Which order.
        folder: Where there is space for their contents.
    """
    purpose = b"order %d" % seed
    hashes, starts = array("Q"), array("Q", [0])
    with tempfile.TemporaryFile(dir=folder, prefix=".shuffle.") as file:
        for sample in samples:
            hashes.append(hash_key(sample["__key__"], purpose))
            pickle.dump(dict(sample), file, pickle.HIGHEST_PROTOCOL)
            starts.append(file.tell())
        for place in np.argsort(np.array(hashes, np.uint64), kind="stable").tolist():
            file.seek(starts[place])
            # What this process has just written itself.
            yield pickle.load(file)
