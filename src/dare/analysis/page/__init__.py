"""An analysis to look at: one HTML page that needs no network, figures as files, the terminal."""

from dare.analysis.page.outcome import Outcome, outcome_of_manifest, outcome_of_report
from dare.analysis.page.writing import write_figures, write_page

__all__ = [
    "Outcome",
    "outcome_of_manifest",
    "outcome_of_report",
    "write_figures",
    "write_page",
]
