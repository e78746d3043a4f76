"""`python -m dare` is the command `dare`."""

import subprocess
import sys

import pytest

from dare import __version__


@pytest.mark.parametrize("command", [["-m", "dare"], ["-c", "from dare.cli import main; main()"]])
def test_the_module_is_the_command(command):
    done = subprocess.run(
        [sys.executable, *command, "--version"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"dare {__version__}\n", "")
