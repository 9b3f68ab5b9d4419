# SPDX-License-Identifier: Apache-2.0
"""Realtime client events → commands. Text only: what needs ears or a voice is refused or, as settings, ignored.

Invariant: one event gives one command or one fault that carries the event's own `event_id`; a refused event
changes nothing. The settings of speech (audio, turn detection, voice, tracing, include, prompt) are accepted
and without effect, as a client made for speech sends them always. It must never keep state.
"""

from collections.abc import Callable, Mapping

from server.core.errors import ServerError, error_of
from server.core.events import (
    CancelResponse,
    Command,
    CreateItem,
    DeleteItem,
    RetrieveItem,
    SettingsPatch,
    StartResponse,
    UpdateSession,
)
from server.core.types import ContentPart, Item, Role, Truncation
from server.wire.fields import ID_CHARS_MAX, Fields
from server.wire.frames import DecodeFault, parse_object

MAX_OUTPUT_TOKENS = 4096
"""The protocol's own bound on `max_output_tokens`; `"inf"` means whatever the context still holds."""

CONTENT_TYPES: Mapping[Role, str] = {
    Role.SYSTEM: "input_text",
    Role.USER: "input_text",
    Role.ASSISTANT: "output_text",
}
"""How a part of each role is called, in and out."""

_ROLES = {role.value: role for role in CONTENT_TYPES}
_MODALITIES = frozenset({"text", "audio"})
_CONVERSATIONS = {"auto": False, "none": True}
_TRUNCATIONS = {"auto": Truncation.AUTO, "disabled": Truncation.DISABLED}
_STATUSES = {"completed": None, "incomplete": None, "in_progress": None}
_HEARD = {"input_audio", "input_image", "output_audio", "audio"}
_TOOL_ITEMS = ("function_call", "function_call_output", "mcp_")
_PARTS_MAX = 64
_INPUT_MAX = 512
_INSTRUCTIONS_CHARS_MAX = 65_536

_SPEECH_EVENTS = frozenset(
    {
        "conversation.item.truncate",
        "input_audio_buffer.append",
        "input_audio_buffer.clear",
        "input_audio_buffer.commit",
        "output_audio_buffer.clear",
    }
)


def decode_event(data: str | bytes) -> Command:
    """Read one message.

    Raises:
        DecodeFault: with the client's `event_id` when it could be read.
    """
    event_id: str | None = None
    try:
        if isinstance(data, bytes):
            raise error_of("invalid_event", "send text messages; binary ones are not supported")
        fields = Fields(parse_object(data))
        event_id = fields.string("event_id", chars_max=512)
        return _reader(fields)(fields, event_id)
    except ServerError as error:
        raise DecodeFault(error, event_id) from None


_Reader = Callable[[Fields, str | None], Command]


def _reader(fields: Fields) -> _Reader:
    fields.require("type")
    kind = fields.string("type") or ""
    if kind in _SPEECH_EVENTS:
        message = f"'{kind}' is about audio, and this server speaks text"
        raise error_of("unsupported_modality", message, param="type")
    if kind not in _READERS:
        raise fields.fault("type", f"must be one of {', '.join(_READERS)}; not '{kind[:64]}'")
    return _READERS[kind]


def _update_session(fields: Fields, event_id: str | None) -> Command:
    fields.require("session")
    session = fields.object("session")
    assert session is not None
    session.require("type")
    session.choice("type", {"realtime": None})
    return UpdateSession(patch=_patch(session), event_id=event_id)


def _create_item(fields: Fields, event_id: str | None) -> Command:
    fields.require("item")
    item = fields.object("item")
    assert item is not None
    previous = fields.string("previous_item_id", chars_min=1, chars_max=ID_CHARS_MAX)
    return CreateItem(item=_item(item), previous_item_id=previous, event_id=event_id)


def _retrieve_item(fields: Fields, event_id: str | None) -> Command:
    return RetrieveItem(item_id=_item_id(fields), event_id=event_id)


def _delete_item(fields: Fields, event_id: str | None) -> Command:
    return DeleteItem(item_id=_item_id(fields), event_id=event_id)


def _start_response(fields: Fields, event_id: str | None) -> Command:
    response = fields.object("response") or Fields({}, "response")
    elements = response.objects("input", count_max=_INPUT_MAX)
    return StartResponse(
        patch=_patch(response),
        input=None if elements is None else tuple(_input(element) for element in elements),
        is_out_of_band=bool(response.choice("conversation", _CONVERSATIONS)),
        metadata=response.metadata("metadata"),
        event_id=event_id,
    )


def _cancel_response(fields: Fields, event_id: str | None) -> Command:
    return CancelResponse(response_id=fields.string("response_id", chars_max=ID_CHARS_MAX), event_id=event_id)


_READERS: dict[str, _Reader] = {
    "session.update": _update_session,
    "conversation.item.create": _create_item,
    "conversation.item.retrieve": _retrieve_item,
    "conversation.item.delete": _delete_item,
    "response.create": _start_response,
    "response.cancel": _cancel_response,
}


def _item_id(fields: Fields) -> str:
    fields.require("item_id")
    return fields.string("item_id", chars_max=ID_CHARS_MAX) or ""


def _patch(fields: Fields) -> SettingsPatch:
    """The settings in a `session` or a `response` object: the same names in both."""
    fields.refuse("tools", ([],), "must be empty: this server calls no tools yet")
    fields.refuse("tool_choice", ("auto", "none"), "must be 'auto' or 'none': this server calls no tools yet")
    # A client that asks to hear the answer gets it as text, and is told so by the effective settings.
    modalities = fields.strings("output_modalities", count_max=len(_MODALITIES), chars_max=16) or ()
    if not _MODALITIES.issuperset(modalities):
        raise fields.fault("output_modalities", "must be ['text']")
    sampling = fields.sampling()
    if fields.get("max_output_tokens") == "inf":
        sampling["max_tokens"] = None
    elif (tokens := fields.integer("max_output_tokens", low=1, high=MAX_OUTPUT_TOKENS)) is not None:
        sampling["max_tokens"] = tokens
    return SettingsPatch(
        model=fields.string("model", chars_min=1, chars_max=256),
        instructions=fields.string("instructions", chars_max=_INSTRUCTIONS_CHARS_MAX),
        sampling=tuple(sampling.items()),
        truncation=_truncation(fields),
    )


def _truncation(fields: Fields) -> Truncation | None:
    """A retention ratio is a finer way to ask for truncation; how much is kept is ours to choose."""
    if isinstance(fields.get("truncation"), dict):
        ratio = fields.object("truncation")
        assert ratio is not None
        ratio.require("type")
        ratio.choice("type", {"retention_ratio": None})
        ratio.number("retention_ratio", low=0, high=1)
        return Truncation.AUTO
    return fields.choice("truncation", _TRUNCATIONS)


def _input(fields: Fields) -> Item | str:
    if fields.get("type") == "item_reference":
        fields.require("id")
        return fields.string("id", chars_min=1, chars_max=ID_CHARS_MAX) or ""
    return _item(fields)


def _item(fields: Fields) -> Item:
    """A message; its `status` is ours to know, as what a client sends is whole."""
    fields.require("type")
    kind = fields.string("type") or ""
    if kind.startswith(_TOOL_ITEMS):
        raise fields.fault("type", "is about tools, and this server calls none yet", "unsupported_parameter")
    fields.choice("type", {"message": None, "item_reference": None})
    fields.require("role")
    role = fields.choice("role", _ROLES) or Role.USER
    item_id = fields.string("id", chars_min=1, chars_max=ID_CHARS_MAX) or ""
    if item_id == "root":
        raise fields.fault("id", "must not be 'root', which names the front of the conversation")
    fields.choice("status", _STATUSES)
    fields.require("content")
    parts = fields.objects("content", count_max=_PARTS_MAX) or []
    if not parts:
        raise fields.fault("content", "must have at least one part")
    return Item(id=item_id, role=role, parts=tuple(_part(part, role) for part in parts))


def _part(fields: Fields, role: Role) -> ContentPart:
    fields.require("type")
    kind = fields.string("type") or ""
    if kind in _HEARD:
        raise fields.fault("type", "must be text: this server has no ears and eyes", "unsupported_modality")
    fields.choice("type", {CONTENT_TYPES[role]: None, "text": None})
    fields.require("text")
    return ContentPart(text=fields.string("text") or "")
