"""What tests of pages share: an outline of their HTML, and a tab of a browser that shows one."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from helpers import PATIENCE_SECONDS


class Outline(HTMLParser):
    """The elements of a page, and its tables as lists of texts, in order and by their labels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.labelled: dict[str | None, list[list[str]]] = {}
        self._is_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
            labels = (a["aria-label"] for _, a in reversed(self.elements) if "aria-label" in a)
            self.labelled[next(labels, None)] = self.tables[-1]
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._is_cell = True

    def handle_data(self, data):
        if self._is_cell:
            self.tables[-1][-1][-1] += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._is_cell = False

    def ids(self) -> list[str | None]:
        return [a["id"] for _, a in self.elements if "id" in a]


@dataclass
class Tab:
    """A page in the browser, and everything that it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    """On the console, or as an error."""
    asked: list[str] = field(default_factory=list)
    """The addresses of all requests."""


def open_address(browser: Any, address: str, ready: str, kind: type[Tab] = Tab, **settings) -> Any:
    """Open an address as a new user would; return its tab when the page matches `ready`."""
    context = browser.new_context(**settings)
    context.set_default_timeout(PATIENCE_SECONDS * 1000)
    tab = kind(context.new_page())
    tab.page.on("console", lambda message: tab.said.append(message.text))
    tab.page.on("pageerror", lambda error: tab.said.append(str(error)))
    tab.page.on("request", lambda request: tab.asked.append(request.url))
    tab.page.goto(address)
    tab.page.wait_for_selector(ready, state="attached")
    return tab
