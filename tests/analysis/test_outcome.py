from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sample

from dare.analysis.results import Outcome
from dare.documents.notices import notice
from dare.errors import InputError


def test_what_stages_leave_is_counted_over_tensors(subject):
    kept = subject.outcome.kept["math"]
    sizes = [tensor.statistics.elements for tensor in subject.analysis.models[0].tensors]
    left = sum(round(size * (1 - 0.9)) // 2 for size in sizes)
    assert kept["trim"] == left / sum(sizes)
    assert list(kept) == ["dare", "trim"]
    assert kept["dare"] == pytest.approx(0.1, abs=1e-3)


def test_without_delta_stages_nothing_is_said_about_what_is_kept(subject):
    report = sample.make_report(subject.analysis)
    bare = tuple(replace(t, survivors=tuple(() for _ in t.models)) for t in report.tensors)
    outcome = sample.outcome_of(replace(report, method="linear", tensors=bare), subject.analysis)
    assert list(outcome.kept.values()) == [{}, {}, {}]


def test_tensors_that_were_not_analysed_do_not_count(subject):
    report = sample.make_report(subject.analysis)
    other = replace(report.tensors[0], name="another", survivors=((9**9, 9**9),) * 3)
    warned = (notice("overflow", values="3 values are"),)
    more = replace(report, tensors=(*report.tensors, other), warnings=warned)
    found = sample.outcome_of(more, subject.analysis)
    assert (found.models, found.kept) == (subject.outcome.models, subject.outcome.kept)
    assert found.warnings == (warned[0].text,)
    with pytest.raises(InputError, match="has no whole report"):
        Outcome.of_manifest({"report": {}}, subject.analysis, output=Path("x"))
