# SPDX-License-Identifier: Apache-2.0
"""What crosses between gateway and engine: frozen messages ⇄ msgpack, named by what their receiver does.

Sans-I/O. Both sides carry the version of this file in their greeting and refuse another one. Decoding is
strict: bytes that are no known message raise MessageFault and never anything else.
"""

from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from server.core.errors import CODES
from server.core.types import FinishReason
from server.engine.sequence import StepOutput, Submission, TokenParams

VERSION = 1
MESSAGE_BYTES_MAX = 8_388_608


class MessageFault(Exception):
    """Bytes that are no message of this version."""


# ---- gateway → engine -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """I am here, or still here: sent all the time. `is_new` asks for a Ready; `version` is this file's."""

    is_new: bool
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run this request."""

    submission: Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End this request; unknown ids are ignored."""

    request_id: str


# ---- engine → gateway -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The answer to a Hello from a new or forgotten gateway: I hold none of your requests, send them all.

    `engine_id` changes with every start.
    """

    engine_id: str
    version: int
    model_id: str
    quantization: str
    fingerprint: str
    max_model_len: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What one step made for this gateway's requests."""

    outputs: tuple[StepOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A Submit was not accepted; the request does not exist."""

    request_id: str
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The engine lives and stands so: after steps, and each second when idle."""

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


def encode(message: Message) -> bytes:
    """Bytes of one message."""
    match message:
        case Outputs():
            fields: Any = [_output_fields(output) for output in message.outputs]
        case Submit():
            fields = asdict(message.submission)
        case _:
            fields = asdict(message)
    packed: bytes = msgpack.packb([type(message).__name__, fields])
    return packed


def decode(data: bytes) -> Message:
    """The message in `data`.

    Raises:
        MessageFault: too long, not msgpack, an unknown kind, or fields that do not fit.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageFault(f"a message of {len(data)} bytes, at most {MESSAGE_BYTES_MAX}")
    try:
        name, fields = msgpack.unpackb(data, use_list=False)
        kind = _KINDS[name]
        if kind is Outputs:
            return Outputs(outputs=tuple(_output(*output) for output in fields))
        if kind is Submit:
            return Submit(submission=_submission(fields))
        return kind(**fields)
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise MessageFault(f"not a message: {type(error).__name__}") from error


def _output_fields(output: StepOutput) -> tuple[Any, ...]:
    reason = output.reason.value if output.reason else None
    return (
        output.request_id,
        output.token_ids,
        reason,
        output.error_code,
        output.error_message,
        output.num_cached_tokens,
    )


def _output(  # noqa: PLR0917  # the fields of one row, in wire order
    request_id: str,
    token_ids: tuple[int, ...],
    reason: str | None,
    code: str | None,
    message: str | None,
    cached: int,
) -> StepOutput:
    if code is not None and code not in CODES:
        raise ValueError(code)
    return StepOutput(
        request_id=request_id,
        token_ids=tuple(token_ids),
        reason=FinishReason(reason) if reason else None,
        error_code=code,
        error_message=message,
        num_cached_tokens=cached,
    )


def _submission(fields: dict[str, Any]) -> Submission:
    params = TokenParams(**fields.pop("params"))
    return Submission(params=params, **fields)
