"""The parts of the documentation that are made from the program itself.

A page says where such a part is:

    <!-- generated: methods -->
    <!-- end -->

`python docs/generate.py` writes the parts into the pages, so that the repository has them too, and
a test holds them up to date. When the site is built, pictures of stages become part of the page,
with a gallery of them at `<!-- gallery -->`; pictures of our pages follow the theme, notebooks
become pages, and the files that `dare playground --build` writes are added. Two pages are files of
the repository's root: contributing.md and changelog.md. What a stage costs was measured by
bench/costs.py, and its picture drawn by make_method_pictures.py. The colours are those of the
program's own pages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare.analysis.advice import HABITS
from dare.analysis.readiness import RULES, STOPPING, Verdict
from dare.cli.flags import FIELDS
from dare.documents.charts import THEMES
from dare.documents.notices import LIMITS, NoticeKind, Severity, catalogue
from dare.documents.values import form_of
from dare.documents.words import counted
from dare.errors import DareError
from dare.recipe.entries import OTHER_NAMES
from dare.recipe.options import Range, RunOptions, Search
from dare.recipe.recipe import ModelEntry, Recipe, TensorRule
from dare.stages import ALIASES, STAGES, Stage
from dare.stages.registry import of_kind
from dare.tensors.names import EMBEDDINGS, PROJECTIONS
from dare.web.assets import page_assets

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
WIDEST_INTEGER = 1 << 63
SIDE = 4096
"""Of a matrix that memory is reckoned for."""
SURE_TIMES = 10
"""Up to here a ratio of times has a digit after the point."""
COSTS = json.loads((ROOT / "docs/method-costs.json").read_text("utf-8"))
"""What bench/costs.py has measured."""
RESULT_FROM, HEAD = 336, 20
"""Where the result begins in the picture of a stage, and the height of its captions."""
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
NOTEBOOKS = ("examples/merge.ipynb", "examples/training.ipynb")

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.S)
_PICTURE = re.compile(r"!\[[^\]]*\]\(images/methods/(\w+)\.svg\)")
_GALLERY = "<!-- gallery -->"
_SHOT = re.compile(r"(!\[[^\]]*\]\([^)]*-)light(-\w+\.png)\)")
"""A picture of a page, which there is in dark colours too."""


# ---------------------------------------------------------------- mkdocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie in the repository's root, notebooks and the playground."""
    from mkdocs.structure.files import File

    for name, source in FROM_ROOT.items():
        text = (ROOT / source).read_text("utf-8")
        text = text.replace("](docs/", "](")
        for other, its_source in FROM_ROOT.items():
            text = text.replace(f"]({its_source}", f"]({other}")
        files.append(File.generated(config, name, content=text))
    for source in NOTEBOOKS:
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, source, content=text))
        page = source.replace(".ipynb", ".md")
        files.append(File.generated(config, page, content=notebook(json.loads(text)["cells"])))
    for name, content in page_assets(is_server=False, has_docs=True).items():
        files.append(File.generated(config, f"playground/{name}", content=content()))
    files.append(File.generated(config, "colours.css", content=style_sheet()))
    return files


def on_page_markdown(markdown: str, **_page: Any) -> str:
    """Draw the stages, and let pictures of pages follow the theme."""
    markdown = _SHOT.sub(r"\1light\2#only-light) \1dark\2#only-dark)", markdown)
    markdown = _PICTURE.sub(lambda found: picture(STAGES[found[1]]), markdown)
    return markdown.replace(_GALLERY, gallery()) if _GALLERY in markdown else markdown


def fill(page: str) -> str:
    """A page with its generated parts as they are now."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", page)


def notebook(cells: Iterable[Mapping[str, Any]]) -> str:
    """A notebook as a page: its texts, its code, and what that showed."""
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            kind = min(data, key=("text/html", "image/svg+xml", "text/plain").index)
            shown = "".join(data[kind])
            is_text = kind == "text/plain"
            parts.append(
                f"```text\n{shown}\n```" if is_text else f'<div class="shown">{shown}</div>'
            )
    return "\n\n".join(parts)


def style_sheet() -> str:
    """The theme's variables in the colours of the program's own pages, and the gallery."""
    schemes = {"default": THEMES["light"], "slate": THEMES["dark"]}
    rules = [_scheme(name, theme.colours) for name, theme in schemes.items()]
    light, dark = ((*theme.models, *theme.colours.values()) for theme in schemes.values())
    rules += [  # of figures in notebooks
        f'[data-md-color-scheme="slate"] .shown [{part}="{old}"]{{{part}:{new}}}'
        for old, new in zip(light, dark, strict=True)
        for part in ("fill", "stroke")
    ]
    return "\n".join([*rules, (ROOT / "docs/gallery.css").read_text("utf-8")])


def _scheme(name: str, colours: Mapping[str, str]) -> str:
    """The variables of mkdocs-material in one colour scheme."""
    variables = {
        "primary-fg-color": colours["raised" if name == "slate" else "accent"],
        "primary-bg-color": colours["ink" if name == "slate" else "panel"],
        "accent-fg-color": colours["fair"],
        "typeset-a-color": colours["accent"],
        "default-bg-color": colours["page"],
        "default-fg-color": colours["ink"],
        "default-fg-color--light": colours["muted"],
        "default-fg-color--lightest": colours["line"],
        "typeset-color": colours["ink"],
        "code-bg-color": colours["raised"],
        "code-fg-color": colours["ink"],
        "footer-bg-color": colours["raised"],
        "footer-bg-color--dark": colours["raised"],
        "footer-fg-color": colours["ink"],
        "footer-fg-color--light": colours["muted"],
        "footer-fg-color--lighter": colours["muted"],
    }
    lines = "".join(f"--md-{key}:{value};" for key, value in variables.items())
    return f'[data-md-color-scheme="{name}"]{{{lines}}}'


# ---------------------------------------------------------------- methods


def gallery() -> str:
    """What every stage makes of the same three deltas, as pictures that lead to their sections."""
    groups = {
        "delta": "Thin out each delta",
        "combine": "Combine all deltas into one",
        "refine": "Refine the combined delta",
    }
    parts = []
    for kind, title in groups.items():
        cards = [
            f'<a href="#{stage.name}">{_result(stage)}<b>{stage.name}</b> '
            f"<span>{escape(stage.summary)}</span></a>"
            for stage in of_kind(kind)
            if picture(stage)
        ]
        parts += [f"**{title}**", f'<div class="gallery">{"".join(cards)}</div>']
    return "\n\n".join(parts)


def _result(stage: Stage) -> str:
    """The right side of a stage's picture, for one who is told its name beside it."""
    shown = re.sub(r"<title>.*?</title>\s*", "", picture(stage), flags=re.S)
    shown = shown.replace('role="img"', 'aria-hidden="true"', 1)
    return re.sub(r'viewBox="0 0 (\d+) (\d+)" width="\d+" height="\d+"', _crop, shown)


def _crop(found: re.Match[str]) -> str:
    width, height = map(int, found.groups())
    return f'viewBox="{RESULT_FROM} {HEAD} {width - RESULT_FROM} {height - HEAD}"'


def methods() -> str:
    """Every stage with its parameters, and every alias."""
    return "\n\n".join(
        [
            "## Delta stages",
            "A delta stage changes the delta of one model.",
            *map(_stage, of_kind("delta")),
            "## Combine stages",
            "A combine stage turns the deltas of all models into one.",
            *map(_stage, of_kind("combine")),
            "## Refine stages",
            "A refine stage changes the merged delta, and sees the deltas that were combined.",
            *map(_stage, of_kind("refine")),
            "## Aliases",
            "Other names for methods, as other tools and papers have them.",
            _table(("name", "method"), ((f"`{a}`", f"`{m}`") for a, m in sorted(ALIASES.items()))),
        ]
    )


def flags() -> str:
    """The flag of every parameter, in a row for each meaning that it has."""
    owners: dict[str, dict[str, list[str]]] = {}
    for stage in STAGES.values():
        for name, parameter in stage.parameters.items():
            meanings = owners.setdefault(name, {})
            meanings.setdefault(parameter.description, []).append(f"`{stage.name}`")
    rows = [
        (f"`--{name.replace('_', '-')} VALUE`", ", ".join(stages), meaning)
        for name, meanings in owners.items()
        for meaning, stages in meanings.items()
    ]
    return _table(("flag", "stages", "meaning"), rows)


def _stage(stage: Stage) -> str:
    image = f"![What {stage.name} makes of three deltas](images/methods/{stage.name}.svg)"
    parts = [f"### {stage.name}", image if picture(stage) else "", stage.documentation]
    facts = [cost(stage)]
    if stage.kind == "combine":
        facts.append(f"Weights: {_default_weight(stage)}.")
        if stage.models is not None:
            facts.append(f"Takes exactly {counted(stage.models, 'model')}.")
    if stage.paper:
        facts.append(f"Paper: {_paper(stage.paper)}.")
    parts.append(" ".join(facts))
    if stage.parameters:
        parts.append(_table(("parameter", "default", "values", "meaning"), _parameters(stage)))
    else:
        parts.append("No parameters.")
    return "\n\n".join(part for part in parts if part)


def picture(stage: Stage) -> str:
    """The picture of a stage, as a part of the page."""
    file = ROOT / "docs/images/methods" / f"{stage.name}.svg"
    text = file.read_text("utf-8").strip() if file.is_file() else ""
    return re.sub(r"<style>.*?</style>\n", "", text)  # a page has its own colours


def cost(stage: Stage) -> str:
    """What a stage costs, in a sentence."""
    measured = COSTS.get(stage.name)
    if measured is None:
        return ""
    reads = "once" if measured["passes"] == 1 else "twice"
    usual, millions = COSTS["linear"]["parameters"], measured["parameters"] / 1e6
    size = (
        "" if measured["parameters"] == usual else f" (models of {millions:.0f} million parameters)"
    )
    return (
        f"**Cost:** {_times(measured)} × the time of `linear`{size}; reads the weights {reads}; "
        f"{_memory(stage)}."
    )


def _times(measured: Mapping[str, float]) -> str:
    """How many times the time of `linear`, with no more digits than are sure."""
    ratio = measured["time"]
    return f"{ratio:.1f}" if ratio < SURE_TIMES else f"{ratio:.0f}"


def _memory(stage: Stage) -> str:
    """What a stage has in memory beyond the buffers, for three models."""
    usual = {name: parameter.default for name, parameter in stage.parameters.items()}
    shape, models = (SIDE, SIDE), stage.models or 3
    surveys = stage.surveys(usual, "layer.weight", shape)
    held = surveys * stage.survey_bytes(shape, models) / (4 * SIDE**2)
    if held < 0.5:  # arcee_fusion surveys into a table of a fixed size
        return "memory is bounded, whatever the size of a tensor"
    return f"holds whole matrices in memory, at most {held:.0f} times the largest one in float32"


def stage_table() -> str:
    """The table of all stages, with what each costs."""
    rows = []
    for stage in (stage for kind in ("combine", "delta", "refine") for stage in of_kind(kind)):
        measured = COSTS.get(stage.name, {})
        times = _times(measured) if measured else ""
        rows.append((f"[`{stage.name}`](methods.md#{stage.name})", stage.summary, times))
    return _table(("stage", "what it does", "time ÷ `linear`"), rows)


def habits() -> str:
    """What is often recommended, as the advice knows it."""
    rows = ((habit.applies_to, f"`{habit.method}`") for habit in HABITS)
    return _table(("for", "often recommended"), rows)


def _parameters(stage: Stage) -> Iterable[Sequence[str]]:
    return [
        (f"`{p.name}`", _value(p.default), p.range, p.description)
        for p in stage.parameters.values()
    ]


def _default_weight(stage: Stage) -> str:
    if stage.default_weight is None:
        return "none"
    return "1 unless given" if stage.default_weight(2) == 1 else "1/n for n models unless given"


def _paper(paper: str) -> str:
    found = re.fullmatch(r"arXiv:(\d{4}\.\d{5})", paper)
    return f"[{paper}](https://arxiv.org/abs/{found.group(1)})" if found else paper


# ---------------------------------------------------------------- recipe


HOMES = {
    "stages": "[NAME OF A STAGE]",
    "tensors": "[[tensors]]",
}
"""Where a field of a recipe stands in TOML, if it is not a key of the same name at the top."""


KINDS = {
    "tensors": "list of tables",
    "shard_size": "size",
    "max_memory": "size",
    "settings": "as its stage says",
}
"""What a field holds, where its schema says too little."""


def recipe() -> str:
    """Every key of a recipe."""
    return "\n\n".join(
        [
            "## Keys of a recipe",
            _fields(Recipe, HOMES),
            "## Keys for a run",
            "They say how a merge runs, and change no byte of its output. In Python they are "
            "`dare.RunOptions`.",
            _fields(RunOptions, {}),
            "## Keys of a model",
            "A model in `models` is a path, or a table with these keys and any parameter of "
            "the method's delta stages.",
            _fields(ModelEntry, {"settings": "drop_rate, …"}),
            "## Keys of a rule for tensors",
            "A table `[[tensors]]` has these keys and any parameter of the methods' stages.",
            _fields(TensorRule, {"settings": "drop_rate, …"}),
            "## Keys of a search",
            "The table `[search]` says what a [search](guides/search.md) around the recipe tries. "
            "Values in `[search.over]` are lists, or ranges with the keys below.",
            _fields(Search, {}),
            _fields(Range, {"start": "from"}),
            "## Names that count as embeddings",
            "`embedding_drop_rate` is for tensors whose names match one of "
            + ", ".join(f"`{pattern}`" for pattern in EMBEDDINGS)
            + ". What projects a time step, a label, a patch or a text in "
            "[a diffusion model](guides/diffusion.md#embeddings) has no row for each token, and is "
            "none: " + ", ".join(f"`{module}`" for module in PROJECTIONS) + ".",
        ]
    )


def names() -> str:
    """What the files of a merge are called, here and elsewhere."""
    places = {
        ours: ([ours], FIELDS[ours][1].names, others[:1], others[1:])
        for ours, others in OTHER_NAMES.items()
    }
    return _table(
        ("name", "on the command line", "in a table `[models]`", "also understood"),
        ([", ".join(f"`{name}`" for name in cell) for cell in row] for row in places.values()),
    )


def _fields(model: Any, homes: Mapping[str, str]) -> str:
    rows = []
    for name, field in model.fields().items():
        default = "required" if field.is_required else _value(field.default)
        kind = KINDS.get(name) or _kind(form_of(field.hint))
        if name == "settings":
            default = "as elsewhere"
        rows.append((f"`{homes.get(name, name)}`", kind, default, field.description))
    return _table(("key", "value", "default", "meaning"), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """What a field may hold, in words."""
    if "anyOf" in schema:
        kinds = [_kind(choice) for choice in schema["anyOf"] if choice.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(f'`"{value}"`' for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_plural(_kind(schema['items']))}"
    if kind == "object":
        return "table"
    words = {"integer": "whole number", "number": "number", "boolean": "true or false"}
    text = "path" if schema.get("format") == "path" else words.get(str(kind), "text")
    return " ".join([text, *_bounds(schema)])


def _bounds(schema: Mapping[str, Any]) -> Iterable[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in signs.items()
        if key in schema and schema[key] < WIDEST_INTEGER
    ]
    return [", ".join(bounds)] if bounds else []


def _plural(word: str) -> str:
    return {
        "text": "texts",
        "path": "paths",
        "table": "paths or tables",
        "whole number": "whole numbers",
    }.get(word, word)


# ---------------------------------------------------------------- analysis


NOT_IN_ANALYSES = {"Outcome", "Fit", "Body", "Link", "ValueRange", "NamedLimits", "NoticeKind"}


def analysis() -> str:
    """Every data class of an analysis with its fields, as the source describes them."""
    parts = []
    modules = ("analysis/results", "planning/make", "analysis/readiness", "analysis/advice")
    for module in (*modules, "documents/notices"):
        tree = ast.parse((ROOT / f"src/dare/{module}.py").read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name not in NOT_IN_ANALYSES:
                parts += [f"### {node.name}", ast.get_docstring(node) or ""]
                parts.append(_described_fields(node))
    return "\n\n".join(parts)


def rules() -> str:
    """What readiness looks for, and the numbers that measurements are held against."""
    entries = [catalogue()[code] for code in RULES]
    return "\n\n".join(
        [
            "## Rules",
            _table(
                ("code", "verdict", "looks for"),
                ((f"`{e.code}`", _effect(e) + MATTERS[e.only_for], e.meaning) for e in entries),
            ),
            "## Limits",
            _table(
                ("limit", "value", "meaning", "source"),
                (
                    (f"`{name}`", f"{value:g}", meaning, source)
                    for name, (value, meaning, source) in LIMITS.items()
                ),
            ),
        ]
    )


def _effect(entry: NoticeKind) -> str:
    if entry.severity is Severity.NOTE:
        return "a note"
    return Verdict.UNFIT if entry.code in STOPPING else Verdict.WITH_CHANGES


MATTERS = {
    "": "",
    "drops_at_random": ", where changes are dropped at random",
    "votes": ", in a vote",
    "adds_up": ", in a sum",
}


def _described_fields(node: ast.ClassDef) -> str:
    """The fields, or the words of an enumeration, each with the text that stands below it."""
    rows = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        text = _text_of(following)
        if isinstance(statement, ast.AnnAssign):
            name, kind = ast.unparse(statement.target), ast.unparse(statement.annotation)
            rows.append((f"`{name}`", f"`{kind}`".replace("|", "\\|"), text))
        elif isinstance(statement, ast.Assign):
            rows.append((f"`{ast.literal_eval(statement.value)}`", "", text))
        elif isinstance(statement, ast.FunctionDef) and _is_property(statement):
            kind = ast.unparse(statement.returns) if statement.returns else ""
            told = " ".join((ast.get_docstring(statement) or "").split())
            rows.append((f"`.{statement.name}`", f"`{kind}`", told))
    return _table(("field", "type", "meaning"), rows)


def _text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


# ---------------------------------------------------------------- messages


def notices() -> str:
    """Every notice: when it is given, what it says, and what to do."""
    parts = []
    for code, entry in catalogue().items():
        parts += [f"### {code}", f"*{entry.severity.capitalize()}: {entry.title}.* {entry.meaning}"]
        if entry.remedy not in ("", "{remedy}"):
            parts.append(f"*What to do:* {entry.remedy}.")
        parts += [entry.details.strip()] if entry.details else []
    return "\n\n".join(parts)


def errors() -> str:
    """The tree of exceptions, each with the first line of its docstring."""
    rows = list(_exceptions(DareError, ""))
    width = max(len(name) for name, _ in rows) + 2
    tree = "\n".join(f"{name:{width}}{meaning}".rstrip() for name, meaning in rows)
    return f"<!-- not run: a drawing -->\n```text\n{tree}\n```"


def _exceptions(kind: type[DareError], before: str) -> Iterable[tuple[str, str]]:
    meaning = (kind.__doc__ or "").strip().splitlines()[0]
    yield before + kind.__name__, meaning
    below = [other for other in kind.__subclasses__() if other.__module__ == kind.__module__]
    stem = before[:-4] + {"├── ": "│   ", "└── ": "    "}.get(before[-4:], "")
    for other in below:
        yield from _exceptions(other, stem + ("└── " if other is below[-1] else "├── "))


def versions() -> str:
    """The versions that tests were run with, listed by the runs: `pytest --record` in tests."""
    runs = json.loads((ROOT / "docs/versions-run.json").read_text("utf-8"))
    head = ("Python", "machine", "NumPy", "safetensors", "torch", "tests", "passed")
    return _table(head, [[str(run[name.lower()]) or "–" for name in head] for run in runs])


# ---------------------------------------------------------------- pieces


def _value(value: object) -> str:
    """A default as it would be written in TOML."""
    if value is None:
        return "not set"
    if value in ((), {}):
        return "none"
    return f"`{json.dumps(value)}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {
    "analysis": analysis,
    "errors": errors,
    "flags": flags,
    "habits": habits,
    "methods": methods,
    "names": names,
    "notices": notices,
    "recipe": recipe,
    "rules": rules,
    "stages": stage_table,
    "versions": versions,
}

if __name__ == "__main__":
    for path in (ROOT / "docs").rglob("*.md"):
        path.write_text(fill(path.read_text("utf-8")), "utf-8")
