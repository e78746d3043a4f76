"""The check of every request: only the page that got the server's token is answered.

The server listens on this machine only. Other users of the machine, and pages from elsewhere in
the user's browser, can reach it there all the same. So:

- Its Host is ours. Else a foreign name that was made to lead here would count as our own site.
- It comes from our page or from the address bar, as Origin and Sec-Fetch-Site say.
- It has the token: in the address, which is exchanged for a cookie, as that cookie, or as a header.
- A body is JSON by its type, which other sites cannot send without asking first.

A body is small, and its contents are bounded, before anything is made of them: `read_object`.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dare.errors import DareError, InputError

LOOPBACK = "127.0.0.1"
MOST_BODY_BYTES = 1 << 20
MOST_ITEMS = 200  # the most items in each list and table of a body: models, rules, settings
MOST_DEPTH = 16
MOST_DIGITS = 20  # the most digits of a whole number; a seed has no more
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'self'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
REMEDY = (
    "The command that serves this page printed an address with a token. Copy "
    "all of it from the terminal to the address bar. If that command has "
    "ended, start it again."
)
REFUSAL = (Path(__file__).parent / "templates" / "refusal.html").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Key:
    """The tokens that open the server, and its port."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    # Opens it one time: other users see the command that starts a browser, with its address.
    once: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def address(self) -> str:
        """The address of the page, with the token."""
        return f"http://{self.hosts[0]}/?token={self.token}"

    @property
    def address_once(self) -> str:
        """An address that works one time."""
        return f"http://{self.hosts[0]}/?token={self.once}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that the page's address may have."""
        return f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"

    @property
    def cookie(self) -> str:
        """The cookie's name: a browser has one jar for all ports."""
        return f"dare-playground-{self.port}"


class RequestGuard:
    """Passes on to the app what may be answered, and refuses everything else."""

    def __init__(self, app: ASGIApp, key: Key) -> None:
        self._app = app
        self._key = key
        self._once: str | None = key.once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**HEADERS, "Cache-Control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        answer = self._check_origin(request) or self._check_token(request) or _check_type(request)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _check_origin(self, request: Request) -> Response | None:
        """Return the refusal of a request that does not come from our own page."""
        host = request.headers.get("host", "")
        if host not in self._key.hosts:
            return refuse(request, 403, f"This server answers only to {self._key.hosts[0]}.")
        origin = request.headers.get("origin", f"http://{host}")
        asker = request.headers.get("sec-fetch-site", "same-origin")
        is_link = request.headers.get("sec-fetch-mode") == "navigate" and _is_page(request)
        if origin != f"http://{host}" or (asker not in ("same-origin", "none") and not is_link):
            return refuse(request, 403, "Requests from another site are not allowed.")
        return None

    def _check_token(self, request: Request) -> Response | None:
        """Return the answer to a token that must be exchanged, is missing, or is wrong."""
        in_address = request.query_params.get("token") if _is_page(request) else None
        kind, _, in_header = request.headers.get("authorization", "").partition(" ")
        cookie = request.cookies.get(self._key.cookie)
        given = in_header.strip() if kind.lower() == "bearer" else cookie
        given = given if in_address is None else in_address
        if given is None:
            return refuse(request, 401, f"The token is missing. {REMEDY}")
        is_once = in_address is not None and self._once is not None and _is_same(given, self._once)
        if not is_once and not _is_same(given, self._key.token):
            return refuse(request, 403, f"The token does not belong to this server. {REMEDY}")
        self._once = None if is_once else self._once
        return None if in_address is None else self._exchange(request)

    def _exchange(self, request: Request) -> Response:
        """Send the browser to the same page with the token as a cookie."""
        others = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
        answer = RedirectResponse(f"/?{urlencode(others)}" if others else "/", status_code=303)
        answer.set_cookie(self._key.cookie, self._key.token, httponly=True, samesite="strict")
        return answer


def refuse(request: Request, status: int, text: str) -> Response:
    """Refuse a request, in the form that the asker reads."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    if request.scope["path"].startswith("/api/"):
        return Json({"error": text}, status, headers)
    title = "No token" if status == 401 else "Not allowed"
    page = REFUSAL.format(title=title, text=escape(text))
    return HTMLResponse(page, status, headers)


def _check_type(request: Request) -> Response | None:
    """Return the refusal of a body that is not JSON by its type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method in ("GET", "HEAD") or kind == "application/json":
        return None
    return refuse(request, 415, "The body must be JSON, with Content-Type: application/json.")


class TooLargeError(DareError):
    """A body that is larger than any request of the page."""


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in a body, or an empty one for no body.

    Things that JSON lacks or no recipe has are refused: NaN, infinities, unpaired surrogates,
    numbers with more digits than a seed, long lists, deep nesting.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise TooLargeError(f"The body is larger than {MOST_BODY_BYTES} bytes.")
    try:
        text = (body or b"{}").decode()
        document = json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_float)
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON that can be read: {error!s:.200}") from None
    if not isinstance(document, dict):
        raise InputError("the body must be an object")
    _check_size(document)
    return document


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; at most {MOST_DIGITS} are allowed")
    return int(digits)


def _float(written: str) -> float:
    if not math.isfinite(value := float(written)):
        raise ValueError(f"{written[:MOST_DIGITS]} is not a finite number")
    return value


def _check_size(value: Any, depth: int = 1) -> None:
    if not isinstance(value, dict | list):
        return
    if len(value) > MOST_ITEMS or depth > MOST_DEPTH:
        raise InputError(
            f"the body has {len(value)} entries in a list or table, {depth} deep; "
            f"at most {MOST_ITEMS} entries and a depth of {MOST_DEPTH} are allowed"
        )
    for item in value.values() if isinstance(value, dict) else value:
        _check_size(item, depth + 1)


class Json(JSONResponse):
    """An answer in ASCII: names of files may hold bytes that are no text, and UTF-8 has none."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _is_page(request: Request) -> bool:
    """Tell whether the request is for the page itself."""
    return bool(request.scope["path"] == "/")


def _is_same(given: str, expected: str) -> bool:
    """Compare in a time that does not tell how much is right."""
    return hmac.compare_digest(given.encode(), expected.encode())
