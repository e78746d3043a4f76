"""The tables of a recipe while a method fills them in, and what there is to say about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dare.errors import did_you_mean
from dare.recipe.mergekit.configuration import Config
from dare.recipe.mergekit.nodes import Node
from dare.recipe.mergekit.parameters import Case, Cases
from dare.stages import STAGES
from dare.tensors.dtypes import MODEL_TYPES


class Draft:
    """The tables of a recipe, being filled in."""

    def __init__(self, config: Config) -> None:
        self._document: dict[str, Any] = {}
        self._rules: list[dict[str, Any]] = []
        self._models: list[dict[str, Any]] = []
        self._base = ""
        self.differences: list[str] = []
        self.notes: list[str] = []
        for key in (config.out_dtype, config.dtype):
            if key is not None:
                self._document["dtype"] = storage_type(key)
                break

    def merge(self, method: str, base: str, models: Sequence[str]) -> None:
        """Say what is merged, and by which method."""
        self._document["method"] = method
        self._base = base
        self._models = [{"file": model} for model in models]

    def scale(self, factor: float) -> None:
        """Say what the merged delta is multiplied by."""
        if factor != 1:
            self._document["scale"] = factor

    def set_stage(self, stage: str, parameter: str, value: Any) -> None:
        """Set a parameter of a stage."""
        self._document.setdefault(stage, {})[parameter] = value

    def set_cases(self, stage: str, parameter: str, cases: Cases) -> None:
        """Set a parameter that all models share."""
        for case in cases:
            _check_range(stage, parameter, case)
        self.set_stage(stage, parameter, cases[-1].value)
        self._add_rules(parameter, cases)

    def set_for_models(self, stage: str | None, parameter: str, found: Sequence[Cases]) -> None:
        """Set a parameter of each model; a stage's own table will do if all are the same."""
        if stage is not None and all(cases == found[0] for cases in found):
            self.set_cases(stage, parameter, found[0])
            return
        for entry, cases in zip(self._models, found, strict=True):
            for case in cases:
                if stage is not None:
                    _check_range(stage, parameter, case)
            entry[parameter] = cases[-1].value
            self._add_rules(parameter, cases, entry["file"])

    def _add_rules(self, parameter: str, cases: Cases, model: str | None = None) -> None:
        """The first case that matches counts there, the last rule here."""
        whose = {} if model is None else {"model": model}
        for case in reversed(cases[:-1]):
            self._rules.append({"contains": case.contains, **whose, parameter: case.value})

    def document(self) -> dict[str, Any]:
        """The recipe's tables."""
        models = [entry if len(entry) > 1 else entry["file"] for entry in self._models]
        files = {"base_file": self._base, "merge_files": models}
        rules = {"tensors": self._rules} if self._rules else {}
        return {**self._document, "models": files, **rules}


def _check_range(stage: str, parameter: str, case: Case) -> None:
    where = f"{case.node.file}, line {case.node.line}: "
    STAGES[stage].parameters[parameter].check(case.value, where)


def storage_type(node: Node) -> str:
    """The type that weights are stored in, by its name in torch."""
    known = [kind.torch_name for kind in MODEL_TYPES]
    name = str(node.value).removeprefix("torch.")
    if name not in known:
        hint = did_you_mean(name, known)
        raise node.refuse(f"{node.value!r} is no type of weights{hint}: {', '.join(known)}")
    return name
