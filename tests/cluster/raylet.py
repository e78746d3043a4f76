"""One node of a Ray cluster, until its standard input ends. Its first line says it is up.

    python raylet.py ADDRESS HEAD_ADDRESS FOLDER

The node whose address is the head's is the head.
"""

from __future__ import annotations

import json
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams

PORT = 6379
STORE_BYTES = 80 << 20

address, head, folder = sys.argv[1:]
is_head = address == head
place = {"gcs_server_port": PORT} if is_head else {"gcs_address": f"{head}:{PORT}"}
parameters = RayParams(
    node_ip_address=address,
    num_cpus=1,
    num_gpus=0,
    object_store_memory=STORE_BYTES,
    min_worker_port=0,
    max_worker_port=0,
    node_manager_port=0,
    dashboard_agent_listen_port=0,
    include_log_monitor=False,
    include_dashboard=False,
    temp_dir=folder,
    **place,
)
node = Node(parameters, head=is_head, shutdown_at_exit=True, spawn_reaper=False)
(raylet,) = node.all_processes["raylet"]
print(json.dumps({"raylet": raylet.process.pid}), flush=True)
sys.stdin.read()
