"""What reading from and writing to S3 takes beside local files, and what it waits for.

    python bench/stores.py --million 100 --runs 3

The store is OpenStack Swift with its s3api on this machine (tests/stores), so there is no network:
what is measured is what dare and a client take, and what this server takes. The floors are boto3
alone: the same bytes, fetched by ranges of 8 MiB in eight threads, and sent by parts of 16 MiB in
four. All take turns; figures are medians. Every merge must give the same SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/stores"))
from servers import SwiftServer

MIB = 1 << 20
RANGE_BYTES = 8 * MIB
READERS = 8
PART_BYTES = 16 * MIB
SENDERS = 4
TENSOR_ELEMENTS = 4 * MIB
BUCKET = "bench"
NAMES = ("base", "math", "code")


@dataclass(frozen=True)
class Row:
    """One way, once."""

    way: str
    seconds: float
    ours: float
    """Processor time of this process."""
    store: float
    """Processor time of the four processes of the store."""


def make_models(folder: Path, million: int) -> int:
    """A base and two fine-tunes in bfloat16; return the bytes of one."""
    generator = np.random.default_rng(1)
    count = max(1, million * 1_000_000 // TENSOR_ELEMENTS)
    base = {
        f"layer.{n:03}.weight": generator.normal(0, 0.02, (1024, TENSOR_ELEMENTS // 1024))
        for n in range(count)
    }
    for name in NAMES:
        moved = {
            tensor: w + (name != "base") * generator.normal(0, 1e-3, w.shape)
            for tensor, w in base.items()
        }
        stored = {tensor: w.astype(ml_dtypes.bfloat16) for tensor, w in moved.items()}
        save_file(stored, folder / f"{name}.safetensors")
    return (folder / "base.safetensors").stat().st_size


def fetch(client: Any, name: str) -> None:
    """Read an object by ranges and drop it."""
    key = f"{name}.safetensors"
    size = client.head_object(Bucket=BUCKET, Key=key)["ContentLength"]

    def get(start: int) -> int:
        span = f"bytes={start}-{min(start + RANGE_BYTES, size) - 1}"
        return len(client.get_object(Bucket=BUCKET, Key=key, Range=span)["Body"].read())

    with ThreadPoolExecutor(READERS) as pool:
        assert sum(pool.map(get, range(0, size, RANGE_BYTES))) == size


def send(client: Any, file: Path, key: str) -> None:
    """Write a file by parts."""
    place = {"Bucket": BUCKET, "Key": key}
    upload = client.create_multipart_upload(**place)["UploadId"]
    content = memoryview(file.read_bytes())
    starts = range(0, len(content), PART_BYTES)

    def put(number: int) -> dict[str, Any]:
        body = bytes(content[starts[number] : starts[number] + PART_BYTES])
        given = {**place, "UploadId": upload, "PartNumber": number + 1}
        return {"PartNumber": number + 1, "ETag": client.upload_part(**given, Body=body)["ETag"]}

    with ThreadPoolExecutor(SENDERS) as pool:
        parts = list(pool.map(put, range(len(starts))))
    client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts})


def merge(inputs: str, output: object, threads: int | None) -> None:
    import dare
    from dare.recipe.recipe import Request

    base, *models = (f"{inputs}/{name}.safetensors" for name in NAMES)
    recipe = Request.of(
        base=base,
        models=models,
        output=output,
        method="dare+linear",
        threads=threads,
        verbose=False,
    )
    dare.merge(recipe, overwrite=True)


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(options: argparse.Namespace, folder: Path, server: SwiftServer) -> dict[str, Any]:
    os.environ.update(server.s3.environment)
    client = server.s3.client()
    client.create_bucket(Bucket=BUCKET)
    size = make_models(folder, options.million)
    for name in NAMES:
        send(client, folder / f"{name}.safetensors", f"{name}.safetensors")
    local = folder / "merged.safetensors"
    stored = f"s3://{BUCKET}/merged.safetensors"
    ways: dict[str, Callable[[], None]] = {
        "GET alone (boto3)": lambda: [fetch(client, name) for name in NAMES] and None,
        "PUT alone (boto3)": lambda: send(client, folder / "base.safetensors", "copy"),
        "files to a file": lambda: merge(str(folder), local, options.threads),
        "S3 to a file": lambda: merge(f"s3://{BUCKET}", local, options.threads),
        "files to S3": lambda: merge(str(folder), stored, options.threads),
        "S3 to S3": lambda: merge(f"s3://{BUCKET}", stored, options.threads),
    }
    rows: list[Row] = []
    digests = set()
    for number in range(options.runs + 1):
        for way, action in ways.items():
            before = [processor_seconds(p) for p in server.processes]
            ours, started = time.process_time(), time.perf_counter()
            action()
            seconds = time.perf_counter() - started
            store = sum(processor_seconds(p) for p in server.processes) - sum(before)
            if number:  # the first fills caches
                rows.append(Row(way, seconds, time.process_time() - ours, store))
            if way.endswith("a file"):
                digests.add(hashlib.sha256(local.read_bytes()).hexdigest())
            elif way.endswith("to S3"):
                body = client.get_object(Bucket=BUCKET, Key="merged.safetensors")["Body"]
                digests.add(hashlib.sha256(body.read()).hexdigest())
    assert len(digests) == 1, digests
    moved = {"GET": 3 * size, "PUT": size}
    return {
        "cores": os.cpu_count(),
        "bytes_of_a_model": size,
        "sha256": digests.pop(),
        "moved_bytes": {way: moved.get(way.split()[0], 4 * size) for way in ways},
        "rows": [asdict(row) for row in rows],
    }


def show(found: dict[str, Any]) -> None:
    rows = [Row(**row) for row in found["rows"]]
    print(f"a model has {found['bytes_of_a_model'] / 1e6:.0f} MB; sha256 {found['sha256'][:16]}…\n")
    print("| | seconds | MB/s | processor, ours | processor, store | both of all cores |")
    print("|---|---:|---:|---:|---:|---:|")
    for way, moved in found["moved_bytes"].items():
        some = [row for row in rows if row.way == way]
        seconds = statistics.median(row.seconds for row in some)
        ours = statistics.median(row.ours for row in some)
        store = statistics.median(row.store for row in some)
        share = (ours + store) / seconds / found["cores"]
        print(
            f"| {way} | {seconds:.2f} | {moved / seconds / 1e6:.0f} | {ours:.2f} s | {store:.2f} s "
            f"| {share:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--million", type=int, default=100, help="parameters of a model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="where to keep all figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dare-stores-") as name:
        folder = Path(name)
        with SwiftServer(folder / "swift") as server:
            found = run(options, folder, server)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
