"""The file: one HTML page of a study."""

from __future__ import annotations

from pathlib import Path

from dare.output.page.writing import check_installed, library_for, write_file
from dare.studies.page.assembly import assemble_study_page
from dare.studies.results import Conclusion, StudyData


def write_study_page(
    path: Path, data: StudyData, conclusion: Conclusion, *, overwrite: bool = True
) -> None:
    """Write one HTML page that needs nothing else."""
    check_installed()
    from dare.studies.page.figures import draw_figures

    figures = draw_figures(data, conclusion)
    page = assemble_study_page(data, conclusion, figures, library_for(figures))
    write_file(path, page.encode(), "page", overwrite=overwrite)
