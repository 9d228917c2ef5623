"""A Ray cluster of one machine, in which every node has a process of its own."""

import os
import sys

import pytest

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nodes of a busy machine take long to start.
    "RAY_raylet_start_wait_time_s": "240",
}


@pytest.fixture(scope="session")
def cluster():
    """A cluster with a head node of 4 CPUs and an object store of 80 MB."""
    os.environ.update(ENVIRONMENT)
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
        },
    )
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    # Ray leaves folders of its own on the path of the program.
    sys.path[:] = [each for each in sys.path if "ray/thirdparty_files" not in each]
