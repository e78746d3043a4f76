"""An analysis to look at: one HTML page that needs no network, figures as files, the terminal."""

from dare.analysis.page.assembly import write_figures, write_page
from dare.analysis.page.series import Outcome, outcome_of_manifest, outcome_of_report

__all__ = [
    "Outcome",
    "outcome_of_manifest",
    "outcome_of_report",
    "write_figures",
    "write_page",
]
