"""The Ray cluster that this process is connected to."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from energon.errors import WorkerError
from energon.loader.options import RayWorkers, logger

HEAD_CHECK_SECONDS = 5.0
HEAD_PATIENCE_SECONDS = 20.0
"""How long the head node may be gone, to be restarted: Ray ends this process after 60 seconds."""
HEAD_ANSWER_SECONDS = 5.0
STORE_SHARE = 0.5
"""How much of an object store the batches under way to a rank may fill; what the trainer and the
hooks hold needs the rest."""


class Cluster:
    """A Ray cluster, to which this process is connected.

    Args:
        workers: The actors that are wanted of it.
        num_actors: How many of them this rank has.

    Raises:
        WorkerError: If no cluster answers.
    """

    def __init__(self, workers: RayWorkers, num_actors: int) -> None:
        _connect(workers.address)
        self._workers = workers
        self._head = ray.get_runtime_context().gcs_address
        self._checked_at = self._answered_at = time.monotonic()
        stores = [
            node["Resources"]["object_store_memory"]
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"] and "object_store_memory" in node["Resources"]
        ]
        self.bytes_per_actor = int(STORE_SHARE * min(stores, default=1 << 30) / num_actors)
        """How many bytes of batches an actor may have under way."""

    def start_actor(self, kind: type) -> Any:
        """Start an actor of this class."""
        options: dict[str, Any] = {
            "num_cpus": self._workers.num_cpus,
            "max_restarts": 0,
            # Not within the placement group of the training program, which has no room for them.
            "scheduling_strategy": "DEFAULT",
            "concurrency_groups": {"control": 1},
        }
        if self._workers.resources:
            options["resources"] = dict(self._workers.resources)
        if self._workers.runtime_env:
            options["runtime_env"] = dict(self._workers.runtime_env)
        return ray.remote(**options)(kind).remote()

    def run_on(
        self, node: str, function: Callable[..., Any], *arguments: Any, timeout: float
    ) -> Any:
        """Return the result of a function on a node; None if that fails, or the node is gone."""
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        try:
            return ray.get(task.remote(*arguments), timeout=timeout)
        except (RayError, OSError):
            return None

    def check_head(self) -> None:
        """Raise WorkerError if the head node has been gone for too long."""
        now = time.monotonic()
        if now - self._checked_at < HEAD_CHECK_SECONDS:
            return
        try:
            _call(self._head)
            self._answered_at = now
        except OSError as error:
            gone = now - self._answered_at
            logger.warning("the head node of Ray at %s does not answer: %s", self._head, error)
            if gone >= HEAD_PATIENCE_SECONDS:
                raise WorkerError(
                    f"the head node of Ray at {self._head} has been gone for {gone:.0f} s, and Ray "
                    "will end this process soon; save loader.state_dict() now, and resume from it "
                    "on another cluster or with worker processes"
                ) from error
        self._checked_at = time.monotonic()


def _connect(address: str | None) -> None:
    """Connect this process to a cluster, unless it is connected."""
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", connected):
            raise WorkerError(
                f"this process is connected to the Ray cluster at {connected}, not to that at "
                f"{address}; omit address, or call ray.shutdown() first"
            )
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address is not None and ":" in address:
            _call(address)  # Ray itself would retry for many minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise WorkerError(
            f"no Ray cluster answers at {address or 'this machine'}: {error}; start one with "
            "`ray start --head`, pass its address to RayWorkers, and if it requires a token, set "
            "RAY_AUTH_MODE=token"
        ) from error


def _call(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), HEAD_ANSWER_SECONDS).close()
