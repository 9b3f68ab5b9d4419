# SPDX-License-Identifier: Apache-2.0
"""The messages between gateway and engine: what was said arrives, and nothing else is taken for a message."""

from contextlib import suppress
from dataclasses import fields, is_dataclass

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import CODES
from server.core.types import FinishReason
from server.engine.process import messages
from server.engine.process.messages import (
    MESSAGE_BYTES_MAX,
    VERSION,
    Hello,
    Message,
    MessageFault,
    decode,
    encode,
)
from server.engine.sequence import StepOutput, Submission, TokenParams

IDS = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
OF_TYPE = {
    int: st.integers(-(2**63), 2**64 - 1),
    int | None: st.none() | st.integers(0, 10**9),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    str | None: st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    float: st.floats(allow_nan=False),
    tuple[int, ...]: IDS,
    FinishReason | None: st.none() | st.sampled_from(FinishReason),
}


def values_of(kind):
    """Any object of a class."""
    made = {
        each.name: OF_TYPE[each.type] if each.type in OF_TYPE else nested(each.type) for each in fields(kind)
    }
    made |= {name: st.none() | st.sampled_from(sorted(CODES)) for name in made if name == "error_code"}
    made |= {name: st.sampled_from(sorted(CODES)) for name in made if name == "code"}
    return st.builds(kind, **made)


def nested(kind):
    if is_dataclass(kind):
        return values_of(kind)
    assert kind == tuple[StepOutput, ...]
    return st.lists(values_of(StepOutput), max_size=3).map(tuple)


EVERY = st.one_of([values_of(kind) for kind in messages._KINDS.values()])
PARAMS = TokenParams(
    temperature=1, top_k=0, top_p=1.0, min_p=0.0, seed=2**64 - 1, max_tokens=5, end_token_ids=(2,)
)
SUBMISSION = Submission(request_id="r", token_ids=(1, 2), params=PARAMS)
SAMPLES = [
    messages.Hello(epoch=0),
    messages.Submit(epoch=1, submission=SUBMISSION),
    messages.Outputs(epoch=1, outputs=(StepOutput(request_id="r", token_ids=(1,), reason=FinishReason.STOP),)),
    messages.Refused(epoch=1, request_id="r", code="queue_full", message="m", param=None, retry_after_ms=5),
]


@given(message=EVERY)
def test_what_is_said_arrives(message):
    """Any message of any kind comes out as it went in."""
    assert decode(encode(message)) == message


def test_every_kind_is_known():
    """No message of the union is forgotten by the codec."""
    assert set(messages._KINDS.values()) == set(Message.__args__)


@given(data=st.binary(max_size=40))
def test_other_bytes_are_a_fault(data):
    """Whatever comes is a message or a MessageFault, and nothing worse."""
    with suppress(MessageFault):
        assert isinstance(decode(data), Message)


@given(
    message=EVERY,
    change=st.sampled_from([True, None, -1.5, "x", b"x", [], {}, [None], ["a"], {"a": 1}]),
    data=st.data(),
)
def test_a_field_of_another_kind_is_a_fault(message, change, data):
    """A field whose value has another type makes no message, or one that differs in that field alone."""
    version, name, values = msgpack.unpackb(encode(message))
    place = data.draw(st.integers(0, len(values) - 1))
    wrong = [*values[:place], change, *values[place + 1 :]]
    try:
        decoded = decode(msgpack.packb([version, name, wrong]))
    except MessageFault:
        return
    assert msgpack.packb(messages._plain(decoded)) == msgpack.packb(wrong)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("change", [lambda values: values[:-1], lambda values: [*values, 1], lambda _: None])
def test_counts_are_exact(sample, change):
    """A field too few or too many makes no message."""
    version, name, values = msgpack.unpackb(encode(sample))
    with pytest.raises(MessageFault):
        decode(msgpack.packb([version, name, change(values)]))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", msgpack.packb(5), msgpack.packb([VERSION]), msgpack.packb({}),
     msgpack.packb([VERSION, "Nothing", []]), msgpack.packb([VERSION, ["Hello"], [1]]), msgpack.packb([]),
     msgpack.packb([VERSION, "Hello", [1], 2]), msgpack.packb([VERSION, "Hello"]),
     encode(Hello(epoch=1))[:-1], encode(Hello(epoch=1)) + b"x",
     b"x" * (MESSAGE_BYTES_MAX + 1), b"\x91" * 5000],
)  # fmt: skip
def test_near_misses_are_faults(data):
    """Cut, extended, nested, empty, too long: no message."""
    with pytest.raises(MessageFault) as caught:
        decode(data)
    assert caught.value.version is None


def test_unknown_codes_are_faults():
    """An error code that has no row could not be told to a client."""
    refused = msgpack.unpackb(encode(SAMPLES[3]))
    refused[2][2] = "no_such_code"
    with pytest.raises(MessageFault, match="unknown error code"):
        decode(msgpack.packb(refused))


def test_another_version_is_named():
    """A message of another release says whose it is, whatever its fields are."""
    for data in (msgpack.packb([VERSION + 1, "Hello", [1, 2, 3]]), msgpack.packb([VERSION + 1, "New"])):
        with pytest.raises(MessageFault) as caught:
            decode(data)
        assert caught.value.version == VERSION + 1
    with pytest.raises(MessageFault) as caught:
        decode(msgpack.packb(["1", "Hello", [1]]))
    assert caught.value.version is None
