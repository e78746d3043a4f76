"""Merge by mergekit as often as asked, in one process that has everything imported.

Each line of stdin is a JSON object with a configuration and an output folder; for each, a line with
the seconds is printed. This is how mergekit-evolve merges to disk; its program `mergekit-yaml`
would start Python and import torch each time.
"""

from __future__ import annotations

import json
import sys
import time

from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

OPTIONS = MergeOptions(copy_tokenizer=False, quiet=True, random_seed=42)

for line in sys.stdin:
    job = json.loads(line)
    started = time.perf_counter()
    run_merge(MergeConfiguration.model_validate(job["configuration"]), job["output"], OPTIONS)
    print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
