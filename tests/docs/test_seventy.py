"""The page on 70 billion parameters says what the plan and the rates give."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("seventy", ROOT / "bench" / "seventy.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["seventy"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_script_and_no_range_is_wide():
    script = load_script()
    page = (ROOT / "docs" / "70b.md").read_text().splitlines()
    lines = list(script.tables())
    assert [line for line in lines if line and line not in page] == []
    rows = list(script.rows())
    assert {row.method for row in rows} == {"dare+linear", "dare+ties", "trim+ties"}
    for row in rows:
        assert row.low <= row.high <= 4 * row.low  # as the page says
        assert sum(tensor.elements for tensor in row.plan.tensors) == 70_553_706_496
