"""Guard: which requests are answered: those of the page itself, with the token of this server.

Invariant: a request of another site's page is refused, whatever that page does. It cannot read the token, which is in
the page's address and in no cookie. It cannot send the token's header without the question that browsers ask first,
which is never granted. A name of another site that is led to this host (DNS rebinding) is a wrong `Host`. Only GET and
HEAD are answered, so nothing can be changed. Every answer forbids the browser to load anything from elsewhere, to run
scripts that are no files of this package, and to be framed.

    who asks                                               what is refused
    another site's page                                    `Origin`, `Sec-Fetch-Site`
    another site whose name leads to 127.0.0.1             `Host`
    another user of this host, who knows no token          `Authorization`, for everything but the page's own files

The ticket in the address that a browser is opened with is good once, and for a minute: other users of the host can see
the arguments of a process. The page changes it for the token.

Threads: safe for all.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable

_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
_TICKET_S = 60.0
_SECURE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class Keys(NotCopyable):
    """The token of a server, and the ticket with which a browser is opened."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self.ticket = secrets.token_urlsafe(32)
        self._ticket_ends = monotonic() + _TICKET_S
        self._lock = threading.Lock()

    def is_token(self, given: str) -> bool:
        """True if this is the token."""
        return secrets.compare_digest(given.encode(), self.token.encode())

    def take_ticket(self, given: str) -> bool:
        """True if this is the ticket, the first time within a minute."""
        with self._lock:
            is_good = monotonic() < self._ticket_ends and secrets.compare_digest(given.encode(), self.ticket.encode())
            if is_good:
                self._ticket_ends = 0.0
            return is_good


class Guard:
    """An application of ASGI in front of another one."""

    def __init__(self, app: ASGIApp, keys: Keys, is_open: Callable[[str], bool]) -> None:
        """`is_open`: True for a path that needs no token, because it has no facts about topics."""
        self._app = app
        self._keys = keys
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or refuse it."""
        if scope["type"] != "http":
            return  # no web sockets: the connection is closed
        why = self._refusal(scope)
        app: ASGIApp = self._app if why is None else PlainTextResponse(why[1] + "\n", why[0])

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURE.items():
                    headers[name] = value
            await send(message)

        await app(scope, receive, send_secured)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason for a request that is refused; None for one that is answered."""
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not _is_loopback(hosts[0]):
            return 421, "this page is for this host alone: use the address that loglib ui has printed"
        if len(origins) > 1 or (origins and origins[0] != f"http://{hosts[0]}"):
            return 403, "a page of another site asks"
        # A link from elsewhere may open the page, which has no facts without the token in its address.
        is_a_link = self._is_open(scope["path"]) and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_a_link:
            return 403, "a page of another site asks"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page only reads"
        if self._is_open(scope["path"]):
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if scope["path"] == "/api/enter" and kind == "Ticket":
            is_good = self._keys.take_ticket(given)
            return None if is_good else (401, "this address was used already: use the one that loglib ui has printed")
        if kind != "Bearer" or not self._keys.is_token(given):
            return 401, "the token is missing or wrong: use the address that loglib ui has printed"
        return None


def _is_loopback(host: str) -> bool:
    """True if the header names this host. Any port: it may be forwarded by ssh."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises for a port that is none
    except ValueError:
        return False
    bare = host.rsplit(":", 1)[0] if parts.port is not None else host
    return bare in _HOSTS
