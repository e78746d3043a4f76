"""What inputs show of live models: Gram matrices of layers' inputs, and statistics of norms.

    for name, model in models.items():
        with dare.GramCollector(model) as grams[name], torch.no_grad():
            for batch in batches[name]:
                model(batch)
    dare.write_grams("gathered.safetensors", grams)

A model is any torch module. Its nn.Linear layers and transformers' Conv1D are watched while inputs
are run through it. torch is never imported here: a caller with a module has imported it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from dare.errors import InputError
from dare.inputs.arrays import is_module
from dare.inputs.gathered import GRAM, Gathered, as_triangle, write_gathered
from dare.inputs.sources import Floats
from dare.output.memory import arrays_of, names_in
from dare.tensors.names import STATISTICS


class GramCollector:
    """Sums XᵀX of the inputs X of a model's linear layers in float32, while it is entered.

    `stored` are the names of the base's tensors, if the model in memory has others.
    """

    def __init__(self, model: object, stored: Iterable[str] | None = None) -> None:
        if not is_module(model):
            raise InputError(f"layers can be watched in a torch module, not in {type(model)}")
        arrays = arrays_of(model)
        names = names_in(arrays, arrays if stored is None else stored)
        torch: Any = sys.modules["torch"]
        modules = dict(torch.nn.Module.named_modules(model))
        embedding = torch.nn.Embedding  # one that is also a head is not merged as a head
        shared = {id(m.weight) for m in modules.values() if isinstance(m, embedding)}
        self._layers: dict[str, Any] = {}
        self.turned: set[str] = set()
        """Layers that are stored as inputs × outputs."""
        for name, own in names.items():
            module: Any = modules.get(own.removesuffix("weight").rstrip("."))
            is_turned = type(module).__name__ == "Conv1D"
            is_layer = is_turned or isinstance(module, torch.nn.Linear)
            if is_layer and own.endswith("weight") and id(module.weight) not in shared:
                self._layers[name] = module
                self.turned |= {name} if is_turned else set()
        self.triangles: dict[str, Floats] = {}
        """The upper triangles of the matrices, by the stored names of the layers."""
        self.rows: Counter[str] = Counter()
        """The number of inputs of each layer, such as tokens."""
        self._sums: dict[str, Any] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._layers.items():
            hook = module.register_forward_pre_hook(partial(self._add_inputs, name))
            self._hooks.callback(hook.remove)
        return self

    def _add_inputs(self, name: str, _module: Any, given: tuple[Any, ...]) -> None:
        inputs = given[0].detach().reshape(-1, given[0].shape[-1]).float()
        product = inputs.T @ inputs
        self._sums[name] = self._sums[name].add_(product) if name in self._sums else product
        self.rows[name] += len(inputs)

    def __exit__(self, *_error: object) -> None:
        self._hooks.close()
        for name, gram in self._sums.items():
            self.triangles[name] = as_triangle(gram.cpu().numpy()) + self.triangles.get(name, 0)
        self._sums = {}


def write_grams(path: str | os.PathLike[str], grams: Mapping[str, GramCollector]) -> None:
    """Write the Gram matrices of models, by the names that a recipe has for these."""
    for name, collected in grams.items():
        if not collected.triangles:
            what = "no input reached a linear layer; run inputs while the collector is entered"
            raise InputError(f"{name}: {what}")
    tensors = {
        f"{GRAM}{model}/{layer}": triangle
        for model, collected in grams.items()
        for layer, triangle in collected.triangles.items()
    }
    rows = {model: max(collected.rows.values()) for model, collected in grams.items()}
    turned = {layer for collected in grams.values() for layer in collected.turned}
    write_gathered(path, tensors, rows=rows, turned=turned)


# ---------------------------------------------------------------- statistics of norms


def write_norms(path: Path, model: Any, stored: Iterable[str], gathered: Path | None) -> None:
    """Write the statistics of a model's norms, and the Gram matrices that a file has."""
    arrays = arrays_of(model)
    norms = {f"{module}.{name}" for module in find_norms(model) for name in STATISTICS}
    tensors = {name: arrays[own] for name, own in names_in(arrays, stored).items() if own in norms}
    if gathered is None:
        write_gathered(path, tensors)
        return
    with Gathered(gathered) as earlier:
        grams = {name: earlier.array(name) for name in earlier.tensors if name.startswith(GRAM)}
    notes = earlier.notes
    write_gathered(path, grams | tensors, rows=notes.rows, turned=notes.turned)


def find_norms(model: Any) -> dict[str, Any]:
    """Return the modules of a model that have statistics of their inputs, as BatchNorm has."""
    return {
        name: module
        for name, module in getattr(model, "named_modules", tuple)()
        if getattr(module, STATISTICS[0], None) is not None
        and hasattr(module, "reset_running_stats")
    }


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Take the statistics of norms anew, from the inputs that are run meanwhile.

    They become the means over batches. Everything else works as in evaluation.
    """
    norms = list(find_norms(model).values())
    modes = [(module, module.training) for module in model.modules()]
    momenta = [module.momentum for module in norms]
    model.eval()
    for module in norms:
        module.reset_running_stats()
        module.train().momentum = None  # a cumulative mean
    try:
        with sys.modules["torch"].no_grad():
            yield
    finally:
        for module, momentum in zip(norms, momenta, strict=True):
            module.momentum = momentum
        for module, mode in modes:
            module.training = mode
    if any(not module.num_batches_tracked for module in norms):
        raise InputError("the statistics of norms are lost: no input reached some; give batches")


def recompute_norms(model: Any, batches: Iterable[Any]) -> None:
    """Recompute the statistics of a torch model's BatchNorm layers from batches of inputs.

    A batch is what the model is called with: a tensor, a tuple of arguments, or keywords.
    """
    with recomputing(model):
        for batch in batches:
            match batch:
                case Mapping():
                    model(**batch)
                case tuple() | list():
                    model(*batch)
                case _:
                    model(batch)
