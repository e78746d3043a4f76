"""Results that show themselves: as text, in notebooks and as charts."""

from __future__ import annotations

from typing import Any

from dare.documents.document import Document


class Shown:
    """A result that makes a document of itself, and so has a view in notebooks and as a page."""

    def document(self) -> Document:
        """Return everything that is to be shown."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the document as a terminal shows it, without colours."""
        from dare.documents.terminal import render_text

        return render_text(self.document())

    def _repr_html_(self) -> str:
        from dare.documents.notebook import render_card

        return render_card(self.document())

    def plot(self, figure: str | None = None) -> Any:
        """Return a figure as an Altair chart, by the name that the page saves it by.

        Without a name it is the first one.
        """
        from dare.documents.notebook import make_chart

        return make_chart(self.document(), figure)
