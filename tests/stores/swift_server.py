"""A real S3 server on loopback: OpenStack Swift with its s3api, everything in one folder.

Run as a program, by a Python that has `swift` (`requirements-stores.txt`):

    python tests/stores/swift_server.py FOLDER

It starts the four servers that Swift consists of (proxy, account, container, object; one process
each, one replica), prints the address of the proxy as a line of JSON, and serves until its standard
input ends: so it stops by itself when the process that started it dies, however that happens.
The folder must be on a file system with extended attributes; it stays, for the caller to remove.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

ACCESS_KEY = "test:tester"
SECRET_KEY = "a-secret-that-nobody-may-print"
REGION = "us-east-1"
PARENT_DEATH_SIGNAL = 1

STORAGE = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
devices = {folder}/disks
mount_check = false
disable_fallocate = true
fallocate_reserve = 0
log_level = ERROR
workers = 0

[pipeline:main]
pipeline = {kind}-server

[app:{kind}-server]
use = egg:swift#{kind}
"""

PROXY = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
log_level = ERROR
workers = 0

[pipeline:main]
pipeline = catch_errors gatekeeper listing_formats s3api tempauth bulk slo dlo proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
node_timeout = 60
recoverable_node_timeout = 60

[filter:catch_errors]
use = egg:swift#catch_errors

[filter:gatekeeper]
use = egg:swift#gatekeeper

[filter:listing_formats]
use = egg:swift#listing_formats

[filter:s3api]
use = egg:swift#s3api
location = {region}
max_upload_part_num = 10000

[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
user_other_stranger = {secret} .admin

[filter:bulk]
use = egg:swift#bulk

[filter:slo]
use = egg:swift#slo
max_manifest_segments = 10000
max_manifest_size = 16777216

[filter:dlo]
use = egg:swift#dlo
"""

CLUSTER = """
[swift-hash]
swift_hash_path_suffix = tests
swift_hash_path_prefix = tests

[storage-policy:0]
name = one-copy
default = yes

[swift-constraints]
max_file_size = 5368709122
"""


def main(folder: Path) -> None:
    """Start the servers and wait."""
    (folder / "disks" / "disk").mkdir(parents=True)
    (folder / "swift.conf").write_text(CLUSTER)
    kinds = ("account", "container", "object", "proxy")
    sockets = {kind: _listen() for kind in kinds}
    ports = {kind: listening.getsockname()[1] for kind, listening in sockets.items()}
    for kind in kinds:
        template = PROXY if kind == "proxy" else STORAGE
        values = {"kind": kind, "folder": folder, "region": REGION, "secret": SECRET_KEY}
        (folder / f"{kind}.conf").write_text(template.format(port=ports[kind], **values))
    _make_rings(folder, ports)
    children = [_start(kind, sockets[kind], folder) for kind in kinds]
    for listening in sockets.values():
        listening.close()
    print(json.dumps({"port": ports["proxy"], "processes": children}), flush=True)
    sys.stdin.buffer.read()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _listen() -> socket.socket:
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    listening.setblocking(False)
    return listening


def _make_rings(folder: Path, ports: dict[str, int]) -> None:
    from swift.common.ring import RingBuilder

    for kind in ("account", "container", "object"):
        builder = RingBuilder(part_power=4, replicas=1, min_part_hours=1)
        disk = {"ip": "127.0.0.1", "port": ports[kind], "device": "disk", "weight": 1.0}
        builder.add_dev({**disk, "region": 1, "zone": 1, "meta": ""})
        builder.rebalance()
        builder.get_ring().save(str(folder / f"{kind}.ring.gz"))


def _start(kind: str, listening: socket.socket, folder: Path) -> int:
    """Serve in a process of its own, which dies with this one."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.close(0)
        os.dup2(2, 1)
        _serve(kind, listening, folder)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _serve(kind: str, listening: socket.socket, folder: Path) -> None:
    import eventlet.greenio
    from swift.common import utils, wsgi

    utils.monkey_patch()
    utils.set_swift_dir(str(folder))
    conf = wsgi.load_app_config(str(folder / f"{kind}.conf"))
    conf["__file__"] = str(folder / f"{kind}.conf")
    logger = utils.get_logger(conf, f"{kind}-server", log_route="wsgi")
    wsgi.run_server(conf, logger, eventlet.greenio.GreenSocket(listening))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
