"""The stages: importing this package registers all of them.

To add one, write its function in a file here, the one of its family or a new one, and decorate it.
Every file of the folder is imported.
"""

from importlib import import_module
from pkgutil import iter_modules

from dare.stages.registry import (
    ALIASES,
    IMPLIED,
    STAGES,
    Settings,
    Stage,
    find_stage,
    list_in_order,
    parse_method,
)

__all__ = ["ALIASES", "IMPLIED", "STAGES", "Settings", "Stage", "find_stage", "parse_method"]

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
list_in_order()
