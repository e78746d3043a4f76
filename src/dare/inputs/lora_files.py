"""LoRA files of diffusion models, as kohya's scripts and diffusers write them.

One file has the factors of all parts of a pipeline, and no configuration. Its tensors are named
after modules, with underscores or in an older form; `lora_names.toml` says how to find these
modules in the base. LyCORIS's forms other than plain LoRA are refused by name.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from dare.documents.notices import notice
from dare.errors import InputError
from dare.inputs.adapter_tensors import Product
from dare.inputs.lora import F32, Adapter, LoraSource, finite, parse_config
from dare.inputs.sources import FileSource, Opening, Source, read_floats
from dare.tensors.header import TensorInfo, admit, parse_json

_FACTOR = re.compile(
    r"^(?P<module>.+?)[._]lora(?:_linear_layer)?[._](?P<role>down|up|A|B)(?:\.[^.]+)?\.weight$"
    r"|^(?P<of_alpha>.+)\.alpha$"
)
_LETTERS = {"down": "A", "up": "B"}
MERGE_ELSEWHERE = "merge it with the program it was made for, and give the result as a model"
OTHER_BASE = "give the base that it was trained on, in the layout whose names it uses"
_TABLES = tomllib.loads(files("dare.inputs").joinpath("lora_names.toml").read_text("utf-8"))
NETWORK = "network"
COMPONENTS = (NETWORK, "te1", "te2", "te3")


class _Place(NamedTuple):
    """Rows of a tensor of the base: all, or those of one of several modules packed in it."""

    tensor: str
    row: int
    rows: int


class LoraFile(LoraSource):
    """The changes of a LoRA file, by the names of the base's tensors."""

    def __init__(self, path: Path, stored: FileSource, base: Source) -> None:
        self._settings = _read_settings(path, stored)
        super().__init__(path, Adapter(1, {}, False, False, None), stored, base=base)
        self.files, self.folder = stored.files, None

    def _sort(self) -> None:
        missing: dict[str, str] = {}
        matched: set[str] = set()
        places = _find_places(self._base_tensors)
        with self._stored:
            for module, pair in self._find_modules().items():
                known, name = _split(module, "prefixes")
                component = known or NETWORK
                rows = places.get((component, name)) or places.get((component, _renamed(name)))
                if rows is None:
                    missing[module] = component
                else:
                    matched.add(component)
                    self._add_module(module, pair, rows)
        for module, component in missing.items():
            if component in matched or not matched:
                others = "but others are" if matched else "and neither are the others"
                raise InputError(
                    f"{self.path}: {module} is not in the base, {others}; {OTHER_BASE}"
                )
        if missing:
            counts = Counter(missing.values()).items()
            left = ", ".join(f"{count} of {component}" for component, count in counts)
            self.remarks = (*self.remarks, notice("modules_left_out", left=left))

    def _find_modules(self) -> dict[str, dict[str, str]]:
        """Return the factors of each module, and its alpha if it has one."""
        modules: dict[str, dict[str, str]] = {}
        for key, info in self._stored.tensors.items():
            admit(info, (), str(self.path), as_weight=True)
            name = _FACTOR.match(key)
            if name is None:
                kinds = (kind for part, kind in _TABLES["others"].items() if part in key)
                what = f"{key} is {next(kinds, 'of an unknown kind')}"
                raise InputError(f"{self.path}: {what}; {MERGE_ELSEWHERE}")
            role = _LETTERS.get(name["role"], name["role"] or "alpha")
            pair = modules.setdefault(name["module"] or name["of_alpha"], {})
            if pair.setdefault(role, key) != key or (role == "alpha" and info.elements != 1):
                raise self._refusal(key, pair[role])
        return modules

    def _add_module(self, module: str, pair: dict[str, str], places: list[_Place]) -> None:
        alpha = pair.pop("alpha", None)
        down, up = self._factors(module, pair)
        info = self._base_tensors[places[0].tensor]
        columns = math.prod(info.shape[1:])
        sides = up.shape[0], math.prod(down.shape[1:])
        if len(places) > 1 or sides != (places[0].rows, columns):
            tensors = " or ".join(f"{place.tensor} ({info.form})" for place in places)
            what = f"{down.form} and {up.form} do not fit {tensors}"
            raise InputError(f"{self.path}: {module}: {what}; {OTHER_BASE}")
        scale = self._scale(module, down.shape[0], alpha)
        product = Product(pair["B"], pair["A"], False, scale, offset=places[0].row * columns)
        others = self._products.pop(info.name, ())
        for other in others:
            if isinstance(other, Product) and product.offset == other.offset:
                raise self._refusal(pair["B"], other.left)
        self._add(TensorInfo(info.name, F32, info.shape, 0), product)
        self._products[info.name] = *others, product

    def _scale(self, module: str, rank: int, alpha: str | None) -> float:
        """Return the factor of a module: by its alpha, by the notes in the file, or 1."""
        if alpha is None:
            component, _, name = module.partition(".")
            settings = self._settings.get(component)
            return 1.0 if settings is None else settings.scaling(name, rank)
        try:
            return finite(read_floats(self._stored, alpha, 0, 1)[0]) / rank
        except ValueError as error:
            raise InputError(f"{self.path}: {alpha}: {error}; save the file again") from None


def open_form(opening: Opening) -> LoraFile:
    """Open a LoRA file; its names mean nothing without the base."""
    if any(key.startswith("base_model.model.") for key in opening.stored.tensors):
        raise InputError(f"{opening.path}: is an adapter; give its folder with adapter_config.json")
    if opening.base is None:
        raise InputError(f"{opening.path}: is a LoRA file, which needs its base; give that first")
    return LoraFile(opening.path, opening.stored, opening.base)


def _read_settings(path: Path, stored: FileSource) -> dict[str, Adapter]:
    """Read the settings that diffusers notes in a file, by component."""
    tables: dict[str, dict[str, Any]] = {}
    for header in stored.headers.values():
        noted = parse_json(header.metadata.get("lora_adapter_metadata", "{}").encode(), path)
        for key, value in noted.items() if isinstance(noted, dict) else ():
            component, _, setting = key.partition(".")
            tables.setdefault(component, {"peft_type": "LORA"})[setting] = value
    return {component: parse_config(table, path) for component, table in tables.items()}


def _split(name: str, table: str) -> tuple[str | None, str]:
    """Return the component that a name begins with, if any, and the rest with underscores."""
    prefix = next((prefix for prefix in _TABLES[table] if name.startswith(prefix)), "")
    return _TABLES[table].get(prefix), name.removeprefix(prefix).replace(".", "_")


def _renamed(module: str) -> str:
    """Return diffusers' name for a module of a single file."""
    for pattern, name in _TABLES["renames"].items():
        module = re.sub(pattern, name, module)
    return module


def _find_places(tensors: Mapping[str, TensorInfo]) -> dict[tuple[str, str], list[_Place]]:
    """Return the rows of the base that a LoRA may change, by component and module."""
    places: dict[tuple[str, str], list[_Place]] = {}
    for tensor, info in tensors.items():
        component, name = _split(tensor, "components")
        if len(info.shape) < 2 or not name.endswith("_weight"):
            continue
        name = name.removesuffix("_weight")
        rows, columns = info.shape[0], math.prod(info.shape[1:])
        renamed = _renamed(name)
        modules = dict.fromkeys((name, renamed), _Place(tensor, 0, rows))
        for pattern, parts in _TABLES["packed"].items():
            if packed := re.fullmatch(pattern, renamed):
                for number, part in enumerate(parts):
                    is_last = number + 1 == len(parts)
                    height = rows - number * columns if is_last else columns
                    modules[packed.expand(part)] = _Place(tensor, number * columns, height)
        for module, place in modules.items():
            for each in (component,) if component else COMPONENTS:
                places.setdefault((each, module), []).append(place)
    return places
