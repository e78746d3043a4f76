"""What all tests share; its presence also lets them `import helpers`."""

import os
import signal

from hypothesis import settings

# Matrices are small and tests run on every core: more threads only wait for each other.
for library in ("OPENBLAS", "OMP"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Timing is asserted where it matters; elsewhere a busy machine must not fail a test.
settings.register_profile("dare", deadline=None, max_examples=30)
settings.load_profile("dare")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell runs in the background; the processes under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
