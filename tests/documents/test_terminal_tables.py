from __future__ import annotations

import io

import pytest

from dare.documents.console import Console
from dare.documents.document import Table
from dare.documents.terminal import Names, draw_bar, lay_out


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
