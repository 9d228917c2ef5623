"""Deal samples with the sampler of Hugging Face's Trainer, in the peers' environment.

    python batch_rebalance.py LENGTHS.npy RANKS BATCH_SIZE

Prints the numbers of the samples of each rank in each step; the samples of a step are consecutive.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(sys.prefix) / "transformers-5.24.0"))

from transformers.trainer_pt_utils import BatchRebalanceSampler

lengths = np.load(sys.argv[1]).astype(int).tolist()
ranks, batch_size = map(int, sys.argv[2:])
samplers = [
    BatchRebalanceSampler(lengths, ranks * batch_size, ranks, 1, shuffle=False, rank=rank)
    for rank in range(ranks)
]
print(json.dumps({"batches": list(zip(*samplers, strict=True))}))
