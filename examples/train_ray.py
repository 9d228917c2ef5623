"""Run `pretrain_gpt.py` on a Ray cluster: an actor for each rank.

    python examples/train_ray.py --ranks 2 CORPORA CHECKPOINT [--steps N]

Ranks find each other as they do with torchrun. A rank that fails, or whose node is lost, ends the
attempt, and the next one continues from the checkpoint, on as many ranks as the cluster has room
for. CORPORA and CHECKPOINT have to be on a disk that all nodes share.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence

import click
import ray


@ray.remote(num_cpus=1, max_restarts=0)  # num_gpus=1 with GPUs
class Rank:
    """A process that trains."""

    def address(self) -> tuple[str, int]:
        """Return where rank 0 is found by the others."""
        with socket.socket() as found:
            found.bind(("", 0))
            return ray.util.get_node_ip_address(), found.getsockname()[1]

    def train(self, folder: str, place: dict[str, str], arguments: Sequence[str]) -> float:
        """Train as one rank of several, and return the loss of the last step."""
        os.environ.update(place)
        sys.path.insert(0, folder)
        from pretrain_gpt import main as pretrain

        return pretrain(arguments)


def train(ranks: int, arguments: Sequence[str]) -> float:
    """Train on a number of ranks; return the loss of the last step."""
    actors = [Rank.remote() for _ in range(ranks)]
    try:
        host, port = ray.get(actors[0].address.remote())
        job = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        folder = os.path.dirname(os.path.abspath(__file__))
        return ray.get(
            [
                actor.train.remote(folder, {**job, "RANK": str(rank)}, arguments)
                for rank, actor in enumerate(actors)
            ]
        )[0]
    finally:
        for actor in actors:
            ray.kill(actor)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train until an attempt succeeds; return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="1, 2, 3 or 6")
    parser.add_argument("--attempts", type=int, default=3)
    options, rest = parser.parse_known_args(arguments)
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    for attempt in range(1, options.attempts + 1):
        room = int(ray.cluster_resources()["CPU"])
        ranks = max(each for each in (1, 2, 3, 6) if each <= min(options.ranks, room))
        try:
            loss = train(ranks, rest)
        except ray.exceptions.RayError:
            if attempt == options.attempts:
                raise
        else:
            break
    click.echo(f"{ranks} ranks: loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
