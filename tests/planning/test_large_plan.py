"""The plan of a merge of 70-billion-parameter models: from headers alone, in seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import save_hollow

HIDDEN, INNER, LAYERS, VOCABULARY, KEYS, SHARDS = 8192, 28672, 80, 128256, 1024, 30
SECONDS, BYTES = 4, 200_000_000


def shapes():
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_headers(folder):
    """Shards with true headers and holes for data: they take no room on the disk."""
    folder.mkdir()
    tensors = list(shapes())
    each = -(-len(tensors) // SHARDS)
    places = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        own = dict(tensors[number * each : (number + 1) * each])
        save_hollow(folder / file, own, mark=1)  # so that head and embedding are not the same
        places |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(folder)


RUN = """
import sys, time
from dare.cli import main

status = main(sys.argv[1:])
with open("/proc/self/status") as file:
    (peak,) = (line.split()[1] for line in file if line.startswith("VmHWM:"))
print(time.process_time(), 1024 * int(peak), file=sys.stderr)
sys.exit(status)
"""
"""Runs the command and says what it took. (A parent's peak counts in what it hears of a child.)"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_plan_for_seventy_billion_parameters_takes_seconds_and_little_memory(tmp_path):
    base, *models = (write_headers(tmp_path / name) for name in ("base", "math", "code", "chat"))
    command = [sys.executable, "-c", RUN, "plan", "--json", "--base", base, "--merge", *models]
    command += ["--output", str(tmp_path / "merged"), "--shard-size", "5GB", "--threads", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert len(plan["tensors"]) == 723
    assert plan["bytes_written"] == 141_107_412_992
    assert plan["bytes_read"] == 4 * plan["bytes_written"]
    assert plan["peak_memory_bytes"] < 400_000_000
    seconds, peak_bytes = map(float, done.stderr.splitlines()[-1].split())
    assert seconds < SECONDS
    assert peak_bytes < BYTES


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_many_models_take_as_much_memory_as_two(tmp_path):
    shapes = {"w": [1 << 24]}
    files = (save_hollow(tmp_path / f"m{n}.safetensors", shapes, mark=n) for n in range(25))
    base, *models = map(str, files)
    peaks = {}
    for count in (2, 24):
        command = [sys.executable, "-c", RUN, "merge", base, *models[:count], "--threads", "2"]
        command += ["--output", str(tmp_path / f"{count}.safetensors"), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks[count] = int(done.stderr.split()[-1])
    assert peaks[24] - peaks[2] < 60_000_000  # it was 180 MB
