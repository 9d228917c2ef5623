"""Which actors of a Ray cluster host lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError, check_at_least


@dataclass(frozen=True, kw_only=True)
class RayWorkers:
    """Actors of a Ray cluster as the workers of a rank; `workers="ray"` stands for `RayWorkers()`.

    Batches, their order and saved states are those of worker processes, so a run may be resumed
    with either. The dataset must have the same path or address on all machines, and energon the
    same version.

    Args:
        num_actors: How many actors each rank has; None for `num_workers` of its worker config, or
            1 if that is 0.
        num_cpus: How many CPUs Ray reserves for each actor.
        resources: What else Ray reserves for each, such as `{"decoding": 1}` to keep them on
            machines that have it.
        address: The cluster, as for `ray.init`; None for the one that this program is connected
            to, or that RAY_ADDRESS names, or else a new one on this machine.
        runtime_env: The environment of the actors, as for Ray: packages, variables, files.

    Example:
        >>> RayWorkers(num_actors=4, resources={"decoding": 1}).num_cpus
        1
    """

    num_actors: int | None = None
    num_cpus: float = 1
    resources: Mapping[str, float] | None = None
    address: str | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.num_actors is not None:
            check_at_least(1, "num_actors", self.num_actors)
        if not (isinstance(self.num_cpus, int | float) and self.num_cpus >= 0):
            raise ConfigError(f"num_cpus must be 0 or more, got {self.num_cpus!r}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"address={self.address!r}: batches cannot cross a Ray client; run the training "
                "program on a machine of the cluster, and pass the address of its head node"
            )
