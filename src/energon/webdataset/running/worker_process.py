"""Let code in worker processes of energon's loader find what torch's DataLoader would tell it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from energon.webdataset import utils
from energon.webdataset.running.place import Place


class WorkerProcess:
    """What is done once in each worker process, and before each batch.

    Args:
        dataset: What `get_worker_info().dataset` is.
        init: Called with the number of the worker, once in each process; None does nothing.
        seed: Base of the seeds of workers.
    """

    def __init__(self, dataset: Any, init: Callable[[int], Any] | None, seed: int) -> None:
        self._dataset = dataset
        self._init = init
        self._seed = seed
        self._parent = os.getpid()
        self._initialised = 0
        self._enforce_security = utils.enforce_security

    def enter(self, place: Place) -> None:
        """Say that this process works for the worker at `place` now."""
        if os.getpid() == self._parent:
            return
        utils.enforce_security = self._enforce_security
        module: Any = sys.modules.get("torch.utils.data._utils.worker")
        if module is not None:
            # The one way to be found by torch.utils.data.get_worker_info().
            module._worker_info = module.WorkerInfo(
                id=place.worker,
                num_workers=place.num_workers,
                seed=self._seed + place.worker,
                dataset=self._dataset,
            )
        if self._init is not None and self._initialised != os.getpid():
            self._initialised = os.getpid()
            self._init(place.worker)
