"""The folders that the user pointed to: nothing is read or written anywhere else.

A path counts by where it leads: links are followed before it is held against the folders. A path
with `..` in it is refused. One that is not absolute counts from where the server was started, as it
does for the commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dare.errors import DareError, InputError, RecipeError
from dare.inputs.lora import CONFIG_NAME as ADAPTER_CONFIG
from dare.inputs.sources import INDEX_NAME, SINGLE_NAME
from dare.output.targets import has_mark
from dare.recipe.entries import as_path, distinct
from dare.recipe.schema import Recipe
from dare.stores.locations import StorePath

WEIGHTS = {
    ".safetensors": "safetensors",
    ".gguf": "GGUF",
    **dict.fromkeys((".bin", ".pt", ".pth"), "pickle"),
}
"""What files of weights are, by the end of their names."""
RECIPES = (".toml", ".yaml", ".yml")
MOST_ENTRIES = 500
"""Of a folder that is shown."""


class OutsideError(DareError):
    """A path that leads out of the folders."""


@dataclass(frozen=True)
class Entry:
    """Something in a folder that one can open or choose."""

    name: str
    path: str
    kind: str
    """`folder`, `model` (a folder or a file with weights), `recipe`, `interrupted` (a merge)."""
    holds: str = ""
    """Of a model: safetensors, GGUF, pickle or adapter."""
    nbytes: int = 0
    """Of a model: its weights."""
    opens: bool = False
    """Whether it is a folder that may hold more."""


class Roots:
    """Which paths are inside, and what lies there."""

    def __init__(self, folders: Iterable[Path]) -> None:
        found = dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders)
        for folder in found:
            if not folder.is_dir():
                raise InputError(f"{folder}: is not a folder; name the folders of your models")
        self.folders = tuple(found)

    # ------------------------------------------------------------ where a path leads

    def find(self, given: str | os.PathLike[str]) -> Path:
        """What is there at a path, absolute and as it was written."""
        path = self._inside(given)
        if not path.exists():
            raise InputError(f"{path}: does not exist")
        return path

    def find_model(self, given: str | os.PathLike[str]) -> Path:
        """A model whose files are all inside, too."""
        path = self.find(given)
        folder = path if path.is_dir() else path.parent
        for name in os.listdir(path) if path.is_dir() else ["config.json"]:
            self._inside(folder / name)
        return path

    def find_output(self, given: str | os.PathLike[str]) -> Path:
        """A place for an output, in a folder that is there and inside."""
        path = self._inside(given)
        if not self._inside(path.parent).is_dir():
            raise InputError(f"{path.parent}: is not a folder; create it, or choose another output")
        return path

    def _inside(self, given: str | os.PathLike[str]) -> Path:
        try:
            path = as_path(given)
            if isinstance(path, StorePath):
                raise OutsideError(f"{path}: is not on this machine; use the command line")
            if ".." in path.parts:
                raise OutsideError(f"{path}: write the path without `..`")
            path = path.absolute()
            real = Path(os.path.realpath(path))
        except ValueError as error:
            raise InputError(f"{os.fspath(given)!a}: is not a path: {error}") from None
        if not any(real.is_relative_to(folder) for folder in self.folders):
            leads = "" if real == path else f" leads to {real}, which"
            remedy = "start the playground with its folder: dare playground FOLDER …"
            folders = ", ".join(map(str, self.folders))
            raise OutsideError(f"{path}:{leads} is outside {folders}; {remedy}")
        return path

    # ------------------------------------------------------------ recipes

    def admit(self, recipe: Recipe) -> Recipe:
        """The recipe with absolute paths, all inside; what would leave the machine is refused."""
        if recipe.cluster is not None:
            raise RecipeError("cluster: the page merges on this machine; use the command line")
        if recipe.scratch is not None:
            self.find(recipe.scratch)
        names = distinct([entry.name for entry in recipe.models])
        template = recipe.chat_template
        if template not in ("auto", *names) and "{" not in template:
            self.find(template)
        base = self.find_model(recipe.base)
        models = [self.find_model(entry.file) for entry in recipe.models]
        output = None if recipe.output is None else self.find_output(recipe.output)
        return recipe.with_files(base, models, output)

    # ------------------------------------------------------------ what lies there

    def listing(self, given: str | None) -> dict[str, Any]:
        """A folder with what one can open or choose in it; without a path, the folders."""
        if given is None:
            entries = [_folder(folder, str(folder)) for folder in self.folders]
            return {"path": None, "above": None, "entries": [asdict(entry) for entry in entries]}
        folder = self.find(given)
        if not folder.is_dir():
            entry = _described(folder)
            if entry is None:
                raise InputError(f"{folder}: is neither a model nor a recipe")
            return {**self.listing(str(folder.parent)), "found": asdict(entry)}
        try:
            paths = sorted(folder.iterdir(), key=lambda path: path.name.lower())
        except OSError as error:
            raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
        entries = list(self._entries(paths))
        at_top = Path(os.path.realpath(folder)) in self.folders
        itself = _folder(folder, folder.name)
        return {
            "path": str(folder),
            "above": None if at_top else str(folder.parent),
            "entries": [asdict(entry) for entry in entries[:MOST_ENTRIES]],
            "more": max(0, len(entries) - MOST_ENTRIES),
            **({"found": asdict(itself)} if itself.kind == "model" else {}),
        }

    def _entries(self, paths: Iterable[Path]) -> Iterator[Entry]:
        for path in paths:
            try:
                self._inside(path)
                entry = None if path.name.startswith(".") else _described(path)
            except (OutsideError, OSError):  # a link that leads out, a folder of somebody else's
                continue
            if entry is not None:
                yield entry


def _described(path: Path) -> Entry | None:
    """What a path is, if it can be opened or chosen."""
    if path.is_dir():
        return _folder(path, path.name)
    suffix = path.suffix.lower()
    if suffix in RECIPES:
        return Entry(path.name, str(path), "recipe")
    if suffix in WEIGHTS and path.is_file():
        return Entry(path.name, str(path), "model", WEIGHTS[suffix], path.stat().st_size)
    return None


def _folder(path: Path, name: str) -> Entry:
    """A folder, or the model or the interrupted merge that it is."""
    if has_mark(path):
        return Entry(name, str(path), "interrupted")
    try:
        sizes = {f.name: f.stat().st_size for f in path.iterdir() if f.suffix.lower() in WEIGHTS}
    except OSError:  # which is said where it is opened
        sizes = {}
    if (path / ADAPTER_CONFIG).is_file():
        return Entry(name, str(path), "model", "adapter", sum(sizes.values()), opens=True)
    safetensors = {file: size for file, size in sizes.items() if file.endswith(".safetensors")}
    if len(safetensors) == 1 or SINGLE_NAME in safetensors or (path / INDEX_NAME).is_file():
        return Entry(name, str(path), "model", "safetensors", sum(safetensors.values()), opens=True)
    pickles = {file: size for file, size in sizes.items() if file.startswith("pytorch_model")}
    if pickles and not safetensors:
        return Entry(name, str(path), "model", "pickle", sum(pickles.values()), opens=True)
    return Entry(name, str(path), "folder", opens=True)
