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

from dare.output.page.charts import THEMES, Figure, vega_config
from dare.output.page.words import number

SHELL = "dare.output.page"
CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'"
"""What no page does: load what is not allowed by name, for one thing."""


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
    own = [_resource(package, style)] if style else []
    return render_template(
        package,
        template,
        scripts=[library, _resource(SHELL, "page.js"), _resource(package, script)],
        styles=own,
        policy="img-src data: blob:; style-src 'unsafe-inline'",
        filters=filters,
        drawings=[{"name": figure.name, "spec": _spec(figure)} for figure in figures],
        **values,
    )


def render_template(
    package: str,
    template: str,
    *,
    scripts: Sequence[str],
    styles: Sequence[str],
    policy: str,
    filters: Mapping[str, Callable[..., Any]] | None = None,
    allowed: Sequence[str] = (),
    **values: Any,
) -> str:
    """One text from a package's template, with these scripts and styles in it.

    `policy` says what the page may load, `allowed` which scripts besides its own.
    """
    start = _resource(SHELL, "start.js")
    environment = _environment(package)
    environment.filters |= {"number": number, **(filters or {})}
    text: str = environment.get_template(template).render(
        policy=f"{CLOSED}; {_script_policy([start, *scripts], allowed)}; {policy}",
        colours={name: theme.colours for name, theme in THEMES.items()},
        style="".join([_resource(SHELL, "page.css"), *styles]),
        start=start,
        scripts=scripts,
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


def _script_policy(scripts: Iterable[str], allowed: Sequence[str]) -> str:
    """Only the page's own scripts run, and what is allowed (Vega compiles its expressions)."""
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]
    return " ".join(["script-src", *digests, *allowed, "'unsafe-eval'"])


def _spec(figure: Figure) -> dict[str, Any]:
    """What is drawn, with its description and without the address of a schema."""
    bare = {key: value for key, value in figure.spec.items() if key != "$schema"}
    return {**bare, "description": figure.description}
