# SPDX-License-Identifier: Apache-2.0
"""Chat completions: every field is honoured, reported or refused, and every answer has one true end."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.core.errors import ServerError, error_of
from server.core.events import Delta, TurnFinished
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
from server.wire.completions import CompletionEncoder, decode_completion

CARD = ModelCard(id="m", created=7, context_length=512, quantization="w8a8", fingerprint="fp_1")
MESSAGES = [{"role": "user", "content": "hi"}]


def decoded(defaults=SamplingParams(), **fields):  # noqa: B008 - frozen
    body = json.dumps({"messages": MESSAGES, **fields}).encode()
    return decode_completion(body, (CARD,), defaults)


def fault_of(**fields):
    with pytest.raises(ServerError) as caught:
        decoded(**fields)
    return caught.value


def test_a_bare_request_has_the_defaults():
    """The first model, its sampling, no stream, and an over-long conversation refused."""
    request = decoded(SamplingParams(temperature=0.3))
    assert (CARD, False, False, ()) == (
        request.card, request.is_stream, request.has_usage_chunk, request.warnings
    )  # fmt: skip
    assert SamplingParams(temperature=0.3) == request.settings.sampling
    assert (Truncation.DISABLED, "") == (request.settings.truncation, request.settings.instructions)
    assert (Item(id="msg_0", role=Role.USER, parts=(ContentPart(text="hi"),)),) == request.items


def test_all_sampling_fields_arrive():
    """With null as absent."""
    request = decoded(
        temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=9, stop=["x", "y"], max_tokens=None,
        max_completion_tokens=5, stream=True, stream_options={"include_usage": True}, truncation="auto",
    )  # fmt: skip
    wanted = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=9, stop=("x", "y"), max_tokens=5)
    assert wanted == request.settings.sampling
    assert (True, True, Truncation.AUTO) == (
        request.is_stream, request.has_usage_chunk, request.settings.truncation
    )  # fmt: skip


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 1e300])
def test_a_wrong_token_bound_is_refused(name, value):
    """By its own name; 10^400 does not even parse."""
    assert ("invalid_value", name) == (fault_of(**{name: value}).code, fault_of(**{name: value}).param)


def test_a_number_beyond_json_is_refused_by_name():
    """10^400."""
    body = b'{"messages":[],"max_tokens":1' + b"0" * 400 + b"}"
    with pytest.raises(ServerError) as caught:
        decode_completion(body, (CARD,))
    assert ("invalid_json", "max_tokens") == (caught.value.code, caught.value.param)


@pytest.mark.parametrize("value", [10**8, 2**63, 513])
def test_a_huge_token_bound_is_lowered_and_told(value):
    """To what the context can ever hold, visibly."""
    request = decoded(max_tokens=value)
    assert CARD.context_length == request.settings.sampling.max_tokens
    assert ("max_tokens lowered to the context of 512",) == request.warnings


def test_two_spellings_of_one_bound_must_agree():
    """Equal is fine; different is the client's contradiction."""
    assert 5 == decoded(max_tokens=5, max_completion_tokens=5).settings.sampling.max_tokens
    assert "max_tokens" == fault_of(max_tokens=5, max_completion_tokens=6).param


@pytest.mark.parametrize(
    ("field", "harmless", "refused"),
    [
        ("n", [1, None], [0, 2, "1"]),
        ("tools", [[], None], [[{"type": "function"}]]),
        ("tool_choice", ["none", "auto"], ["required", {"type": "function"}]),
        ("functions", [[]], [[{}]]),
        ("response_format", [{"type": "text"}], [{"type": "json_object"}]),
        ("logprobs", [False], [True]),
        ("top_logprobs", [0], [5, 10**6]),
        ("logit_bias", [{}], [{"-1": 5}, {"5": 1e9}]),
        ("presence_penalty", [0, 0.0], [0.5]),
        ("frequency_penalty", [0], [-1]),
        ("modalities", [["text"]], [["text", "audio"]]),
        ("audio", [None], [{"voice": "x"}]),
        ("web_search_options", [None], [{}]),
        ("model", ["m", None], ["other", 5]),
        ("stream", [False], ["yes", 1]),
        ("stop", [[]], [["a"] * 5, ""]),
        ("temperature", [2], [2.1, -1, "0.7"]),
        ("stream_options", [{}], [5, {"include_usage": "yes"}]),
    ],
)
def test_what_cannot_be_honoured_is_refused_unless_it_asks_for_nothing(field, harmless, refused):
    """A silent half-truth is worse than an error, and the error names the field."""
    for value in harmless:
        assert () == decoded(**{field: value}).warnings
    for value in refused:
        assert fault_of(**{field: value}).param.startswith(field)


def test_unknown_fields_are_tolerated_and_reported():
    """As ASCII on one line each and never many, as they go into a header."""
    fields = {"user": "u", "metadata": {"a": "b"}, "x\r\nSet-Cookie: 字": 1, **{f"y{i}": 1 for i in range(99)}}
    warnings = decoded(**fields).warnings
    assert 8 == len(warnings)
    assert all(text.isascii() and text.isprintable() for text in warnings)
    assert "Set-Cookie" in warnings[0]


def test_roles_and_parts_are_read():
    """Developer is system; parts of text are joined by the item."""
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "name": "x", "content": [{"type": "text", "text": word} for word in "ab"]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
        {"role": "system", "content": ""},
    ]
    items = decoded(messages=messages).items
    assert [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.SYSTEM] == [item.role for item in items]
    assert ["s", "ab", "no", ""] == [item.text for item in items]


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"role": "tool", "content": "x"}, "unsupported_parameter", "messages[0].role"),
        ({"role": "poet", "content": "x"}, "invalid_value", "messages[0].role"),
        ({"content": "x"}, "missing_required_parameter", "messages[0].role"),
        ({"role": "user"}, "missing_required_parameter", "messages[0].content"),
        ({"role": "user", "content": 5}, "invalid_value", "messages[0].content"),
        ({"role": "user", "content": []}, "invalid_value", "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "unsupported_modality",
         "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "missing_required_parameter",
         "messages[0].content[0].text"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "unsupported_parameter",
         "messages[0].tool_calls"),
        ("hi", "invalid_value", "messages[0]"),
    ],
)  # fmt: skip
def test_wrong_messages_are_refused_by_name(message, code, param):
    """By the element and its field."""
    fault = fault_of(messages=[message])
    assert (code, param) == (fault.code, fault.param)


@pytest.mark.parametrize(
    ("messages", "code"), [(None, "missing_required_parameter"), ([], "invalid_value"), ("hi", "invalid_value")]
)
def test_there_must_be_messages(messages, code):
    """An empty conversation has no answer."""
    fault = fault_of(messages=messages)
    assert (code, "messages") == (fault.code, fault.param)


def test_a_body_too_large_is_refused():
    """Before it is parsed."""
    assert "payload_too_large" == fault_of(messages=[{"role": "user", "content": "x" * 2**20}]).code


def encoder(**fields):
    return CompletionEncoder(decoded(**fields), completion_id="chatcmpl-1", created=7)


def finished(reason=FinishReason.STOP, **changes):
    usage = Usage(input_tokens=5, output_tokens=2, cached_tokens=3)
    return TurnFinished(turn_id="t", reason=reason, text="ab", usage=usage, **changes)


def stream_of(end, **fields):
    """The data of every SSE message of a stream of two pieces."""
    made = encoder(stream=True, **fields)
    pieces = [Delta(turn_id="t", index=0, text="a"), Delta(turn_id="t", index=1, text="b")]
    sent = b"".join([made.start(), *map(made.delta, pieces), made.end(end)]).decode()
    assert sent.endswith("\n\n")
    return [message.removeprefix("data: ") for message in sent.split("\n\n")[:-1]]


def test_a_whole_answer_is_one_valid_body():
    """With usage in the client's own shape."""
    body = json.loads(encoder().body(finished(num_dropped_items=2)))
    answer = ChatCompletion.model_validate(body, strict=True)
    choice = answer.choices[0]
    assert ("ab", "stop", "assistant") == (choice.message.content, choice.finish_reason, choice.message.role)
    assert (5, 2, 7) == (
        answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    )  # fmt: skip
    assert 3 == answer.usage.prompt_tokens_details.cached_tokens
    assert ("fp_1", "m", 2) == (answer.system_fingerprint, answer.model, body["truncated"])


def test_a_stream_is_role_pieces_reason_and_done():
    """One id and time on all chunks, no usage unless asked for."""
    *chunks, done = stream_of(finished())
    parsed = [ChatCompletionChunk.model_validate(json.loads(chunk), strict=True) for chunk in chunks]
    assert "[DONE]" == done
    assert ["", "a", "b", None] == [chunk.choices[0].delta.content for chunk in parsed]
    assert ["assistant", None] == [chunk.choices[0].delta.role for chunk in parsed[:2]]
    assert [None, None, None, "stop"] == [chunk.choices[0].finish_reason for chunk in parsed]
    assert {("chatcmpl-1", 7)} == {(chunk.id, chunk.created) for chunk in parsed}
    assert not any("usage" in json.loads(chunk) for chunk in chunks)


def test_usage_comes_once_before_done_when_asked_for():
    """In a chunk without choices; every other chunk says null."""
    *chunks, last, _ = [*stream_of(finished(), stream_options={"include_usage": True})]
    usage = ChatCompletionChunk.model_validate(json.loads(last), strict=True)
    assert ([], 7) == (usage.choices, usage.usage.total_tokens)
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)


@pytest.mark.parametrize(
    ("reason", "spelled"), [(FinishReason.LENGTH, "length"), (FinishReason.FILTERED, "content_filter")]
)
def test_each_reason_is_spelled(reason, spelled):
    """In a body and in a stream."""
    assert spelled == json.loads(encoder().body(finished(reason)))["choices"][0]["finish_reason"]
    assert spelled == json.loads(stream_of(finished(reason))[-2])["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (finished(FinishReason.ERROR, error=error_of("engine_error", "it broke")), "engine_error"),
        (finished(FinishReason.CANCELLED), "engine_unavailable"),
    ],
)
def test_a_failed_answer_never_looks_whole(end, code):
    """A stream ends with one error frame, without [DONE] or reason; a body is refused."""
    *chunks, last = stream_of(end)
    assert code == json.loads(last)["error"]["code"]
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    with pytest.raises(ServerError) as caught:
        encoder().body(end)
    assert code == caught.value.code


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
NAMES = ["messages", "model", "n", "stop", "seed", "max_tokens", "tools", "stream_options", "truncation", "x"]


@given(st.dictionaries(st.sampled_from(NAMES), ANY))
def test_any_body_is_a_request_or_a_fault(fields):
    """No shape escapes the readers."""
    status = 200
    try:
        decoded(**fields)
    except ServerError as fault:
        status = fault.row.http_status
    assert status in {200, 400, 404}
