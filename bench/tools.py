"""What dare is measured beside, as one writes it with other tools: a program for each.

    python bench/tools.py torch OUTPUT BASE MODEL …            # or peft_linear, peft_ties, sd_mecha
    python bench/tools.py statistics BASE MODEL …              # of deltas, with torch
    python bench/tools.py read BASE MODEL …                    # as a merge reads, and nothing else
    python bench/tools.py mergekit                             # merges as often as stdin asks

Models are files; `read` takes folders, too. Merges drop nine tenths and store bfloat16.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

DROP_RATE = 0.9
SEED = 42
SHARES = (0.01, 0.05, 0.5, 0.95, 0.99)
"""Of magnitudes, whose quantiles are looked for."""


def plain_torch(output: str, base_file: str, *model_files: str) -> None:
    """Merge by DARE as tutorials show it: everything in memory, in float32.

    At its peak it holds the base, every model's dropped delta and one that is being dropped:
    4·(models + 2) bytes for each parameter.
    """
    import torch
    from safetensors.torch import load_file, save_file

    base = {name: tensor.float() for name, tensor in load_file(base_file).items()}

    def dropped(file: str, seed: int) -> dict[str, Any]:
        generator, model = torch.Generator().manual_seed(seed), load_file(file)
        delta = {name: model[name].float() - tensor for name, tensor in base.items()}
        keep = 1 - DROP_RATE
        return {
            name: values
            * torch.bernoulli(torch.full_like(values, keep), generator=generator)
            / keep
            for name, values in delta.items()
        }

    deltas = [dropped(file, SEED + index) for index, file in enumerate(model_files)]
    merged = {
        name: (tensor + sum(delta[name] for delta in deltas) / len(deltas)).bfloat16()
        for name, tensor in base.items()
    }
    save_file(merged, output)


def peft(method: str) -> Callable[..., None]:
    """Return a merge by PEFT's function of that name, which is meant for adapters.

    One tensor of every model is read at a time; the merged model is held in memory to save it.
    """

    def merge(output: str, *files: str) -> None:
        import torch
        from peft.utils import merge_utils
        from safetensors.torch import save_file

        weights = torch.full((len(files) - 1,), 1 / (len(files) - 1))
        torch.manual_seed(SEED)
        merged = {}
        with opened(files) as tensors:
            for name, (base, *tuned) in tensors:
                deltas = [tensor - base for tensor in tuned]
                delta = getattr(merge_utils, method)(deltas, weights, 1 - DROP_RATE)
                merged[name] = (base + delta).bfloat16()
        save_file(merged, output)

    return merge


@contextmanager
def opened(files: tuple[str, ...]) -> Iterator[Iterator[tuple[str, list[Any]]]]:
    """Yield names, and tensors of all files in float32."""
    from safetensors import safe_open

    with ExitStack() as stack:
        models = [stack.enter_context(safe_open(file, "pt")) for file in files]
        yield (
            (name, [model.get_tensor(name).float() for model in models])
            for name in models[0].keys()  # noqa: SIM118 (it is no dict)
        )


def sd_mecha(output: str, base: str, *models: str) -> None:
    """Merge by TIES with DARE as sd-mecha's documentation does it, in float32 on all cores."""
    import sd_mecha
    import torch

    read = [sd_mecha.model(Path(file)) for file in (base, *models)]
    recipe = sd_mecha.add_ties_with_dare(*read, probability=DROP_RATE, seed=SEED)
    types = {"merge_dtype": torch.float32, "output_dtype": torch.bfloat16}
    sd_mecha.merge(recipe, threads=os.cpu_count(), output=output, **types)


def statistics(*files: str) -> None:
    """Compute most of what an analysis finds with torch: tensor after tensor, in float32.

    For each tensor and model: zeros, mean, deviation, largest, kurtosis, norm, five quantiles (by
    `kthvalue`, as fast as a sort and faster than `quantile`, which also refuses large tensors),
    the share under a hundredth of the largest and a histogram of octaves. For each two models:
    cosine, agreement of signs. No quantiles of layers or of the whole, no tops, no spectra.
    """
    import torch

    def alone(delta: torch.Tensor) -> list[float]:
        magnitudes = delta.abs()
        largest, mean, deviation = magnitudes.max(), delta.mean(), delta.std(correction=0)
        ranks = [max(1, math.ceil(share * delta.numel())) for share in SHARES]
        octaves = torch.frexp(magnitudes[magnitudes > 0]).exponent
        figures = [
            *((delta == 0).sum(), mean, deviation, largest, magnitudes.mean(), delta.norm()),
            ((delta - mean) / deviation).pow(4).mean() - 3,
            (magnitudes < 0.01 * largest).float().mean(),
            *(torch.kthvalue(magnitudes, rank).values for rank in ranks),
            *torch.bincount(octaves + 150, minlength=280),
        ]
        return [float(figure) for figure in figures]

    def overlap(one: torch.Tensor, other: torch.Tensor) -> list[float]:
        both = (one != 0) & (other != 0)
        agreeing = (one.sign() == other.sign()) & both
        return [float(one @ other), float(both.sum()), float(agreeing.sum())]

    with opened(files) as tensors:
        for _, (weights, *models) in tensors:
            deltas = [(model - weights).reshape(-1) for model in models]
            _ = [alone(delta) for delta in deltas]
            _ = [overlap(*pair) for pair in itertools.combinations(deltas, 2)]
            _ = weights.norm(), torch.stack(deltas).sum(dim=0).abs().sum()


def read(base: str, *models: str) -> None:
    """Read everything once, chunk by chunk on all cores."""
    import numpy as np

    from dare.inputs.opening import open_inputs
    from dare.inputs.sources import hold_open
    from dare.recipe.recipe import Recipe
    from dare.tensors.chunks import CHUNK, chunk_spans
    from dare.tensors.system import available_cores

    _, inputs = open_inputs(Recipe(base=base, models=models))
    sources = (inputs.base, *inputs.models)
    widest = max(i.dtype.itemsize for source in sources for i in source.tensors.values())
    own = threading.local()

    def read_chunk(name: str, start: int, count: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = np.empty(CHUNK * widest, np.uint8)
        for source in sources:
            carrier = source.tensors[name].dtype.carrier
            source.read(name, start, own.buffer.view(carrier)[:count])

    with hold_open(sources), ThreadPoolExecutor(available_cores()) as pool:
        reads = [
            pool.submit(read_chunk, name, start, count)
            for name, info in inputs.base.tensors.items()
            for start, count in chunk_spans(info.elements)
        ]
        for each in reads:
            each.result()


def mergekit() -> None:
    """Merge as often as asked, in one process that has everything imported.

    Each line of stdin is a JSON object with a configuration and an output folder; for each, a line
    with the seconds is printed. This is how mergekit-evolve merges to disk; its program
    `mergekit-yaml` would start Python and import torch each time.
    """
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(copy_tokenizer=False, quiet=True, random_seed=SEED)
    for line in sys.stdin:
        job, started = json.loads(line), time.perf_counter()
        configuration = MergeConfiguration.model_validate(job["configuration"])
        run_merge(configuration, job["output"], options)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


TOOLS: dict[str, Callable[..., None]] = {
    "torch": plain_torch,
    "peft_linear": peft("dare_linear"),
    "peft_ties": peft("dare_ties"),
    "sd_mecha": sd_mecha,
    "statistics": statistics,
    "read": read,
    "mergekit": mergekit,
}

if __name__ == "__main__":
    TOOLS[sys.argv[1]](*sys.argv[2:])
