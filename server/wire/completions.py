# SPDX-License-Identifier: Apache-2.0
"""OpenAI chat completions over HTTP: a body → what a turn needs; a turn's events → a body or SSE frames.

Invariant: every fault of a body is found by `decode_completion`, before the first byte of an answer, and a
stream ends either with its finish reason and `[DONE]` or with one error frame and nothing after it: half an
answer never looks whole. A field we do not know is tolerated and reported; one we know and cannot honour is
refused, unless its value asks for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from server.core.errors import ServerError, error_of
from server.core.events import Delta, SessionSettings, TurnFinished
from server.core.types import (
    ContentPart,
    FinishReason,
    Item,
    ModelCard,
    Role,
    SamplingParams,
    Truncation,
    Usage,
)
from server.wire.fields import Fields
from server.wire.frames import SSE_DONE, dump, parse_object, sse_data
from server.wire.unary import error_object, find_card

BODY_BYTES_MAX = 1_048_576
MESSAGES_MAX = 2_048
PARTS_MAX = 64
WARNINGS_MAX = 8

_DEFAULTS = SamplingParams()
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}
_TRUNCATIONS = {"auto": Truncation.AUTO, "disabled": Truncation.DISABLED}
_FINISH: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.FILTERED: "content_filter",
}

_KNOWN = frozenset(
    {
        # with an effect
        *("messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "truncation"),
        # hints, and bookkeeping of the caller's own, which ask nothing of us
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata", "store"),
        *("service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity", "prediction"),
    }
)

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "is not supported yet: send no tools"),
    "functions": (([],), "is not supported: send no functions"),
    "tool_choice": (("none", "auto"), "is not supported yet: leave it out"),
    "function_call": (("none", "auto"), "is not supported: leave it out"),
    "response_format": (({"type": "text"},), "is supported with type 'text' only"),
    "logprobs": ((False,), "is not supported yet: leave it out or send false"),
    "top_logprobs": ((0,), "is not supported yet: leave it out"),
    "logit_bias": (({},), "is not supported yet: leave it out"),
    "presence_penalty": ((0,), "is not supported yet: leave it out or send 0"),
    "frequency_penalty": ((0,), "is not supported yet: leave it out or send 0"),
    "audio": ((), "is not supported: this server speaks text"),
    "modalities": ((["text"],), "is supported as ['text'] only"),
    "web_search_options": ((), "is not supported: this server searches nothing"),
}
"""Fields we know and cannot honour → the values that ask for nothing, and why the others are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One request, read. `warnings` (unknown fields, lowered values) belong in a header of the answer."""

    card: ModelCard
    settings: SessionSettings
    items: tuple[Item, ...]
    is_stream: bool
    has_usage_chunk: bool
    warnings: tuple[str, ...]


def decode_completion(
    body: bytes, cards: tuple[ModelCard, ...], defaults: SamplingParams = _DEFAULTS
) -> Completion:
    """Read a request body; the first of `cards` answers when no model is named.

    Raises:
        ServerError: with `param` naming the field.
    """
    fields = Fields(parse_object(body, bytes_max=BODY_BYTES_MAX))
    card = find_card(cards, fields.string("model", chars_max=256))
    for name, (harmless, why) in _REFUSED.items():
        fields.refuse(name, harmless, why)
    if fields.integer("n", low=0, high=128) not in (None, 1):
        raise fields.fault("n", "must be 1: ask once for each answer")
    unknown = [name for name in fields.names() if name not in _KNOWN and name not in _REFUSED]
    # As ASCII on one line: these go into a header.
    warnings = [f"unknown field ignored: {name[:64]!a}" for name in unknown[:WARNINGS_MAX]]
    sampling = fields.sampling()
    max_tokens = _max_tokens(fields)
    if max_tokens is not None and max_tokens > card.context_length:
        warnings.append(f"max_tokens lowered to the context of {card.context_length}")
        max_tokens = card.context_length
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    options = fields.object("stream_options") or Fields({})
    return Completion(
        card=card,
        settings=SessionSettings(
            model=card.id,
            sampling=replace(defaults, **sampling),
            # Over HTTP the caller holds the conversation and has to know when it no longer fits.
            truncation=fields.choice("truncation", _TRUNCATIONS) or Truncation.DISABLED,
        ),
        items=_messages(fields),
        is_stream=fields.boolean("stream") or False,
        has_usage_chunk=options.boolean("include_usage") or False,
        warnings=tuple(warnings),
    )


class CompletionEncoder:
    """Spells the answer to one request. `created` is a Unix time in seconds.

    Streaming: `start()`, then `delta(event)` for each Delta, then `end(finished)`; each returns bytes to
    write. Not streaming: `body(finished)`.
    """

    def __init__(self, completion: Completion, *, completion_id: str, created: int) -> None:
        self._has_usage_chunk = completion.has_usage_chunk
        self._head = {
            "id": completion_id,
            "created": created,
            "model": completion.card.id,
            "system_fingerprint": completion.card.fingerprint,
        }

    def start(self) -> bytes:
        """The first chunk: the role."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta(self, event: Delta) -> bytes:
        """One piece of text."""
        return self._chunk({"content": event.text}, None)

    def end(self, event: TurnFinished) -> bytes:
        """The last frames: finish reason, usage when asked for, `[DONE]`; or one error frame alone."""
        error = _failure(event)
        if error is not None:
            return sse_data(error_object(error))
        frames = self._chunk({}, _FINISH[event.reason], _truncated(event))
        if self._has_usage_chunk:
            usage = {"choices": [], "usage": _usage(event.usage)}
            frames += sse_data({**self._head, "object": "chat.completion.chunk", **usage})
        return frames + SSE_DONE

    def body(self, event: TurnFinished) -> bytes:
        """The whole answer as one JSON body.

        Raises:
            ServerError: the turn has failed; answer with its status and its error body.
        """
        error = _failure(event)
        if error is not None:
            raise error
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": event.text, "refusal": None},
            "logprobs": None,
            "finish_reason": _FINISH[event.reason],
        }
        answer = {"choices": [choice], "usage": _usage(event.usage), **_truncated(event)}
        return dump({**self._head, "object": "chat.completion", **answer})

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice], **(more or {})}
        if self._has_usage_chunk:
            chunk["usage"] = None
        return sse_data(chunk)


def _max_tokens(fields: Fields) -> int | None:
    """Both spellings mean the same; a value beyond any context is lowered by the caller, with a warning."""
    low, high = 1, 2**64
    old = fields.integer("max_tokens", low=low, high=high)
    new = fields.integer("max_completion_tokens", low=low, high=high)
    if old is not None and new is not None and old != new:
        raise fields.fault("max_tokens", "differs from 'max_completion_tokens': send one of them")
    return old if new is None else new


def _messages(fields: Fields) -> tuple[Item, ...]:
    fields.require("messages")
    messages = fields.objects("messages", count_max=MESSAGES_MAX) or []
    if not messages:
        raise fields.fault("messages", "must have at least one message")
    return tuple(_message(message, f"msg_{index}") for index, message in enumerate(messages))


def _message(message: Fields, item_id: str) -> Item:
    message.require("role")
    role = message.choice("role", _ROLES) or Role.USER
    if role is Role.TOOL:
        raise message.fault("role", "must not be a tool: none is supported yet", "unsupported_parameter")
    message.refuse("tool_calls", ([],), "is not supported yet: send text only")
    message.refuse("function_call", (), "is not supported: send text only")
    message.require("content")
    if isinstance(message.get("content"), str):
        return Item(id=item_id, role=role, parts=(ContentPart(text=message.get("content")),))
    parts = message.objects("content", count_max=PARTS_MAX) or []
    if not parts:
        raise message.fault("content", "must be a string or at least one part")
    return Item(id=item_id, role=role, parts=tuple(_part(part) for part in parts))


def _part(part: Fields) -> ContentPart:
    part.require("type")
    kind = part.string("type") or ""
    if kind == "refusal":
        part.require("refusal")
        return ContentPart(text=part.string("refusal") or "")
    if kind != "text":
        raise part.fault("type", f"must be 'text', not '{kind[:40]}'", "unsupported_modality")
    part.require("text")
    return ContentPart(text=part.string("text") or "")


def _failure(event: TurnFinished) -> ServerError | None:
    """What ended the turn too early. Nobody cancels over HTTP but us, so that is our failure as well."""
    if event.reason is FinishReason.CANCELLED:
        return error_of("engine_unavailable", "the server stopped the answer: try again")
    return event.error


def _truncated(event: TurnFinished) -> dict[str, int]:
    return {"truncated": event.num_dropped_items} if event.num_dropped_items else {}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
