# SPDX-License-Identifier: Apache-2.0
"""Events → Realtime server events, in the exact order of a text response.

Owns the turns that are open on this connection: what each frame of a response must repeat. Invariant: the
frames of one response always form created … done, whatever ends it, and an open part or item is closed before.
It must never hold an answer's text: the end of a turn brings it.
"""

from typing import Any

from server.core.errors import ServerError
from server.core.events import (
    ConversationReset,
    Delta,
    Event,
    Failed,
    ItemAdded,
    ItemDeleted,
    ItemRetrieved,
    SessionCreated,
    SessionDescribed,
    SessionSettings,
    SessionUpdated,
    TurnFinished,
    TurnStarted,
)
from server.core.types import FinishReason, Item, Truncation, Usage
from server.wire.realtime.decode import CONTENT_TYPES

Frame = dict[str, Any]

_STATUS: dict[FinishReason, tuple[str, str | None]] = {
    FinishReason.STOP: ("completed", None),
    FinishReason.TOOL_CALLS: ("completed", None),
    FinishReason.LENGTH: ("incomplete", "max_output_tokens"),
    FinishReason.FILTERED: ("incomplete", "content_filter"),
    FinishReason.CANCELLED: ("cancelled", "client_cancelled"),
    FinishReason.ERROR: ("failed", None),
}
"""Reason → the response's status and its reason there."""


class EventFrames:
    """Spells one connection's events, without their `event_id`s."""

    def __init__(self) -> None:
        self._conversation_id = ""
        self._turns: dict[str, TurnStarted] = {}

    def frames(self, event: Event) -> list[Frame]:  # noqa: C901, PLR0911 - the one match over a closed union
        """The frames of one event, in order."""
        match event:
            case Delta():
                return [self._in_part("response.output_text.delta", event.turn_id, delta=event.text)]
            case TurnStarted():
                return self._started(event)
            case TurnFinished():
                return self._finished(event)
            case ItemAdded():
                return self._item_added(event)
            case SessionCreated():
                self._conversation_id = "conv_" + event.session_id.rpartition("_")[2]
                return [_frame("session.created", session=_session(event.session_id, event.settings))]
            case SessionUpdated():
                return [_frame("session.updated", session=_session(event.session_id, event.settings))]
            case ItemRetrieved():
                return [_frame("conversation.item.retrieved", item=_item(event.item))]
            case ItemDeleted():
                return [_frame("conversation.item.deleted", item_id=event.item_id)]
            case Failed():
                return [_frame("error", error=_error(event.error) | {"event_id": event.event_id})]
            case ConversationReset() | SessionDescribed():
                return []  # no command of this protocol leads to them

    def _item_added(self, event: ItemAdded) -> list[Frame]:
        item = {"previous_item_id": event.previous_item_id, "item": _item(event.item)}
        return [_frame("conversation.item.added", **item), _frame("conversation.item.done", **item)]

    def _started(self, event: TurnStarted) -> list[Frame]:
        self._turns[event.turn_id] = event
        item = _message(event.item_id, "in_progress", [])
        frames = [
            _frame("response.created", response=self._response(event, "in_progress")),
            _frame("response.output_item.added", response_id=event.turn_id, output_index=0, item=item),
        ]
        if not event.is_out_of_band:
            previous = event.previous_item_id
            frames.append(_frame("conversation.item.added", previous_item_id=previous, item=item))
        part = {"type": "text", "text": ""}
        return [*frames, self._in_part("response.content_part.added", event.turn_id, part=part)]

    def _finished(self, event: TurnFinished) -> list[Frame]:
        turn = self._turns[event.turn_id]
        status, reason = _STATUS[event.reason]
        content = [{"type": "output_text", "text": event.text}]
        item = _message(turn.item_id, "completed" if status == "completed" else "incomplete", content)
        part = {"type": "text", "text": event.text}
        frames = [
            self._in_part("response.output_text.done", event.turn_id, text=event.text),
            self._in_part("response.content_part.done", event.turn_id, part=part),
        ]
        if not turn.is_out_of_band:
            previous = turn.previous_item_id
            frames.append(_frame("conversation.item.done", previous_item_id=previous, item=item))
        done = self._response(turn, status) | {
            "status_details": _status_details(status, reason, event.error),
            "output": [item],
            "usage": _usage(event.usage),
        }
        if event.num_dropped_items:
            done["truncated"] = event.num_dropped_items
        del self._turns[event.turn_id]
        return [
            *frames,
            _frame("response.output_item.done", response_id=event.turn_id, output_index=0, item=item),
            _frame("response.done", response=done),
        ]

    def _in_part(self, kind: str, turn_id: str, **more: Any) -> Frame:
        return {
            "type": kind,
            "response_id": turn_id,
            "item_id": self._turns[turn_id].item_id,
            "output_index": 0,
            "content_index": 0,
            **more,
        }

    def _response(self, turn: TurnStarted, status: str) -> Frame:
        return {
            "object": "realtime.response",
            "id": turn.turn_id,
            "status": status,
            "status_details": None,
            "output": [],
            "conversation_id": None if turn.is_out_of_band else self._conversation_id,
            "output_modalities": ["text"],
            "max_output_tokens": _max_output_tokens(turn.settings),
            "metadata": dict(turn.metadata) if turn.metadata else None,
            "usage": None,
        }


def _frame(kind: str, **more: Any) -> Frame:
    return {"type": kind, **more}


def _session(session_id: str, settings: SessionSettings) -> Frame:
    """The effective settings; the vendor fields stand beside the protocol's own, under their plain names."""
    sampling = settings.sampling
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": settings.model,
        "output_modalities": ["text"],
        "instructions": settings.instructions,
        "tools": [],
        "tool_choice": "auto",
        "max_output_tokens": _max_output_tokens(settings),
        "truncation": "auto" if settings.truncation is Truncation.AUTO else "disabled",
        "tracing": None,
        "prompt": None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
    }


def _max_output_tokens(settings: SessionSettings) -> int | str:
    return settings.sampling.max_tokens or "inf"


def _item(item: Item) -> Frame:
    kind = CONTENT_TYPES[item.role]
    content = [{"type": kind, "text": part.text} for part in item.parts]
    return _message(item.id, item.status.value, content, item.role.value)


def _message(item_id: str, status: str, content: list[Frame], role: str = "assistant") -> Frame:
    return {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "status": status,
        "role": role,
        "content": content,
    }


def _error(error: ServerError) -> Frame:
    return {**_cause(error), "param": error.param}


def _cause(error: ServerError) -> Frame:
    """The wait is ours to add: the protocol has no place for it, and a client that knows it returns in time."""
    wait = {} if error.retry_after_ms is None else {"retry_after_ms": error.retry_after_ms}
    return {"type": error.row.type, "code": error.code, "message": error.message, **wait}


def _status_details(status: str, reason: str | None, error: ServerError | None) -> Frame | None:
    if status == "completed":
        return None
    details: Frame = {"type": status}
    if reason is not None:
        details["reason"] = reason
    if error is not None:
        details["error"] = _cause(error)
    return details


def _usage(usage: Usage) -> Frame:
    cached = usage.cached_tokens
    return {
        "total_tokens": usage.total_tokens,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "input_token_details": {
            "text_tokens": usage.input_tokens,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": usage.output_tokens, "audio_tokens": 0},
    }
