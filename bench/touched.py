"""Count the modules of the package that a small merge calls a function of.

    python bench/touched.py          # as a Markdown table
    python bench/touched.py --list   # and the modules, with the number of functions of each

A merge of the same models has run before, so what is done once in a process does not count.
"""

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType

import numpy as np
from safetensors.numpy import save_file

import dare

PACKAGE = f"{Path(dare.__file__).parent}/"
NAMES = ("base", "math", "code")
MERGES = {
    "files to a file": ("{}/model.safetensors", "{}.safetensors"),
    "folders to a folder": ("{}", "{}"),
}
"""The form of inputs and output, by what is merged to what."""


def make_models(folder: Path) -> None:
    """Write a base and two fine-tunes of four matrices, as folders."""
    for seed, name in enumerate(NAMES):
        tensors = {}
        for layer in range(4):
            base = np.random.default_rng(layer).standard_normal((64, 64), np.float32)
            change = np.random.default_rng([seed, layer]).standard_normal((64, 64), np.float32)
            tensors[f"model.layers.{layer}.weight"] = base + np.float32(0.01 * (seed > 0)) * change
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text('{"model_type": "llama"}')


def touched(folder: Path, method: str, inputs: str, output: str) -> dict[str, set[str]]:
    """Return the functions that are called in a merge, by module."""
    found: dict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            found[code.co_filename.removeprefix(PACKAGE)].add(code.co_qualname)

    def merge(name: str) -> None:
        base, *models = (folder / inputs.format(name) for name in NAMES)
        target = folder / output.format(name)
        dare.merge(base=base, models=models, output=target, method=method, verbose=False)

    merge(f"{method}-warm")
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        merge(method)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="dare+linear")
    parser.add_argument("--list", action="store_true", help="name the modules, with functions")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        found = {what: touched(Path(folder), asked.method, *form) for what, form in MERGES.items()}
    print("| merge | modules | functions |\n|---|---:|---:|")
    for what, modules in found.items():
        print(f"| {what} | {len(modules)} | {sum(map(len, modules.values()))} |")
    for what, modules in found.items() if asked.list else ():
        print(f"\n{what}:\n")
        for module in sorted(modules):
            print(f"- `{module}`: {len(modules[module])}")


if __name__ == "__main__":
    main()
