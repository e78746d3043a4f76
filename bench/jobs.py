"""The jobs that are compared: for each tool, the same merge and the command that does it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import available_memory_bytes
from models import Shape, model_folders

BENCH = Path(__file__).parent
DROP_RATE = 0.9
SEED = 42
TORCH_ITSELF_BYTES = 1_000_000_000
"""What plain torch takes besides its tensors, with some to spare."""


@dataclass(frozen=True)
class Inputs:
    """A base and its fine-tunes on disk."""

    shape: Shape
    base: Path
    tuned: Sequence[Path]

    @classmethod
    def find(cls, data: Path, shape: Shape, models: int) -> Inputs:
        """Name the directories that hold, or will hold, these models."""
        base, *tuned = model_folders(data, shape, models)
        return cls(shape, base, tuned)

    @property
    def files(self) -> list[Path]:
        """The weights, base first."""
        return [folder / "model.safetensors" for folder in (self.base, *self.tuned)]


@dataclass(frozen=True)
class Job:
    """A merge by one tool."""

    name: str
    title: str
    commands: Sequence[Sequence[str]]
    """Run one after the other and measured as one."""
    rival: str | None = None
    """The job of mergekit that does the same."""
    environment: Mapping[str, str] = field(default_factory=dict)
    obstacle: str | None = None
    """Why it cannot be run here."""


OUR_JOBS = {
    "ours-linear": ("dare+linear", "mergekit-linear", ()),
    "ours-ties": ("dare+ties", "mergekit-ties", ()),
    "ours-ties-trimmed": ("dare+ties", "mergekit-ties", ("[ties]", "keep_ratio = 0.5")),
    "ours-trimmed": ("trim+ties", "mergekit-trimmed", ("[trim]", "keep_ratio = 0.1")),
}
"""Method, rival and further lines of the recipe."""

MERGEKIT_JOBS = {
    "mergekit-linear": ("dare_linear", "bfloat16"),
    "mergekit-ties": ("dare_ties", "bfloat16"),
    "mergekit-trimmed": ("ties", "bfloat16"),
    "mergekit-linear-f32": ("dare_linear", "float32"),
    "mergekit-ties-f32": ("dare_ties", "float32"),
}
"""Method and the type it computes in: bf16 as in its examples, and float32 as we do."""

SCRIPT_JOBS = {
    "peft-linear": ("PEFT's functions: dare_linear", "peft_functions.py", ("dare_linear",)),
    "peft-ties": ("PEFT's functions: dare_ties", "peft_functions.py", ("dare_ties",)),
    "sd-mecha-ties": ("sd-mecha: TIES with DARE", "sd_mecha_merge.py", ()),
}
"""Title, script in this folder and its first arguments; then come output, base and models."""

JOB_NAMES = (*OUR_JOBS, *MERGEKIT_JOBS, *SCRIPT_JOBS, "torch", "floor")


def make_jobs(
    inputs: Inputs, work: Path, output: Path, peers_python: Path, mergekit_flags: Sequence[str]
) -> list[Job]:
    """List all jobs; recipes and configurations are written into `work`, results to `output`."""
    mergekit = [
        make_mergekit_job(name, inputs, work, output, peers_python, mergekit_flags)
        for name in MERGEKIT_JOBS
    ]
    return [
        *(make_our_job(name, inputs, work, output) for name in OUR_JOBS),
        *mergekit,
        *(make_script_job(name, inputs, output, peers_python) for name in SCRIPT_JOBS),
        make_torch_job(inputs, output, peers_python),
        make_floor_job(inputs, output),
    ]


# ---------------------------------------------------------------- ours


def make_our_job(name: str, inputs: Inputs, work: Path, output: Path) -> Job:
    """One of our merges."""
    method, rival, settings = OUR_JOBS[name]
    recipe = work / f"{name}.toml"
    drop_rate = DROP_RATE if "dare" in method.split("+") else None
    recipe.write_text(write_recipe(inputs, output, method, settings, drop_rate))
    command = (sys.executable, "-m", "dare", str(recipe), "--overwrite")
    title = ", ".join((f"dare: {method}", *settings[1:]))
    return Job(name, title, [command], rival)


def write_recipe(
    inputs: Inputs,
    output: Path,
    method: str,
    settings: Sequence[str],
    drop_rate: float | None = DROP_RATE,
) -> str:
    """A recipe of ours as TOML, in which strings are written as in JSON."""
    return "\n".join(
        [
            f"method = {json.dumps(method)}",
            f"seed = {SEED}",
            "verbose = false",
            *(() if drop_rate is None else ("[dare]", f"drop_rate = {drop_rate}")),
            *settings,
            "[models]",
            f"base_file = {json.dumps(str(inputs.base))}",
            f"merge_files = {json.dumps([str(path) for path in inputs.tuned])}",
            f"output_file = {json.dumps(str(output / 'merged.safetensors'))}",
        ]
    )


# ---------------------------------------------------------------- theirs


def make_mergekit_job(
    name: str,
    inputs: Inputs,
    work: Path,
    output: Path,
    peers_python: Path,
    flags: Sequence[str],
) -> Job:
    """One of mergekit's merges, by its program."""
    method, dtype = MERGEKIT_JOBS[name]
    configuration = configure_mergekit(inputs, method, dtype)
    title = f"mergekit: {method}, {dtype}"
    return mergekit_job(name, title, configuration, work, output, peers_python, flags)


def mergekit_job(
    name: str,
    title: str,
    configuration: Mapping[str, Any],
    work: Path,
    output: Path,
    peers_python: Path,
    flags: Sequence[str] = (),
) -> Job:
    """A run of mergekit's program on a configuration, without a GPU unless a flag asks for one."""
    file = work / f"{name}.yaml"
    file.write_text(json.dumps(configuration))
    program = peers_python.with_name("mergekit-yaml")
    options = ("--no-cuda", "--no-copy-tokenizer", "--quiet", "--random-seed", str(SEED))
    return Job(
        name,
        title,
        [(str(program), str(file), str(output), *options, *flags)],
        environment={"HF_HUB_OFFLINE": "1"},
        obstacle=None if program.exists() else "mergekit is not where --peers-python points",
    )


def configure_mergekit(inputs: Inputs, method: str, dtype: str) -> dict[str, Any]:
    """What mergekit-yaml reads; JSON is YAML."""
    share = {"weight": 1 / len(inputs.tuned), "density": round(1 - DROP_RATE, 9)}
    return {
        "merge_method": method,
        "base_model": str(inputs.base),
        "models": [{"model": str(path), "parameters": share} for path in inputs.tuned],
        "dtype": dtype,
        "out_dtype": "bfloat16",
    }


def make_script_job(name: str, inputs: Inputs, output: Path, peers_python: Path) -> Job:
    """A merge by a script around another tool."""
    title, script, arguments = SCRIPT_JOBS[name]
    files = [str(output / "merged.safetensors"), *map(str, inputs.files)]
    command = (str(peers_python), str(BENCH / script), *arguments, *files)
    rival = "mergekit-ties" if name.endswith("ties") else "mergekit-linear"
    return Job(
        name,
        title,
        [command],
        rival,
        obstacle=None if peers_python.exists() else "it is not where --peers-python points",
    )


def make_torch_job(inputs: Inputs, output: Path, peers_python: Path) -> Job:
    """DARE linear in a few lines of torch, which holds everything in memory at once."""
    files = [str(path) for path in inputs.files]
    command = (
        str(peers_python),
        str(BENCH / "plain_torch.py"),
        str(output / "merged.safetensors"),
        *files,
    )
    needed = inputs.shape.parameters * 4 * (len(inputs.tuned) + 2) + TORCH_ITSELF_BYTES
    available = available_memory_bytes()
    obstacle = None
    if not peers_python.exists():
        obstacle = "torch is not where --peers-python points"
    elif needed > available:
        obstacle = f"needs {needed / 1e9:.0f} GB of memory; {available / 1e9:.0f} GB are free"
    return Job("torch", "plain torch: DARE linear", [command], "mergekit-linear", obstacle=obstacle)


def make_floor_job(inputs: Inputs, output: Path) -> Job:
    """What no merge can beat: read every input once and write one file of the output's size.

    A copy that only shares blocks (`reflink`) would write nothing.
    """
    base, *_ = files = [str(path) for path in inputs.files]
    copy = ("cp", "--reflink=never", base, str(output / "copy.safetensors"))
    return Job("floor", "floor: cat inputs, cp one", [("cat", *files), copy])
