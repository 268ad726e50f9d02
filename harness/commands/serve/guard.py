"""Checks host, key and size of every request before `app` sees it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from harness.config.machine import is_loopback

_OPEN = ("/", "/health")  # they reveal nothing, so they need no key
CLIENT_LEFT = 499  # nginx's code for a client that left before an answer began


@dataclass(frozen=True)
class Guard:
    """Middleware that refuses requests.

    Attributes:
        local: answer only requests for loopback, so that a web page whose name points here cannot
            use the service (DNS rebinding).
        key: what requests must bring; None for nothing.
        max_bytes: the longest body.
    """

    app: ASGIApp
    local: bool
    key: str | None
    max_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self.app
        if scope["type"] == "http":
            headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
            }
            answer = self._refusal(scope["path"], headers) or self.app
        await answer(scope, receive, send)

    def _refusal(self, path: str, headers: dict[str, str]) -> JSONResponse | None:
        try:
            host = urlsplit(f"//{headers.get('host', '')}").hostname
        except ValueError:
            return error_response(400, "the Host header is no address")
        # A browser always sends a Host, so a request without one comes from no web page.
        if self.local and not is_loopback(host or "localhost"):
            return error_response(400, "this service answers requests for localhost alone")
        if self.key and path not in _OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_right = secrets.compare_digest(given.strip().encode("latin-1"), self.key.encode())
            if scheme.lower() != "bearer" or not is_right:
                return error_response(401, "the API key is missing or wrong")
        if "transfer-encoding" in headers:
            return error_response(411, "a body must come with its length")
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return error_response(400, "the Content-Length header is no number")
        # Python refuses to convert a text of thousands of digits.
        if len(length) > 18 or int(length) > self.max_bytes:
            return error_response(413, f"the body is larger than {self.max_bytes} bytes")
        return None


def error_response(status: int, message: str, member: str | None = None) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
    return JSONResponse(error_body(status, message, member), status, headers.get(status))


def error_body(status: int, message: str, member: str | None = None) -> dict[str, Any]:
    """An error as OpenAI shapes it; `member` is the one of the request that is wrong."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    # The message may quote the request, whose JSON may hold lone surrogates.
    text = message.encode(errors="backslashreplace").decode()[:500]
    return {"error": {"message": text, "type": kind, "param": member, "code": None}}
