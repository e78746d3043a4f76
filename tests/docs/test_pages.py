"""What the pages say is complete: every stage, key, flag, warning, name and dependency."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import sys
import tomllib
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from doc_blocks import ROOT
from PIL import Image

import dare
from dare import compat
from dare.cli import COMMANDS, main
from dare.demo.merges import write_models
from dare.documents.notices import catalogue
from dare.errors import DareError
from dare.recipe.entries import OTHER_NAMES
from dare.recipe.recipe import ModelEntry, Recipe, TensorRule
from dare.stages import ALIASES, STAGES

DOCS = ROOT / "docs"
OURS = [
    name
    for name, stage in STAGES.items()
    if stage.apply.__module__.startswith("dare.") and stage.models != 0  # which change nothing
]
"""Not what other tests may have registered."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load(DOCS / "generate.py")


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return load(DOCS / "make_method_pictures.py")


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


# ---------------------------------------------------------------- generated pages


def test_methods_has_every_stage_alias_and_parameter(generate: ModuleType) -> None:
    text = generate.methods()
    for stage in STAGES.values():
        section = (
            text.partition(f"### {stage.name}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
        )
        assert section, f"{stage.name} has no section"
        assert stage.paper.removeprefix("arXiv:") in section
        for parameter in stage.parameters.values():
            (row,) = [line for line in section.splitlines() if f"| `{parameter.name}` |" in line]
            assert parameter.description, f"{stage.name} {parameter.name} is not described"
            assert parameter.description in row
            assert parameter.range in row
    for alias, method in ALIASES.items():
        assert f"| `{alias}` | `{method}` |" in text


def test_generated_parts_are_up_to_date(generate: ModuleType) -> None:
    for path in DOCS.rglob("*.md"):
        text = path.read_text("utf-8")
        assert generate.fill(text) == text, f"{path.name}: run `python docs/generate.py`"


def test_gallery_leads_to_every_stage(generate: ModuleType) -> None:
    found = re.findall(r'href="#(\w+)"', generate.gallery())
    assert sorted(found) == sorted(OURS)


def test_pictures_show_the_headings_of_today() -> None:
    # Each holds the headings it shows: docs/make_screenshots.py. Those with numbers are composed.
    source = " ".join(
        path.read_text("utf-8")
        for path in (ROOT / "src/dare").rglob("*")
        if path.suffix in {".html", ".jinja", ".js", ".py", ".toml"}
    )
    source = " ".join(source.split())
    for name in ("report", "playground"):
        for picture in DOCS.glob(f"images/{name}-*.png"):
            with Image.open(picture) as image:
                texts = json.loads(image.info["texts"])
            assert texts, picture
            for text in texts:
                assert text in source or re.search(r"\d", text), f"{picture}: {text}"


def test_recording_shows_what_commands_print_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "96")
    write_models(Path("models"))
    models = [f"models/{name}" for name in ("base", "add", "sort", "say")]
    assert main(["analyze", *models]) == 0
    recorded = unescape((DOCS / "images/recording.svg").read_text("utf-8"))
    shown = re.findall(r"[^\W\d_]{4,}", capsys.readouterr().out)
    assert len(shown) > 50
    assert not [word for word in shown if word not in recorded]


def test_recipe_has_every_key(generate: ModuleType) -> None:
    text = generate.recipe()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for model, homes in ((Recipe, generate.HOMES), (ModelEntry, {}), (TensorRule, {})):
        for name, field in model.fields().items():
            key = "drop_rate, …" if name == "settings" else homes.get(name, name)
            found = [row for row in rows if row.startswith(f"| `{key}` |")]
            assert found, f"{key} is missing"
            assert all(not row.endswith("|  |") for row in found), f"{key} is not described"
            if field.description:
                assert any(field.description.replace("|", "\\|") in row for row in found)


def test_names_has_every_name(generate: ModuleType) -> None:
    rows = generate.names().splitlines()[2:]
    for (ours, others), row in zip(OTHER_NAMES.items(), rows, strict=True):
        assert row.startswith(f"| `{ours}` | `--{ours}`, ")
        assert re.findall(r"`(\w+)`", row) == [ours, *others]


def test_the_picture_is_up_to_date() -> None:
    drawn = load(DOCS / "images" / "architecture.py").draw()
    assert (DOCS / "images" / "architecture.svg").read_text("utf-8") == drawn


def test_what_the_architecture_names_is_there() -> None:
    package, page = Path(dare.__file__).parent, (DOCS / "architecture.md").read_text("utf-8")
    named = re.findall(r"`([a-z_]+(?:/[a-z_]*)*/|(?:[a-z_]+/)*[a-z_]+\.(?:py|toml))`", page)
    assert {"run/engine.py", "output/", "api.py"} <= set(named)
    found = [name for name in named if list(package.rglob(name)) or (DOCS.parent / name).exists()]
    assert found == named
    folders = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    assert folders <= {name.strip("/") for name in named}


@pytest.mark.parametrize("name", OURS)
def test_every_stage_has_a_picture_that_is_up_to_date(name: str, pictures: ModuleType) -> None:
    """Run `python docs/make_method_pictures.py` after a change of a stage or its first line."""
    drawn = (DOCS / "images" / "methods" / f"{name}.svg").read_text("utf-8")
    assert drawn == pictures.draw(STAGES[name])
    assert {file.stem for file in pictures.FOLDER.glob("*.svg")} == set(OURS)


def test_every_stage_has_a_measured_cost(generate: ModuleType) -> None:
    """Run `python bench/costs.py FOLDER` for a new stage."""
    assert generate.COSTS.keys() == set(OURS)
    assert generate.COSTS["linear"]["time"] == 1
    assert "1.0 × the time of `linear`; reads the weights once" in generate.cost(STAGES["linear"])
    assert "reads the weights twice" in generate.cost(STAGES["slerp"])


# ---------------------------------------------------------------- pages written by hand


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_the_command_line_page_has_every_flag_and_no_other(generate: ModuleType) -> None:
    commands = [[name] for name in COMMANDS] + [
        [],
        *(["lora", name] for name in ("merge", "extract")),
        *(["search", name] for name in ("show", "best")),
    ]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for command in commands:
            for flag in ("--help", "--help-all"):
                main([*command, flag])
    known = flags(printed.getvalue())
    assert "--on-integer-mismatch" in known
    written = flags(page("cli.md")) | flags(generate.flags())
    assert written == known


def test_the_versions_that_were_run_are_those_that_runs_have_listed(generate: ModuleType) -> None:
    runs = json.loads((ROOT / "docs/versions-run.json").read_text("utf-8"))
    assert all(run["passed"] > 0 and run["tests"] for run in runs)
    listed = generate.versions().splitlines()[2:]
    assert [line.split(" | ")[0] for line in listed] == [f"| {run['python']}" for run in runs]
    assert "<!-- generated: versions -->" in page("platforms.md")


def test_every_notice_is_explained(generate: ModuleType) -> None:
    sections = re.findall(r"^### (.*)$", generate.notices(), re.M)
    assert sections == list(catalogue())
    assert "<!-- generated: notices -->" in page("messages.md")


def test_every_error_is_drawn(generate: ModuleType) -> None:
    kinds = [DareError]
    for kind in kinds:
        kinds += [other for other in kind.__subclasses__() if other.__module__ == kind.__module__]
    tree = generate.errors()
    drawn = re.findall(r"^[│├└─ ]*(\w+Error) +\S", tree, re.M)
    assert sorted(drawn) == sorted(kind.__name__ for kind in kinds)
    assert "│   ├── HeaderError  " in tree
    in_source = sys.modules[DareError.__module__].__doc__
    assert in_source is not None
    assert all(f" {name} " in in_source.replace("\n", " ") for name in drawn)


def test_every_message_that_is_quoted_is_in_the_source() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", source)  # a text over several lines
    rows = page("messages.md").partition("| message | what to do |")[2].splitlines()
    quoted = [
        text
        for row in rows
        if row.startswith("| `")
        for text in re.findall(r"`([^`]*)`", row.split(" | ")[0])
    ]
    assert len(quoted) > 15
    pieces = [piece.strip() for text in quoted for piece in text.split("…")]
    assert [piece for piece in pieces if piece not in source] == []


def test_the_python_page_has_every_public_name() -> None:
    text = page("python.md")
    listed, _, compatible = text.partition("## Names from papers and articles")
    compatible, _, errors = compatible.partition("## Errors")
    public = [name for name in dare.__all__ if name != "__version__"]
    assert [n for n in public if not re.search(rf"\b{n}\b", listed + errors)] == []
    assert re.findall(r"^::: dare\.compat\.(\w+)", compatible, re.M) == compat.__all__


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = [
        line for extra in project.get("optional-dependencies", {}).values() for line in extra
    ]
    development = (ROOT / "requirements-dev.txt").read_text("utf-8").splitlines()
    listed = [*project["dependencies"], *optional, *development]
    names = [re.split(r"[<>=\[;~ ]", line)[0] for line in listed if re.match(r"\w", line)]
    rows = "\n".join(line for line in page("design.md").splitlines() if line.startswith("| "))
    assert [name for name in names if not re.search(rf"^\|[^|]*\b{name}\b", rows, re.M)] == []


# ---------------------------------------------------------------- beside the pages


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (dare.__version__, "Apache-2.0")
    (paper,) = citation["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:2311.03099"


def test_the_changelog_has_this_version() -> None:
    assert f"## [{dare.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
