"""Ray nodes that listen on loopback only, until standard input ends.

    python local.py NODES [PROCESSORS]

Its first line says, as JSON, where the cluster is and which processes its nodes are.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

STORE_BYTES = 80 << 20
TRIES = 4
"""A node gives up if its agents take more than 15 s to start, on a machine that is very busy."""


def add_node(cluster: Any, processors: int) -> int:
    """Start a node; return its process."""
    before = set(raylets())
    for tries_left in reversed(range(TRIES)):
        try:
            cluster.add_node(
                wait=False,
                node_ip_address="127.0.0.1",
                num_cpus=processors,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                include_log_monitor=False,
                no_monitor=True,
            )
        except Exception:
            if not tries_left:
                raise
        else:
            break
    (raylet,) = set(raylets()) - before
    return raylet


def raylets() -> list[int]:
    """The nodes that this process has started and that are alive."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    states = {child: Path(f"/proc/{child}/stat").read_text().split()[1:3] for child in children}
    return [
        int(child) for child, state in states.items() if state[0] == "(raylet)" and state[1] != "Z"
    ]


if __name__ == "__main__":
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else 127.0.0.1 is taken for the real address
        "RAY_enable_metrics_collection": "0",
        "RAY_health_check_period_ms": "500",
    }
    Path(os.environ["RAY_TMPDIR"], "ray").mkdir()

    from ray.cluster_utils import Cluster

    cluster = Cluster()
    count, processors = map(int, (*sys.argv[1:], 1)[:2])
    found = [add_node(cluster, processors) for _ in range(count)]
    print(json.dumps({"address": cluster.address, "raylets": found}), flush=True)
    sys.stdin.read()
    cluster.shutdown()
