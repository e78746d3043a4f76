"""The stages: importing this package registers all of them.

To add one, write its function in a file here, decorate it and import the file below.
"""

from dare.stages import dare, linear, slerp, ties, trim
from dare.stages.blocks import Block, Deltas, Mask, Scratch, Walk
from dare.stages.registry import ALIASES, STAGES, Parameter, Settings, Stage, parse_method

__all__ = [
    "ALIASES",
    "STAGES",
    "Block",
    "Deltas",
    "Mask",
    "Parameter",
    "Scratch",
    "Settings",
    "Stage",
    "Walk",
    "dare",
    "linear",
    "parse_method",
    "slerp",
    "ties",
    "trim",
]
