"""The frame of every page: its head, its sections, its scripts, and what it may do.

The only module that imports Jinja, which escapes every value. A page's own template extends
`page.html.jinja`; `parts` has what the templates of sections share.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dare.output.page.figures import Figure
from dare.output.page.themes import THEMES, vega_config
from dare.output.page.words import number

SHELL = "dare.output.page"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    name: str
    title: str
    template: str
    figures: tuple[Figure, ...] = ()


def render_page(
    package: str,
    template: str,
    *,
    figures: Sequence[Figure],
    library: str,
    script: str,
    style: str = "",
    filters: Mapping[str, Callable[..., Any]] | None = None,
    **values: Any,
) -> str:
    """One text from a package's template; `library` is the JavaScript that draws.

    `script` and `style` are files among the package's templates, added to those of all pages.
    """
    start = _resource(SHELL, "start.js")
    scripts = [library, _resource(SHELL, "page.js"), _resource(package, script)]
    own = [_resource(package, style)] if style else []
    environment = _environment(package)
    environment.filters |= {"number": number, **(filters or {})}
    text: str = environment.get_template(template).render(
        policy=_policy([start, *scripts]),
        colours={name: theme.colours for name, theme in THEMES.items()},
        style="".join([_resource(SHELL, "page.css"), *own]),
        start=start,
        scripts=scripts,
        drawings=[{"name": figure.name, "spec": _spec(figure)} for figure in figures],
        themes={name: vega_config(theme) for name, theme in THEMES.items()},
        **values,
    )
    return text


def _environment(package: str) -> Any:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(SHELL)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    return environment


def _resource(package: str, name: str) -> str:
    return files(package).joinpath("templates", name).read_text("utf-8")


def _policy(scripts: Iterable[str]) -> str:
    """Nothing is fetched, and only the page's own scripts run (Vega compiles its expressions)."""
    digests = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    )
    return (
        f"default-src 'none'; script-src {digests} 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _spec(figure: Figure) -> dict[str, Any]:
    """What is drawn, with its description and without the address of a schema."""
    bare = {key: value for key, value in figure.spec.items() if key != "$schema"}
    return {**bare, "description": figure.description}
