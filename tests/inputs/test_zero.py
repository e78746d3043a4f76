"""Checkpoints of DeepSpeed's ZeRO, in the layout that DeepSpeed writes, and what must be in them.

`tests/peers/test_zero.py` has checkpoints that DeepSpeed itself writes.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import types
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import PLACES, Ranged
from safetensors.torch import save_file

import dare
from dare.errors import InputError
from dare.inputs.checkpoints import ZeroSource
from dare.inputs.opening import form_of, open_model
from dare.inputs.sources import Opening
from helpers import read_tensor

torch = pytest.importorskip("torch")

STAGE = types.ModuleType("deepspeed")


class ZeroStageEnum(int):
    """As in DeepSpeed, an object that a pickle names and that nothing may import."""

    __module__ = STAGE.__name__

    def __reduce__(self):
        return type(self), (int(self),)


STAGE.ZeroStageEnum = ZeroStageEnum


def share(tensor, ranks):
    """Return the part of each rank, all of one size."""
    size = ceil(tensor.numel() / ranks)
    padded = torch.cat([tensor.reshape(-1), torch.zeros(size * ranks - tensor.numel())])
    return padded.to(tensor.dtype).split(size) if size else [padded] * ranks


def describe(stage, groups, ranks, *, frozen=(), buffers=(), shared=(), gap=0, most=10**6):
    """Return the files of a checkpoint, by name: what each holds."""
    frozen, buffers, shared = dict(frozen), dict(buffers), dict(shared)
    model = {
        "module": {**buffers, **dict.fromkeys(shared, torch.zeros(0))},
        "buffer_names": list(buffers),
        "param_shapes": [{n: t.shape for n, t in group.items()} for group in groups],
        "shared_params": shared,
        "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()},
        "frozen_param_fragments": frozen,
        "global_steps": 7,
        "ds_version": "0.19.8",
    }
    if stage == 3:
        parts = [share(tensor, ranks) for group in groups for tensor in group.values()]
        flats = [
            list(torch.cat([part[rank] for part in parts]).split(most)) for rank in range(ranks)
        ]
        kept = {name: share(tensor, ranks) for name, tensor in frozen.items()}
        model["module"] |= {n: torch.zeros(0) for group in groups for n in group}
        found = {
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": {
                **model,
                "shared_params": {} if rank else shared,
                "frozen_param_fragments": {name: part[rank] for name, part in kept.items()},
            }
            for rank in range(ranks)
        }
        states = [{"fp32_flat_groups": flat, "partition_count": ranks} for flat in flats]
    else:
        flats = []
        for group in groups:
            spaced = [torch.cat([t.reshape(-1), torch.ones(gap)]) for t in group.values()]
            flat = torch.cat(spaced)
            whole = torch.cat([flat, torch.zeros(-flat.numel() % (2 * ranks))])
            flats.append(share(whole, ranks))
        model["module"] |= {**frozen, **{n: t.half() for group in groups for n, t in group.items()}}
        found = {"mp_rank_00_model_states.pt": model}
        states = [
            {
                "single_partition_of_fp32_groups": [flat[rank] for flat in flats],
                "partition_count": [ranks] * len(groups),
                "param_alignment_paddings": [[gap] * len(group) for group in groups],
            }
            for rank in range(ranks)
        ]
    for rank, state in enumerate(states):
        moments = {"state": {0: {"exp_avg": torch.ones(9)}}}
        optimizer = {**state, "zero_stage": ZeroStageEnum(stage), "base_optimizer_state": moments}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        found[name] = {"optimizer_state_dict": optimizer, "ds_config": {"a": [1, None]}}
    return found


def save(folder, held):
    """Write the files of a checkpoint below a folder, and `latest` and the script beside them."""
    step = folder / "global_step7"
    step.mkdir(parents=True, exist_ok=True)
    sys.modules[STAGE.__name__] = STAGE  # pickle looks there
    try:
        for name, value in held.items():
            # torch saves a whole storage with each view of it, and DeepSpeed a copy
            torch.save(copied(value), step / name)
    finally:
        del sys.modules[STAGE.__name__]
    (folder / "latest").write_text("global_step7\n")
    (folder / "zero_to_fp32.py").touch()
    return folder


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if type(value) is list else value


def raw_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(path):
    with ZeroSource(path) as source:
        return {name: read_tensor(source, name) for name in source.tensors}


# ---------------------------------------------------------------- what the ranks have

EMBED = torch.arange(35.0).reshape(7, 5)
GROUPS = [
    {"embed": EMBED, "up": torch.arange(100.0, 139.0).reshape(3, 13), "none": torch.empty(0, 3)},
    {"bias": torch.arange(9.0) - 4, "scale": torch.tensor(2.5), "one": torch.tensor([7.0])},
]
FROZEN = {"down": torch.arange(11).bfloat16()}
BUFFERS = {"seen": torch.arange(4), "turned": torch.arange(20.0).reshape(4, 5).t()}
SHARED = {"head": "embed"}
PARTS = {"frozen": FROZEN, "buffers": BUFFERS, "shared": SHARED}
EXPECTED = {**GROUPS[0], **GROUPS[1], **FROZEN, **BUFFERS, "head": EMBED}
LAYOUTS = [(1, 2, {}), (2, 1, {}), (2, 3, {}), (2, 2, {"gap": 3}), (3, 1, {}), (3, 4, {})]
LAYOUTS += [(3, 3, {"most": 4})]


@pytest.mark.parametrize(("stage", "ranks", "more"), LAYOUTS)
def test_all_tensors_are_put_together(tmp_path, stage, ranks, more):
    path = save(tmp_path / "run", describe(stage, GROUPS, ranks, **PARTS, **more))
    with ZeroSource(path) as source:
        assert source.tensors.keys() == EXPECTED.keys()
        for name, tensor in EXPECTED.items():
            info = source.tensors[name]
            assert (info.shape, info.dtype.torch_name) == (
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
            )
            source.prefetch(name, 0, info.elements)
            assert read_tensor(source, name) == raw_bytes(tensor)
        assert source.place("head") == source.place("embed") != source.place("up")
    assert contents(path / "global_step7").keys() == EXPECTED.keys()


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5)


@given(st.sampled_from([2, 3]), st.lists(SHAPES, min_size=1, max_size=2), st.integers(1, 5))
def test_any_shapes_and_any_number_of_ranks(tmp_path_factory, stage, shapes, ranks):
    groups = [
        {f"{g}.{n}": torch.randn(shape) for n, shape in enumerate(group)}
        for g, group in enumerate(shapes)
    ]
    held = describe(stage, groups, ranks, gap=ranks % 2 * (stage == 2), most=7)
    path = save(tmp_path_factory.mktemp("any"), held)
    tensors = {name: tensor for group in groups for name, tensor in group.items()}
    assert contents(path) == {name: raw_bytes(tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module", params=[(2, 3, {"gap": 1}), (3, 4, {"most": 5})])
def ranged(tmp_path_factory, request):
    stage, ranks, more = request.param
    held = describe(stage, GROUPS, ranks, **PARTS, **more)
    with ZeroSource(save(tmp_path_factory.mktemp("ranged"), held)) as source:
        yield Ranged(source, {name: raw_bytes(tensor) for name, tensor in EXPECTED.items()})


@given(st.sampled_from(sorted(EXPECTED)), PLACES, PLACES)
def test_any_range_is_the_same_part_of_the_whole(ranged, name, one, other):
    ranged.check(name, one, other)


def test_what_is_not_of_the_model_is_named(tmp_path):
    held = describe(2, GROUPS, 2)
    held["mp_rank_00_model_states.pt"]["module"]["layer._extra_state"] = None
    remark = ZeroSource(save(tmp_path, held)).remarks[0]
    assert (remark.code, "optimizer" in remark.text) == ("not_weights", True)
    assert "layer._extra_state" in remark.text


def test_no_torch_is_needed(tmp_path, monkeypatch):
    path = save(tmp_path, describe(3, GROUPS, 2))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert contents(path)["bias"] == raw_bytes(GROUPS[1]["bias"])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_merge_is_that_of_the_same_weights_in_safetensors(tmp_path, stage):
    torch.manual_seed(0)
    names = ["model.embed_tokens.weight", "model.layers.0.weight", "model.norm.weight"]
    base = {name: torch.randn(40, 30) for name in names}
    tuned = {name: tensor + torch.randn(40, 30) / 9 for name, tensor in base.items()}
    save_file(
        {name: tensor.bfloat16() for name, tensor in base.items()}, tmp_path / "base.safetensors"
    )
    save_file(tuned, tmp_path / "tuned.safetensors")
    shared = {"lm_head.weight": names[0]}
    path = save(tmp_path / "checkpoint-7", describe(stage, [tuned], 3, shared=shared))
    outputs = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for model, output in zip((tmp_path / "tuned.safetensors", path), outputs, strict=True):
        settings = {"seed": 3, "allow_pickle": True, "verbose": False, "output": output}
        settings |= {"on_extra": "drop"}
        dare.merge(
            base=tmp_path / "base.safetensors", models=[model], method="dare+linear", **settings
        )
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


# ---------------------------------------------------------------- folders


def test_the_folder_that_trainer_leaves_is_a_model(tmp_path):
    path = save(tmp_path / "checkpoint-7", describe(3, GROUPS, 2))
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name in ("training_args.bin", "scheduler.pt", "rng_state_0.pth"):
        (path / name).touch()
    opening = Opening(path, allow_pickle=True)
    assert (form_of(opening), opening.config["model_type"]) == ("checkpoints", "llama")
    source = open_model(path, allow_pickle=True)
    assert (source.folder, "embed" in source.tensors) == (path, True)
    settings = {"allow_pickle": True, "method": "linear", "verbose": False}
    other = save(tmp_path / "other", describe(2, GROUPS, 1))
    report = dare.merge(base=path, models=[other], output=tmp_path / "out", **settings)
    written = ["README.md", "config.json", "dare-manifest.json", "model.safetensors"]
    assert sorted(file.name for file in report.output.iterdir()) == written
    save_file({"w": EMBED}, path / "model.safetensors")
    assert open_model(path).tensors.keys() == {"w"}  # the whole model that is also there
    assert open_model(path / "global_step7", allow_pickle=True).tensors.keys() != {"w"}


@pytest.mark.parametrize("latest", [None, "", "global_step8", "..", "../run/global_step7", "\xff/"])
def test_latest_must_name_a_folder_beside_it(tmp_path, latest):
    path = save(tmp_path / "run", describe(2, GROUPS, 1))
    (path / "latest").unlink()
    if latest is not None:
        (path / "latest").write_bytes(latest.encode("latin-1"))
    with pytest.raises(InputError, match=r"run: has checkpoints of DeepSpeed.*latest.*give the"):
        open_model(path, allow_pickle=True)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_00-model_00-model_states.pt",
        "layer_0_expert_3_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_other_parallelism_is_refused(tmp_path, name):
    path = save(tmp_path, describe(2, GROUPS, 2))
    (path / "global_step7" / name).touch()
    for folder in (path, path / "global_step7"):
        with pytest.raises(
            InputError, match=rf"parallelism \({name}\); .*save them as safetensors"
        ):
            open_model(folder, allow_pickle=True)


def test_a_file_of_a_rank_says_what_to_give(tmp_path):
    step = save(tmp_path, describe(2, GROUPS, 1)) / "global_step7"
    for file in step.iterdir():
        with pytest.raises(InputError, match="give its folder"):
            open_model(file, allow_pickle=True)


# ---------------------------------------------------------------- hostile


class Malice:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("number", [0, 1])
def test_a_pickle_needs_permission_and_cannot_run(tmp_path, number):
    held = describe(2, GROUPS, 1)
    name = list(held)[number]
    held[name]["client"] = Malice(f"touch {tmp_path / 'ran'}")
    path = save(tmp_path / "run", held)
    with pytest.raises(InputError, match="allow_pickle"):
        open_model(path)
    with pytest.raises(InputError, match=rf"{name}: refused.*\(posix\.system"):
        open_model(path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path / "global_step7" / name, weights_only=True)


MODEL = "mp_rank_00_model_states.pt"
FIRST, SECOND = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
STATE = "optimizer_state_dict"
DAMAGED = r"is damaged, or not what DeepSpeed writes.*save the checkpoint again"
INCOMPLETE = r"not all of one checkpoint: [^;]*; get all its files again"


def change_shape(name, shape):
    return lambda held: held[MODEL]["param_shapes"][0].update({name: shape})


def change_state(key, value, name=FIRST):
    return lambda held: held[name][STATE].update({key: value})


LIES = {
    "larger": (change_shape("up", torch.Size([3, 14])), DAMAGED),
    "much larger": (change_shape("up", torch.Size([1 << 40, 1 << 20])), DAMAGED),
    "too large to count": (change_shape("up", (1 << 40, 1 << 40)), DAMAGED),
    "smaller": (change_shape("up", torch.Size([3])), DAMAGED),
    "negative": (change_shape("up", (-3, -13)), DAMAGED),
    "not a shape": (change_shape("up", "39"), DAMAGED),
    "fractions": (change_shape("up", (3.0, 13.0)), DAMAGED),
    "not a name": (
        lambda held: held[MODEL]["param_shapes"][0].update(
            {3: held[MODEL]["param_shapes"][0].pop("none")}
        ),
        "name 3 is not text",
    ),
    "no shapes": (lambda held: held[MODEL].update(param_shapes=None), DAMAGED),
    "other groups": (lambda held: held[MODEL]["param_shapes"].pop(), DAMAGED),
    "negative gap": (
        change_state("param_alignment_paddings", [[-1] * 3, [0] * 3], SECOND),
        DAMAGED,
    ),
    "half a gap": (change_state("param_alignment_paddings", [[0.5] * 3, [0] * 3], SECOND), DAMAGED),
    "other gaps": (change_state("param_alignment_paddings", [[0]], SECOND), DAMAGED),
    "more ranks": (change_state("partition_count", [3, 3]), INCOMPLETE),
    "other ranks": (change_state("partition_count", [2, 1], SECOND), INCOMPLETE),
    "no number": (change_state("partition_count", ["2", "2"]), INCOMPLETE),
    "a rank is missing": (lambda held: held.pop(FIRST), r"of one checkpoint: 1; get all"),
    "a rank twice": (lambda held: held.update({f"bf16_{FIRST}": held[FIRST]}), INCOMPLETE),
    "no ranks": (lambda h: [h.pop(FIRST), h.pop(SECOND)], r"has no \*_optim_states.pt"),
    "no model": (lambda held: held.pop(MODEL), rf"{MODEL}: no such file"),
    "no weights": (change_state("single_partition_of_fp32_groups", []), DAMAGED),
    "not tensors": (change_state("single_partition_of_fp32_groups", [1, 2]), DAMAGED),
    "another type": (
        change_state("single_partition_of_fp32_groups", [torch.ones(38).half(), torch.ones(6)]),
        DAMAGED,
    ),
    "complex": (
        change_state(
            "single_partition_of_fp32_groups", [torch.ones(38).to(torch.complex128), torch.ones(6)]
        ),
        "group 0 of optimizer 0 is .*omplex.*.*give a plain tensor",
    ),
    "no optimizer": (lambda held: held[FIRST].pop(STATE), DAMAGED),
    "a list": (lambda held: held.update({FIRST: [1]}), DAMAGED),
    "experts": (lambda held: held[MODEL].update(ds_autoep_layers=[]), "expert parallelism"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_refused(tmp_path, lie):
    change, message = LIES[lie]
    assert contents(save(tmp_path / "right", describe(2, GROUPS, 2)))
    held = describe(2, GROUPS, 2)
    change(held)
    with pytest.raises(InputError, match=rf"wrong/global_step7.*{message}"):
        ZeroSource(save(tmp_path / "wrong", held))


OF_RANK = "zero_pp_rank_1_mp_rank_00_model_states.pt"
LIES_OF_STAGE_3 = {
    "another step": (lambda h: h[OF_RANK].update(global_steps=8), r"steps 7, 8; get all files"),
    "no model": (lambda held: held.pop(OF_RANK), rf"{OF_RANK}: no such file"),
    "no fragment": (lambda h: h[OF_RANK]["frozen_param_fragments"].clear(), DAMAGED),
    "other fragment": (
        lambda h: h[OF_RANK]["frozen_param_fragments"].update(down=torch.ones(5).bfloat16()),
        DAMAGED,
    ),
    "fewer weights": (change_state("fp32_flat_groups", [torch.ones(46)]), DAMAGED),
    "another stage": (change_state("fp32_flat_groups", [torch.ones(46)]), DAMAGED),
    "other shape": (
        lambda h: h[OF_RANK.replace("1", "0", 1)]["param_shapes"][0].update(embed=torch.Size([7])),
        DAMAGED,
    ),
}


@pytest.mark.parametrize("lie", LIES_OF_STAGE_3)
def test_files_of_stage_3_that_lie_are_refused(tmp_path, lie):
    change, message = LIES_OF_STAGE_3[lie]
    held = describe(3, GROUPS, 2, **PARTS)
    change(held)
    with pytest.raises(InputError, match=rf"global_step7.*{message}"):
        ZeroSource(save(tmp_path, held))


def test_a_file_that_was_cut_is_refused(tmp_path):
    path = save(tmp_path, describe(2, GROUPS, 2))
    file = path / "global_step7" / SECOND
    content = file.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(InputError, match=re.escape(SECOND)):
            ZeroSource(path)


def test_memory_for_reading_is_bounded(tmp_path, monkeypatch):
    tensor = torch.arange(3500.0)
    path = save(tmp_path, describe(3, [{"w": tensor}], 3))
    monkeypatch.setattr("dare.inputs.checkpoints.PIECE_ELEMENTS", 300)
    assert contents(path) == {"w": raw_bytes(tensor)}
    assert ZeroSource(path).cost.reading_bytes == 300 * 8
    assert np.frombuffer(contents(path)["w"], np.float32)[-1] == 3499
