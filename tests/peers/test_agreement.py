"""The table of agreement: that it is complete, and that it says what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agreement import Agreement, Row, Subject
from side_by_side import DEFINITION

from dare.recipe.mergekit.methods import METHODS

IN_PEFT = ("task_arithmetic", "dare_linear", "dare_ties", "ties", "magnitude_prune")
DEFINED = (
    *("star", "fourier", "tsv", "iso (Iso-C)", "iso (Iso-CTS)", "knots"),
    *("ties", "consensus", "emr", "pcb", "cabs"),
)
NEEDED = {
    *((method, "mergekit") for method in METHODS if method != "passthrough"),  # it copies
    *((method, "mergekit YAML") for method in METHODS),
    *((method, "PEFT") for method in IN_PEFT),
    *((method, DEFINITION) for method in DEFINED),
}


def test_every_method_that_a_peer_has_is_compared(request):
    items = request.session.items
    files = {item.path.name for item in items}
    if not {file.name for file in Path(__file__).parent.glob("test_*.py")} <= files:
        pytest.skip("only a part of the tests was asked for")
    compared = {
        marker.args
        for item in items
        if not item.name.startswith("test_difference")
        for marker in [item.get_closest_marker("compares")]
        if marker is not None
    }
    assert NEEDED - compared == set()


@pytest.fixture
def found():
    agreement = Agreement()
    ties = Subject("ties", "PEFT")
    agreement.running = (ties, "first")
    agreement.measure(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    agreement.measure(torch.tensor([torch.inf, 8.25]), torch.tensor([torch.inf, 8.0]))
    agreement.running = (ties, "second")
    agreement.measure(torch.tensor([[4.0]]), torch.tensor([[4.0]]))
    agreement.measure(torch.tensor([]), torch.tensor([]))
    agreement.running = None
    agreement.measure(torch.tensor([9.0]), torch.tensor([0.0]))  # of a test that compares nothing
    agreement.reasons += [(ties, "why"), (ties, "why"), (Subject("dare", "PEFT"), "so")]
    return agreement.rows()


def test_a_row_has_the_largest_difference_and_every_case_once(found):
    assert found == [
        Row("dare", "PEFT", 0, 0.0, 0.0, ("so",)),
        Row("ties", "PEFT", 2, 0.5, 0.25, ("why",)),
    ]
