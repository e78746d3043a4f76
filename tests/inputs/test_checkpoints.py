"""Checkpoints that torch.distributed writes here, and the tensors they were made of."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import textwrap
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import PLACES, Ranged
from safetensors.torch import save_file

import dare
from dare.errors import InputError
from dare.inputs.checkpoints import ShardedSource
from dare.inputs.opening import form_of, open_model
from dare.inputs.sources import Opening
from helpers import read_tensor

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def cut(tensor, *edges):
    """Return the pieces between the edges of each dimension, by their offsets."""
    spans = [
        pairwise([0, *sorted(inner), size]) for inner, size in zip(edges, tensor.shape, strict=True)
    ]
    boxes = product(*(list(span) for span in spans))
    return {tuple(low for low, _ in box): tensor[tuple(slice(*s) for s in box)] for box in boxes}


class CuttingPlanner(DefaultSavePlanner):
    """Saves tensors in pieces, as if each were on a machine of its own."""

    def __init__(self, pieces):
        super().__init__()
        self.pieces = pieces

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self.pieces]
        for item in plan.items:
            for offsets, piece in self.pieces.get(item.index.fqn, {}).items():
                chunk = ChunkStorageMetadata(torch.Size(offsets), piece.shape)
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                index = MetadataIndex(item.index.fqn, offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index):
        if index.fqn in self.pieces:
            return self.pieces[index.fqn][tuple(index.offset)]
        return super().lookup_object(index)


def write(folder, state, pieces=(), threads=1):
    """Save a state dict with torch, some of its tensors in pieces."""
    writer = FileSystemWriter(folder, thread_count=threads, sync_files=False)
    planner = CuttingPlanner(dict(pieces))
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return folder


def raw_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(path):
    with ShardedSource(path) as source:
        return {name: read_tensor(source, name) for name in source.tensors}


# ---------------------------------------------------------------- pieces of tensors

W = torch.arange(56, dtype=torch.float32).reshape(7, 8)
TENSORS = {
    "rows": W,
    "columns": W + 100,
    "both": (W + 200).double(),
    "cube": torch.arange(60).reshape(3, 4, 5).bfloat16(),
    "bias": torch.arange(9).half(),
    "scalar": torch.tensor(3.5),
    "whole": torch.arange(6),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(20.0).reshape(4, 5).t(),
}
EDGES = {
    "rows": [(2, 3), ()],
    "columns": [(), (1, 6)],
    "both": [(4,), (3, 5)],
    "cube": [(1,), (), (2,)],
    "bias": [(4, 8)],
    "turned": [(2,), ()],
}
PIECES = {name: cut(TENSORS[name], *edges) for name, edges in EDGES.items()}


@pytest.fixture(scope="module")
def ranged(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("ranged") / "c", TENSORS, PIECES, threads=3)
    assert len(list(path.glob("*.distcp"))) == 3
    with ShardedSource(path) as source:
        yield Ranged(source, {name: raw_bytes(tensor) for name, tensor in TENSORS.items()})


def test_tensors_are_put_together_from_their_pieces(ranged):
    types = {"both": "F64", "cube": "BF16", "bias": "F16", "whole": "I64"}
    for name, tensor in TENSORS.items():
        info = ranged.source.tensors[name]
        assert (info.shape, info.dtype.name) == (tuple(tensor.shape), types.get(name, "F32"))
        ranged.source.prefetch(name, 0, tensor.numel())
        ranged.check(name, 0, tensor.numel())


@given(st.sampled_from(sorted(TENSORS)), PLACES, PLACES)
def test_any_range_is_the_same_part_of_the_whole(ranged, name, one, other):
    ranged.check(name, one, other)


def test_large_pieces_are_read_in_bounded_memory(tmp_path, monkeypatch):
    tensor = torch.arange(3500.0).reshape(50, 70)
    path = write(tmp_path / "c", {"w": tensor}, {"w": cut(tensor, (20,), (33,))})
    monkeypatch.setattr("dare.inputs.checkpoints.PIECE_ELEMENTS", 300)
    assert contents(path) == {"w": raw_bytes(tensor)}
    assert ShardedSource(path).cost.reading_bytes == 300 * 8


def test_no_torch_is_needed(tmp_path, monkeypatch):
    path = write(tmp_path / "c", {"w": W})
    monkeypatch.setitem(sys.modules, "torch", None)
    assert contents(path) == {"w": raw_bytes(W)}


SHARDED_BY_TORCH = """
    import os, sys
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank = 0 if (child := os.fork()) else 1
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    given = torch.load(sys.argv[2])
    placed = {"rows": Shard(0), "columns": Shard(1), "cube": Shard(1), "whole": Replicate()}
    tensors = {
        name: distribute_tensor(given[name], mesh, [place]) for name, place in placed.items()
    }
    moments = {name: {"exp_avg": 2 * tensor} for name, tensor in tensors.items()}
    state = {"model": tensors, "optim": {"state": moments}, "step": 3}
    dcp.save(state, checkpoint_id=sys.argv[3])
    dcp.save(state, checkpoint_id=sys.argv[3] + "-alone", use_collectives=False)
    dist.destroy_process_group()
    if rank:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_what_processes_save_together_is_one_model(tmp_path):
    torch.save(TENSORS, tmp_path / "given.pt")
    arguments = [tmp_path / "meeting", tmp_path / "given.pt", tmp_path / "c"]
    script = textwrap.dedent(SHARDED_BY_TORCH)
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=300)
    names = ("rows", "columns", "cube", "whole")
    for folder, metadata in (("c", 1), ("c-alone", 2)):  # in the second each has its own
        path = tmp_path / folder
        assert len(list(path.glob("*.distcp"))) == 2
        assert len(list(path.glob("*.metadata"))) == metadata
        assert contents(path) == {name: raw_bytes(TENSORS[name]) for name in names}
        assert "optim, step" in ShardedSource(path).remarks[0].text


# ---------------------------------------------------------------- state dicts


@pytest.mark.parametrize(
    ("nest", "left_out"),
    [
        (lambda w, m: w, ""),
        (lambda w, m: {"model": w, "optimizer": m, "ema": {"w": W}}, "optimizer, ema"),
        (lambda w, m: {"app": {"model": w, "optim": m}, "step": 3}, "app, step"),
        (lambda w, m: {**w, "optimizer": m, "lr_scheduler": {"a": 1}}, "optimizer, lr_scheduler"),
    ],
)
def test_only_the_weights_of_a_training_are_read(tmp_path, nest, left_out):
    weights = {"model.embed.weight": W, "lm_head.weight": W + 1}
    path = write(tmp_path / "c", nest(weights, {"state": {"lm_head.weight": {"exp_avg": W}}}))
    assert contents(path) == {name: raw_bytes(tensor) for name, tensor in weights.items()}
    texts = [remark.text for remark in ShardedSource(path).remarks]
    assert [text.partition(": ")[2] for text in texts] == ([left_out] if left_out else [])


def test_two_models_in_one_checkpoint_are_refused(tmp_path):
    path = write(tmp_path / "c", {"actor": {"model": {"w": W}}, "critic": {"model": {"w": W}}})
    with pytest.raises(InputError, match="w occurs twice"):
        ShardedSource(path)


def test_a_merge_is_that_of_the_same_weights_in_safetensors(tmp_path):
    torch.manual_seed(0)
    base = {f"model.layers.{n}.weight": torch.randn(40, 30).bfloat16() for n in range(3)}
    tuned = {name: tensor + torch.randn(40, 30).bfloat16() / 9 for name, tensor in base.items()}
    files = []
    for name, model in (("base", base), ("tuned", tuned)):
        save_file(model, tmp_path / f"{name}.safetensors")
        pieces = {f"model.{tensor}": cut(model[tensor], (7, 20), (9,)) for tensor in model}
        write(tmp_path / name, {"model": model}, pieces, threads=2)
        files.append((tmp_path / f"{name}.safetensors", tmp_path / name))
    outputs = []
    for number, (one, other) in enumerate(zip(*files, strict=True)):
        outputs.append(tmp_path / f"out{number}.safetensors")
        settings = {"seed": 3, "allow_pickle": True, "verbose": False, "output": outputs[-1]}
        dare.merge(base=one, models=[other], method="dare+linear", **settings)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_a_prefix_of_all_names_is_matched(tmp_path):
    weights = {f"layers.{n}.weight": W + n for n in range(3)}
    save_file(weights, tmp_path / "base.safetensors")
    path = write(tmp_path / "c", {f"model.{name}": tensor for name, tensor in weights.items()})
    given = {"base": tmp_path / "base.safetensors", "models": [path], "method": "linear"}
    plan = dare.plan(**given, allow_pickle=True, output=tmp_path / "out", verbose=False)
    assert "renamed" in [note.code for note in plan.notes]


# ---------------------------------------------------------------- hostile and other folders


class Malice:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


def test_a_pickle_needs_permission_and_cannot_run(tmp_path):
    path = write(tmp_path / "c", {"w": W})
    with pytest.raises(InputError, match="allow_pickle"):
        open_model(path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = Malice(f"touch {tmp_path / 'ran'}")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match=r"\.metadata: refused.*\(posix\.system"):
        open_model(path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()  # it would have run


@pytest.mark.parametrize(
    "program",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}U\x05stateNstb.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n}U\x05stateNsb.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
        b"ctorch\nSize\n)R.",
        b"}.",
        b"",
    ],
)
def test_a_pickle_cannot_change_what_reads_it(tmp_path, program):
    path, other = (write(tmp_path / name, {"w": W}) for name in "ab")
    (other / ".metadata").write_bytes(program)
    with pytest.raises(InputError, match=r"b/\.metadata: .*is damaged"):
        ShardedSource(other)
    assert contents(path) == {"w": raw_bytes(W)}


def change_place(**values):
    """Change where the metadata say that the first piece is."""

    def change(metadata):
        place = next(iter(metadata.storage_data.values()))
        for name, value in values.items():
            setattr(place, name, value(getattr(place, name)) if callable(value) else value)

    return change


def change_entry(name, value):
    return lambda metadata: setattr(metadata.state_dict_metadata["w"], name, value)


def change_chunk(name, value):
    return lambda m: setattr(m.state_dict_metadata["w"].chunks[0], name, torch.Size(value))


def exchange(metadata):
    """Exchange two pieces of different shapes."""
    one, *_, other = metadata.storage_data
    places = metadata.storage_data
    places[one], places[other] = places[other], places[one]


OTHER = r"__0_0\.distcp: not a file of torch\.save"
LIES = {
    "beyond the end": (change_place(offset=lambda n: n + 10**6), r"__0_0\.distcp: w .*truncated"),
    "too long": (change_place(length=1 << 62), r"__0_0\.distcp: w .*truncated"),
    "too short": (change_place(length=lambda n: n - 300), OTHER),
    "no bytes": (change_place(length=0), OTHER),
    "elsewhere": (change_place(offset=lambda n: n + 64), OTHER),
    "negative": (change_place(offset=-1), r"\.metadata: is damaged"),
    "text": (change_place(offset="0"), r"\.metadata: is damaged"),
    "huge": (change_place(length=1 << 70), r"\.metadata: is damaged"),
    "another folder": (change_place(relative_path="../__0_0.distcp"), "w is in .*same folder"),
    "absolute": (change_place(relative_path="/etc/passwd"), "w is in .*same folder"),
    "no such file": (change_place(relative_path="__9_0.distcp"), r"__9_0\.distcp: no such file"),
    "compressed": (change_place(transform_descriptors=["zstd"]), "w .*zstd.*without extensions"),
    "exchanged": (exchange, r"__0_0\.distcp: w is 2×5 F32, and float32 5×3 in"),
    "larger": (change_entry("size", torch.Size([9, 8])), "w: a piece is missing"),
    "smaller": (change_entry("size", torch.Size([7, 7])), "w: a piece reaches beyond 7×7"),
    "other dimensions": (change_entry("size", torch.Size([56])), r"\.metadata: is damaged"),
    "huge shape": (change_entry("size", torch.Size([2**62, 2**62])), r"\.metadata: is damaged"),
    "pieces are missing": (change_entry("chunks", []), "w: a piece is missing"),
    "no pieces": (change_entry("chunks", None), r"\.metadata: is damaged"),
    "overlap": (change_chunk("sizes", [6, 5]), "w: has pieces that overlap"),
    "no such piece": (change_chunk("offsets", [1, 1]), r"\.metadata: is damaged"),
    "no places": (lambda m: m.storage_data.clear(), r"\.metadata: is damaged"),
    "nothing": (lambda m: m.state_dict_metadata.clear(), "holds no weights"),
    "another dtype": (
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.float16),
        r"__0_0\.distcp: w is .* F32, and float16",
    ),
    "complex": (
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.complex128),
        "w is complex128; give a plain tensor",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lie_are_refused(tmp_path, lie):
    change, message = LIES[lie]
    path = write(tmp_path / "c", {"w": W}, {"w": cut(W, (5,), (3,))})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match=rf"c/?.*{message}"):
        ShardedSource(path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["__0_0.distcp"], r"has no \.metadata.*did not finish"),
        (["__0_0.distcp", ".metadata", "common.pt"], "is a checkpoint of Megatron.*Bridge"),
        (["mp_rank_00/model_optim_rng.pt"], "is a checkpoint of Megatron.*Bridge"),
        (["iter_0000100/mp_rank_00/x", "latest_checkpointed_iteration.txt"], "of Megatron"),
        (["model_world_size_8_rank_0.pt"], r"verl.*verl\.model_merger"),
        (["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"], r"fsdp_0\).*that folder"),
    ],
)
def test_a_folder_of_another_trainer_says_what_it_is(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=message):
        open_model(tmp_path, allow_pickle=True)


def test_a_file_of_a_checkpoint_says_what_it_is(tmp_path):
    path = write(tmp_path / "c", {"w": W})
    with pytest.raises(InputError, match="give its folder"):
        open_model(path / "__0_0.distcp", allow_pickle=True)
    (tmp_path / "model_optim_rng.pt").touch()
    with pytest.raises(InputError, match="Megatron"):
        open_model(tmp_path / "model_optim_rng.pt", allow_pickle=True)


def test_a_folder_with_a_whole_model_is_not_a_checkpoint(tmp_path):
    save_file({"w": W}, tmp_path / "model.safetensors")
    for name in ("zero_to_fp32.py", "__0_0.distcp"):
        (tmp_path / name).touch()
    assert form_of(Opening(tmp_path)) == "sources"
