"""Paths as others may read them: nothing that is published speaks of the machine it was made on.

In a manifest a path is relative to the output, so that both can be moved together, or only a name
if they have nothing in common. Cards, pages and tables have the name alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from dare.inputs.sources import SINGLE_NAME
from dare.recipe.hub_names import parse_name
from dare.stores.locations import StorePath, home_folder, to_path

MIN_SHARED_FOLDERS = 2  # a way between `/home/ann` and `/home/bob` would tell who works there

_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")
_PATH = re.compile(r"(?<!\S)[~/][^\s:;,]*")


def portable_path(path: Path, output: Path) -> str:
    """Return an input's path as a manifest names it; hub names and addresses stay as they are.

    >>> portable_path(Path("/data/me/models/base"), Path("/data/me/merged"))
    '../models/base'
    >>> portable_path(Path("/data/me/models/base"), Path("/scratch/merged"))
    'base'
    """
    if is_hub_name(path) or isinstance(path, StorePath):
        return path.as_posix()
    real = Path(os.path.realpath(path.parent), path.name)
    if isinstance(output, StorePath):  # from where no way leads here
        return real.name
    start = Path(os.path.realpath(output.parent), output.name)
    common = os.path.commonpath([real, start]) if real.drive == start.drive else ""
    if len(Path(common).parts) <= MIN_SHARED_FOLDERS:  # the root is a part too
        return real.name
    return Path(os.path.relpath(real, start)).as_posix()


def resolve_path(text: str, output: Path) -> Path:
    """Return the path of an input that a manifest names."""
    path = to_path(text)
    if is_hub_name(path) or isinstance(path, StorePath):
        return path
    if isinstance(output, StorePath):
        return to_path(re.sub(r"(?<=:/)(?=[^/])", "/", os.path.normpath(str(output / text))))
    return Path(os.path.normpath(output / text))


def is_hub_name(path: Path) -> bool:
    """Tell whether a path is the name of a model on the hub, with its commit."""
    name = parse_name(path.as_posix())
    return name is not None and name.revision is not None


def short_name(path: str | os.PathLike[str]) -> str:
    """The last part of a path; the name on the hub for a folder of its cache.

    A directory stands for the `model.safetensors` in it.

    >>> short_name("/home/me/models/math"), short_name("~/base.safetensors")
    ('math', 'base.safetensors')
    >>> short_name("~/cache/hub/models--org--name/snapshots/0a1b/"), short_name("org/name@main")
    ('org/name', 'org/name@main')
    """
    text = to_path(path).as_posix()
    if isinstance(to_path(path), StorePath):
        return text.removesuffix(f"/{SINGLE_NAME}")
    if Path(text).parent != home_folder():  # which is called like its owner
        text = text.removesuffix(f"/{SINGLE_NAME}")
    if is_hub_name(Path(text)):
        return text
    cached = _HUB_CACHE.search(text + "/")
    return f"{cached[1]}/{cached[2]}" if cached else Path(text).name


def without_folders(text: str, known: Iterable[Path] = ()) -> str:
    """Text, with the paths in it shortened; those that are `known` may have spaces.

    >>> without_folders("~me/a/b.jinja: is not in /data/x/y/z, but 1/2")
    'b.jinja: is not in z, but 1/2'
    >>> without_folders("/home/Ann B/base/config.json: is odd", [Path("/home/Ann B/base")])
    'base/config.json: is odd'
    """
    here = {str(path.absolute().parent) for path in known if not isinstance(path, StorePath)}
    for folder in sorted(here, key=len, reverse=True):
        text = text.replace(folder + os.sep, "")
    return _PATH.sub(lambda path: short_name(path[0]), text)
