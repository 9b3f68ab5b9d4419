# SPDX-License-Identifier: Apache-2.0
"""What every HTTP request and reply has in common: bounded bodies in, one form of error and header out.

Owns the wrapping around each door: request id, origin check, CORS, safe headers, and the last net under a bug.
Invariant: every reply, whoever made it, carries a request id and the CORS headers of an allowed origin, and
every error is the OpenAI form with its retry times. It must never show a traceback or a path of ours, and
never log a query, a header or a body.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from math import ceil

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.core.errors import ServerError, error_of
from server.gateway.access.origins import OriginPolicy
from server.wire.unary import error_body

BODY_WAIT_S = 30.0
"""A body is whole within this of its head."""
EXCESS_BYTES_MAX = 1_048_576
EXCESS_WAIT_S = 2.0
"""What is read and thrown away past the limit, so that the sender is done and reads the refusal."""
RETRY_AFTER_MS = 1000
"""What a 429 or 503 without a better guess asks for."""
PREFLIGHT_S = 600
ERROR_CODE = "sampan.error_code"
"""Where in a request's scope a door notes the code of the error it told the client."""

_STATUS_CODES = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large", 426: "upgrade_required"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EXPOSED = "retry-after, retry-after-ms, x-request-id, x-sampan-warning"
_SAFE_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

_log = logging.getLogger(__name__)


def error_response(error: ServerError) -> Response:
    """An error in the OpenAI form; 429 and 503 say when to come back, in both units that clients read."""
    headers = {}
    if error.row.http_status in (429, 503):
        wait_ms = RETRY_AFTER_MS if error.retry_after_ms is None else error.retry_after_ms
        headers = {"retry-after": str(max(1, ceil(wait_ms / 1000))), "retry-after-ms": str(wait_ms)}
    return json_response(error_body(error), status=error.row.http_status, headers=headers)


def json_response(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON body that is already bytes; no cache may keep it."""
    return Response(
        body,
        status_code=status,
        media_type="application/json",
        headers={"cache-control": "no-store", **(headers or {})},
    )


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Read a whole body.

    Raises:
        ServerError: `payload_too_large`, known from the announced length or from the bytes; `request_timeout`.
        ClientDisconnect: the client left.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_WAIT_S) as waiting:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= bytes_max:
                    chunks.append(chunk)
                    continue
                if chunks:
                    chunks.clear()
                    waiting.reschedule(asyncio.get_running_loop().time() + EXCESS_WAIT_S)
                if size > bytes_max + EXCESS_BYTES_MAX:
                    break
    except TimeoutError:
        if size <= bytes_max:
            raise error_of("request_timeout", f"the body did not arrive within {BODY_WAIT_S:.0f} s") from None
    if size > bytes_max:
        raise error_of("payload_too_large", f"the body is larger than {bytes_max} bytes: send less")
    return b"".join(chunks)


async def on_server_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for a ServerError raised by a door."""
    assert isinstance(error, ServerError)
    return _told(request.scope, error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for its own 404, 405 and the like, in our form."""
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"{request.method} is not possible here",
    }
    code = _STATUS_CODES.get(error.status_code, "invalid_http")
    response = _told(request.scope, error_of(code, words.get(error.status_code, error.detail)))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


def _told(scope: Scope, error: ServerError) -> Response:
    """The response, with a note for the edge of what was told."""
    scope[ERROR_CODE] = error.code
    return error_response(error)


class Edge:
    """The outermost ASGI layer of HTTP; WebSockets and the lifespan pass through untouched.

    Args:
        app: what answers.
        origins: which websites may ask, and see the answers.
        new_id: draws a process-unique id from a prefix.
        on_error: told the code of each error that a client is told, for metrics.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        origins: OriginPolicy,
        new_id: Callable[[str], str],
        on_error: Callable[[str], None],
    ) -> None:
        self._app = app
        self._origins = origins
        self._new_id = new_id
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; never raises for an HTTP one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = asyncio.get_running_loop().time()
        reply = _Reply(send, self._headers_for(scope))
        try:
            await self._answer(scope, receive, reply)
        except ClientDisconnect:
            _log.debug("client_left")
        except Exception as error:  # noqa: BLE001 - the last net: one request fails, the server goes on
            _log.error("request_failed", extra={"request_id": reply.request_id}, exc_info=error)
            await self._answer_bug(scope, receive, reply)
        if ERROR_CODE in scope:
            self._on_error(scope[ERROR_CODE])
        seconds = round(asyncio.get_running_loop().time() - started, 4)
        line = {"route": _route_of(scope), "status": reply.status, "seconds": seconds}
        _log.debug("http_request", extra={**line, "request_id": reply.request_id})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(headers)(scope, receive, send)
        elif scope["path"].startswith("/v1/") and not self._may_ask(scope, headers):
            error = error_of("origin_not_allowed", "this website may not ask: add its origin to the settings")
            await _told(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_ask(self, scope: Scope, headers: Headers) -> bool:
        return self._origins.allows(
            headers.getlist("origin"), hosts=headers.getlist("host"), scheme=scope["scheme"]
        )

    def _preflight(self, headers: Headers) -> Response:
        """The answer to a browser's question; the CORS headers themselves are on every reply."""
        if not self._origins.is_listed(headers.get("origin", "")):
            return Response(status_code=204)
        asked = headers.get("access-control-request-headers", "")
        is_plain = re.fullmatch(r"[A-Za-z0-9_, -]{1,1000}", asked) is not None
        return Response(
            status_code=204,
            headers={
                "access-control-allow-methods": "GET, POST, OPTIONS",
                "access-control-allow-headers": asked if is_plain else "authorization, content-type",
                "access-control-max-age": str(PREFLIGHT_S),
            },
        )

    def _headers_for(self, scope: Scope) -> dict[str, str]:
        """What every reply to this request carries."""
        headers = Headers(scope=scope)
        asked_id = headers.get("x-request-id", "")
        request_id = asked_id if _REQUEST_ID.fullmatch(asked_id) else self._new_id("req")
        common = {"x-request-id": request_id, "vary": "Origin", **_SAFE_HEADERS}
        origin = headers.get("origin", "")
        if origin and self._origins.is_listed(origin):
            # The origin itself and never the star, so no cache can show one site's answer to another.
            common |= {"access-control-allow-origin": origin, "access-control-expose-headers": _EXPOSED}
        return common

    async def _answer_bug(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        if not reply.status:
            error = error_of("internal_error", "the server failed; its log has the cause")
            await _told(scope, error)(scope, receive, reply)


class _Reply:
    """A `send` that adds the common headers and remembers the status; 0 until the reply began."""

    def __init__(self, send: Callable[[Message], Awaitable[None]], common: dict[str, str]) -> None:
        self._send = send
        self._common = common
        self.status = 0

    @property
    def request_id(self) -> str:
        return self._common["x-request-id"]

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in self._common.items():
                headers.setdefault(name, value)
        await self._send(message)


def _route_of(scope: Scope) -> str:
    """The route's own pattern, never the client's path: metric labels must stay few."""
    return getattr(scope.get("route"), "path", "unrouted")
