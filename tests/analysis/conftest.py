from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import sample

from dare.analysis.advice import Advice
from dare.analysis.document import Analysis, make_document
from dare.analysis.readiness import Readiness
from dare.analysis.results import Outcome
from dare.documents.document import Document
from dare.documents.page import render_page


@dataclass(frozen=True)
class Subject:
    analysis: Analysis
    readiness: Readiness
    advice: Advice
    outcome: Outcome

    def document(self) -> Document:
        return make_document(self.analysis, self.readiness, self.advice, self.outcome)


def make_subject(analysis: Analysis, advice: Advice) -> Subject:
    survival = sample.make_survival(analysis)
    outcome = sample.outcome_of(sample.make_report(analysis), analysis, survival)
    return Subject(analysis, sample.make_readiness(analysis.names), advice, outcome)


@pytest.fixture(scope="session")
def subject() -> Subject:
    return make_subject(sample.make_analysis(), sample.make_advice())


@pytest.fixture(scope="session")
def crowd() -> Subject:
    analysis = sample.make_many(12)
    return make_subject(analysis, sample.make_many_advice(analysis))


@pytest.fixture(scope="session")
def crowded_page(crowd: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "crowded.html"
    path.write_text(render_page(crowd.document()), "utf-8")
    return path


@pytest.fixture(scope="session")
def page(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(subject.document()), "utf-8")
    return path
