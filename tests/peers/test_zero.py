"""Checkpoints that DeepSpeed writes, with ZeRO in several processes: its converter against us."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from dare.inputs.opening import open_model
from helpers import read_tensor

RANKS = 3
TRAINING = """
    import os, sys
    import deepspeed, torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(11, 7)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(7, 7) for _ in range(3)])
            self.head = torch.nn.Linear(7, 11, bias=False)
            self.head.weight = self.embed.weight
            self.layers[1].weight.requires_grad_(False)
            self.register_buffer("seen", torch.arange(5))

        def forward(self, ids):
            hidden = self.embed(ids)
            for layer in self.layers:
                hidden = hidden + layer(hidden).tanh()
            return torch.nn.functional.cross_entropy(self.head(hidden), ids.roll(1))

    def train(stage, out):
        torch.manual_seed(0)
        model = Tied()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        matrices, others = ([w for w in trained if (w.ndim > 1) == flag] for flag in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 30}
        zero["parameter_alignment"] = stage == 2
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        settings |= {"zero_allow_untested_optimizer": True, "bf16": {"enabled": stage == 2}}
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        for step in range(2):
            engine.backward(engine(torch.arange(9) % (3 + rank + step)))
            engine.step()
        engine.save_checkpoint(out)
        deepspeed.comm.barrier()
        if rank == 0:
            found = get_fp32_state_dict_from_zero_checkpoint(out)
            found = {name: tensor.clone().contiguous() for name, tensor in found.items()}
            save_file(found, f"{out}.safetensors")

    deepspeed.ops.__compatible_ops__.clear()  # or it would compile them
    rank = int(os.environ["RANK"])
    for stage in (2, 3):
        train(stage, f"{sys.argv[1]}/{stage}")
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with checkpoints of both stages, and with what DeepSpeed converts them to."""
    folder = tmp_path_factory.mktemp("trained")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    common |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TRAINING), folder],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=600)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, said[0]
    return folder


@pytest.mark.parametrize("stage", ["2", "3"])
def test_weights_are_those_that_deepspeed_converts(trained, stage):
    converted = load_file(trained / f"{stage}.safetensors")
    assert len(converted) == 9
    with open_model(trained / stage, allow_pickle=True) as source:
        assert source.tensors.keys() == converted.keys()
        for name, tensor in converted.items():
            info = source.tensors[name]
            kind = str(tensor.dtype).removeprefix("torch.")
            assert (info.shape, info.dtype.torch_name) == (tuple(tensor.shape), kind)
            assert (
                read_tensor(source, name) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            )
