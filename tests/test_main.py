"""`python -m dare` is the command `dare`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dare import __version__
from helpers import save


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "dare", "--version"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"dare {__version__}\n", "")


def left_behind(before: str, *arguments: str, **variables: str) -> list[object]:
    """What a call of `main` leaves: is the collector on, what is frozen, BLAS's threads."""
    code = f"""
import gc, json, os, sys
frozen = gc.get_freeze_count()  # Python 3.12 starts with some
{before}
from dare.cli import main
main({list(arguments)!r})
frozen = gc.get_freeze_count() - frozen
print(json.dumps([gc.isenabled(), frozen, os.environ.get("OPENBLAS_NUM_THREADS")]))
"""
    environment = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment | variables,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_collector_is_left_as_it_was_and_blas_gets_one_thread_where_more_would_wait():
    assert left_behind("", "methods", "dare") == [True, 0, "1"]
    assert left_behind("", "methods", "dare", OPENBLAS_NUM_THREADS="2")[2] == "2"
    # its matrices are large
    assert left_behind("", "lora", "--help")[2] is None
    # too late, and not ours
    assert left_behind("gc.disable(); import numpy", "methods", "dare") == [False, 0, None]
    # what the user says, also where the call is refused
    assert left_behind("", "merge", "--no-such-flag", OMP_NUM_THREADS="2") == [True, 0, None]


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("dare.run.engine:run_steps", "{0}/base.safetensors {0}/tuned.safetensors -o {0}/out"),
        (
            "dare.studies.searching:Study",
            "sweep --base {0}/base.safetensors --merge {0}/tuned.safetensors "
            "--over scale=1 --eval dare.demo.merges:validation --study {0}/study.db",
        ),
    ],
)
def test_the_collector_is_on_while_a_command_works(tmp_path: Path, place: str, arguments: str):
    for name, value in (("base", 0.0), ("tuned", 1.0)):
        save(tmp_path / f"{name}.safetensors", {"w": np.full(4, value, np.float32)})
    module, name = place.split(":")
    code = f"""
import gc, importlib, sys
from dare.cli import main
def work(*_given, **_more):
    print("collects", gc.isenabled(), gc.get_freeze_count() > 10_000)
    raise KeyboardInterrupt
setattr(importlib.import_module({module!r}), {name!r}, work)
sys.argv = ["dare", *{arguments.format(tmp_path)!r}.split()]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "collects True True" in done.stdout.splitlines(), done.stderr
