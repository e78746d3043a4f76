"""What `dare methods --json` tells of stages and their parameters."""

from __future__ import annotations

import pytest

from dare.stages import ALIASES, STAGES
from dare.stages.registry import catalogue


def test_methods_are_those_of_the_registry():
    shown = catalogue(STAGES)
    assert shown["aliases"] == ALIASES
    stages = {stage["name"]: stage for stage in shown["stages"]}
    assert list(stages) == list(STAGES)
    assert stages["slerp"]["models"] == 2
    assert stages["slerp"]["default_weight"] is None
    assert stages["linear"]["models"] is None
    assert stages["linear"]["default_weight"][:3] == [1, 1 / 2, 1 / 3]
    assert stages["sum"]["default_weight"][:3] == [1, 1, 1]
    assert "default_weight" not in stages["dare"]


@pytest.mark.parametrize(
    ("stage", "name", "control"),
    [
        ("dare", "drop_rate", {"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
        ("dare", "rescale", {"type": "choice", "options": [True, False, "l1"]}),
        ("trim", "scope", {"type": "choice", "options": ["tensor", "model"]}),
        ("cabs", "rescale", {"type": "boolean"}),
        ("nm", "m", {"type": "integer", "minimum": 1, "maximum": 4096}),
        ("darex", "q", {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "optional": True}),
    ],
)
def test_a_control_can_be_made_of_a_parameter(stage, name, control):
    assert STAGES[stage].parameters[name].control == {"optional": False, **control}


def test_every_control_allows_the_default_and_nothing_wrong():
    for stage in STAGES.values():
        for parameter in stage.parameters.values():
            control = parameter.control
            assert control["type"] in ("boolean", "choice", "number", "integer")
            values = [*control.get("options", []), control.get("minimum"), control.get("maximum")]
            for value in values:
                if value is not None:
                    assert parameter.check(value, "") == value
            if parameter.default is None:
                assert control["optional"]
            elif "options" in control:
                assert parameter.default in control["options"]
