"""Photograph a page for the documentation: `python docs/make_screenshots.py report.html`.

Writes images/report-{light,dark}-{desktop,tablet,phone}.png, or into --folder; the first part of
the names is that of the page. The playground is photographed from its folder, which is served
meanwhile, when its models have answered:

    dare playground --build playground
    python docs/make_screenshots.py playground --height 1000 --wait 10 --sizes desktop phone

A picture ends with an element of the page if one is named (--until). It holds the headings that it
shows as text, so that a test can tell whether the page has changed since.

Needs playwright and a chromium that is installed on the machine; nothing is fetched.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).with_name("images")
SIZES = {"desktop": (1280, 1110), "tablet": (820, 1425), "phone": (390, 1250)}
"""Width and height of what is shown, in CSS pixels."""
MARGIN = 16
"""Pixels below the last element to show."""
COLOURS = 256
"""Of the palette: pictures of text and flat colours need no more."""
TEXTS = "texts"
"""The name under which a picture holds its texts, as JSON."""
VISIBLE_TEXTS = """
[...document.querySelectorAll("h2, th, summary, dt, legend")]
  .filter((e) => e.checkVisibility() && e.getBoundingClientRect().bottom < innerHeight)
  .map((e) => e.innerText.replace(/\\s+/g, " ").trim())
  .filter((text) => text)
"""


def find_chromium() -> str:
    """Where chromium is, or the end of the program."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    sys.exit("no chromium found; install it (Debian: apt install chromium)")


class QuietHandler(SimpleHTTPRequestHandler):
    """Hands out files and says nothing about it."""

    def log_message(self, *_: object) -> None:
        """Leave the terminal alone."""


@contextmanager
def served(page: Path) -> Iterator[str]:
    """The address of a page: a file's own, or that of a server for a folder."""
    if page.is_file():
        yield page.resolve().as_uri()
        return
    handler = partial(QuietHandler, directory=str(page))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def photograph(
    browser: Browser, address: str, theme: str, size: tuple[int, int], arguments: argparse.Namespace
) -> tuple[bytes, list[str]]:
    """The top of a page, some time after its figures are drawn, and the texts it shows."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
    )
    tab = context.new_page()
    tab.goto(address)
    tab.wait_for_selector(f"html[data-drawn={theme}]")
    tab.wait_for_timeout(1000 * arguments.wait)
    if arguments.until and (box := tab.locator(arguments.until).first.bounding_box()):
        height = round(box["y"] + box["height"]) + MARGIN
        tab.set_viewport_size({"width": width, "height": height})
    picture, texts = tab.screenshot(), tab.evaluate(VISIBLE_TEXTS)
    context.close()
    return picture, texts


def compress(picture: bytes, texts: Sequence[str]) -> bytes:
    """The same picture with a palette, and with its texts."""
    small = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS)
    held = PngInfo()
    held.add_itxt(TEXTS, json.dumps(texts, ensure_ascii=False), zip=True)
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True, pnginfo=held)
    return out.getvalue()


def main() -> None:
    """Write the pictures, light and dark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("page", type=Path, help="an HTML page, or a folder with one")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--height", type=int, help="pixels of the page to show")
    parser.add_argument("--until", help="a selector: the last element to show")
    parser.add_argument("--wait", type=float, default=0, help="seconds after the first drawing")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, served(arguments.page) as address:
        browser = playwright.chromium.launch(executable_path=find_chromium())
        for theme in ("light", "dark"):
            for device in arguments.sizes:
                width, height = SIZES[device]
                size = (width, arguments.height or height)
                picture = compress(*photograph(browser, address, theme, size, arguments))
                target = arguments.folder / f"{arguments.page.stem}-{theme}-{device}.png"
                target.write_bytes(picture)
                print(f"{target}: {len(picture) / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
