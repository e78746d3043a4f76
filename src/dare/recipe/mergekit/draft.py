"""The tables of a recipe while a method fills them in, and what there is to say about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dare.recipe.entries import ModelEntry, distinct
from dare.recipe.mergekit.configuration import Config
from dare.recipe.mergekit.parameters import Cases
from dare.stages import STAGES


class Draft:
    """The tables of a recipe, being filled in from a configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.differences: list[str] = []
        self.notes: list[str] = []
        self._document: dict[str, Any] = dict(config.keys)
        self._rules: list[dict[str, Any]] = []
        self._models: list[dict[str, Any]] = []
        self._base = ""

    @property
    def required_base(self) -> str:
        """The base of a method that needs one."""
        self.require(self.config.base, f"base_model is missing; {self.config.method} needs one")
        return str(self.config.base)

    def require(self, holds: object, text: str) -> None:
        """Refuse the method, with its line, unless something holds."""
        self.config.method_node.require(holds, text)

    def merge(self, method: str, base: str, models: Sequence[str], scale: float = 1.0) -> None:
        """Say what is merged, by which method, and what the merged delta is multiplied by."""
        self._document |= {"method": method, "scale": scale}
        source = self._document.pop("copy_from", base)
        if source != base:  # which it is from if nothing is said
            names = distinct([ModelEntry(file=model).name for model in models])
            self._document["copy_from"] = names[models.index(source)]
        self._base = base
        self._models = [{"file": model} for model in models]

    def set_stage(self, stage: str, parameter: str, value: Any) -> None:
        """Set a parameter of a stage."""
        self._document.setdefault(stage, {})[parameter] = value

    def set_cases(self, stage: str, parameter: str, cases: Cases) -> None:
        """Set a parameter that all models share."""
        self._add_rules(stage, parameter, cases)
        self.set_stage(stage, parameter, cases[-1].value)

    def set_for_models(self, stage: str | None, parameter: str, found: Sequence[Cases]) -> None:
        """Set a parameter of each model; a stage's own table will do if all are the same."""
        if stage is not None and all(cases == found[0] for cases in found):
            self.set_cases(stage, parameter, found[0])
            return
        for entry, cases in zip(self._models, found, strict=True):
            self._add_rules(stage, parameter, cases, {"model": entry["file"]})
            entry[parameter] = cases[-1].value

    def _add_rules(
        self, stage: str | None, parameter: str, cases: Cases, model: dict[str, str] | None = None
    ) -> None:
        """The first case that matches counts there, the last rule here."""
        if stage is not None:
            for case in cases:
                where = f"{case.node.file}, line {case.node.line}: "
                STAGES[stage].parameters[parameter].check(case.value, where)
        for case in reversed(cases[:-1]):
            self._rules.append({"contains": case.contains, **(model or {}), parameter: case.value})

    def document(self) -> dict[str, Any]:
        """The recipe's tables."""
        models = [entry if len(entry) > 1 else entry["file"] for entry in self._models]
        files = {"base_file": self._base, "merge_files": models}
        rules = {"tensors": self._rules} if self._rules else {}
        return {**self._document, "models": files, **rules}
