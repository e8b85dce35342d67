"""Checks that every request must pass before a page sees it (SAFE-1).

- The method must be GET or HEAD.
- On loopback, the Host header must name this machine. Otherwise, a page of another site whose name resolves to
  127.0.0.1 could read the responses (DNS rebinding).
- On any other address, a random token is required. The link that the command prints contains it; the first response
  moves it to a cookie that browsers do not send with requests from pages of other sites.

Every response forbids inline scripts, and scripts, styles, pictures and connections from any other server.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_COOKIE = "streamvid-preview"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """ASGI middleware that refuses requests and adds headers, as described at the top of this module.

    host: address that the server listens on.
    token: token that requests must present; None to check the Host header instead.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        self._app, self._token = app, token
        self._names = _LOCAL_NAMES | {f"[{host}]" if ":" in host else host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._answer(scope)
        await (answer or self._app)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> Response | None:
        """Return the response to a request that must be refused, or None if the request is allowed."""
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET and HEAD are allowed", 405)
        headers = Headers(scope=scope)
        if self._token is None:
            if _host_name(headers.get("host", "")) in self._names:
                return None
            return PlainTextResponse("unknown host; open the address that `streamvid preview` printed", 421)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and self._is_right(given[0]):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # Two slashes at the start would name another host.
            path = "/" + scope["path"].lstrip("/\\") + (f"?{rest}" if rest else "")
            answer = RedirectResponse(path, 303)
            # Not "strict": with it, a link in a chat would lead to this redirect, and then to a refusal.
            answer.set_cookie(_cookie_name(scope), self._token, httponly=True, samesite="lax")
            return answer
        if self._is_right(_cookie(headers.get("cookie", ""), _cookie_name(scope))):
            return None
        return PlainTextResponse("a token is required; open the link that `streamvid preview` printed", 403)

    def _is_right(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode(), self._token.encode())


def _host_name(header: str) -> str:
    """Return the host of a Host header without its port, in lower case."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdecimal() else header).lower()


def _cookie_name(scope: Scope) -> str:
    """Return a cookie name that contains the port, because browsers send cookies to all ports of a host."""
    server = scope.get("server")
    return f"{_COOKIE}-{server[1] if server else 0}"


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value
