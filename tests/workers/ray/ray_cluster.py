"""A Ray cluster of this machine, with several raylets, as small and quiet as Ray allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MEMORY = 100 * 2**20
"""Bytes of the object store of a node."""

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 20_000,
    "health_check_failure_threshold": 4,
}
"""A killed raylet is noticed in seconds, and a slow one on a busy machine does not count as dead."""


@contextmanager
def cluster() -> Iterator[Any]:
    """A head node with 8 logical CPUs that this process is connected to; `add_node` and `remove_node` change it."""
    import ray
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 8, "object_store_memory": MEMORY, "include_dashboard": False, "_system_config": HEALTH}
    nodes = Cluster()
    try:
        _add_head(nodes, arguments)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def _add_head(nodes: Any, arguments: dict[str, Any]) -> None:
    for left in reversed(range(4)):
        try:
            nodes.add_node(**arguments)
            return
        except Exception as error:
            # Ray gives a node half a minute to start, whatever else the machine does.
            if not left or "timed out during startup" not in str(error):
                raise
