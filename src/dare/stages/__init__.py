"""The stages: importing this package registers all of them.

To add one, write its function in a file here, decorate it and import the file below.
"""

from dare.stages import (
    breadcrumbs,
    cabs,
    consensus,
    dare,
    darex,
    della,
    emr,
    fourier,
    iso,
    karcher,
    knots,
    linear,
    model_stock,
    nm,
    nuslerp,
    pcb,
    slerp,
    star,
    ties,
    trim,
    tsv,
    wudi,
)
from dare.stages.blocks import Block, Deltas, Mask, Scratch, Walk
from dare.stages.methods import ALIASES, parse_method
from dare.stages.registry import STAGES, Parameter, Round, Settings, Stage

__all__ = [
    "ALIASES",
    "STAGES",
    "Block",
    "Deltas",
    "Mask",
    "Parameter",
    "Round",
    "Scratch",
    "Settings",
    "Stage",
    "Walk",
    "breadcrumbs",
    "cabs",
    "consensus",
    "dare",
    "darex",
    "della",
    "emr",
    "fourier",
    "iso",
    "karcher",
    "knots",
    "linear",
    "model_stock",
    "nm",
    "nuslerp",
    "parse_method",
    "pcb",
    "slerp",
    "star",
    "ties",
    "trim",
    "tsv",
    "wudi",
]
