"""A document shows the same in a terminal, as a page and in a notebook; numbers can be read."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.documents import words
from dare.documents.console import Console
from dare.documents.document import (
    Code,
    Document,
    Facts,
    Figure,
    Folded,
    Listing,
    Section,
    SortableTable,
    Table,
    Tone,
    tabulate,
)
from dare.documents.notices import Severity, catalogue, notice
from dare.documents.page import make_chart, render_card, render_page
from dare.documents.shown import Shown
from dare.documents.terminal import Names, draw_bar, lay_out, print_document
from dare.errors import RecipeError

HOSTILE = "<b>\x1b[2J"
MODELS = ("math", "code")


def draw() -> list[Figure]:
    from dare.documents.charts import alt, finish_chart

    chart = alt.layer(alt.Chart().mark_point().encode(x="x:Q"))
    spec = finish_chart(chart, [{"x": 1}])
    return [
        Figure("points", "Points", "Each is one.", "A point.", spec, Table(("x >",), (("1",),)))
    ]


def sample() -> Document:
    models = Table(
        ("model", "change >", "verdict"),
        (("math", "3%", "good one"), ("code", "9%", HOSTILE)),
        tones={"good one": Tone.GOOD},
        bars=(30.0, 100.0),
        of_models=True,
    )
    hidden = Folded("More", (Listing("Inputs", ("base.safetensors",)), Facts((("seed", "42"),))))
    rows = SortableTable(("trial", "score"), ((0, 0.5), ("base", None)), (True, False), "Trials")
    return Document(
        title="No defect found",
        kind="test",
        tone=Tone.GOOD,
        lead="2 models onto base",
        facts=(("Advice", "take the average"),),
        tiles=(("Change", "9%", "of the base"),),
        code=Code("The recipe", "recipe", 'method = "linear"'),
        sections=(
            Section("models", "Models", (models,), is_brief=True),
            Section("figures", "Figures", figures=("points",)),
            Section("others", "Others", (rows, hidden)),
            Section("empty", "Empty", figures=("nothing",)),
        ),
        notices=(notice("equals_base", "math"),),
        steps={"merge": "dare recipe.toml"},
        models=MODELS,
        draw=draw,
    )


def printed(document: Document, width: int = 80) -> str:
    file = io.StringIO()
    print_document(Console(file, width=width), document)
    return file.getvalue()


def test_a_terminal_shows_what_decides():
    text = printed(sample())
    for piece in ("No defect found  2 models onto base", "take the average", "dare recipe.toml"):
        assert piece in text
    (header,) = (line for line in text.splitlines() if " verdict" in line)
    assert header.split() == ["model", "change", "verdict", "change"]  # the last is that of bars
    assert "equal to the base" in text
    assert "Trials" not in text
    assert "\x1b[2J" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_narrow_terminal_leaves_optional_columns_out():
    wide = "x" * 40
    table = Table(("model", "file", "why"), (("math", wide, wide),), optional=("file",))
    section = Section("models", "Models", (table,), is_brief=True)
    document = Document("T", "test", sections=(section,))
    assert "file" in printed(document, 120)
    assert "file" not in printed(document, 80)


def test_a_page_shows_everything_and_escapes_it():
    page = render_page(sample(), library="")
    for piece in ("take the average", "equals_base", "The recipe", "base.safetensors", "sortable"):
        assert piece in page
    assert "<b>\x1b" not in page
    assert re.findall(r'<section id="([^"]*)"', page) == ["notices", "models", "figures", "others"]
    assert 'id="chart-points"' in page


def test_a_notebook_shows_what_a_terminal_does_and_draws_figures():
    card = render_card(sample())
    for piece in ("No defect found", "take the average", "math", "equal", "linear"):
        assert piece in card
    assert "<b>\x1b" not in card
    assert make_chart(sample()).to_dict()["title"] == "Points"
    with pytest.raises(RecipeError, match="did you mean 'points'"):
        make_chart(sample(), "point")


def test_a_result_shows_itself():
    class Result(Shown):
        def document(self) -> Document:
            return sample()

    assert Result()._repr_html_() == render_card(sample())
    assert Result().plot("points").to_dict()["title"] == "Points"


def test_a_table_is_made_of_items():
    columns = {"n": str, "remarks": lambda _n: "", "square >": lambda n: str(n * n)}
    table = tabulate([1, 2], columns, title="Squares")
    assert table.rows == (("1", "1"), ("2", "4"))
    assert table.title == "Squares"


def test_notices_have_codes_severities_and_subjects():
    found = notice("equals_base", "math", severity=Severity.NOTE)
    assert (found.code, found.severity, found.subjects) == ("equals_base", "note", ("math",))
    assert str(found).startswith("math: ")


@pytest.mark.parametrize("code", catalogue())
def test_texts_of_the_catalogue_can_be_put_together(code):
    entry = catalogue()[code]
    assert entry.title
    assert entry.meaning.endswith(".")
    assert not entry.text.endswith(".")
    assert not entry.remedy.endswith(".")


@pytest.mark.parametrize(
    ("part", "bar"),
    [(-1, "    "), (0, "    "), (1e-9, "▏   "), (0.25, "█   "), (0.28125, "█▏  "), (7, "████")],
)
def test_a_bar_has_its_cells_whatever_the_part(part, bar):
    assert draw_bar(part, 4, solid=True) == bar


def test_names_of_columns_are_not_markup():
    console = Console(io.StringIO(), width=40)
    table = Table(("[bold]x[/bold]", "a > b", "n >"), (("1", "2", "3"),))
    columns, _ = lay_out(table, console, Names())
    assert [column.cells[0][0] for column in columns] == ["[bold]x[/bold]", "a > b", "n"]


@given(st.floats(1e-12, 1e6), st.integers(0, 10**14))
def test_a_share_and_an_amount_can_be_read_back(value, count):
    text, short = words.share(value), words.amount(count)
    assert float(text.removesuffix("%").replace(",", "")) / 100 == pytest.approx(value, rel=0.006)
    units = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number = float(short.rstrip("kMBT")) * units.get(short[-1], 1)
    assert (number, len(short) <= 5) == (pytest.approx(count, rel=0.006), True)
