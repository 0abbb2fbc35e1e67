"""The door in front of all routes: who may come in, with what, and how much of it.

Owns: checks of Host, Origin, key, content type and size; the request id, the tenant, the stamp of a
request's arrival; that nobody comes in by WebSocket. Must not know: routes, models, the engine.
CORS headers themselves are starlette's, in front of this.

A web page can reach a local server by DNS rebinding (its own name for our address: the Host check)
and by "simple" cross-site posts (no JSON type: 415; a foreign Origin: 403).
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
import secrets
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .ids import new_id
from .options import ADDRESSES, ANY, ServerOptions
from .page import is_page

OPEN_PATHS = frozenset({"/health", "/ready"})
DENIAL = "websocket.http.response"
"""The extension by which a handshake gets an answer in words."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """ASGI middleware, so that streams and disconnects pass through untouched."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._keys = [key.encode() for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        arrived_ns = time.monotonic_ns()
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope.setdefault("state", {}).update(request_id=request_id, arrived_ns=arrived_ns)

        async def send_named(message: Message) -> None:
            if message["type"].endswith("http.response.start"):
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await _deny(error, scope, receive, send_named)
            return
        if scope["type"] == "websocket":
            await _deny(no_websocket(), scope, receive, send_named)
            return
        await self._app(scope, self._limited(receive), send_named)

    def _check(self, scope: Scope, headers: Headers) -> None:
        _check_host(headers, self._options)
        _check_origin(headers, self._options)
        if self._keys and not _is_open(scope):
            scope["state"]["tenant"] = self._tenant(headers)
        if scope.get("method") == "POST":
            _check_type(headers)
            self._check_length(headers)

    def _tenant(self, headers: Headers) -> bytes:
        """What prefixes of this key's requests are salted with. Raises ApiError for a bad key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # All keys are compared, in constant time each: the time tells nothing about them.
        matches = [secrets.compare_digest(given.encode(), key) for key in self._keys]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return hashlib.blake2b(given.encode(), digest_size=16, person=b"martlet-tenant").digest()

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._options.max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        n_bytes, is_whole = 0, False
        end_s = asyncio.get_running_loop().time() + self._options.body_s

        async def limited() -> Message:
            nonlocal n_bytes, is_whole
            if is_whole:  # what comes now is the client leaving, whenever that is
                return await receive()
            left_s = end_s - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), left_s)
            except asyncio.TimeoutError:
                raise self._too_slow() from None
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._options.max_body_bytes:
                raise self._too_large()
            is_whole = not message.get("more_body", False)
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._options.max_body_bytes} bytes",
            code="body_too_large",
            # The rest of the body stays unread, so the connection cannot serve another request.
            headers={"Connection": "close"},
        )

    def _too_slow(self) -> ApiError:
        return ApiError(
            408,
            f"the body did not arrive within {self._options.body_s:g} s",
            code="body_too_slow",
            headers={"Connection": "close"},
        )


async def _deny(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and DENIAL not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})  # before it was accepted: the server makes it a 403
        return
    await error.response(scope["path"])(scope, receive, send)


def no_websocket() -> ApiError:
    return ApiError(404, "nothing here speaks WebSocket; streams are server-sent events")


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if scope["type"] == "websocket":
        return False
    return path in OPEN_PATHS or (is_page(path) and scope["method"] in ("GET", "HEAD"))


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else new_id()


def _check_host(headers: Headers, options: ServerOptions) -> None:
    if ANY in options.hosts:
        return
    name = _host_name(headers.get("host", ""))
    if name not in options.hosts and not (ADDRESSES in options.hosts and _is_address(name)):
        raise ApiError(
            403,
            f"host {name[:80]!r} is not served here; start with --allow-host for it",
            "permission_error",
            code="host_not_allowed",
        )


def _host_name(host: str) -> str:
    """The name without its port; an IPv6 address without brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _check_origin(headers: Headers, options: ServerOptions) -> None:
    origin = headers.get("origin")
    if origin is None or ANY in options.origins or origin in options.origins:
        return
    if _netloc(origin) == headers.get("host"):
        return
    raise ApiError(
        403,
        f"origin {origin[:80]!r} is not allowed; start with --origin for it",
        "permission_error",
        code="origin_not_allowed",
    )


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc or None
    except ValueError:
        return None


def _check_type(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"content type {kind[:80]!r}; send Content-Type: application/json",
            code="unsupported_media_type",
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":  # a few bytes of it could become gigabytes
        raise ApiError(
            415,
            f"content encoding {encoding[:80]!r}; send the body as it is",
            code="unsupported_content_encoding",
        )
