"""Who may ask `oapl view`: this machine alone, or whoever has the token; and no page of another site in their name."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
METHODS = ("GET", "HEAD")


class Access:
    """Passes a request on to `app`, or refuses it; every answer carries the security headers.

    `names` are the host names, beside IP addresses, that a request may be for: another name that leads here is how a
    page of another site would pass for this one (DNS rebinding), which cannot be done to an address. Of addresses, only
    this machine's own without a token. With a token, a request needs it: as `?token=` once, and then as a cookie.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str], token: str | None, port: int) -> None:
        self._app, self._names, self._token = app, {name.lower() for name in names}, token
        self._cookie = f"oapl_view_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        answer = self._answer(scope)
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        """A refusal, or the way to the page without the token in its address; None where the request may go on."""
        headers = Headers(scope=scope)
        if scope["method"] not in METHODS:
            return refusal(405, "oapl view only shows: GET and HEAD are all it answers.", allow=", ".join(METHODS))
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return refusal(421, "This name does not belong to oapl view. Open the address that it printed.")
        origins, sites = headers.getlist("origin"), headers.getlist("sec-fetch-site")
        if any(urlsplit(origin).netloc.lower() != hosts[0].lower() for origin in origins):
            return refusal(403, "A page of another site asked, which oapl view does not answer.")
        is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if any(site not in ("same-origin", "none") for site in sites) and not (is_link and scope["path"] == "/"):
            return refusal(403, "A page of another site asked, which oapl view does not answer.")
        return None if self._token is None else self._check_token(scope, headers, self._token)

    def _check_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        given = QueryParams(scope["query_string"]).get("token") if scope["path"] == "/" else None
        if given is not None and is_same(given, token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, token, path="/", httponly=True, samesite="strict")
            return answer
        cookies = [cookie_parser(line).get(self._cookie, "") for line in headers.getlist("cookie")]
        if any(is_same(cookie, token) for cookie in cookies):
            return None
        return refusal(401, "The token is missing or wrong. Open the address that oapl view printed, token included.")

    def _is_ours(self, host: str) -> bool:
        name = host_name(host)
        if name is None:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return self._token is not None or address.is_loopback


def refusal(status: int, why: str, **headers: str) -> Response:
    return PlainTextResponse(f"{why}\n", status, headers)


def is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None where it is none."""
    with suppress(ValueError):
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018 - raises where it is no number
        if parts.netloc == host and parts.username is None:
            return parts.hostname
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def names_of_machine() -> set[str]:
    return {name.lower() for name in (socket.gethostname(), socket.getfqdn())}
