"""The model card of an output directory: what it is, what it was made from and how.

The text depends on the recipe, the inputs and what the merge found, not on the time, the machine
or the folder: of a path only the name is told.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dare.errors import Concern, Notice, Strength
from dare.inputs.directory import read_text
from dare.output.places import short_name, without_folders
from dare.output.report import Report
from dare.planning.plan import Plan
from dare.recipe.entries import distinct
from dare.stores.locations import to_path
from dare.tensors.mask import MASK_VERSION

NAME = "README.md"
TAGS = ("merge", "dare-merge")
INHERITED = ("license", "license_name", "license_link", "library_name", "pipeline_tag")
"""What the base's card says of itself and that holds for the output too."""
MACHINE_KEYS = ("input_digests", "output_digest", "threads", "max_memory", "verbose")
"""Keys of a recipe that do not decide what the output is."""
MAX_FRONT_MATTER = 1 << 19
"""Characters; the cards of embedding models carry their scores there, some 100,000."""

MOST_EVENTS = 50_000

_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)


def model_card(plan: Plan, report: Report, inherited: Mapping[str, str] | None = None) -> bytes:
    """Write the card of a finished merge; `inherited` is what it takes from the base's own."""
    title = plan.layout.target.name if plan.layout else "merged"
    *some, last = [_code(name) for name in plan.model_names]
    names = f"{', '.join(some)} and {last}" if some else last
    summary = (
        f"{names} merged onto {_code(short_name(plan.recipe.base))} with `{report.method}`,"
        f" seed {plan.recipe.seed}, by dare."
    )
    word = shlex.quote(" ".join(title.split()))
    text = f"""{_front_matter(plan, inherited or {})}
# {_inline(title)}

{summary}

## Models

{_models(plan, report)}

{_warnings(plan, report)}## Recipe

{_fenced("toml", _recipe(plan))}

## Reproduce

```bash
dare {word} --output again   # the same bytes, from the same inputs
dare verify {word}           # these bytes, to the bit
```

Mask version {MASK_VERSION}. Digests (XXH3-128 by tensor, as dare-manifest.json says):

{_digests(report)}
"""
    return text.encode(errors="replace")  # a file's name need not be text


# ---------------------------------------------------------------- the head


def _front_matter(plan: Plan, inherited: Mapping[str, str]) -> str:
    import yaml  # type: ignore[import-untyped]

    paths = [plan.recipe.base, *(entry.file for entry in plan.recipe.models)]
    metadata = {
        "base_model": list(dict.fromkeys(short_name(path).partition("@")[0] for path in paths)),
        "base_model_relation": "merge",
        "library_name": "transformers",
        **inherited,
        "tags": list(TAGS),
    }
    text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=math.inf)
    return f"---\n{text}---\n"


def inherited(directory: Path) -> dict[str, str]:
    """What is taken over from the card in the base's directory, if it has one that can be read."""
    import yaml

    card = (read_text(directory, NAME) or b"").decode(errors="replace")
    front = _FRONT_MATTER.match(card[:MAX_FRONT_MATTER].replace("\r\n", "\n"))
    try:
        # BaseLoader is safe and leaves scalars text: a licence may be called "no". The faster one,
        # libyaml's, crashes the process where lists are nested deeply.
        metadata = _bounded_loader(yaml)(front[1]).get_single_data() if front else None
    except (yaml.YAMLError, RecursionError, ValueError):
        metadata = None
    values = metadata if isinstance(metadata, dict) else {}
    return {
        key: values[key] for key in INHERITED if values.get(key) and isinstance(values[key], str)
    }


def _bounded_loader(yaml: Any) -> Any:
    """A loader that gives up after so many events: it takes seconds for 100,000."""

    class Bounded(yaml.BaseLoader):  # type: ignore[misc]
        events = 0

        def get_event(self) -> Any:
            self.events += 1
            if self.events > MOST_EVENTS:
                raise yaml.YAMLError("too many events")
            return super().get_event()

    return Bounded


# ---------------------------------------------------------------- the body


def _table(*rows: Sequence[str]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _models(plan: Plan, report: Report) -> str:
    head = "| model | from | weight | seed | dropped | asked | largest change | in |"
    rows = []
    for entry, model in zip(plan.recipe.models, report.models, strict=True):
        weights = model.weight if isinstance(model.weight, list) else [model.weight]
        realised, asked = model.drop_rate_realised, model.drop_rate_asked
        rows.append(
            [
                _code(model.name),
                _code(short_name(entry.file)),
                " to ".join(f"{weight:.6g}" for weight in weights),  # from first to last layer
                str(model.seed),
                "–" if realised is None else f"{realised:.4%}",
                "–" if asked is None else f"{asked:.4%}",
                f"{model.largest_delta:.3g}",
                _code(model.largest_delta_in) if model.largest_delta_in else "–",
            ]
        )
    return f"{head}\n|---|---|---:|---:|---:|---:|---:|---|\n{_table(*rows)}"


def _digests(report: Report) -> str:
    names = [_code(model.name) for model in report.models]
    digests = [report.digests.base, *report.digests.models, report.digests.output]
    rows = zip(["base", *names, "output"], digests, strict=True)
    return "| | digest |\n|---|---|\n" + _table(*([name, f"`{digest}`"] for name, digest in rows))


def _warnings(plan: Plan, report: Report) -> str:
    lines = [
        f"- {_graded(notice)}: {_inline(without_folders(notice.text, plan.recipe.paths))}\n"
        for notice in report.warnings
        if notice.about is not Concern.LEFTOVERS
    ]
    return f"## Warnings\n\n{''.join(lines)}\n" if lines else ""


def _graded(notice: Notice) -> str:
    """What a notice is about, and that it is a strong one."""
    return f"**{notice.about}**" if notice.strength is Strength.STRONG else str(notice.about)


def _recipe(plan: Plan) -> str:
    import tomli_w

    files = distinct([short_name(entry.file) for entry in plan.recipe.models])
    shortened = plan.recipe.with_files(
        to_path(short_name(plan.recipe.base)),
        list(map(to_path, files)),
        plan.recipe.output and Path(plan.recipe.output.name),
    )
    document: dict[str, Any] = {
        key: without_folders(value) if isinstance(value, str) else value
        for key, value in shortened.to_document().items()
        if key not in MACHINE_KEYS
    }
    usual = {"method": plan.recipe.method, "seed": plan.recipe.seed}
    return tomli_w.dumps({**usual, **document})


def _fenced(language: str, text: str) -> str:
    fence = "```" if "```" not in text else "`" * (len(max(re.findall("`+", text))) + 1)
    return f"{fence}{language}\n{text}{fence}"


def _code(text: str) -> str:
    """Code in a line or a table's cell."""
    plain = _one_line(text).replace("`", "'")
    return f"`{plain}`"


def _inline(text: str) -> str:
    """Text that is no markup, in a line or a table's cell."""
    return _one_line(text).replace("<", "&lt;").replace("[", "\\[")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
