# SPDX-License-Identifier: Apache-2.0
"""How things fail: one error for a request, one for a socket, and the one table that spells a code everywhere.

    ServerError(code)          answers one request; the socket, the session and everyone else go on
    ├ ClientFault              the request is wrong: mend it, do not retry          4xx
    ├ Overloaded               we are full: retry after `retry_after_ms`            429
    ├ Unavailable              we cannot now: retry                                 503
    └ Bug                      we are wrong: retry may help, the log has the cause  500
    Close(code, reason)        ends a socket; its range is the client's reconnect policy

Every `code` has a row in CODES, and `error_of(code, ...)` builds the right class from it, so no door
invents its own spelling. A message is for the person who wrote the request: it names the field and the fix,
and never holds a traceback, a secret or another user's text.
"""

from dataclasses import dataclass
from enum import Enum


class LogLevel(Enum):
    """How loud an error is in the log: a client's mistake is not our alarm."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CodeRow:
    """What one code means at every door.

    `http_status` for HTTP and for a refused handshake; `type` for OpenAI-shaped bodies; `log_level` for
    the log. The code itself is the metric label.
    """

    http_status: int
    type: str
    log_level: LogLevel


_CLIENT = "invalid_request_error"

CODES: dict[str, CodeRow] = {
    "invalid_json": CodeRow(400, _CLIENT, LogLevel.INFO),
    "invalid_event": CodeRow(400, _CLIENT, LogLevel.INFO),
    "invalid_value": CodeRow(400, _CLIENT, LogLevel.INFO),
    "missing_required_parameter": CodeRow(400, _CLIENT, LogLevel.INFO),
    "unsupported_parameter": CodeRow(400, _CLIENT, LogLevel.INFO),
    "unsupported_modality": CodeRow(400, _CLIENT, LogLevel.INFO),
    "context_length_exceeded": CodeRow(400, _CLIENT, LogLevel.INFO),
    "conversation_already_has_active_response": CodeRow(409, _CLIENT, LogLevel.INFO),
    "response_cancel_not_active": CodeRow(400, _CLIENT, LogLevel.INFO),
    "item_not_found": CodeRow(404, _CLIENT, LogLevel.INFO),
    "item_already_exists": CodeRow(400, _CLIENT, LogLevel.INFO),
    "conversation_full": CodeRow(400, _CLIENT, LogLevel.INFO),
    "model_not_found": CodeRow(404, _CLIENT, LogLevel.INFO),
    "not_found": CodeRow(404, _CLIENT, LogLevel.INFO),
    "method_not_allowed": CodeRow(405, _CLIENT, LogLevel.INFO),
    "request_timeout": CodeRow(408, _CLIENT, LogLevel.INFO),
    "payload_too_large": CodeRow(413, _CLIENT, LogLevel.INFO),
    "upgrade_required": CodeRow(426, _CLIENT, LogLevel.INFO),
    "headers_too_large": CodeRow(431, _CLIENT, LogLevel.INFO),
    "invalid_http": CodeRow(400, _CLIENT, LogLevel.INFO),
    "origin_not_allowed": CodeRow(403, "permission_error", LogLevel.WARNING),
    "rate_limit_exceeded": CodeRow(429, "rate_limit_error", LogLevel.INFO),
    "connection_limit_reached": CodeRow(503, "overloaded_error", LogLevel.WARNING),
    "queue_full": CodeRow(429, "overloaded_error", LogLevel.WARNING),
    "queue_timeout": CodeRow(503, "overloaded_error", LogLevel.WARNING),
    "engine_unavailable": CodeRow(503, "server_error", LogLevel.ERROR),
    "server_draining": CodeRow(503, "server_error", LogLevel.INFO),
    "engine_error": CodeRow(500, "server_error", LogLevel.ERROR),
    "internal_error": CodeRow(500, "server_error", LogLevel.ERROR),
}


class ServerError(Exception):
    """One request failed. Compared by identity; safe to keep and to send once.

    Args:
        code: a key of CODES.
        message: for the person who wrote the request.
        param: the field at fault, in the spelling of the door it came through.
        retry_after_ms: when a retry may succeed, if we know.

    Raises:
        KeyError: `code` has no row in CODES.
    """

    def __init__(
        self, code: str, message: str, *, param: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.row = CODES[code]
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.row.http_status in (429, 500, 503)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by parts: BaseException would call `__init__` with the message alone."""
        return _rebuild, (type(self), self.code, self.message, self.param, self.retry_after_ms)


class ClientFault(ServerError):
    """The request is wrong."""


class Overloaded(ServerError):
    """We are full."""


class Unavailable(ServerError):
    """We cannot serve now."""


class Bug(ServerError):
    """We are wrong."""


def error_of(
    code: str, message: str, *, param: str | None = None, retry_after_ms: int | None = None
) -> ServerError:
    """Build the error class that fits a code's row.

    Raises:
        KeyError: `code` has no row in CODES.
    """
    status = CODES[code].http_status
    kind: type[ServerError] = {429: Overloaded, 503: Unavailable, 500: Bug}.get(status, ClientFault)
    return kind(code, message, param=param, retry_after_ms=retry_after_ms)


def _rebuild(
    kind: type[ServerError], code: str, message: str, param: str | None, retry_after_ms: int | None
) -> ServerError:
    return kind(code, message, param=param, retry_after_ms=retry_after_ms)


@dataclass(frozen=True, slots=True)
class Close:
    """How a socket ends. 1001, 1006, 1011–1013, 4000–4499 ask the client to reconnect; the rest are final."""

    code: int
    reason: str


CLOSE_DONE = Close(1000, "done")
CLOSE_UNSUPPORTED_DATA = Close(1003, "text frames only")
CLOSE_SERVER_ERROR = Close(1011, "server error")
CLOSE_RESTART = Close(1012, "server restart")
CLOSE_TRY_LATER = Close(1013, "try again later")
CLOSE_SLOW = Close(4008, "slow reader")
CLOSE_BAD_REQUEST = Close(4501, "bad request")
CLOSE_ORIGIN = Close(4505, "origin not allowed")
