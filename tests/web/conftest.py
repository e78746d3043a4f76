"""The page as people meet it: as static files, and from the real server, in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sites import Site, Tab, serving

from dare.web.assets import write_folder
from pages import open_address

HEIGHTS = {390: 844, 1280: 900}

OpenTab = Callable[..., Tab]


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture(scope="session")
def static_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The page as static files, from a server that knows nothing of it."""
    folder = tmp_path_factory.mktemp("static-site")
    write_folder(folder)
    handler = partial(_Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield Site(f"http://127.0.0.1:{server.server_port}/", folder)
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def local_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The page from the command, with a server for own models."""
    with serving(tmp_path_factory.mktemp("local-site")) as (site, _):
        yield site


@pytest.fixture
def open_tab(browser: Any) -> Iterator[OpenTab]:
    """Opens an address as a new user would, and returns its tab when the page is ready."""
    contexts = []

    def open_one(address: str, width: int = 1280, theme: str = "light", **settings: Any) -> Tab:
        size = {"width": width, "height": HEIGHTS.get(width, 900)}
        looks = {"viewport": size, "color_scheme": theme, **settings}
        tab = open_address(browser, address, "html[data-ready=true]", Tab, **looks)
        contexts.append(tab.page.context)
        return tab

    yield open_one
    for context in contexts:
        context.close()
