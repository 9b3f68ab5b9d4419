# SPDX-License-Identifier: Apache-2.0
"""Every field a client sends is typed and in range, or refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import ServerError
from server.core.types import SamplingParams
from server.wire.fields import Fields

VALUES = {
    "null": None, "true": True, "int": 3, "float": 1.5, "string": "x", "array": ["x"], "object": {"x": "y"}
}  # fmt: skip


def fault_of(read, *args, **kwargs):
    with pytest.raises(ServerError) as caught:
        read(*args, **kwargs)
    return caught.value


def test_null_is_as_absent_for_every_getter():
    """One rule at every door."""
    fields = Fields({"a": None})
    for name in ("a", "b"):
        assert not fields.has(name)
        assert fields.string(name) is fields.boolean(name) is fields.object(name) is None
        assert fields.number(name, low=0, high=1) is fields.integer(name, low=0, high=1) is None
        assert fields.array(name, count_max=1) is fields.objects(name, count_max=1) is None
        assert fields.strings(name, count_max=1, chars_max=1) is fields.choice(name, {}) is None
        assert () == fields.metadata(name)
    assert [] == list(fields.names())


@pytest.mark.parametrize(
    ("getter", "kwargs", "accepted"),
    [
        ("string", {}, {"string"}),
        ("boolean", {}, {"true"}),
        ("number", {"low": 0, "high": 9}, {"int", "float"}),
        ("integer", {"low": 0, "high": 9}, {"int"}),
        ("array", {"count_max": 1}, {"array"}),
        ("strings", {"count_max": 1, "chars_max": 9}, {"string", "array"}),
        ("object", {}, {"object"}),
        ("choice", {"choices": {"x": 1}}, {"string"}),
        ("metadata", {}, {"object"}),
    ],
)
def test_each_getter_takes_its_own_types_and_no_other(getter, kwargs, accepted):
    """Nothing is coerced, and a fault names the whole path."""
    for kind in VALUES.keys() - {"null"}:
        read = getattr(Fields({"field": VALUES[kind]}, "outer[2]"), getter)
        if kind in accepted:
            assert read("field", **kwargs) is not None
        else:
            fault = fault_of(read, "field", **kwargs)
            assert ("invalid_value", "outer[2].field") == (fault.code, fault.param)
            assert "'outer[2].field'" in fault.message


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 10**20 * 1.0, 2**53 + 2.0, 2.0**70])
def test_a_wrong_integer_is_refused(value):
    """Out of range, not whole, no number, or too big a double to be one integer."""
    assert "a" == fault_of(Fields({"a": value}).integer, "a", low=1, high=2**64).param


@pytest.mark.parametrize(("value", "number"), [(1, 1), (1.0, 1), (2**63, 2**63)])
def test_a_whole_number_is_an_integer_however_it_is_written(value, number):
    """1.0 is 1."""
    found = Fields({"a": value}).integer("a", low=1, high=2**64)
    assert (number, int) == (found, type(found))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 5e-324, 1e-38, 1e-6, 0.7, 2], [-1, 2.1, 1e9, "0.7", True]),
        ("top_p", [0, 1e-9, 1], [-0.1, 1.1, "1"]),
        ("top_k", [-1, 0, 1, 10**7], [-2, 1.5, "1"]),
        ("min_p", [0, 0.5, 1], [-1, 2]),
        ("seed", [0, -(2**63), 2**64 - 1], [1.5, "7", 2.0**64]),
        ("stop", ["x", ["x"] * 4, []], ["", ["x"] * 5, [""], [None], [1], 5, "x" * 257]),
    ],
)
def test_sampling_ranges(name, good, bad):
    """Every sampling field has one range, whichever door it comes through, and fits SamplingParams."""
    for value in good:
        SamplingParams(**Fields({name: value}).sampling())
    for value in bad:
        fault = fault_of(Fields({name: value}, "session").sampling)
        assert fault.param.startswith(f"session.{name}")


def test_top_k_off_and_huge_are_clamped():
    """-1 and 0 are off; nothing larger than any vocabulary is passed on."""
    found = [Fields({"top_k": value}).sampling()["top_k"] for value in (-1, 0, 5, 10**7, 2**64 - 1)]
    assert [0, 0, 5, 1_000_000, 1_000_000] == found


def test_stop_keeps_its_order_and_absent_fields_stay_absent():
    """Only what the client sent is in the result."""
    assert {"stop": ("b", "a")} == Fields({"stop": ["b", "a"]}).sampling()
    assert {"stop": ("b",)} == Fields({"stop": "b"}).sampling()


@pytest.mark.parametrize(
    "value", [{str(i): "" for i in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}, []]
)
def test_metadata_is_bounded(value):
    """16 pairs, keys of 64, values of 512, strings only."""
    assert fault_of(Fields({"metadata": value}).metadata, "metadata").param.startswith("metadata")


def test_metadata_keeps_its_pairs():
    """In the client's order."""
    value = {"b": "1", "a": ""}
    assert (("b", "1"), ("a", "")) == Fields({"metadata": value}).metadata("metadata")


def test_lengths_and_counts_are_bounded():
    """A string and an array say how long they may be."""
    fields = Fields({"s": "abc", "a": [1, 2, 3], "o": [{}, 1]})
    assert "at least 4" in fault_of(fields.string, "s", chars_min=4).message
    assert "at most 2" in fault_of(fields.string, "s", chars_max=2).message
    assert "at most 2" in fault_of(fields.array, "a", count_max=2).message
    assert "o[1]" == fault_of(fields.objects, "o", count_max=2).param


def test_elements_know_their_place():
    """A fault inside an array names the element."""
    (element,) = Fields({"items": [{"x": 1}]}, "response").objects("items", count_max=1)
    assert "response.items[0].x" == fault_of(element.string, "x").param


def test_a_choice_lists_what_is_possible():
    """The message is the documentation."""
    fault = fault_of(Fields({"a": "z" * 99}).choice, "a", {"x": 1, "y": 2})
    assert "must be one of 'x', 'y'" in fault.message
    assert len(fault.message) < 90


def test_a_missing_field_and_a_refused_one_have_their_own_codes():
    """A client can tell what to do."""
    fields = Fields({"n": 2, "m": []})
    assert "missing_required_parameter" == fault_of(fields.require, "x").code
    assert "unsupported_parameter" == fault_of(fields.refuse, "n", (1,), "must be 1").code
    fields.require("n")
    fields.refuse("m", ([],), "must be empty")
    fields.refuse("x", (), "must be absent")


ANY = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()) | st.just({})


@given(st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "min_p", "seed", "stop"]), ANY))
def test_any_values_make_sampling_params_or_a_named_fault(values):
    """Nothing else can come out, and what comes out is finite and in range."""
    params, blamed = SamplingParams(), None
    try:
        params = SamplingParams(**Fields(values).sampling())
    except ServerError as fault:
        blamed = fault.param.split("[")[0]
    assert blamed in {None, *values}
    assert 0 <= params.temperature <= 2
    assert 0 <= params.top_p <= 1
