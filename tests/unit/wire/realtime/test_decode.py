# SPDX-License-Identifier: Apache-2.0
"""Realtime client events become commands, or faults that carry their event_id and name the field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.events import (
    CancelResponse,
    CreateItem,
    DeleteItem,
    RetrieveItem,
    SettingsPatch,
    StartResponse,
    UpdateSession,
)
from server.core.types import ContentPart, Item, Role, Truncation
from server.wire.frames import DecodeFault
from server.wire.realtime.decode import decode_event

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def fault_of(event):
    with pytest.raises(DecodeFault) as caught:
        decode_event(json.dumps(event) if isinstance(event, dict) else event)
    return caught.value


def decoded(**event):
    return decode_event(json.dumps(event))


def update(**session):
    return {"type": "session.update", "event_id": "e1", "session": {"type": "realtime", **session}}


def create(**response):
    return {"type": "response.create", "event_id": "e1", "response": response}


def item(**changes):
    return {"type": "conversation.item.create", "event_id": "e1", "item": {**USER, **changes}}


@pytest.mark.parametrize(
    ("event", "command"),
    [
        ({"type": "response.create"}, StartResponse()),
        ({"type": "response.create", "response": None}, StartResponse()),
        ({"type": "response.cancel", "event_id": "e"}, CancelResponse(event_id="e")),
        ({"type": "response.cancel", "response_id": "r"}, CancelResponse(response_id="r")),
        ({"type": "conversation.item.delete", "item_id": "i"}, DeleteItem(item_id="i")),
        ({"type": "conversation.item.retrieve", "item_id": "i"}, RetrieveItem(item_id="i")),
    ],
)
def test_small_events(event, command):
    """Each event is one command."""
    assert command == decode_event(json.dumps(event))


def test_session_update_reads_every_setting():
    """The protocol's own fields and the vendor ones, under their plain names."""
    command = decode_event(
        json.dumps(
            update(
                model="m", instructions="", output_modalities=["text"], max_output_tokens=7, temperature=0,
                top_p=0.5, top_k=3, min_p=0.1, seed=9, stop="x", truncation="disabled", tools=[],
                tool_choice="auto",
            )
        )
    )  # fmt: skip
    sampling = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 9, "stop": ("x",)}
    assert isinstance(command, UpdateSession)
    assert {**sampling, "max_tokens": 7} == dict(command.patch.sampling)
    assert ("m", "", Truncation.DISABLED) == (
        command.patch.model, command.patch.instructions, command.patch.truncation
    )  # fmt: skip


def test_absent_settings_stay_absent():
    """Absent means unchanged."""
    assert UpdateSession(patch=SettingsPatch(), event_id="e1") == decode_event(json.dumps(update()))


def test_inf_means_no_bound():
    """The word inf is a value: it takes a bound away."""
    patch = decode_event(json.dumps(update(max_output_tokens="inf"))).patch
    assert (("max_tokens", None),) == patch.sampling


def test_settings_of_speech_are_accepted_and_change_nothing():
    """A client made for speech works unmodified."""
    speech = {
        "audio": {"input": {"turn_detection": {"type": "server_vad"}}, "output": {"voice": "marin"}},
        "tracing": "auto", "include": ["item.input_audio_transcription.logprobs"], "prompt": {"id": "p"},
        "output_modalities": ["audio"], "reasoning": {"effort": "low"}, "parallel_tool_calls": True,
    }  # fmt: skip
    assert UpdateSession(patch=SettingsPatch(), event_id="e1") == decode_event(json.dumps(update(**speech)))


def test_a_retention_ratio_is_truncation():
    """How much is kept is the server's choice."""
    ratio = {"type": "retention_ratio", "retention_ratio": 0.8, "token_limits": {"post_instructions": 9}}
    assert Truncation.AUTO is decode_event(json.dumps(update(truncation=ratio))).patch.truncation


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"type": "transcription"}, "invalid_value", "session.type"),
        ({"type": None}, "missing_required_parameter", "session.type"),
        ({"temperature": 2.1}, "invalid_value", "session.temperature"),
        ({"max_output_tokens": 0}, "invalid_value", "session.max_output_tokens"),
        ({"max_output_tokens": 4097}, "invalid_value", "session.max_output_tokens"),
        ({"max_output_tokens": "many"}, "invalid_value", "session.max_output_tokens"),
        ({"output_modalities": ["smell"]}, "invalid_value", "session.output_modalities"),
        ({"output_modalities": "text"}, None, None),
        ({"truncation": "half"}, "invalid_value", "session.truncation"),
        ({"truncation": {"type": "x"}}, "invalid_value", "session.truncation.type"),
        ({"truncation": {"type": "retention_ratio", "retention_ratio": 2}}, "invalid_value",
         "session.truncation.retention_ratio"),
        ({"tools": [{"type": "function", "name": "f"}]}, "unsupported_parameter", "session.tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "session.tool_choice"),
        ({"instructions": 5}, "invalid_value", "session.instructions"),
        ({"model": ""}, "invalid_value", "session.model"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_by_name(session, code, param):
    """The field's path is the client's own spelling; the same fields are refused in response.create."""
    if code is None:
        decode_event(json.dumps(update(**session)))
        return
    fault = fault_of(update(**session))
    assert (code, param, "e1") == (fault.error.code, fault.error.param, fault.event_id)
    if "type" not in session:
        assert param.replace("session", "response") == fault_of(create(**session)).error.param


def test_an_item_is_read_with_its_parts():
    """Ids and places are the client's to choose; an id left out is the session's to draw."""
    event = item(content=[{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}])
    wanted = Item(id="", role=Role.USER, parts=(ContentPart(text="a"), ContentPart(text="b")))
    assert CreateItem(item=wanted, event_id="e1") == decode_event(json.dumps(event))
    placed = decode_event(json.dumps({**item(id="mine", status="in_progress"), "previous_item_id": "root"}))
    assert ("mine", "root") == (placed.item.id, placed.previous_item_id)


@pytest.mark.parametrize(
    ("role", "kind"), [("system", "input_text"), ("user", "input_text"), ("assistant", "output_text")]
)
def test_each_role_has_its_part_type(role, kind):
    """And no other role's."""
    decode_event(json.dumps(item(role=role, content=[{"type": kind, "text": ""}])))
    other = {"input_text": "output_text", "output_text": "input_text"}[kind]
    fault = fault_of(item(role=role, content=[{"type": other, "text": ""}]))
    assert "item.content[0].type" == fault.error.param


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"role": "tool"}, "invalid_value", "item.role"),
        ({"role": None}, "missing_required_parameter", "item.role"),
        ({"type": None}, "missing_required_parameter", "item.type"),
        ({"type": "function_call"}, "unsupported_parameter", "item.type"),
        ({"type": "function_call_output"}, "unsupported_parameter", "item.type"),
        ({"type": "mcp_call"}, "unsupported_parameter", "item.type"),
        ({"type": "poem"}, "invalid_value", "item.type"),
        ({"content": []}, "invalid_value", "item.content"),
        ({"content": None}, "missing_required_parameter", "item.content"),
        ({"content": "hi"}, "invalid_value", "item.content"),
        ({"content": [{"type": "input_audio"}]}, "unsupported_modality", "item.content[0].type"),
        ({"content": [{"type": "input_image"}]}, "unsupported_modality", "item.content[0].type"),
        ({"content": [{"type": "input_text"}]}, "missing_required_parameter", "item.content[0].text"),
        ({"id": "root"}, "invalid_value", "item.id"),
        ({"id": ""}, "invalid_value", "item.id"),
        ({"id": 5}, "invalid_value", "item.id"),
        ({"status": "done"}, "invalid_value", "item.status"),
    ],
)
def test_wrong_items_are_refused_by_name(changes, code, param):
    """Whatever is wrong, the path of it stands in the error."""
    fault = fault_of(item(**changes))
    assert (code, param, "e1") == (fault.error.code, fault.error.param, fault.event_id)


def test_response_create_reads_input_metadata_and_place():
    """An array of items and references replaces the conversation; [] is an empty prompt."""
    command = decode_event(
        json.dumps(
            create(input=[USER, {"type": "item_reference", "id": "i7"}], conversation="none",
                   metadata={"k": "v"}, instructions="x", temperature=1)
        )
    )  # fmt: skip
    assert Item(id="", role=Role.USER, parts=(ContentPart(text="hi"),)) == command.input[0]
    assert ("i7", True, (("k", "v"),)) == (command.input[1], command.is_out_of_band, command.metadata)
    assert SettingsPatch(instructions="x", sampling=(("temperature", 1.0),)) == command.patch
    assert () == decode_event(json.dumps(create(input=[], conversation="auto"))).input


@pytest.mark.parametrize(
    ("response", "param"),
    [
        ({"conversation": "conv_1"}, "response.conversation"),
        ({"input": {}}, "response.input"),
        ({"input": ["hi"]}, "response.input[0]"),
        ({"input": [{"type": "item_reference"}]}, "response.input[0].id"),
        ({"input": [{**USER, "role": "x"}]}, "response.input[0].role"),
        ({"metadata": {str(i): "" for i in range(17)}}, "response.metadata"),
        ({"metadata": {"k": 1}}, "response.metadata.k"),
    ],
)
def test_wrong_responses_are_refused_by_name(response, param):
    """Elements of arrays are named by their place."""
    assert param == fault_of(create(**response)).error.param


@pytest.mark.parametrize(
    "kind",
    ["input_audio_buffer.append", "input_audio_buffer.commit", "input_audio_buffer.clear",
     "output_audio_buffer.clear", "conversation.item.truncate"],
)  # fmt: skip
def test_audio_events_are_refused_without_harm(kind):
    """A client of ours has no ears."""
    fault = fault_of({"type": kind, "event_id": "e1", "audio": "AA=="})
    assert ("unsupported_modality", "type", "e1") == (fault.error.code, fault.error.param, fault.event_id)


def test_an_unknown_type_lists_the_known_ones():
    """The message is the documentation."""
    fault = fault_of({"type": "session.dance", "event_id": "e1"})
    assert ("invalid_value", "type", "e1") == (fault.error.code, fault.error.param, fault.event_id)
    assert "session.update" in fault.error.message
    assert "response.cancel" in fault.error.message


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b'{"type":"response.cancel"}', "invalid_event", None),
        ("hello", "invalid_json", None),
        ("[1]", "invalid_event", None),
        ('{"event_id":"e"}', "missing_required_parameter", "type"),
        ('{"type":5}', "invalid_value", "type"),
        ('{"type":"session.update"}', "missing_required_parameter", "session"),
        ('{"type":"conversation.item.create"}', "missing_required_parameter", "item"),
        ('{"type":"conversation.item.delete"}', "missing_required_parameter", "item_id"),
        ('{"type":"response.cancel","event_id":7}', "invalid_value", "event_id"),
        ('{"type":"response.cancel","metadata":' + "[" * 9000 + "]" * 9000 + "}", "invalid_json", None),
    ],
)
def test_messages_that_are_no_event(data, code, param):
    """Binary, no JSON, no object, no type, too deep: an error each, never another exception."""
    fault = fault_of(data)
    assert (code, param) == (fault.error.code, fault.error.param)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "id", "input", "tools", "top_k", "truncation"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=10,
)
KINDS = ["session.update", "conversation.item.create", "response.create", "response.cancel", "x"]


@given(
    st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS)},
        optional={"session": ANY, "item": ANY, "response": ANY, "event_id": ANY, "item_id": ANY},
    )
)
def test_any_event_is_a_command_or_a_fault(event):
    """No shape of a field escapes the readers."""
    message = "a command"
    try:
        decode_event(json.dumps(event))
    except DecodeFault as fault:
        message = fault.error.message
    assert message
