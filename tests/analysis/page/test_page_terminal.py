from __future__ import annotations

import io
from dataclasses import replace

import pytest
import sample
from rich.cells import cell_len
from rich.console import Console

from dare.analysis.page.terminal import show_analysis
from dare.analysis.page.words import cosine
from dare.output.page.words import amount, share


def shown(subject, width, encoding="utf-8", **changes):
    subject = replace(subject, **changes)
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    console = Console(
        width=width, file=file, highlight=False, markup=False, emoji=False, legacy_windows=False
    )
    show_analysis(console, subject.analysis, subject.readiness, subject.advice)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_longer_than_the_terminal(subject, width):
    lines = shown(subject, width).splitlines()
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", [80, 200])
def test_the_numbers_of_the_analysis_are_there(subject, width):
    text = shown(subject, width)
    for model in subject.analysis.models:
        assert share(model.total.relative_norm) in text
        assert amount(model.total.elements) in text
    for pair in subject.analysis.pairs:
        assert cosine(pair.total.cosine) in text
        assert share(pair.total.conflict) in text
    assert text.startswith("Ready with changes  3 models onto base.safetensors\n")
    assert "Change  chat  Its last layers are changed by 13% of the base" in text
    assert "LoRA, rank 4 (adapter)" in text


def test_the_largest_change_has_the_longest_bar(subject):
    lines = [line for line in shown(subject, 80).splitlines() if line.startswith(" chat ")]
    assert "█" * 10 in lines[0]
    assert lines[0].count("█") == 10


def test_advised_rates_have_a_star(subject):
    lines = shown(subject, 200).splitlines()
    starred = {line.split()[0]: line.count(" * ") for line in lines if " * " in line}
    assert starred == {"0.75": 1, "0.8": 1, "0.9": 1}


def test_bars_are_plain_where_blocks_cannot_be_written(subject):
    text = shown(subject, 200, encoding="latin-1")
    assert "#" * 16 in text
    assert "█" not in text


def test_eight_models_lose_their_bars_and_nothing_else(subject):
    names = tuple(f"model{number}" for number in range(8))
    model = subject.analysis.models[0]
    analysis = replace(
        subject.analysis, models=tuple(replace(model, name=name) for name in names), pairs=()
    )
    lines = shown(subject, 80, analysis=analysis).splitlines()
    kinds = next(line for line in lines if line.startswith(" mlp "))
    assert "█" not in kinds
    assert max(map(cell_len, lines)) <= 80


def test_one_model_has_no_pairs(subject):
    text = shown(subject, 80, analysis=sample.make_analysis(("alone",)))
    assert "Cosine" not in text
    assert "cancel out" not in text


def test_names_are_no_markup(subject):
    names = ("[red]math[/red]", "[bold", "chat :smile:")
    text = shown(subject, 200, analysis=sample.make_analysis(names))
    for name in names:
        assert name in text
