"""LoRA adapters that are made: several merged into one, or one extracted from a full fine-tune."""

from dare.lora.extraction import extract_adapter
from dare.lora.merging import AdapterPlan, merge_adapters, plan_adapters, run_plan
from dare.lora.writing import AdapterReport, ExtractionReport, ModuleReport, OmittedTensor

__all__ = [
    "AdapterPlan",
    "AdapterReport",
    "ExtractionReport",
    "ModuleReport",
    "OmittedTensor",
    "extract_adapter",
    "merge_adapters",
    "plan_adapters",
    "run_plan",
]
