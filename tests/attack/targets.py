"""What is attacked: for each format valid files, how they are changed, and what then reads them."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mutating import change_bytes, change_json, change_text, change_values
from small_deltas import (
    KINDS,
    Parts,
    compress_quietly,
    make_base,
    put_together,
    take_apart,
    write_models,
)

import dare
from configurations import CONFIGURATIONS
from dare.analysis.advice import Advice
from dare.analysis.document import Analysis
from dare.analysis.readiness import Readiness
from dare.deltas.restoring import open_delta
from dare.inputs import directory, vocabulary
from dare.inputs.arrays import array_source
from dare.inputs.delta_files import INDEX, DeltaSource
from dare.inputs.gguf import MAGIC, GgufSource
from dare.inputs.lora import bind_base, open_adapter
from dare.inputs.opening import convert_yaml, open_model
from dare.inputs.sources import Source, decoded, open_source
from dare.output.targets import seal
from dare.output.verification import verify
from dare.recipe.document import request_from_document
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import LocalFile
from dare.tensors.header import parse_header, read_header
from helpers import entry, file_bytes, save, save_shards, write_recipe

Judged = tuple[Analysis, Readiness, Advice]

MOST_ELEMENTS = 1 << 16
"""Of a tensor that is read when its header is accepted."""


class Target:
    """A format: `make` makes a case, `read` reads it as the program does."""

    names: tuple[str, ...]
    """What an error must name one of."""

    cases_timed: int = 1
    """How many cases may take as long as one: to set a timer takes longer than a small case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, random: Random) -> Any:
        """A case that follows from the random numbers alone."""
        raise NotImplementedError

    def read(self, case: Any) -> None:
        """Read a case; return if it is accepted."""
        raise NotImplementedError


class OneFile(Target):
    """A format whose cases are the content of one file."""

    name: str
    seeds: tuple[bytes, ...]
    change: Callable[..., bytes]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = folder / self.name
        self.names = (self.name,)

    def make(self, random: Random) -> bytes:
        return type(self).change(random, random.choice(self.seeds), self.seeds)

    def read(self, case: bytes) -> None:
        self.file.write_bytes(case)
        self.open()

    def open(self) -> None:
        """Read the file that holds the case."""
        raise NotImplementedError


def plan_with(model: Path, output: Path, **settings: Any) -> dare.Plan:
    """Plan a merge of a model with itself, and show the plan."""
    again = dare.ModelEntry(file=model, seed=1)  # a model with a seed may be the base
    given = {"base": model, "models": [again], "method": "linear", "verbose": False}
    planned = dare.plan(dare.Request.of(**given, **settings, output=output))
    str(planned), planned.to_dict()
    return planned


def read_some(source: Source) -> None:
    """Read the beginning and the end of every tensor."""
    with source:
        for name, info in source.tensors.items():
            count = min(info.elements, MOST_ELEMENTS)
            source.prefetch(name, 0, info.elements)
            for start in {0, info.elements - count}:
                source.read(name, start, np.empty(count, info.dtype.carrier))


# ---------------------------------------------------------------- weights


HEADER_SEEDS = (
    {"a": entry("F32", [2, 2], 0, 16), "b.weight": entry("BF16", [3], 16, 22)},
    {"__metadata__": {"format": "pt"}, "x": entry("U8", [], 0, 1), "y": entry("I64", [0, 5], 1, 1)},
    {f"layers.{n}.w": entry("F16", [n, 2], 2 * n * (n - 1), 2 * n * (n + 1)) for n in range(6)},
)


class Headers(Target):
    """Safetensors headers: parsed, and read from a file where more than the JSON is changed."""

    names = ("m.safetensors",)
    cases_timed = 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [json.dumps(seed).encode() for seed in HEADER_SEEDS]
        self.sizes = [
            max(e["data_offsets"][1] for k, e in seed.items() if k != "__metadata__")
            for seed in HEADER_SEEDS
        ]
        self.file_descriptor = os.open(folder / "m.safetensors", os.O_RDWR | os.O_CREAT)

    def make(self, random: Random) -> tuple[bytes, int | None]:
        """A header and the size of the data after it; or a whole file, and no size."""
        chosen = random.randrange(len(self.seeds))
        text = change_json(random, self.seeds[chosen], self.seeds)
        if random.random() < 0.9:
            return text, self.sizes[chosen]
        whole = file_bytes(text, bytes(self.sizes[chosen]))
        return change_bytes(random, whole), None

    def read(self, case: tuple[bytes, int | None]) -> None:
        content, size = case
        if size is not None:
            header = parse_header(content, size, "m.safetensors")
            end = 8 + len(content) + size
        else:
            os.ftruncate(self.file_descriptor, len(content))
            os.pwrite(self.file_descriptor, content, 0)
            header = read_header(LocalFile(self.file_descriptor), "m.safetensors")
            end = len(content)
        for info in header.tensors.values():
            assert info.start + info.nbytes <= end, "a tensor outside of its file"


class Indexes(OneFile):
    """The index of a model in shards."""

    name = "model.safetensors.index.json"
    change = staticmethod(change_json)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        arrays = {f"layers.{n}.w": np.ones(3, np.float32) for n in range(4)}
        save_shards(folder, arrays, 2)
        self.seeds = (self.file.read_bytes(),)
        self.names = (folder.name,)

    def read(self, case: bytes) -> None:
        self.file.write_bytes(case)
        open_source(self.folder)


GGUF_TREES: tuple[dict[str, Any], ...] = (
    {
        "metadata": {"general.architecture": "llama", "llama.attention.head_count": 2},
        "tensors": {"blk.0.attn_q.weight": [0, [4, 4], 64], "output_norm.weight": [0, [4], 16]},
    },
    {
        "metadata": {"general.architecture": "gemma", "general.alignment": 64, "x.float": 0.5},
        "tensors": {"blk.0.attn_norm.weight": [0, [4], 16], "x": [8, [2, 32], 68]},
    },
    {
        "metadata": {"general.architecture": "llama", "llama.attention.head_count": 1},
        "tensors": {"blk.0.attn_q.weight": [0, [4, 0], 0], "blk.0.attn_k.bias": [0, [2], 8]},
    },
    {
        "metadata": {"general.architecture": "x", "x.tokens": ["a", "bc"], "split.count": 1},
        "tensors": {"a": [1, [], 2], "b": [30, [0, 4], 0], "c": [14, [1, 256], 210]},
    },
)
"""Metadata, and of each tensor its type's number, its shape and its bytes."""


def gguf_bytes(tree: Any) -> bytes:
    """A GGUF file of a tree, as far as its values can be written."""
    table = tree if isinstance(tree, dict) else {}
    metadata, tensors = (table.get(key) for key in ("metadata", "tensors"))
    pairs = [
        _gguf_text(key) + _gguf_value(value)
        for key, value in (metadata.items() if isinstance(metadata, dict) else ())
    ]
    infos, data = [], b""
    for name, facts in tensors.items() if isinstance(tensors, dict) else ():
        kind, shape, nbytes = facts if isinstance(facts, list) and len(facts) == 3 else (0, [], 4)
        sizes = [_gguf_number(size) for size in shape] if isinstance(shape, list) else [1]
        numbers = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes[::-1])
        infos.append(
            _gguf_text(name) + numbers + struct.pack("<IQ", _gguf_number(kind, 32), len(data))
        )
        data += bytes(_gguf_number(nbytes) % 1000)
        data += bytes(-len(data) % 32)
    head = MAGIC + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join([*pairs, *infos])
    return head + bytes(-len(head) % 32) + data


def _gguf_text(text: Any) -> bytes:
    encoded = str(text).encode(errors="surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded


def _gguf_number(value: Any, bits: int = 64) -> int:
    return value % (1 << bits) if isinstance(value, int) else 1


def _gguf_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<IQ", 10, _gguf_number(value))
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_gguf_text, value))
    return struct.pack("<I", 8) + _gguf_text(value)


class Gguf(OneFile):
    """GGUF files: bytes are changed, or values that are then written rightly."""

    name = "m.gguf"
    seeds = tuple(map(gguf_bytes, GGUF_TREES))

    def make(self, random: Random) -> bytes:
        if random.random() < 0.5:
            return change_bytes(random, random.choice(self.seeds), self.seeds)
        tree = json.loads(json.dumps(random.choice(GGUF_TREES)))
        return gguf_bytes(change_values(random, tree))

    def open(self) -> None:
        read_some(GgufSource(self.file))
        plan_with(self.file, self.folder / "out")


QUANTISED_TREES: tuple[dict[str, Any], ...] = (
    {
        "tensors": {
            "layers.0.weight": ["F8_E4M3", [3, 5]],
            "layers.0.weight_scale_inv": ["F32", [1, 1]],
            "layers.0.input_scale": ["F32", []],
        },
        "config": {"quantization_config": {"modules_to_not_convert": ["layers.0.x"]}},
    },
    {
        "tensors": {
            "mlp.experts.down_proj_blocks": ["U8", [1, 2, 1, 16]],
            "mlp.experts.down_proj_scales": ["U8", [1, 2, 1]],
        },
        "config": {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
    },
    {
        "tensors": {
            "a.weight_packed": ["U8", [2, 8]],
            "a.weight_scale": ["F8_E4M3", [2, 1]],
            "a.weight_global_scale": ["F32", [1]],
        },
        "config": {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}},
                "ignore": ["lm_head"],
            }
        },
    },
    {
        "tensors": {
            "a.weight": ["U8", [3, 2, 16]],
            "a.weight_scale": ["F8_E4M3", [3, 2, 2]],
            "a.weight_scale_2": ["F32", []],
            "b.weight": ["F8_E5M2", [3, 5]],
            "b.weight_scale": ["BF16", [3, 1]],
        },
        "config": {"quantization_config": {"quant_algo": "NVFP4", "group_size": 16}},
    },
    {
        "tensors": {
            "experts.gate_up_proj_blocks": ["U8", [2, 3, 2, 16]],
            "experts.gate_up_proj_scales": ["U8", [2, 3, 2]],
            "experts.gate_up_proj_bias": ["BF16", [2, 3]],
            "a.weight_packed": ["I32", [2, 1]],
            "a.weight_shape": ["I64", [2]],
        },
        "config": {"quantization_config": {"quant_method": "mxfp4", "bits": 4}},
    },
)
"""The types and shapes of tensors, and a configuration."""


class Quantised(Target):
    """Weights with scales: types, shapes, names and the configuration are changed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names = (folder.name, "config.json", 'format = "input"')

    def make(self, random: Random) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(json.dumps(random.choice(QUANTISED_TREES)))
        tensors = list(tree["tensors"].values())
        for kind in random.choices(tensors, k=random.randrange(3)):
            kind[0] = random.choice(["F32", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I32"])
        for _, shape in random.choices(tensors, k=random.randrange(3)):
            shape[random.randrange(len(shape) + 1) :] = random.choices(range(4), k=2)
        tree["config"] = change_values(random, tree["config"])
        for name in random.choices(list(tree["tensors"]), k=random.choice((0, 0, 0, 1))):
            other = random.choice([*tree["tensors"], f"{name}_scale", "a.weight"])
            tree["tensors"][other] = tree["tensors"].pop(name)
        tree["seed"] = random.getrandbits(32)
        return tree

    def read(self, case: dict[str, Any]) -> None:
        header, end = {}, 0
        for name, (kind, shape) in case["tensors"].items():
            start, end = end, end + math.prod(shape) * STORAGE_TYPES[kind].itemsize
            header[name] = entry(kind, shape, start, end)
        (self.folder / "model.safetensors").write_bytes(
            file_bytes(header, Random(case["seed"]).randbytes(end))
        )
        (self.folder / "config.json").write_text(json.dumps(case["config"]))
        read_some(open_model(self.folder))
        planned = plan_with(self.folder, self.folder / "out", format="input")
        for tensor in planned.tensors:
            for values in self.values_of(tensor):
                planned.recoding.encode(
                    tensor.described,
                    lambda size, values=values: (
                        (start, values[start : start + size])
                        for start in range(0, values.size, max(size, 1))
                    ),
                    lambda name, offset, data: None,
                )

    def values_of(self, tensor: Any) -> Iterator[Any]:
        """Zeros, and what is stored: the same, whether read whole or in two pieces."""
        yield np.zeros(tensor.elements, tensor.dtype.carrier)
        with open_model(self.folder, keeps_scales=True) as source:
            parts = [np.empty(n, tensor.dtype.carrier) for n in (tensor.elements, tensor.elements)]
            source.read(tensor.name, 0, parts[0])
            place = tensor.elements // 3
            source.read(tensor.name, 0, parts[1][:place])
            source.read(tensor.name, place, parts[1][place:])
        assert parts[0].tobytes() == parts[1].tobytes(), "other values in pieces"
        if tensor.dtype.name in ("F32", "BF16") and np.isfinite(decoded(parts[0])).all():
            yield parts[0]


def change_pickle(random: Random, seed: bytes) -> bytes:
    """What torch.save wrote, with another pickle in an archive that is sound."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(seed)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            is_pickle = info.filename.endswith("/data.pkl")
            new.writestr(info, change_bytes(random, content, ()) if is_pickle else content)
    return made.getvalue()


class Torch(OneFile):
    """Files of torch.save, whose pickles are read without torch."""

    name = "m.pt"
    change = staticmethod(change_bytes)

    def __init__(self, folder: Path) -> None:
        import torch

        super().__init__(folder)
        weights = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.ones(2, dtype=torch.int64)}
        weights["t"] = weights["w"].t()
        seeds = []
        for value in (weights, {"state_dict": weights, "step": 3}, {"model": {"deep": [1, (2,)]}}):
            torch.save(value, self.file)
            seeds.append(self.file.read_bytes())
        self.seeds = tuple(seeds)
        self.read(seeds[0])  # what torch loads then is not the cases' time

    def make(self, random: Random) -> bytes:
        """Mostly changes in the pickle: the directory of the archive holds no more surprises."""
        seed = random.choice(self.seeds)
        if random.random() < 0.2:
            return change_bytes(random, seed, self.seeds)
        return change_pickle(random, seed)

    def open(self) -> None:
        from dare.inputs.torch_bin import TorchSource

        read_some(TorchSource(self.file))
        plan_with(self.file, self.folder / "out", allow_pickle=True)


class Checkpoints(Target):
    """Checkpoints of torch.distributed: their list of pieces, and sometimes the pieces."""

    def __init__(self, folder: Path) -> None:
        import torch
        from torch.distributed import checkpoint

        super().__init__(folder)
        weights = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.ones(2, dtype=torch.int64)}
        state = {"model": weights, "optim": {"step": 1}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs in one process
            checkpoint.save(state, checkpoint_id=folder, no_dist=True)
        self.names = (folder.name,)
        self.seeds = [(folder / name).read_bytes() for name in (".metadata", "__0_0.distcp")]

    def make(self, random: Random) -> list[bytes]:
        """Both files, at least one of them changed."""
        chosen = random.random()
        return [
            change_bytes(random, seed, self.seeds) if chosen < most else seed
            for seed, most in zip(self.seeds, (0.8, 0.3), strict=True)
        ]

    def read(self, case: list[bytes]) -> None:
        from dare.inputs.checkpoints import ShardedSource

        for name, content in zip((".metadata", "__0_0.distcp"), case, strict=True):
            (self.folder / name).write_bytes(content)
        read_some(ShardedSource(self.folder))


class Zero(Target):
    """Checkpoints of DeepSpeed's ZeRO: names and shapes, and the weights of two ranks."""

    def __init__(self, folder: Path) -> None:
        import torch

        super().__init__(folder)
        model = {
            "module": {"seen": torch.arange(3)},
            "buffer_names": ["seen"],
            "param_shapes": [{"w": torch.Size([2, 3])}],
            "shared_params": {"head": "w"},
            "global_steps": 1,
        }
        held = {"mp_rank_00_model_states.pt": model}
        for rank in range(2):
            groups = [torch.arange(3.0) + rank]
            state = {"single_partition_of_fp32_groups": groups, "partition_count": [2]}
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            held[name] = {"optimizer_state_dict": state}
        for name, value in held.items():
            torch.save(value, folder / name)
        self.names = (folder.name,)
        self.seeds = {name: (folder / name).read_bytes() for name in held}

    def make(self, random: Random) -> dict[str, bytes]:
        """All files, the pickle of one of them changed."""
        name = random.choice(list(self.seeds))
        return {**self.seeds, name: change_pickle(random, self.seeds[name])}

    def read(self, case: dict[str, bytes]) -> None:
        from dare.inputs.checkpoints import ZeroSource

        for name, content in case.items():
            (self.folder / name).write_bytes(content)
        read_some(ZeroSource(self.folder))


class Deltas(OneFile):
    """Delta files of every kind: bytes, notes, index or contents, most with digests that fit."""

    name = "m.delta.safetensors"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.base, model = write_models(folder, make_base())
        for number, kind in enumerate(KINDS):
            compress_quietly(self.base, model, folder / f"{number}.delta.safetensors", kind)
        files = sorted(folder.glob("*.delta.safetensors"))
        self.seeds = tuple(file.read_bytes() for file in files)
        self.read(self.seeds[0])  # kernels are loaded then

    def make(self, random: Random) -> bytes:
        seed = random.choice(self.seeds)
        if random.random() < 0.2:
            return change_bytes(random, seed, self.seeds)
        notes, parts = take_apart(seed)
        kind = random.random()
        if kind < 0.3:
            change_values(random, notes[random.choice(("tensors", "files"))])
        elif kind < 0.5:
            notes = change_values(random, notes)
        if random.random() < 0.6:
            self._change_part(random, parts)
        try:
            return put_together(notes, parts, sound=random.random() < 0.9)
        except UnicodeEncodeError:  # JSON has no such thing
            return seed

    def _change_part(self, random: Random, parts: Parts) -> None:
        """Change the numbers or the bytes of one part, or leave it out; the shape follows."""
        name = random.choice(list(parts))
        kind, shape, data = parts[name]
        if random.random() < 0.1:
            del parts[name]
            return
        if name == INDEX and random.random() < 0.7:
            rows = np.frombuffer(data, np.int64).reshape(shape).copy()
            value = random.choice((0, 1, -1, 2, 3, 60, 108, 109, 2**31, 2**62, -(2**63)))
            rows[random.randrange(len(rows)), 0] = value
            parts[name] = (kind, shape, rows.tobytes())
            return
        changed = change_bytes(random, data)
        if random.random() < 0.7:
            changed = changed[: len(data)].ljust(len(data), b"\1")
        size = STORAGE_TYPES[kind].itemsize
        changed = changed[: len(changed) // size * size]
        count = len(changed) // size
        parts[name] = (kind, shape if count == math.prod(shape) else (count,), changed)

    def open(self) -> None:
        file = open_delta(self.file)
        verify(self.file)
        source = DeltaSource(file, open_source(self.base), rescales=True)
        read_some(source)
        assert source.folder != self.base
        given = {"base": self.base, "models": [self.file], "verbose": False}
        dare.plan(dare.Request.of(**given, output=self.folder / "out"))


# ---------------------------------------------------------------- recipes

RECIPES = (
    """method = "dare+ties"
seed = 7
scale = 0.5
dtype = "BF16"
max_memory = "1GiB"
embedding_drop_rate = 0.25
input_digests = ["a", "b", "c"]

[models]
base_file = "base.safetensors"
merge_files = [{ file = "a.safetensors", weight = 0.5, seed = 3 }, "org/name@main"]
output_file = "merged"

[dare]
drop_rate = [0.1, 0.9]
rescale = "l1"

[ties]
divide_by = "votes"

[[tensors]]
match = ["*.mlp.*", "*norm*"]
contains = "x"
model = "a"
weight = [0.1, 0.9]
drop_rate = 0.1
""",
    """method = "slerp"
vocabulary = "union"
shard_size = "5GB"
threads = 2

[models]
base_file = "~/b"
merge_files = ["m", 'n']

[slerp]
t = 0.5
""",
)


class Recipes(OneFile):
    """Recipes in TOML, and what they are written as again."""

    name = "recipe.toml"
    seeds = tuple(recipe.encode() for recipe in RECIPES)

    def make(self, random: Random) -> bytes:
        import tomllib

        import tomli_w

        seed = random.choice(self.seeds)
        if random.random() < 0.5:
            return change_text(random, seed, self.seeds)
        document = change_values(random, tomllib.loads(seed.decode()))
        try:
            return tomli_w.dumps(document).encode(errors="surrogatepass")
        except (TypeError, AttributeError, ValueError, RecursionError):  # TOML has no such thing
            return str(document).encode(errors="surrogatepass")

    def open(self) -> None:
        recipe = dare.load_recipe(self.file)
        import tomllib

        again = request_from_document(tomllib.loads(recipe.to_toml()), "again")
        assert again == recipe, "another recipe when it is written and read"


class Yaml(OneFile):
    """Configurations for mergekit: those that are merged by both programs elsewhere."""

    name = "merge.yaml"
    seeds = (
        b"merge_method: linear\nmodels:\n- model: {model: {path: c/d, revision: main}}\n",
        *(c.yaml.encode() for c in CONFIGURATIONS if "\n---\n" not in c.yaml),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names = (self.name, ": has no safetensors file")  # of a model that it names

    def make(self, random: Random) -> bytes:
        import yaml

        seed = random.choice(self.seeds)
        if random.random() < 0.5:
            return change_text(random, seed, self.seeds)
        return change_json(random, json.dumps(yaml.safe_load(seed)).encode())

    def open(self) -> None:
        conversion = convert_yaml(self.file)
        import tomllib

        again = request_from_document(tomllib.loads(conversion.to_toml()), "again").recipe
        assert again == conversion.recipe, "another recipe when it is written and read"


# ---------------------------------------------------------------- models with files beside them


class Adapters(Target):
    """LoRA adapters: their configuration, and the names and shapes of their weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names = (folder.name,)
        plain = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "alpha_pattern": {r"layers\.(0|1)\..*": 8, "q_proj": 2},
            "rank_pattern": {"q_proj": 2},
            "target_modules": ["q_proj", "embed"],
            "use_rslora": False,
            "fan_in_fan_out": False,
            "modules_to_save": ["head"],
            "init_lora_weights": True,
            "base_model_name_or_path": "base",
        }
        prefix = "base_model.model.layers.0"
        pair = {
            f"{prefix}.q_proj.lora_A.weight": ["F32", [2, 4]],
            f"{prefix}.q_proj.lora_B.weight": ["F32", [3, 2]],
        }
        others = {
            f"{prefix}.conv.lora_A.weight": ["F16", [2, 2, 1, 1]],
            f"{prefix}.conv.lora_B.weight": ["BF16", [3, 2, 1, 1]],
            "base_model.model.embed.lora_embedding_A": ["F32", [2, 5]],
            "base_model.model.embed.lora_embedding_B": ["F32", [4, 2]],
            "base_model.model.head.modules_to_save.default.weight": ["F32", [2, 2]],
            f"{prefix}.q_proj.lora_B.bias": ["F32", [3]],
        }
        made = {
            f"{prefix}.q_proj.lora_magnitude_vector": ["F32", [3]],
            "base_model.model.embed.token_adapter.trainable_tokens_delta": ["F32", [2, 4]],
        }
        experts = {
            f"{prefix}.experts.base_layer.lora_A.weight": ["F32", [4, 2]],
            f"{prefix}.experts.base_layer.lora_B.weight": ["F32", [6, 4]],
            f"{prefix}.experts.lora_A.weight": ["F32", [4, 3]],
            f"{prefix}.experts.lora_B.weight": ["F32", [2, 4]],
        }
        parameters = ["experts.gate_up_proj", "experts.down_proj"]
        self.seeds = [
            (plain, pair | others),
            (plain | {"use_dora": True, "trainable_token_indices": {"embed": [1, 3]}}, pair | made),
            (plain | {"target_parameters": parameters}, experts),
            (plain | {"init_lora_weights": "pissa_niter_4"}, pair),
        ]
        self.initial = (plain, pair)
        (folder / "pissa_init").mkdir()
        shapes = {
            "layers.0.q_proj.weight": (3, 4),
            "embed.weight": (5, 4),
            "layers.0.experts.down_proj": (2, 2, 3),
        }
        self.base = array_source({n: np.ones(s, np.float32) for n, s in shapes.items()}, "base")

    def make(self, random: Random) -> dict[str, tuple[bytes, bytes]]:
        """An adapter, and the one before training, which only PiSSA reads."""
        made = {}
        for place, seed in (("", random.choice(self.seeds)), ("pissa_init", self.initial)):
            config, weights = (json.dumps(part).encode() for part in seed)
            if random.random() < 0.6:
                config = change_json(random, config)
            if random.random() < 0.6:
                weights = json.dumps(change_values(random, json.loads(weights))).encode()
            made[place] = config, any_numbers(random, weights)
        return made

    def read(self, case: dict[str, tuple[bytes, bytes]]) -> None:
        for place, (config, weights) in case.items():
            (self.folder / place / "adapter_config.json").write_bytes(config)
            (self.folder / place / "adapter_model.safetensors").write_bytes(weights)
        source = open_adapter(self.folder, base=self.base)
        bind_base(source)
        read_some(source)


class LoraFiles(Target):
    """LoRA files of diffusion models: names, shapes, and what diffusers notes in them."""

    names = ("lora.safetensors",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        noted = {"unet.lora_alpha": 3, "unet.r": 2, "unet.alpha_pattern": {"conv_in": 1}}
        self.metadata = json.dumps(noted)
        self.weights = json.dumps(
            {
                "unet.conv_in.lora_A.weight": ["F32", [2, 4, 1, 1]],
                "unet.conv_in.lora_B.weight": ["F32", [3, 2, 1, 1]],
                "lora_te_text_model_q.lora_down.weight": ["F16", [2, 4]],
                "lora_te_text_model_q.lora_up.weight": ["F16", [3, 2]],
                "lora_te_text_model_q.alpha": ["F32", []],
                "lora_unet_time_embed_0.lora_down.weight": ["BF16", [2, 4]],
                "lora_unet_time_embed_0.lora_up.weight": ["BF16", [3, 2]],
                "lora_unet_time_embed_0.alpha": ["F16", [1]],
                "unet.mid.attn.processor.to_q_lora.down.weight": ["F32", [2, 4]],
                "unet.mid.attn.processor.to_q_lora.up.weight": ["F32", [3, 2]],
                "unet.double_blocks.0.img_attn.qkv.lora_A.weight": ["F32", [2, 4]],
                "unet.double_blocks.0.img_attn.qkv.lora_B.weight": ["F32", [12, 2]],
                "unet.transformer_blocks.1.attn.to_k.lora_A.weight": ["F32", [2, 4]],
                "unet.transformer_blocks.1.attn.to_k.lora_B.weight": ["F32", [4, 2]],
            }
        ).encode()
        shapes = {
            "conv_in.weight": (3, 4, 1, 1),
            "text_model.q.weight": (3, 4),
            "time_embedding.linear_1.weight": (3, 4),
            "mid.attn.to_q.weight": (3, 4),
            "double_blocks.0.img_attn.qkv.weight": (12, 4),
            "double_blocks.1.img_attn.qkv.weight": (12, 4),
        }
        self.base = array_source({n: np.ones(s, np.float32) for n, s in shapes.items()}, "base")

    def make(self, random: Random) -> bytes:
        noted, weights = self.metadata, self.weights
        if random.random() < 0.4:
            noted = change_json(random, noted.encode()).decode("latin-1")
        if random.random() < 0.7:
            weights = json.dumps(change_values(random, json.loads(weights))).encode()
        return any_numbers(random, weights, {"lora_adapter_metadata": noted})

    def read(self, case: bytes) -> None:
        file = self.folder / "lora.safetensors"
        file.write_bytes(case)
        read_some(open_model(file, base=self.base))


def any_numbers(random: Random, weights: bytes, metadata: dict[str, str] | None = None) -> bytes:
    """A file of zeros or any bytes, by a table of names, types and shapes, maybe nonsense."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position, entries = 0, json.loads(weights)
    for name, value in entries.items() if isinstance(entries, dict) else ():
        kind, shape = value if isinstance(value, list) and len(value) == 2 else ("F32", [1])
        is_shape = isinstance(shape, list) and all(type(side) is int for side in shape)
        size = (4 if kind == "F32" else 2) * (math.prod(shape) if is_shape else 1)
        size = size if 0 <= size < MOST_ELEMENTS else 4
        header[name] = entry(kind, shape, position, position + size)
        position += size
    is_zero = random.random() < 0.3
    return file_bytes(header, bytes(position) if is_zero else random.randbytes(position))


class Tokenizers(Target):
    """Tokenizers and configurations: rows are aligned, sidecars collected."""

    names = ("base", "tuned", "config.json")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        self.seeds: dict[str, bytes] = {}
        for name, tokens in (("base", ["a", "b", "c"]), ("tuned", ["a", "c", "b", "new"])):
            rows = np.arange(2 * len(tokens), dtype=np.float32).reshape(-1, 2)
            save(folder / name / "model.safetensors", {"model.embed_tokens.weight": rows})
            ids = {token: number for number, token in enumerate(tokens[:3])}
            last = {"id": len(tokens) - 1, "content": tokens[-1], **flags}
            documents = {
                "tokenizer.json": {
                    "version": "1.0",
                    "added_tokens": [last] if name == "tuned" else [],
                    "model": {"type": "WordLevel", "vocab": ids},
                },
                "config.json": {
                    "model_type": "tiny",
                    "vocab_size": len(tokens),
                    "torch_dtype": "float32",
                    "eos_token_id": [1, 2],
                    "text_config": {"vocab_size": len(tokens), "dtype": "float32"},
                    "quantization_config": None,
                    "tie_word_embeddings": True,
                },
                "added_tokens.json": {tokens[-1]: len(tokens) - 1},
                "tokenizer_config.json": {
                    "added_tokens_decoder": {str(len(tokens) - 1): {"content": tokens[-1]}},
                    "chat_template": [{"name": "default", "template": "{{ x }}"}],
                },
            }
            for file, document in documents.items():
                self.seeds[f"{name}/{file}"] = json.dumps(document).encode()
        self.written: dict[str, bytes] = {}

    def make(self, random: Random) -> dict[str, bytes]:
        chosen = random.sample(sorted(self.seeds), random.choice((1, 1, 2)))
        return {name: change_json(random, self.seeds[name]) for name in chosen}

    def read(self, case: dict[str, bytes]) -> None:
        for name, content in (self.seeds | case).items():
            if self.written.get(name) != content:
                (self.folder / name).write_bytes(content)
        self.written = self.seeds | case
        folders = [self.folder / "base", self.folder / "tuned"]
        base, tuned = map(open_source, folders)
        for policy in ("base", "union"):
            aligned = vocabulary.align(
                policy, base, [tuned], directories=folders, names=["tuned"], weights=[1.0]
            )
            changes = directory.Changes(
                directory.main_type([]), aligned.resized(), (aligned.token_ids or (None,))[-1]
            )
            directory.collect(folders[1], changes, replaced=aligned.tokenizer_files)
            directory.choose_chat_template("auto", folders[0], {"tuned": folders[1]})
            read_some(aligned.base)


# ---------------------------------------------------------------- what dare itself has written


class Manifests(OneFile):
    """Manifests beside an output: by one a merge is repeated, by one it is verified."""

    name = "out.safetensors.manifest.json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        base = {"model.embed_tokens.weight": np.ones((2, 2), np.float32)}
        tuned = {"model.embed_tokens.weight": np.full((2, 2), 1.01, np.float32)}
        settings = {"method": "dare+ties", "stages": {"dare": {"drop_rate": 0.5}}}
        dare.merge(write_recipe(folder, base, [tuned, tuned], **settings), backend="reference")
        self.seeds = (self.file.read_bytes(),)
        self.names = ("out.safetensors",)

    @staticmethod
    def change(random: Random, text: bytes, seeds: tuple[bytes, ...]) -> bytes:
        """Change a manifest, mostly as somebody would who also mends its check."""
        changed = change_json(random, text, seeds)
        try:
            document = json.loads(changed)
            return seal(document, document["files"]) if random.random() < 0.8 else changed
        except (ValueError, RecursionError, KeyError, TypeError):
            return changed

    def open(self) -> None:
        output = self.folder / "out.safetensors"
        try:
            dare.verify(output)
        except dare.DareError as error:
            if "out.safetensors" not in str(error):
                raise
        dare.load_recipe(output)


class Analyses(OneFile):
    """Analyses: read, judged, written as documents and shown."""

    name = "analysis.json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from made_up import SHAPES, analysis, make_base, tune

        from dare.analysis.results import Spectrum

        names = list(SHAPES)[:3]
        base = {name: make_base()[name][:8, :8] for name in names}
        models = {"math": tune(base, 0.02, 1), "code": tune(base, 0.02, 2)}
        document = analysis(base, models).to_dict()
        spectrum = Spectrum(8, 8, (2.0, 1.0), (1, 8), 4.0, 2.0, 3, 0.1, 1.5, 1, 0.4, 1)
        document["models"][0]["tensors"][1]["spectrum"] = vars(spectrum)
        document["pairs"][0]["by_layer"] = {0: document["pairs"][0]["total"]}
        document["together"]["by_layer"] = {-1: 0.1, 0: 0.2}
        self.seeds = (json.dumps(document).encode(),)

    change = staticmethod(change_json)

    def open(self) -> None:
        from dare.analysis.advice import to_json
        from dare.cli.template import advised_toml

        judged = self.judge()
        to_json(*judged)
        advised_toml(judged[2], Path("merged"))
        for result in judged:
            str(result)

    def judge(self) -> Judged:
        """Read the analysis; what is made of it."""
        from dare.analysis.advice import advise
        from dare.analysis.readiness import assess

        analysis = Analysis.load(self.file)
        readiness = assess(analysis)
        return analysis, readiness, advise(analysis, readiness)


class Reports(Analyses):
    """The pages that are made of analyses."""

    def open(self) -> None:
        from dare.analysis.document import make_document
        from dare.documents.page import render_page

        judged = self.judge()
        if judged[0].models:
            render_page(make_document(*judged), library="")


TARGETS: dict[str, type[Target]] = {
    "headers": Headers,
    "indexes": Indexes,
    "gguf": Gguf,
    "quantised": Quantised,
    "torch": Torch,
    "checkpoints": Checkpoints,
    "zero": Zero,
    "deltas": Deltas,
    "recipes": Recipes,
    "yaml": Yaml,
    "adapters": Adapters,
    "lora_files": LoraFiles,
    "tokenizers": Tokenizers,
    "manifests": Manifests,
    "analyses": Analyses,
    "reports": Reports,
}
NEEDS = {
    "torch": "torch",
    "checkpoints": "torch",
    "zero": "torch",
    "gguf": "gguf",
    "yaml": "yaml",
    "reports": "altair",
}
"""Packages without which a format cannot be read."""


def is_possible(name: str) -> bool:
    """Whether what a format needs is installed."""
    return name not in NEEDS or find_spec(NEEDS[name]) is not None
