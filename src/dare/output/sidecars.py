"""The files that a model needs besides its weights, in an output folder, and its card.

The card says what the model is, what it was made from and how. Its text depends on the recipe, the
inputs and the figures of the merge, not on the time, the machine or the folder.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dare.documents.notices import LEFTOVERS, Notice, Severity, catalogue, notice
from dare.inputs.directory import (
    Changes,
    StopTokens,
    chat_template_of,
    choose_chat_template,
    collect,
    main_type,
    read_text,
    renumber_stop_tokens,
    stop_tokens_of,
)
from dare.inputs.names import find_tied
from dare.inputs.opening import Inputs
from dare.inputs.pipeline import collect_components
from dare.inputs.shards import components_of
from dare.inputs.sources import CONFIG, TIED, read_config, says_tied
from dare.output.receipt import Report, short_name, without_folders
from dare.planning.data import Layout
from dare.planning.plan import Plan
from dare.recipe.entries import number_duplicates
from dare.recipe.fields import NOT_RECORDED
from dare.recipe.recipe import Recipe
from dare.recipe.settings import moved
from dare.stores.locations import looks_like_name, parse_address, parse_name, to_path
from dare.tensors.dtypes import StorageType
from dare.tensors.files import is_there
from dare.tensors.header import Described
from dare.tensors.mask import MASK_VERSION

CARD_NAME = "README.md"
TAGS = ("merge", "dare-merge")
LICENCE = ("license", "license_name", "license_link")
# Fields of the base's card that hold for the output too, with one value or with several.
INHERITED = (*LICENCE, "library_name", "pipeline_tag")
INHERITED_LISTS = ("language", "tags")
MOST_VALUES = 100
# Licences under which a work may be passed on under any that comes later, or that is not here.
PERMISSIVE = ("cc0-1.0", "unlicense", "mit", "bsd-2-clause", "bsd-3-clause", "apache-2.0")
MAX_FRONT_MATTER = 1 << 19  # characters; cards with scores have some 100,000
MOST_EVENTS = 50_000
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)


def with_sidecars(planned: Plan, inputs: Inputs) -> Plan:
    """Add to a plan the files beside the weights, if the output is a folder."""
    recipe, aligned = planned.recipe, inputs.aligned
    chosen = 0 if recipe.copy_from is None else recipe.number_of(recipe.copy_from, "copy_from")
    layout, home = planned.layout, inputs.folders[chosen]
    if layout is None or not (layout.is_directory or (layout.recoding and home)):
        return planned
    if home is not None and components_of(home):
        sidecars = collect_components(home, _types_of_folders(layout))
        card, licences = card_fields([inputs.folders[0] or home, *inputs.folders[1:]])
        card = {"library_name": "diffusers", **card}
        notes = (*planned.notes, *sidecars.notes, *licences)
        return replace(planned, notes=notes, sidecars=sidecars, base_card=card)
    planned = _with_missing_configuration(planned, inputs, chosen)
    if home is None:
        return planned
    fitting = aligned.tokenizer
    is_decided = fitting is not None and inputs.folders[fitting] is not None
    tokenizer = fitting if fitting is not None and is_decided else chosen
    template, giver, notes = _template(recipe, inputs, chosen, tokenizer)
    tokens = aligned.tokens[0 if is_decided else 1 + chosen] if aligned.tokens else None
    stop, notices = _stop_tokens(inputs, giver)
    tied, said = find_tied(planned.base), says_tied(read_config(home))
    is_new = tied is False and bool(planned.base.layers or planned.base.extras)
    is_wrong = tied is (not said) if said is not None else is_new
    is_coded = layout.recoding is not None and not layout.recoding.replacing
    changes = Changes(
        dtype=None if is_coded else main_type(t for f in layout.files.values() for t in f),
        vocab_size=aligned.resized(chosen),
        token_ids=aligned.token_ids[chosen] if aligned.token_ids else None,
        chat_template=template,
        stop_tokens=None if giver == chosen == tokenizer else stop,
        tokens=tokens,
        layers=planned.sources[chosen].layers,
        config={**inputs.config, TIED: tied} if is_wrong else inputs.config,
        recoded=layout.recoding.config if layout.recoding else {},
    )
    sidecars = collect(
        home, changes, tokenizer=inputs.folders[tokenizer], replaced=aligned.tokenizer_files
    )
    warnings = (*planned.warnings, *notices)
    if layout.recoding is not None:
        layout = replace(layout, recoding=layout.recoding.with_files(sidecars))
    if not layout.is_directory:
        return replace(planned, layout=layout, warnings=warnings, notes=(*planned.notes, *notes))
    card, licences = card_fields(inputs.folders)
    return replace(
        planned,
        layout=layout,
        warnings=warnings,
        notes=(*planned.notes, *sidecars.notes, *notes, *licences),
        sidecars=sidecars,
        base_card=card,
    )


def _types_of_folders(layout: Layout) -> dict[str, StorageType | None]:
    """Return the main type of each component's weights."""
    tensors: dict[str, list[Described]] = {}
    for file, in_file in layout.files.items():
        tensors.setdefault(file[: file.rfind("/") + 1], []).extend(in_file)
    return {folder: main_type(in_folder) for folder, in_folder in tensors.items()}


def _template(
    recipe: Recipe, inputs: Inputs, chosen: int, tokenizer: int
) -> tuple[str | None, int, tuple[Notice, ...]]:
    """Return the template to write, if any; the input that gives it and the stop tokens; notes.

    Input `chosen` gives the configuration, and the template if it has one; `tokenizer` gives the
    tokenizer, and the template before all others if the recipe names a model for its tokens.
    """
    templates = [None if home is None else chat_template_of(home) for home in inputs.folders]
    is_models = isinstance(recipe.vocabulary_of, int) and recipe.copy_from is None
    first = tokenizer if is_models else chosen
    default = next((n for n in (first, chosen) if templates[n] is not None), tokenizer)
    home = inputs.folders[default]
    assert home is not None
    models = dict(zip(inputs.names, inputs.folders[1:], strict=True))
    setting = recipe.chat_template
    may_name = setting != "auto" and "{" not in setting
    named = recipe.find_models(setting, "chat_template") if may_name else []
    setting = inputs.names[named[0]] if named else setting
    template, notes = choose_chat_template(setting, home, models)
    if template is None and default != tokenizer:
        template = templates[default]
    if template is None:
        return None, first if templates[default] is None else default, notes
    givers = (*(1 + number for number in named), default, *range(1, len(templates)))
    giver = next((number for number in givers if templates[number] == template), first)
    if setting == "auto" and giver != default and (lost := _lost(inputs, giver)):
        unused = notice("unused_template", inputs.names[giver - 1], lost=lost)
        return None, first, (unused,)
    return template, giver, notes


def _lost(inputs: Inputs, giver: int) -> str:
    """Return the stop tokens of a model that the output does not have."""
    home, tokens = inputs.folders[giver], inputs.aligned.tokens
    if home is None or not tokens or tokens[0] is None or inputs.aligned.tokenizer is None:
        return ""
    ids = tokens[1 + giver]
    return ", ".join(sorted(stop_tokens_of(home, ids).texts(ids) - tokens[0].keys()))


def _stop_tokens(inputs: Inputs, giver: int) -> tuple[StopTokens | None, list[Notice]]:
    """Return the stop tokens with the output's ids, and a notice if the models' differ."""
    aligned = inputs.aligned
    tokens = aligned.tokens[1:] or [None] * len(inputs.folders)
    read = [
        None if home is None else stop_tokens_of(home, known)
        for home, known in zip(inputs.folders, tokens, strict=True)
    ]
    stop = read[giver]
    if stop is None:
        return None, []
    texts = [
        frozenset[str]() if each is None else each.texts(known)
        for each, known in zip(read, tokens, strict=True)
    ]
    names = ("base", *inputs.names)
    others = [
        f"{name} with {', '.join(sorted(theirs))}"
        for name, theirs in zip(names, texts, strict=True)
        if theirs and texts[giver] and theirs != texts[giver]
    ]
    notices = []
    if others:
        own = ", ".join(sorted(texts[giver]))
        whose = "; ".join(others)
        notices.append(notice("stop_tokens", own=own, giver=names[giver], others=whose))
    if aligned.token_ids and (ids := aligned.token_ids[giver]) is not None:
        stop = renumber_stop_tokens(stop, ids, names[giver])
    return stop, notices


def _with_missing_configuration(planned: Plan, inputs: Inputs, chosen: int) -> Plan:
    """Say that an output will have no configuration, and which model has one."""
    has_one = [folder is not None and is_there(folder / CONFIG) for folder in inputs.folders]
    if has_one[chosen]:
        return planned
    whose = f"{('the base', *inputs.names)[chosen]}'s"
    others = [name for name, has in zip(inputs.names, has_one[1:], strict=True) if has]
    severity, remedy = Severity.NOTE, "Put a config.json beside the output yourself"
    if others:
        given = f"copy_from = {others[0]!r} (--copy-from {shlex.quote(others[0])})"
        severity, remedy = Severity.WARNING, f"Set {given} to take it and the tokenizer from there"
    found = notice("no_configuration", severity=severity, whose=whose, file=CONFIG, remedy=remedy)
    return planned.saying(warnings=[found])


def sidecar_files(planned: Plan, report: Report) -> dict[str, bytes | Path]:
    """Return the files that go beside the weights, the card among them."""
    assert planned.sidecars is not None
    return {**planned.sidecars.files, CARD_NAME: model_card(planned, report)}


# ---------------------------------------------------------------- the card


def model_card(plan: Plan, report: Report) -> bytes:
    """Write the card of a finished merge."""
    title = _title(plan)
    names = [_code(name) for name in plan.model_names]
    base = _code(short_name(plan.recipe.base))
    summary = f"{base} passed through by dare."
    if plan.recipe.layers:
        models = ", ".join(dict.fromkeys(_code(short_name(p)) for p in plan.recipe.merged_models))
        summary = f"A stack of layers of {models}, made by dare."
    elif names:
        *some, last = names
        models = f"{', '.join(some)} and {last}" if some else last
        seed = f", seed {plan.recipe.seed}," if plan.is_random else ""
        summary = f"{models} merged into {base} with `{report.method}`{seed} by dare."
    word = shlex.quote(" ".join(title.split()))
    if plan.layout is not None and plan.layout.is_on_hub:
        word = shlex.quote(str(plan.layout.target))
    text = f"""{front_matter(plan, plan.recipe.merged_models)}
# {inline(title)}

{summary}

{_measured(plan)}{_models(plan, report)}{_format(report)}{_warnings(plan, report)}## Recipe

{fenced("toml", _recipe(plan))}

## Reproduce

```bash
dare {word} --output again   # the same bytes, from the same inputs
dare verify {word}           # checks every byte
```

Mask version {MASK_VERSION}. Digests (XXH3-128 by tensor, as dare-manifest.json says):

{_digests(report)}
"""
    return text.encode(errors="replace")  # a file's name need not be text


def _title(plan: Plan) -> str:
    name = plan.layout.target.name if plan.layout else "merged"
    return name.partition("@")[0] if plan.layout and plan.layout.is_on_hub else name


def front_matter(plan: Plan, paths: Sequence[Path], *tags: str) -> str:
    """Return the fields at the beginning of a card; `paths` are the models that were merged."""
    import yaml  # type: ignore[import-untyped]

    names = list(dict.fromkeys(map(_base_model, paths)))
    if plan.layout is not None and plan.layout.is_on_hub:
        names = list(filter(looks_like_name, names))  # as the hub takes no others
    card = plan.base_card or {}
    task = {"type": card.get("pipeline_tag", "other")}
    index = {"name": _title(plan), "results": [{"task": task, **result} for result in plan.scores]}
    metadata = {
        **({"base_model": names, "base_model_relation": "merge"} if names else {}),
        "library_name": "transformers",
        **card,
        "tags": list(dict.fromkeys([*TAGS, *tags, *card.get("tags", ())])),
        **({"model-index": [index]} if plan.scores else {}),
    }
    text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=math.inf)
    return f"---\n{text}---\n"


def _base_model(path: Path) -> str:
    """Return the name of a model in a card: for one on the hub, its repository."""
    text = short_name(path)
    name = parse_address(text) if text.startswith("hf://") else parse_name(text)
    return text if name is None else name.repo


def card_fields(folders: Sequence[Path | None]) -> tuple[dict[str, Any], list[Notice]]:
    """Return what the inputs' cards say for the output's, and a note if it has no licence.

    Of several licences the strictest holds, if all others may be passed on under it.
    """
    cards = [inherited(folder) if folder else {} for folder in folders]
    licences: dict[tuple[str, ...], dict[str, Any]] = {}
    for card in (card for card in cards if "license" in card):
        licence = {key: card[key] for key in LICENCE if key in card}
        licences.setdefault(tuple(text.lower() for text in licence.values()), licence)
    ranks = {name: rank for rank, name in enumerate(PERMISSIVE)}
    ordered = sorted(licences, key=lambda key: ranks.get(key[0], len(ranks)))
    fields = {key: value for key, value in cards[0].items() if key not in LICENCE}
    names = [key[0] for key in ordered]
    clash = "apache-2.0" in names and any(name.startswith("gpl-2.0") for name in names)
    if clash or (len(ordered) > 1 and names[-2] not in ranks):
        return fields, [notice("licences", licences=", ".join(names))]
    return (licences[ordered[-1]] if ordered else {}) | fields, []


def inherited(directory: Path) -> dict[str, Any]:
    """Return the fields that the output's card takes from the base's card, if that can be read."""
    import yaml

    card = (read_text(directory, CARD_NAME) or b"").decode(errors="replace")
    front = _FRONT_MATTER.match(card[:MAX_FRONT_MATTER].replace("\r\n", "\n"))
    try:
        # BaseLoader is safe and keeps scalars as text: a licence may be called "no". The faster
        # loader of libyaml crashes the process if lists are nested deeply.
        metadata = _bounded_loader(yaml)(front[1]).get_single_data() if front else None
    except (yaml.YAMLError, RecursionError, ValueError):
        metadata = None
    values = metadata if isinstance(metadata, dict) else {}
    found: dict[str, Any] = {
        key: text for key in INHERITED if (text := values.get(key)) and isinstance(text, str)
    }
    for key in INHERITED_LISTS:
        given = values.get(key)
        listed = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        if texts := [text for text in listed[:MOST_VALUES] if text and isinstance(text, str)]:
            found[key] = texts
    return found


def _bounded_loader(yaml: Any) -> Any:
    """Return a loader that stops after `MOST_EVENTS` events: 100,000 would take seconds."""

    class Bounded(yaml.BaseLoader):  # type: ignore[misc]
        events = 0

        def get_event(self) -> Any:
            self.events += 1
            if self.events > MOST_EVENTS:
                raise yaml.YAMLError("too many events")
            return super().get_event()

    return Bounded


def markdown_rows(*rows: Sequence[str]) -> str:
    """Return rows of a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _models(plan: Plan, report: Report) -> str:
    if not report.models:
        return ""
    head = "| model | from | weight | seed | dropped | drop rate | largest change | in tensor |"
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
    table = f"{head}\n|---|---|---:|---:|---:|---:|---:|---|\n{markdown_rows(*rows)}"
    return f"## Models\n\n{table}\n\n"


def _measured(plan: Plan) -> str:
    return f"## Scores\n\n{plan.measured.strip()}\n\n" if plan.measured else ""


def _format(report: Report) -> str:
    return f"## Format\n\n{inline(str(report.recoded))}.\n\n" if report.recoded else ""


def _digests(report: Report) -> str:
    names = [_code(model.name) for model in report.models]
    digests = [report.digests.base, *report.digests.models, report.digests.output]
    rows = zip(["base", *names, "output"], digests, strict=True)
    return "| | digest |\n|---|---|\n" + markdown_rows(
        *([name, f"`{digest}`"] for name, digest in rows)
    )


def _warnings(plan: Plan, report: Report) -> str:
    lines = ""
    for given in report.warnings:
        if given.code != LEFTOVERS:
            mark = "**" if given.severity is Severity.SEVERE else ""
            text = inline(without_folders(str(given), plan.recipe.paths))
            lines += f"- {mark}{catalogue()[given.code].title}{mark}: {text}\n"
    return f"## Warnings\n\n{lines}\n" if lines else ""


def _recipe(plan: Plan) -> str:
    import tomli_w

    recipe = plan.recipe
    names = number_duplicates([short_name(path) for path in recipe.inputs])
    shorter = dict(zip(recipe.inputs, map(to_path, names), strict=True))
    shortened = moved(recipe, shorter.__getitem__, recipe.output and Path(recipe.output.name))
    document: dict[str, Any] = {
        key: without_folders(value) if isinstance(value, str) else value
        for key, value in shortened.without(NOT_RECORDED).to_tables().items()
    }
    usual = {"method": recipe.method} | ({"seed": recipe.seed} if plan.is_random else {})
    return tomli_w.dumps({**document, **usual})


def fenced(language: str, text: str) -> str:
    """Return text as a block of code, even if it contains fences."""
    fence = "```" if "```" not in text else "`" * (len(max(re.findall("`+", text))) + 1)
    return f"{fence}{language}\n{text}{fence}"


def _code(text: str) -> str:
    """Return code for a line or a table's cell."""
    return "`" + _one_line(text).replace("`", "'") + "`"


def inline(text: str) -> str:
    """Return text for a line or a table's cell, without markup."""
    return _one_line(text).replace("<", "&lt;").replace("[", "\\[")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
