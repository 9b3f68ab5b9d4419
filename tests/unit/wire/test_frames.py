# SPDX-License-Identifier: Apache-2.0
"""Strict JSON in, unfailing JSON out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import ServerError
from server.wire.frames import DEPTH_MAX, dump, dump_text, parse_object, sse_data

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def fault_of(data, **kwargs):
    with pytest.raises(ServerError) as caught:
        parse_object(data, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"temperature":NaN}', "temperature"),
        ('{"a":1,"temperature": -Infinity}', "temperature"),
        ('{"temperature":1e999}', "temperature"),
        ('{"seed":' + "9" * 5000 + "}", "seed"),
        ('{"content":"\\ud800"}', "content"),
        ('{"content":"\\udc00\\ud800"}', "content"),
        ("{", None),
        ("", None),
        ("{'a':1}", None),
    ],
)
def test_what_is_not_strict_json_is_refused_with_the_field_it_stands_in(text, param):
    """NaN, infinities, giant numbers and half surrogate pairs never enter, in text or bytes."""
    for data in (text, text.encode()):
        fault = fault_of(data)
        assert ("invalid_json", param) == (fault.code, fault.param)


@pytest.mark.parametrize("text", ["[]", "1", '"a"', "null", "true"])
def test_json_that_is_no_object_is_an_invalid_event(text):
    """Every message of every protocol is one object."""
    assert "invalid_event" == fault_of(text).code


def test_broken_utf8_is_refused():
    """Bytes that are no text are no JSON."""
    assert "invalid_json" == fault_of(b'{"a":"\xff"}').code


def test_a_half_surrogate_in_a_str_is_refused():
    """A str can hold what UTF-8 cannot."""
    assert "invalid_json" == fault_of('{"a":"\ud800"}').code


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 1000, 1025, 25_000])
def test_too_deep_is_a_fault_and_no_recursion_error(depth):
    """However deep, in arrays or objects, under any field."""
    for text in ('{"a":' * depth + "1" + "}" * depth, '{"a":' + "[" * depth + "]" * depth + "}"):
        assert "invalid_json" == fault_of(text, bytes_max=10**6).code


def test_the_deepest_allowed_passes():
    """DEPTH_MAX levels, the object itself counted."""
    text = '{"a":' * DEPTH_MAX + "1" + "}" * DEPTH_MAX
    assert parse_object(text) == json.loads(text)


@pytest.mark.parametrize("letter", ["a", "é", "字", "😀"])
def test_the_size_is_counted_in_bytes(letter):
    """The bound is exact in UTF-8 for text and bytes alike."""
    text = json.dumps({"a": letter * 50}, ensure_ascii=False)
    size = len(text.encode())
    for data in (text, text.encode()):
        assert parse_object(data, bytes_max=size) == {"a": letter * 50}
        assert "payload_too_large" == fault_of(data, bytes_max=size - 1).code


def test_a_proper_pair_and_nul_pass():
    """They are characters."""
    assert {"a": "😀\0"} == parse_object('{"a":"\\ud83d\\ude00\\u0000"}')


def test_out_go_whole_characters_and_finite_numbers_only():
    """Half pairs become U+FFFD, two halves in order their character, infinities null."""
    value = {"a": ["x\ud800y", "\ud83d\ude00"], "\udfff": float("-inf"), "b": (1, None)}
    assert {"a": ["x\ufffdy", "😀"], "\ufffd": None, "b": [1, None]} == json.loads(dump(value))


def test_sse_data_is_one_message():
    """No newline of a text can end it early."""
    assert b'data: {"a":"x\\ny"}\n\n' == sse_data({"a": "x\ny"})


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_what_goes_out_comes_in_the_same(value):
    """Dump and parse are each other's inverse on strict JSON."""
    assert value == parse_object(dump(value)) == parse_object(dump_text(value))


@given(st.text(st.characters(), max_size=40) | st.binary(max_size=40))
def test_any_message_is_parsed_or_refused(data):
    """No input leads to another exception."""
    codes = {None}
    try:
        parse_object(data)
    except ServerError as fault:
        codes = {fault.code}
    assert codes <= {None, "invalid_json", "invalid_event"}


@given(st.lists(st.text(st.characters(categories=None))))
def test_any_text_goes_out(texts):
    """Lone surrogates included."""
    assert len(texts) == len(json.loads(dump(texts).decode()))
