"""The plan of a merge of 70-billion-parameter models: from headers alone, in seconds."""

import json
import os
import subprocess
import sys

HIDDEN, INNER, LAYERS, VOCABULARY, KEYS, SHARDS = 8192, 28672, 80, 128256, 1024, 30
SECONDS, BYTES = 2, 200_000_000


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
        header, end = {}, 0
        for name, shape in tensors[number * each : (number + 1) * each]:
            start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            places[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(folder)


def test_a_plan_for_seventy_billion_parameters_takes_seconds_and_little_memory(tmp_path):
    base, *models = (write_headers(tmp_path / name) for name in ("base", "math", "code", "chat"))
    command = [sys.executable, "-m", "dare", "plan", "--json", "--base", base, "--merge", *models]
    command += ["--output", str(tmp_path / "merged"), "--shard-size", "5GB", "--threads", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        plan = json.loads(process.stdout.read())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status
    assert status == 0
    assert len(plan["tensors"]) == 723
    assert plan["bytes_written"] == 141_107_412_992
    assert plan["bytes_read"] == 4 * plan["bytes_written"]
    assert plan["peak_memory_bytes"] < 300_000_000
    resident = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert used.ru_utime + used.ru_stime < SECONDS
    assert resident < BYTES
