"""Access control: who may see the pages, and what browsers may do with them.

- A site whose name resolves to this machine (DNS rebinding) sends that name as `Host`, and is
  refused: only known names are answered, and numeric addresses.
- If other machines can connect, each browser presents a token once, and keeps it in a cookie.
- Pages of other sites can link here, but cannot embed or fetch anything, or submit forms.
- Pages load nothing from elsewhere and run only our scripts, whatever the data contain.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})

PAGE_POLICY = "; ".join(
    [
        "default-src 'none'",
        "img-src 'self' data:",
        "media-src 'self'",
        "style-src 'self'",
        "script-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ]
)
"""What pages may load."""
PART_POLICY = "default-src 'none'; sandbox"
"""What parts may do if a browser opens them directly: nothing."""

_HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache, private",
}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a server bound to an address.

    Example:
        >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "box")]
        [True, True, True, False, False]
    """
    address = None if host.startswith("[") else _address(host)
    return host == "localhost" if address is None else address.is_loopback


@dataclass(frozen=True)
class Guard:
    """Middleware that answers only authorized requests, and adds security headers.

    Args:
        app: What makes the pages.
        names: Names of this server in addition to those of loopback, as in `Host`, without port.
        token: What browsers have to present; None if only this machine can connect.
    """

    app: ASGIApp
    names: Collection[str] = ()
    token: str | None = None
    _cookie: str = field(default_factory=lambda: f"energon-view-{secrets.token_hex(4)}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self.app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        name, colon, port = headers.get("host", "").lower().rpartition(":")
        host = name if colon and port.isdecimal() else f"{name}{colon}{port}"
        # A numeric address cannot resolve to a different machine.
        is_own = self.token is not None and _address(host) is not None
        if not (is_own or host in LOOPBACK_NAMES or host in self.names):
            return PlainTextResponse(
                f"this server does not answer to the name {host!r}; to allow it, start `energon "
                "view` with --server-name\n",
                status_code=421,
            )
        if _is_of_another_site(scope["method"], headers):
            return PlainTextResponse("other sites may only link to these pages\n", status_code=403)
        return None if self.token is None else self._check_token(scope, headers, self.token)

    def _check_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        shown = dict(query).get("token")
        if shown is not None and _same(shown, token):
            others = urlencode([pair for pair in query if pair[0] != "token"])
            path = "/" + scope["path"].lstrip("/")
            response = RedirectResponse(f"{path}?{others}" if others else path, status_code=303)
            response.set_cookie(self._cookie, token, httponly=True, samesite="strict")
            return response
        kept = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        if _same(kept, token) or _same(headers.get("authorization", ""), f"Bearer {token}"):
            return None
        return PlainTextResponse(
            "Open the address printed by `energon view`; it ends with ?token=…\n",
            status_code=403,
        )


def server_names(host: str, names: Collection[str]) -> frozenset[str]:
    """Return the names of a server bound to `host`, in addition to those of loopback."""
    own = {name.lower() for name in names}
    if not is_loopback(host):
        own |= {name.lower() for name in (host, socket.gethostname(), socket.getfqdn())}
    return frozenset(own)


def _is_of_another_site(method: str, headers: Headers) -> bool:
    """Return whether a page of another site sent the request, other than by following a link.

    Requests without these headers are allowed: they come from programs, not from browsers.
    """
    site = headers.get("sec-fetch-site", "same-origin")
    follows_link = method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
    is_framed = headers.get("sec-fetch-dest", "document") != "document"
    return site in ("cross-site", "same-site") and (is_framed or not follows_link)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return a numeric address; None for a name."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _same(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())
