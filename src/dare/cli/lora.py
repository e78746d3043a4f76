"""`dare lora`: adapters into one adapter, and a model into an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from dare.cli import DONE, show
from dare.cli.flags import RUN, Debug, Json, Overwrite, Quiet, output_flag, several, switch
from dare.cli.texts import COMMANDS
from dare.lora.extraction import extract_adapter
from dare.lora.merging import plan_adapters, run_plan

lora = App(name="lora", help=COMMANDS["lora"], help_format="rich", help_epilogue="")

Rank = Annotated[int | None, Parameter(help="Rank of the result.")]
Energy = Annotated[float | None, Parameter(help="Or: the share of the squared change to keep.")]
Output = Annotated[Path, output_flag("Directory of the adapter.")]
Type = Annotated[Literal["F32", "F16", "BF16"], Parameter(help="Storage type.")]


@lora.command
def merge(
    adapters: Annotated[list[Path], Parameter(help="LoRA adapters of one base, from PEFT.")],
    /,
    *,
    output: Output,
    weight: Annotated[list[float] | None, several("Weights, one for each adapter.")] = None,
    method: Annotated[str, Parameter(help="As in a merge: sum, dare+linear, ties, …")] = "linear",
    rank: Rank = None,
    energy: Energy = None,
    drop_rate: Annotated[float | None, Parameter(help="Share of each delta to drop.")] = None,
    seed: int = 42,
    scale: float = 1.0,
    dtype: Type = "F32",
    threads: int | None = None,
    max_memory: Annotated[str | None, Parameter(help="Memory for buffers and factors.")] = None,
    dry_run: Annotated[bool, switch("Show the plan, but do not merge.", group=RUN)] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Merge LoRA adapters into one, without the base.

    Without --rank and --energy the result is exact, and its rank the sum of the ranks.
    """
    plan = plan_adapters(
        adapters,
        weights=weight,
        method=method,
        rank=rank,
        energy=energy,
        drop_rate=drop_rate,
        seed=seed,
        scale=scale,
        dtype=dtype,
        threads=threads,
        max_memory=max_memory,
    )
    console = show.console(json=json, quiet=quiet)
    if dry_run:
        show.document(console, plan.document())
    else:
        show.result(console, run_plan(plan, output, overwrite=overwrite), as_json=json)
    return DONE


@lora.command
def extract(
    *,
    base: Annotated[Path, Parameter(name=["--base", "-b"], help="The model before fine-tuning.")],
    model: Annotated[Path, Parameter(name=["--model", "-m"], help="The fine-tuned model.")],
    output: Output,
    rank: Rank = None,
    energy: Energy = None,
    modules: Annotated[list[str] | None, several("Patterns of modules to take.")] = None,
    save_others: Annotated[
        bool, Parameter(negative="", help="Store other changed tensors in full.")
    ] = False,
    base_name: Annotated[
        str | None, Parameter(help="Name of the base in the adapter, if not that of its folder.")
    ] = None,
    as_stored: Annotated[
        bool, Parameter(negative="", help="Take names from the file, not from transformers.")
    ] = False,
    dtype: Type = "F32",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Extract a LoRA from a fine-tuned model: its change to the base, cut to a rank."""
    report = extract_adapter(
        base,
        model,
        output,
        rank=rank,
        energy=energy,
        modules=modules,
        save_others=save_others,
        base_name=base_name,
        as_stored=as_stored,
        dtype=dtype,
        overwrite=overwrite,
    )
    show.result(show.console(json=json, quiet=quiet), report, as_json=json)
    return DONE
