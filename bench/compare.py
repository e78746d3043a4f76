"""Measure merges and more by several tools, or at several sizes: time, CPU and memory.

    python bench/compare.py                       # dare beside mergekit and others
    python bench/compare.py methods               # every method, beside mergekit's where it has it
    python bench/compare.py analysis              # beside torch, and what a merge takes
    python bench/compare.py deltas                # delta files, beside copying and zstd
    python bench/compare.py threads --data /dev/shm/models        # by the number of threads
    python bench/compare.py growth                # by the size and the number of models
    python bench/compare.py gpu --data /dev/shm/models            # merges on a GPU of NVIDIA

Every run is a process of its own, measured from its start to its end, with the inputs in the page
cache; jobs take turns, since machines are shared. Models are made in --data if they are not there
(models.py). Other tools run in the environment of --peers-python (tools.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import (
    Job,
    ProgramError,
    Result,
    available_memory_bytes,
    describe_machine,
    print_results,
    take_turns,
    write_json,
)
from models import Shape, missing_folders, model_folders, shape_for

from dare.stages import STAGES

BENCH = Path(__file__).parent
PEERS_PYTHON = BENCH.parent / ".venv-peers" / "bin" / "python"
SEED = 42
DROPPED = "[dare]\ndrop_rate = 0.9"
"""Lines of a recipe."""
MATRIX_MEMORY = 'max_memory = "8GiB"'
"""What matrix stages may take; the others stay far below."""
TORCH_ITSELF_BYTES = 1_000_000_000
"""What plain torch takes besides its tensors, with some to spare."""
LEAST_PARAMETERS = 1e6


@dataclass(frozen=True)
class Inputs:
    """A base and its fine-tunes on disk, and where merges of them go."""

    shape: Shape
    folders: Sequence[Path]
    """The base first."""
    work: Path
    """For recipes, and for what one job leaves to another."""
    output: Path
    options: argparse.Namespace

    @property
    def files(self) -> list[Path]:
        """The weights, base first."""
        return [folder / "model.safetensors" for folder in self.folders]

    def ours(
        self, name: str, method: str, *lines: str, models: Sequence[Path] = (), **more: Any
    ) -> Job:
        """One of our merges, by a recipe with further lines; TOML has strings as JSON has them."""
        base, *tuned = self.folders
        merged = [str(path) for path in models or tuned]
        top = [line for line in lines if not line.startswith("[")]
        recipe = self.work / f"{name.replace(' ', '-')}.toml"
        recipe.write_text(
            "\n".join(
                [
                    *(f"method = {json.dumps(method)}", f"seed = {SEED}", "verbose = false", *top),
                    *(line for line in lines if line not in top),
                    *("[models]", f"base_file = {json.dumps(str(base))}"),
                    f"merge_files = {json.dumps(merged)}",
                    f"output_file = {json.dumps(str(self.output / 'merged.safetensors'))}",
                ]
            )
        )
        command = (sys.executable, "-m", "dare", str(recipe), "--overwrite")
        return Job(name, [command], self.files, self.shape.model_bytes, **more)

    def mergekit(
        self,
        name: str,
        method: str,
        of_each: dict[str, float],
        device: str = "--no-cuda",
        **more: Any,
    ) -> Job:
        """A run of mergekit's program, with parameters of each model; JSON is YAML."""
        file, (base, *tuned) = self.work / f"{name}.yaml", map(str, self.folders)
        models = [{"model": path, "parameters": of_each} for path in tuned]
        types = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
        what = {"merge_method": method, "base_model": base, "models": models}
        file.write_text(json.dumps({**what, **types, **more}))
        program = self.options.peers_python.with_name("mergekit-yaml")
        how = (device, "--no-copy-tokenizer", "--quiet", "--random-seed", str(SEED))
        flags = self.options.mergekit_flags.split()
        return Job(
            name,
            [(str(program), str(file), str(self.output), *how, *flags)],
            self.files,
            self.shape.model_bytes,
            environment={"HF_HUB_OFFLINE": "1"},
            obstacle=None if program.exists() else "mergekit is not where --peers-python points",
        )

    def tool(self, name: str, tool: str, rival: str | None, *, writes: bool = True) -> Job:
        """A run of a program of tools.py with other tools."""
        python = self.options.peers_python
        output = [str(self.output / "merged.safetensors")] if writes else []
        command = (str(python), str(BENCH / "tools.py"), tool, *output, *map(str, self.files))
        obstacle = None if python.exists() else "it is not where --peers-python points"
        if tool == "torch" and not obstacle:
            needed = self.shape.parameters * 4 * (len(self.folders) + 1) + TORCH_ITSELF_BYTES
            if needed > (free := available_memory_bytes()):
                obstacle = f"needs {needed / 1e9:.0f} GB of memory; {free / 1e9:.0f} GB are free"
        least = self.shape.model_bytes if writes else 0
        return Job(name, [command], self.files, least, rival, obstacle=obstacle)


# ---------------------------------------------------------------- what is compared


def tools(inputs: Inputs) -> list[Job]:
    """DARE by every tool; `floor` reads every input once and writes one: no merge can beat it.

    mergekit computes in bf16 as in its examples, and in float32 as we do. A copy that only shares
    blocks (`reflink`) would write nothing.
    """
    share = {"weight": 1 / (len(inputs.folders) - 1), "density": 0.1}
    trimmed = "[ties]\nkeep_ratio = 0.5"
    floor = (
        ("cat", *map(str, inputs.files)),
        ("cp", "--reflink=never", str(inputs.files[0]), str(inputs.output / "copy.safetensors")),
    )
    return [
        inputs.ours("linear", "dare+linear", DROPPED, rival="mergekit-linear"),
        inputs.ours("ties", "dare+ties", DROPPED, rival="mergekit-ties"),
        inputs.ours("ties-trimmed", "dare+ties", DROPPED, trimmed, rival="mergekit-ties"),
        inputs.ours("trimmed", "trim+ties", "[trim]\nkeep_ratio = 0.1", rival="mergekit-trimmed"),
        inputs.mergekit("mergekit-linear", "dare_linear", share),
        inputs.mergekit("mergekit-ties", "dare_ties", share),
        inputs.mergekit("mergekit-trimmed", "ties", share),
        inputs.mergekit("mergekit-linear-f32", "dare_linear", share, dtype="float32"),
        inputs.mergekit("mergekit-ties-f32", "dare_ties", share, dtype="float32"),
        inputs.tool("peft-linear", "peft_linear", "mergekit-linear"),
        inputs.tool("peft-ties", "peft_ties", "mergekit-ties"),
        inputs.tool("sd-mecha-ties", "sd_mecha", "mergekit-ties"),
        inputs.tool("torch", "torch", "mergekit-linear"),
        Job("floor", floor, inputs.files, inputs.shape.model_bytes),
    ]


def on_gpu(inputs: Inputs) -> list[Job]:
    """DARE on the processor and on a GPU."""
    share = {"weight": 1 / (len(inputs.folders) - 1), "density": 0.1}
    jobs = []
    for name in ("linear", "ties"):
        rival = f"mergekit-{name}"
        for device in ("cpu", "cuda"):
            how = f"dare+{name}", f'device = "{device}"', DROPPED
            jobs.append(inputs.ours(f"{name}-{device}", *how, rival=rival))
        jobs.append(inputs.mergekit(rival, f"dare_{name}", share, device="--cuda"))
    return jobs


RIVALS: dict[str, tuple[str, dict[str, float]]] = {
    "linear": ("task_arithmetic", {"weight": 0.25}),
    "sum": ("task_arithmetic", {"weight": 1.0}),
    "dare+linear": ("dare_linear", {"weight": 0.25, "density": 0.1}),
    "dare+ties": ("dare_ties", {"weight": 0.25, "density": 0.1}),
    "ties": ("ties", {"weight": 0.25, "density": 1.0}),
    "trim+ties": ("ties", {"weight": 0.25, "density": 0.2}),
    "breadcrumbs+linear": ("breadcrumbs", {"weight": 0.25, "density": 0.9, "gamma": 0.01}),
    "della+linear": ("della_linear", {"weight": 0.25, "density": 0.1, "epsilon": 0.05}),
    "slerp": ("slerp", {}),
    "nuslerp": ("nuslerp", {"weight": 0.5}),
    "karcher": ("karcher", {}),
    "model_stock": ("model_stock", {}),
}
"""What mergekit calls a method, and each model's parameters that make it the same."""


def methods(inputs: Inputs) -> list[Job]:
    """Each combine stage, each delta stage with `linear` and usual chains, at their defaults."""
    combines = [n for n, s in STAGES.items() if s.kind == "combine" and not s.takes_grams]
    deltas = [f"{name}+linear" for name, stage in STAGES.items() if stage.kind == "delta"]
    jobs = []
    for method in (*combines, *deltas, "dare+ties", "trim+ties", "linear+svc"):
        taken = STAGES[method.rpartition("+")[2]].models or len(inputs.folders) - 1
        some = replace(inputs, folders=inputs.folders[: 1 + taken])
        rival = f"mergekit-{method}" if method in RIVALS else None
        jobs.append(some.ours(method, method, MATRIX_MEMORY, rival=rival))
        if rival:
            how: dict[str, Any] = {}
            if method == "slerp":  # which interpolates between its base and one model
                how = {"base_model": str(some.folders[1]), "parameters": {"t": 0.5}}
            jobs.append(some.mergekit(rival, *RIVALS[method], **how))
    return jobs


ANALYZE = """
import sys
from dare.analysis.analyzing import analyze
analyze(sys.argv[2], sys.argv[3:], spectra=sys.argv[1], verbose=False)
"""


def analysis(inputs: Inputs) -> list[Job]:
    """All of `dare.analyze`, beside reading alone, a merge, and fewer figures by torch."""
    folders, ours = tuple(map(str, inputs.folders)), (sys.executable, "-c", ANALYZE)
    read = (sys.executable, str(BENCH / "tools.py"), "read", *folders)
    return [
        Job("read", [read], inputs.files),
        Job("analyze", [(*ours, "auto", *folders)], inputs.files, rival="torch"),
        Job("without-spectra", [(*ours, "none", *folders)], inputs.files),
        inputs.ours("merge", "dare+linear", DROPPED),
        inputs.tool("torch", "statistics", None, writes=False),
    ]


KINDS = {
    "native, p .9": "drop_rate=0.9",
    "2 bits, p .6": "bits=2, drop_rate=0.6",
    "4 bits, p .9": "bits=4, drop_rate=0.9",
    "lossless": "lossless=True",
}
"""Of delta files, with what `dare.compress` is given."""


def deltas(inputs: Inputs) -> list[Job]:
    """Delta files of one fine-tune, and merges from three. What is written is synced.

    Every file lies where the job that needs it finds it.
    """

    def python(name: str, code: str) -> Job:
        return Job(name, [(sys.executable, "-W", "ignore", "-c", code)], inputs.files)

    def of_dare(name: str, call: str, *given: object, settings: str = "") -> Job:
        paths = "".join(f"{str(path)!r}, " for path in given)
        return python(
            name, f"import dare; dare.{call}({paths}{settings}verbose=False, overwrite=True)"
        )

    base, first, *_ = inputs.folders
    file, copied, packed = inputs.files[1], inputs.work / "copied", inputs.work / "model.zst"
    jobs = [
        Job("cp and sync", [("cp", str(file), str(copied)), ("sync", str(copied))], inputs.files),
        python(
            "zstd -3",
            f"import os, zstandard; source, sink = open({str(file)!r}, 'rb'), "
            f"open({str(packed)!r}, 'wb'); zstandard.ZstdCompressor(level=3, threads=-1)"
            ".copy_stream(source, sink); sink.flush(); os.fsync(sink.fileno())",
        ),
    ]
    for kind, settings in KINDS.items():
        delta = inputs.work / f"{settings}.delta.safetensors"
        applied = inputs.work / "applied.safetensors"
        compress = of_dare(
            f"compress: {kind}", "compress", base, first, delta, settings=f"{settings}, "
        )
        jobs += [compress, of_dare(f"apply: {kind}", "apply_delta", base, delta, applied)]
    jobs.append(inputs.ours("merge one model, dare+sum", "dare+sum", models=[first]))
    files = []
    for number, folder in enumerate(inputs.folders[1:]):
        files.append(inputs.work / f"{number}.delta.safetensors")
        seed = f"drop_rate=0.9, seed={SEED + number}, "
        job = of_dare("", "compress", base, folder, files[-1], settings=seed)
        subprocess.run(job.commands[0], check=True)
    for method in ("dare+linear", "dare+ties"):
        rival = f"merge models, {method}"
        jobs.append(inputs.ours(rival, method, DROPPED))
        jobs.append(
            inputs.ours(f"merge delta files, {method}", method, DROPPED, models=files, rival=rival)
        )
    return jobs


def threads(inputs: Inputs) -> list[Job]:
    """Merges on 1, 2, 4, … threads, up to the number of cores."""
    counts = [1 << n for n in range(len(os.sched_getaffinity(0)).bit_length())]
    return [
        inputs.ours(
            f"{method} on {count}",
            method,
            f"threads = {count}",
            'max_memory = "16GB"',
            *((DROPPED,) if method.startswith("dare") else ()),
            rival=f"{method} on 1",
        )
        for method in ("dare+linear", "dare+ties", "trim+ties", "della+linear")
        for count in counts
    ]


def growth(inputs: Inputs) -> list[Job]:
    """A merge; it is run for models of several sizes, and for several numbers of them."""
    name = f"{inputs.shape.parameters / 1e6:.1f} million × {len(inputs.folders) - 1}"
    return [inputs.ours(name, "dare+linear", DROPPED)]


SUITES: dict[str, tuple[Callable[[Inputs], list[Job]], float, int, str | None]] = {
    "tools": (tools, 0.95e9, 3, "floor"),
    "methods": (methods, 0.3e9, 4, None),
    "analysis": (analysis, 0.95e9, 3, "read"),
    "deltas": (deltas, 0.95e9, 3, None),
    "threads": (threads, 0.95e9, 3, None),
    "growth": (growth, 0.95e9, 3, None),
    "gpu": (on_gpu, 0.95e9, 3, None),
}
"""With the usual size of a model, the number of fine-tunes, and the job that the others are held
against."""
GROWTH = ((2 / 19, 3), (6 / 19, 3), (1, 3), (1, 2), (1, 5), (1, 8))
"""Shares of the size, and numbers of models."""


# ---------------------------------------------------------------- the run


def main() -> int:
    """Measure what is asked for; 1 if a job failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("suite", nargs="?", choices=SUITES, default="tools")
    add("--parameters", type=float, help="size of a model (0.95e9; methods: 0.3e9)")
    add("--models", type=int, help="how many fine-tunes (3; methods: 4)")
    add("--repeat", type=int, default=3, help="rounds, in each of which every job runs once (3)")
    add("--mergekit-flags", default="", metavar="FLAGS", help="such as '--num-threads 2'")
    add("--peers-python", type=Path, default=PEERS_PYTHON, metavar="PATH",
        help="python that has mergekit and torch (.venv-peers/bin/python)")  # fmt: skip
    add("--only", nargs="+", metavar="JOB")
    add("--skip", nargs="+", default=(), metavar="JOB")
    add("--data", type=Path, default=BENCH / "data", help="where models and outputs are")
    add("--json", type=Path, metavar="PATH", help="also write all figures to this file")
    options = parser.parse_args()
    options.data = options.data.absolute()
    make, parameters, models, floor = SUITES[options.suite]
    options.parameters = options.parameters or parameters
    options.models = options.models or models
    if options.repeat < 1 or options.parameters < LEAST_PARAMETERS:
        parser.error(f"at least 1 run and {LEAST_PARAMETERS:g} parameters")
    sizes = [(options.parameters, options.models)]
    if options.suite == "growth":
        sizes = [(part * options.parameters, models) for part, models in GROWTH]
    provide_models(options.data, sizes)
    with tempfile.TemporaryDirectory(dir=options.data, prefix="work-") as name:
        work = Path(name)
        jobs = []
        for size, models in sizes:
            shape = shape_for(size)
            folders = model_folders(options.data, shape, models)
            inputs = Inputs(shape, folders, work, work / "output", options)
            jobs += make(inputs)
        chosen = [job for job in jobs if job.name in (options.only or [job.name])]
        chosen = [job for job in chosen if job.name not in options.skip]
        if not chosen:
            parser.error(f"the jobs are {', '.join(job.name for job in jobs)}")
        results = take_turns(chosen, work / "output", options.repeat)
        left = {file.name: file.read_bytes() for file in sorted(work.glob("*.delta.safetensors"))}
    print_results(results, floor)
    for file, data in left.items():
        print(f"{file}: {len(data):,} bytes, SHA-256 {hashlib.sha256(data).hexdigest()[:16]}…")
    document = {"machine": describe_machine(options.peers_python), "suite": options.suite}
    document |= {"parameters": shape_for(options.parameters).parameters, "models": options.models}
    document["jobs"] = [result.to_dict() for result in results]
    if options.suite == "growth" and not any(result.problem for result in results):
        document["fit"] = fit_growth(sizes, results)
    if options.json:
        write_json(options.json, document)
    return int(any((result.problem or "").startswith("failed") for result in results))


def provide_models(data: Path, sizes: Sequence[tuple[float, int]]) -> None:
    """Make the models that are not there yet, in a process of its own; refuse if the disk is full.

    Our own memory must stay small: see `measure`.
    """
    shapes = [(shape_for(size), models) for size, models in sizes]
    missing = {
        folder: shape.model_bytes
        for shape, models in shapes
        for folder in missing_folders(data, shape, models)
    }
    output_bytes = max(shape.model_bytes for shape, _ in shapes)
    needed = int(1.02 * (sum(missing.values()) + output_bytes)) + (100 << 20)
    data.mkdir(exist_ok=True, parents=True)
    if (free := shutil.disk_usage(data).free) < needed:
        raise SystemExit(
            f"{data} needs {needed / 1e9:.1f} GB of free disk ({len(missing)} models to make, one "
            f"merged model at a time), and has {free / 1e9:.1f} GB; ask for fewer --parameters or "
            "--models"
        )
    for size, models in sizes if missing else ():
        command = [sys.executable, BENCH / "models.py", data]
        subprocess.run([*command, "--parameters", str(size), "--models", str(models)], check=True)
    input_bytes = max(shape.model_bytes * (1 + models) for shape, models in shapes)
    if input_bytes + output_bytes > available_memory_bytes():
        print("note: the page cache may not hold all inputs, so times include the disk's")


def fit_growth(sizes: Sequence[tuple[float, int]], results: Sequence[Result]) -> dict[str, float]:
    """Fit wall = start + elements·(base + models·model) by least squares."""
    elements = [1e-9 * shape_for(size).parameters for size, _ in sizes]
    terms = [[1.0, e, e * models] for e, (_, models) in zip(elements, sizes, strict=True)]
    seconds = [result.median("wall_seconds") for result in results]
    start, base, model = np.linalg.lstsq(np.array(terms), np.array(seconds, float))[0].tolist()
    print(f"wall ≈ {start:.2f} s + elements × ({base:.2f} ns + models × {model:.2f} ns)")
    return {"start_seconds": start, "base_ns_per_element": base, "model_ns_per_element": model}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ProgramError as error:
        sys.exit(str(error))
