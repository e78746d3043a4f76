"""Mutated files of every format are read or refused, and nothing else: a short run of `fuzz`."""

from __future__ import annotations

import pytest
from fuzz import TARGETS, attack
from targets import is_possible

CASES = {
    "headers": 8000,
    "indexes": 1500,
    "gguf": 1000,
    "quantised": 100,
    "torch": 50,
    "checkpoints": 150,
    "zero": 300,
    "deltas": 250,
    "recipes": 300,
    "yaml": 250,
    "adapters": 600,
    "lora_files": 400,
    "tokenizers": 150,
    "manifests": 200,
    "analyses": 50,
    "reports": 4,
}
"""In `make test`: about a second for each format."""


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_is_read_or_refused_by_name(
    name: str, attack_size: int, attack_seed: int
) -> None:
    if not is_possible(name):
        pytest.skip(f"what reads {name} is not installed")
    tally = attack(name, attack_seed, 0, CASES[name] * attack_size)
    assert tally.failures == []
    assert tally.cases == CASES[name] * attack_size
    assert tally.refused > 0
    assert name == "reports" or tally.accepted > 0
