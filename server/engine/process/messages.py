# SPDX-License-Identifier: Apache-2.0
"""What crosses between gateway and engine: frozen messages ⇄ msgpack, named by what their receiver does.

    [VERSION, kind, [field, …]]    fields in the order of the class, classes inside them likewise

Sans-I/O. Every message carries the version of this file, and another version is refused before its fields are
looked at, so that each side can name the other's. Decoding is strict in kinds, counts and types: bytes that
are no message raise MessageFault and never anything else.

An `epoch` is the engine's number for one greeting: it begins with a Ready, when the engine holds no request
of this gateway, and ends with the next one. What either side says carries the epoch it believes in; what
carries another one is about requests that no longer exist, and is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import msgpack

from server.core.errors import CODES
from server.core.types import FinishReason
from server.engine.sequence import StepOutput, Submission

VERSION = 1
MESSAGE_BYTES_MAX = 8_388_608


class MessageFault(Exception):
    """Bytes that are no message of this version; `version` is the other side's if it has another one."""

    def __init__(self, message: str, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version


# ---- gateway → engine -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """I am here, or still here: sent all the time. `epoch` 0 asks for a Ready."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run this request."""

    epoch: int
    submission: Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End this request, without a word; unknown ids are ignored."""

    epoch: int
    request_id: str


# ---- engine → gateway -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The answer to a Hello of another epoch: I hold none of your requests, send them all.

    `engine_id` changes with every start of the engine.
    """

    epoch: int
    engine_id: str
    model_id: str
    quantization: str
    fingerprint: str
    max_model_len: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What one step made for this gateway's requests."""

    epoch: int
    outputs: tuple[StepOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A Submit was not accepted; the request does not exist."""

    epoch: int
    request_id: str
    code: str
    message: str
    param: str | None
    retry_after_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The engine lives and stands so: after steps, and at least each second."""

    engine_id: str
    num_steps: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_slots: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_failed_forwards: int
    num_fault_rows: int
    resident_bytes: int


Message = Hello | Submit | Cancel | Ready | Outputs | Refused | Heartbeat
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Hello, Submit, Cancel, Ready, Outputs, Refused, Heartbeat)
}


# ---- bytes ------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Bytes of one message."""
    packed: bytes = msgpack.packb([VERSION, type(message).__name__, _plain(message)])
    return packed


def decode(data: bytes) -> Message:
    """The message in `data`.

    Raises:
        MessageFault: too long, not msgpack, another version, an unknown kind, or fields that do not fit.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageFault(f"a message of {len(data)} bytes, at most {MESSAGE_BYTES_MAX}")
    try:
        version, *rest = msgpack.unpackb(data, use_list=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise MessageFault(f"not a message: {type(error).__name__}") from error
    if version != VERSION:
        known = version if type(version) is int else None
        raise MessageFault(f"a message of version {version!r:.20}, this is {VERSION}", known)
    try:
        name, values = rest
        message: Message = _made(_KINDS[name], values)
    except (ValueError, TypeError, KeyError) as error:
        raise MessageFault(f"a message that does not fit: {error!s:.100}") from error
    return message


def _plain(value: Any) -> Any:
    """A value as msgpack knows it: classes as lists of their fields, enums as their words."""
    if is_dataclass(value):
        return [_plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_plain(each) for each in value]
    return value


def _made(kind: type[Any], values: Any) -> Any:
    """An object of this class with these fields."""
    pairs = zip(_plans(kind), _listed(values), strict=True)
    return kind(**{name: convert(value) for (name, convert), value in pairs})


def _exactly(*kinds: type[Any] | None) -> Callable[[Any], Any]:
    """A check that a value is of one of these very types: True is no number here."""
    allowed = {type(None) if kind is None else kind for kind in kinds}

    def check(value: Any) -> Any:
        if type(value) not in allowed:
            raise TypeError(f"{type(value).__name__} where {kinds} should stand")
        return value

    return check


def _integers(value: Any) -> Any:
    if not set(map(type, _listed(value))) <= {int}:
        raise TypeError("not a list of integers")
    return value


def _listed(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise TypeError("not a list")
    return value


def _code(value: Any) -> Any:
    if value not in CODES:
        raise ValueError("an unknown error code")
    return value


_CONVERT: dict[Any, Callable[[Any], Any]] = {
    int: _exactly(int),
    str: _exactly(str),
    float: _exactly(int, float),
    int | None: _exactly(int, None),
    str | None: _exactly(str, None),
    tuple[int, ...]: _integers,
    FinishReason | None: lambda value: None if value is None else FinishReason(value),
    tuple[StepOutput, ...]: lambda values: tuple(_made(StepOutput, each) for each in _listed(values)),
}
_CODES: dict[tuple[type[Any], str], Callable[[Any], Any]] = {
    (Refused, "code"): _code,
    (StepOutput, "error_code"): lambda value: None if value is None else _code(value),
}
_PLANS: dict[type[Any], list[tuple[str, Callable[[Any], Any]]]] = {}


def _plans(kind: type[Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    """Each field's name and what checks and converts it; made once a class."""
    if kind not in _PLANS:
        _PLANS[kind] = [(each.name, _plan(kind, each.name, each.type)) for each in fields(kind)]
    return _PLANS[kind]


def _plan(kind: type[Any], name: str, declared: Any) -> Callable[[Any], Any]:
    if (kind, name) in _CODES:
        return _CODES[kind, name]
    if is_dataclass(declared) and isinstance(declared, type):
        return lambda value: _made(declared, value)
    return _CONVERT[declared]
