"""Results that show themselves: as text, in notebooks, as charts and as JSON."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import asdict
from typing import Any

from dare.documents.document import Document


def json_ready(value: Any) -> Any:
    """Return a value with NaN and infinities as the strings that `float` takes: JSON has none.

    >>> json_ready({"largest": float("inf"), "shares": (0.5, float("nan"))})
    {'largest': 'inf', 'shares': [0.5, 'nan']}
    """
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            ready = {key: json_ready(item) for key, item in value.items()}
            return value if all(ready[key] is item for key, item in value.items()) else ready
        case list() | tuple():
            items = [json_ready(item) for item in value]
            return value if all(map(operator.is_, items, value)) else items
        case _:
            return value


class Shown:
    """A result that makes a document of itself, and so has a view in notebooks and as a page."""

    def document(self) -> Document:
        """Return everything that is to be shown."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, ready for JSON."""
        return dict(json_ready(asdict(self)))  # type: ignore[call-overload]

    def to_json(self) -> str:
        """Return all of it as JSON; a number that is not finite becomes a string."""
        return json.dumps(json_ready(self.to_dict()), indent=2, ensure_ascii=False)

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
