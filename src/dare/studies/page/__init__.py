"""A study to look at: one HTML page that needs no network, in the looks of the report."""

from dare.studies.page.writing import write_study_page

__all__ = ["write_study_page"]
