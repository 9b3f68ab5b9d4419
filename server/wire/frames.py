# SPDX-License-Identifier: Apache-2.0
"""The only place that parses or writes JSON: strict in, never failing out. And the framing of SSE.

Invariant: what `parse_object` lets through is plain JSON of at most DEPTH_MAX levels, with finite numbers and
whole characters, so nothing behind it needs a second check; what is refused says where. Lone surrogates are
refused on the way in and become U+FFFD on the way out. It must never recurse over a client's data.
"""

import re
from typing import Any

import orjson

from server.core.errors import ServerError, error_of

DEPTH_MAX = 64
"""Levels of nesting in a client's JSON; the deepest honest request (a tool schema) needs about ten."""

MESSAGE_BYTES_MAX = 65_536
"""One WebSocket message. The HTTP floor has its own, larger bound."""

_KEY_BEFORE = re.compile(r'"((?:[^"\\]|\\.){1,64})"\s*:\s*[-+\w.]*$')
_WINDOW = 200  # characters looked at before a fault to name its field

SSE_DONE = b"data: [DONE]\n\n"
SSE_COMMENT = b": keep-alive\n\n"


class DecodeFault(Exception):
    """A message that is no command. `event_id` is the client's own name for it, if one could be read."""

    def __init__(self, error: ServerError, event_id: str | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.event_id = event_id


def parse_object(data: str | bytes, *, bytes_max: int = MESSAGE_BYTES_MAX) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        ServerError: `payload_too_large`; `invalid_json` for what is not strict JSON (NaN, a number beyond a
            double, half a surrogate pair, broken UTF-8, too deep), with `param` when a field is at fault;
            `invalid_event` for JSON that is not an object.
    """
    # A str has at most 4 bytes a character, so most need no encoding to be known as small enough.
    size = len(data) if isinstance(data, bytes) or len(data) * 4 > bytes_max else 0
    if size > bytes_max or (isinstance(data, str) and size and _num_bytes(data) > bytes_max):
        raise error_of("payload_too_large", f"the message is larger than {bytes_max} bytes: send less")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _json_fault(error) from None
    if not isinstance(value, dict):
        raise error_of("invalid_event", "send one JSON object: {…}")
    _check_depth(value)
    return value


def dump(value: Any) -> bytes:
    """Write JSON. NaN and infinities become null, half surrogate pairs U+FFFD; never raises for any text."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_mended(value))


def dump_text(value: Any) -> str:
    """Write JSON as the payload of a text frame."""
    return dump(value).decode()


def sse_data(value: Any) -> bytes:
    """Write one SSE message without a name."""
    return b"data: " + dump(value) + b"\n\n"


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _json_fault(error: orjson.JSONDecodeError) -> ServerError:
    """Name the field when the fault is its value: the last key just before the place."""
    before = error.doc[max(0, error.pos - _WINDOW) : error.pos] if isinstance(error.doc, str) else ""
    key = _KEY_BEFORE.search(before.removesuffix('"'))
    where = f" in '{key[1]}'" if key else ""
    return error_of("invalid_json", f"not valid JSON{where}: {error}", param=key[1] if key else None)


def _check_depth(value: dict[str, Any]) -> None:
    """Level by level, so that a deep value costs no stack."""
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise error_of("invalid_json", f"the JSON is nested deeper than {DEPTH_MAX} levels: flatten it")


def _mended(value: Any) -> Any:
    """Copy our own answer, whose depth we know, with whole characters only."""
    if isinstance(value, str):
        # Through UTF-16 two halves that stand together become their character.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_mended(key): _mended(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_mended(child) for child in value]
    return value
