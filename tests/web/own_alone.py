"""The page with its last part alone: the others compute for seconds, and are tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAIN = """
import * as own from "./parts/own.js";
import { createState } from "./state.js";
const kind = document.querySelector("meta[name=dare-engine]").content;
own.mount(document.getElementById("own"), { state: createState(own.defaults), engine: { kind } });
document.documentElement.dataset.ready = "true";
"""


@contextmanager
def own_alone(browser: Any, address: str, **settings: Any) -> Iterator[tuple[Any, list[str]]]:
    """The page in a new tab, and what it says on the console."""
    context = browser.new_context(**settings)
    context.set_default_timeout(30_000)
    context.route(
        "**/main.js", lambda route: route.fulfill(body=MAIN, content_type="text/javascript")
    )
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(address)
    page.wait_for_selector("html[data-ready=true]", state="attached")
    yield page, said
    context.close()
