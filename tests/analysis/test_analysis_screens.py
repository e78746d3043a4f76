"""An analysis on one screen: what is said, and that it fits."""

from __future__ import annotations

import functools
import io
from dataclasses import replace

import made_up
import numpy as np
import pytest
from rich.cells import cell_len

from dare.analysis.advice import judge
from dare.analysis.document import make_document
from dare.analysis.readiness import body_of
from dare.documents.console import Console
from dare.documents.notices import catalogue
from dare.documents.terminal import print_document
from dare.documents.words import share

WIDTHS = pytest.mark.parametrize("width", [80, 100, 120])
LONG = "a-model-with-a-name-that-is-much-longer-than-any-column-of-a-terminal-can-be-"
HOSTILE = ("[red]math[/red]", "[bold", "b\x1b[2J\nc", "模型" * 30, "", f"{LONG}v1", f"{LONG}v2")
NAMES = ("math", "code", "sort", "copy-of-sort", "anti-math", "huge", "nan", "other", "law", "chat")


@functools.cache
def make_ten():
    """Ten models: plain ones, copies, an opposed pair, a large, a broken and an unrelated one."""
    base = made_up.make_base()
    tuned = [made_up.tune(base, 0.02, seed) for seed in range(1, 11)]
    tuned[3] = tuned[2]
    tuned[4] = made_up.mixed(base, tuned[0], -0.8, tuned[1], 0.2)
    tuned[5] = made_up.mixed(base, tuned[5], 20.0, tuned[5], 0.0)
    tuned[6] = {name: array.copy() for name, array in tuned[6].items()}
    tuned[6]["layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    tuned[7] = made_up.make_base(seed=5)
    return made_up.analysis(base, dict(zip(NAMES, tuned, strict=True)))


def make_models(names=NAMES):
    """The first of the ten, by other names."""
    called = dict(zip(NAMES, names, strict=False))
    analysis = make_ten()
    return replace(
        analysis,
        models=tuple(replace(m, name=called[m.name]) for m in analysis.models if m.name in called),
        pairs=tuple(
            replace(pair, first=called[pair.first], second=called[pair.second])
            for pair in analysis.pairs
            if {pair.first, pair.second} <= called.keys()
        ),
    )


@pytest.fixture(scope="module")
def ten():
    analysis = make_models()
    return analysis, *judge(analysis)


def printed(judged, width):
    file = io.StringIO()
    console = Console(file, width=width)
    print_document(console, make_document(*judged))
    return file.getvalue()


def rows(text, name):
    return [line for line in text.splitlines() if line.startswith(f" {name} ")]


# ---------------------------------------------------------------- what fits


@WIDTHS
@pytest.mark.parametrize("count", [1, 3, 10])
def test_no_line_is_longer_than_the_terminal_and_no_cell_is_wrapped(count, width):
    names = NAMES[:count]
    hostile = [*HOSTILE, *names][:count]
    for given in (names, hostile):
        analysis = make_models(given)
        lines = printed((analysis, *judge(analysis)), width).splitlines()
        assert max(map(cell_len, lines)) <= width
        header = next(line for line in lines if line.startswith(" model "))
        table = lines[lines.index(header) + 2 :][: count + 1]
        assert [bool(line.strip()) for line in table] == [True] * count + [False]
        assert all(line.count("%") == 1 for line in table[:count])


def test_long_names_stay_apart():
    names = [f"{LONG}{number}" for number in range(10)]
    analysis = make_models(names)
    text = printed((analysis, *judge(analysis)), 80)
    for number_shown in range(10):
        starts = [x for x in text.splitlines() if x[:1] == " " and f"-be-{number_shown} " in x[:24]]
        assert len(starts) == 1


# ---------------------------------------------------------------- what is said


def test_what_is_notable_of_ten_models_is_said(ten):
    text, (analysis, readiness, advice) = printed(ten, 120), ten
    assert text.startswith(readiness.headline)
    for model in analysis.models:
        assert share(body_of(model).ratio) in rows(text, model.name)[0]
    for name, said in {
        "nan": f"left out: {catalogue()['not_finite'].title}",
        "other": f"left out: {catalogue()['unrelated'].title}",
        "sort": "same model twice, with copy-of-sort",
    }.items():
        assert rows(text, name)[0].rstrip().endswith(said)
    overlap = " ".join(text[text.index("Overlap") : text.index("In a sum")].split())
    assert "sort and copy-of-sort are copies (cosine +1.000)" in overlap
    assert "math and anti-math are opposed (cosine -0.9" in overlap
    advised = text[text.index("Advice") :].splitlines()[0]
    assert readiness.method == advice.recipe["method"]
    words = (readiness.method, "without", "nan", "copy-of-sort", "other")
    assert all(word in advised for word in words)
    gravest = readiness.findings[0]
    assert f"{gravest.subjects[0]}: {gravest.text}" in " ".join(printed(ten, 200).split())
    assert len(printed(ten, 80).splitlines()) <= 50


def test_where_nothing_fits_the_advice_is_to_merge_none():
    base = made_up.make_base()
    analysis = made_up.analysis(base, {"copy": base})
    text = printed((analysis, *judge(analysis)), 80)
    assert "none of the models should be merged" in text
    assert "Overlap" not in text
    assert "needs changes" in rows(text, "copy")[0]
