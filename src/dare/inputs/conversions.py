"""How transformers brings the stored tensors of a model into memory, and back.

It does so by tables that it does not describe to its users, so they may change with any version.
This is the only module that uses them. `missing_names` says what a version lacks. With such a
version, models of the types in `loaded.toml` are read as before, because their names stay as they
are. All others are refused by name, and so is a model whose layout is not its base's; nothing is
guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

# What is used of transformers' undocumented modules.
USED_NAMES = (
    "conversion_mapping.get_model_conversion_mapping",
    "core_model_loading.dot_natural_key",
    "core_model_loading.rename_source_key",
    "core_model_loading.WeightConverter.add_tensor",
    "core_model_loading.WeightConverter.convert",
    "core_model_loading.WeightConverter.reverse_transform",
    "core_model_loading.WeightConverter.was_used",
)


def missing_names() -> list[str]:
    """Return the names that this version of transformers does not have."""
    from transformers import conversion_mapping, core_model_loading

    modules = SimpleNamespace(
        conversion_mapping=conversion_mapping, core_model_loading=core_model_loading
    )
    missing = []
    for name in USED_NAMES:
        try:
            attrgetter(name)(modules)
        except AttributeError:
            missing.append(f"transformers.{name}")
    return missing


class ConversionTables:
    """The tables by which transformers brings the stored tensors of a model into memory."""

    def __init__(self, model: Any, transforms: Sequence[Any] | None = None) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.model, self._core = model, core_model_loading
        self.state: Mapping[str, Any] = model.state_dict(keep_vars=True)
        if transforms is None:
            transforms = conversion_mapping.get_model_conversion_mapping(model)
        self._transforms = transforms  # which note whether they were used
        self.converters = [each for each in transforms if hasattr(each, "operations")]
        self._renamings = [each for each in transforms if not hasattr(each, "operations")]

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return names of tensors in the order in which transformers loads them."""
        return sorted(names, key=self._core.dot_natural_key)

    def find(self, name: str) -> tuple[str, str | None]:
        """Return the name in memory of a stored tensor, and the pattern of its converter if any."""
        new, pattern = self._core.rename_source_key(
            name, self._renamings, self.converters, self.model.base_model_prefix, self.state
        )
        return (name, None) if new not in self.state and name in self.state else (new, pattern)

    def load(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return stored tensors as the model has them in memory."""
        return self._convert(tensors, self.find)

    def save(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors in memory as they are saved, in the layout that these have loaded."""
        used = [each for each in self._transforms if each.was_used()]
        back = ConversionTables(self.model, [each.reverse_transform() for each in reversed(used)])
        rename = self._core.rename_source_key
        found = back._convert(loaded, lambda name: rename(name, [], back.converters))
        return {rename(name, back._renamings, [])[0]: tensor for name, tensor in found.items()}

    def _convert(self, tensors: Mapping[str, Any], find: Callable[[str], Any]) -> dict[str, Any]:
        by_pattern = {p: each for each in self.converters for p in each.source_patterns}
        found: dict[str, Any] = {}
        gathered: dict[str, Any] = {}
        for name in self.in_order(tensors):
            new, pattern = find(name)
            if pattern is None:
                found.setdefault(new, tensors[name])
                continue
            if new not in gathered:
                gathered[new] = deepcopy(by_pattern[pattern])
            gathered[new].add_tensor(new, name, pattern, tensors[name])
        for new, converter in gathered.items():
            made = converter.convert(new, model=self.model, config=self.model.config)
            found |= {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
        return found
