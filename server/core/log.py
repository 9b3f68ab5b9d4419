# SPDX-License-Identifier: Apache-2.0
"""The log: one fixed event word and named fields a line, for people or for machines, without secrets.

Write `log = logging.getLogger(__name__)` and `log.info("socket_closed", extra={"code": 1000})`. Invariant:
whatever a caller or a library hands in, no credential and no query string leaves here (each becomes a short
hash, so that lines about the same one can be found), no line holds a line break, and the text of an exception
is written only where the words are ours or the system's: others may quote what a user wrote.
"""

import hashlib
import json
import logging
import re
import secrets
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

VALUE_CHARS_MAX = 512
READ_CHARS_MAX = 2_048
"""Of a text nothing beyond this is looked at, so that no client can make a line slow to write."""

DEPTH_MAX = 4
FRAMES_MAX = 24

_STANDARD = {
    *vars(logging.LogRecord("", 0, "", 0, "", (), None)),
    "message",
    "asctime",
    "taskName",
    "color_message",
}
_SECRET_NAMES = re.compile(
    r"authori[sz]ation|api[-_]?key|ticket|secret|password|passwd|cookie|credential|subprotocol"
    r"|(?:^|[-_])(?:access|auth|bearer|id|refresh|resume|session)?[-_]?token$",
    re.IGNORECASE,
)
# Each pattern keeps its first group and hides its second.
_SECRETS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\b(?:bearer|basic)\s+)([^\s,;\"']+)",
        r"(\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?)((?!bearer |basic )[^\s,;\"']+)",
        r"(\b(?:set-)?cookie[\"']?\s*[:=]\s*[\"']?)([^\"'\n]+)",
        r"(insecure-api-key\.)([^\s,;\"']+)",
        r"(\b(?:api[-_]?key|ticket|secret|password|(?:\w+[-_])?token)[\"']?\s*[:=]\s*[\"']?)([^\s,;&\"']+)",
        r"(\b(?:sk|pk|rk)-)([\w-]{8,})",
        r"((?:https?|wss?|tcp|redis)s?://)([^\s/@\"']+)(?=@)",
        r"([/\w.~%@:-]\?|^\?)([^\s\"'<>]+)",
    )
)
_PLAIN = re.compile(r"[\w.:/@+*\-–…#%,]+")
_OUR_WORDS = (OSError, AssertionError, MemoryError, ImportError, NotImplementedError)
_LIBRARY_WORDS = ("onnxruntime", "zmq", "sqlite3", "server")
_SALT = secrets.token_bytes(16)


def configure(level: str, form: str, stream: TextIO) -> None:
    """Send every logger's lines of `level` and above to `stream`, replacing what was set up before.

    Args:
        level: "debug", "info", "warning" or "error".
        form: "text" or "json".
        stream: where lines go; it stays its owner's to close.
    """
    handler = _Handler(stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for chatty in ("asyncio", "httpcore", "httpx", "websockets"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def redact(text: str) -> str:
    """The first READ_CHARS_MAX of a text with each credential and query replaced by a short hash of it."""
    text = text[:READ_CHARS_MAX]
    for pattern in _SECRETS:
        text = pattern.sub(lambda found: found.group(1) + fingerprint(found.group(2)), text)
    return text


def fingerprint(secret: str) -> str:
    """A name for a secret: equal within one process, of no use outside it."""
    if re.fullmatch(r"#[0-9a-f]{8}", secret):
        return secret  # hidden by an earlier pattern
    return "#" + hashlib.blake2b(secret.encode("utf-8", "replace"), digest_size=4, key=_SALT).hexdigest()


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The named fields of a record, redacted and bounded, its fault included."""
    fields = {name: _clean(name, value) for name, value in vars(record).items() if name not in _STANDARD}
    if record.exc_info and record.exc_info[1] is not None:
        fields["error"] = describe(record.exc_info[1])
        fields["at"] = list(_frames(record.exc_info[1].__traceback__))
    return fields


def describe(error: BaseException) -> str:
    """What may be said of an exception: its class, its own words if they are ours, and its causes' classes."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(parts) < DEPTH_MAX:
        name = type(seen).__qualname__
        module = type(seen).__module__.partition(".")[0]
        is_trusted = isinstance(seen, _OUR_WORDS) or module in _LIBRARY_WORDS
        parts.append(f"{name}: {redact(str(seen))}"[:VALUE_CHARS_MAX] if is_trusted and str(seen) else name)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return " <- ".join(parts)


class TextLines(logging.Formatter):
    """`time LEVEL event name=value …`, values quoted where they need it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        head = f"{_time_of(record)} {record.levelname:<7} {_event_of(record)}"
        pairs = [f"{name}={_quoted(value)}" for name, value in fields_of(record).items()]
        return " ".join([head, *pairs])


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        head = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _event_of(record),
        }
        fields = {f"{name}_" if name in head else name: value for name, value in fields_of(record).items()}
        return json.dumps({**head, **fields}, ensure_ascii=False)


class _Handler(logging.StreamHandler[TextIO]):
    """Drops a line it can't write: the standard handler would print the record, unredacted, to stderr."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Do nothing: a full disk or a closed pipe must not end a turn."""


def _clean(name: str, value: Any, depth: int = 0) -> Any:
    if _SECRET_NAMES.search(name) and value not in (None, "", True, False):
        return fingerprint(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping) and depth < DEPTH_MAX:
        return {_bounded(str(key)): _clean(str(key), each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and depth < DEPTH_MAX:
        return [_clean("", each, depth + 1) for each in value]
    if isinstance(value, BaseException):
        return describe(value)
    return _bounded(str(value))


def _bounded(text: str) -> str:
    text = redact(text)
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


def _event_of(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except (TypeError, ValueError):  # a library's format and arguments do not fit
        text = str(record.msg)
    return _one_line(_bounded(text))


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _quoted(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return _one_line(json.dumps(value, ensure_ascii=False))


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _frames(trace: TracebackType | None) -> Iterator[str]:
    """Where it happened, innermost last: places only, no source lines and no values."""
    for frame in traceback.extract_tb(trace)[-FRAMES_MAX:]:
        path = "/".join(frame.filename.replace("\\", "/").split("/")[-3:])
        yield f"{path}:{frame.lineno} {frame.name}"
