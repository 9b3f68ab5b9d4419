# SPDX-License-Identifier: Apache-2.0
"""The detokenizer: whole characters at once, exact stop strings, and never more held than must be."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.engine.text.detokenizer import IncrementalDetokenizer
from server.engine.text.tokenizer import Tokenizer
from tests.data.tiny_tokenizers import END, KINDS, write

FAMILY = "👩‍👩‍👧"


class Spelled:
    """A tokenizer whose ids are places in a list of byte strings."""

    strips_first_space = False

    def __init__(self, *pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def token_bytes(self, token_id):
        return self.pieces[token_id]


def deltas(pieces, stops=()):
    """What each piece made certain, then what the end did; empty ones included."""
    text = IncrementalDetokenizer(Spelled(*pieces), stops)
    return [*(text.add(index) for index in range(len(pieces))), text.finish()]


def cut(data, places):
    """The bytes in pieces, cut at these places."""
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(borders)]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer(write(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["", "😀", ""]),
        ([b"\xe9", b"\xbe", b"\x98"], ["", "", "龘", ""]),
        ([b"a", b"\xff", b"b"], ["a", "\ufffd", "b", ""]),
        ([b"\xe9\xbe", b" the"], ["", "\ufffd the", ""]),
        ([b"\xf0\x9f\x98"], ["", "\ufffd"]),
        ([b"\xff"] * 3, ["\ufffd"] * 3 + [""]),
    ],
)
def test_characters_come_whole(pieces, expected):
    """A character in pieces comes with its last one; a byte that fits nowhere is one mark, at once."""
    assert deltas(pieces) == expected


@given(text=st.text(), places=st.lists(st.integers(0, 200), max_size=40))
@example(text=FAMILY, places=range(18))
def test_any_cut_gives_the_same_text(text, places):
    """Wherever the bytes are cut, the deltas join to the text, and no mark of loss stands in it."""
    assert (
        "".join(deltas(cut(text.encode("utf-8", "ignore"), places))) == text.encode("utf-8", "ignore").decode()
    )


@given(data=st.binary(max_size=60), places=st.lists(st.integers(0, 60)))
def test_any_bytes_decode_as_at_once(data, places):
    """Also bytes that are no text come as a decoder of the whole would show them."""
    assert "".join(deltas(cut(data, places))) == data.decode("utf-8", "replace")


@given(data=st.lists(st.binary(min_size=1, max_size=1), max_size=30))
def test_a_broken_byte_holds_up_three_tokens_at_most(data):
    """Whatever comes, the text never stands more than three bytes behind."""
    text = IncrementalDetokenizer(Spelled(*data))
    shown = ""
    for index in range(len(data)):
        shown += text.add(index)
        ends = range(max(0, index - 2), index + 2)
        assert shown in [b"".join(data[:end]).decode("utf-8", "replace") for end in ends]


def naive(text, stops):
    """The first stop string to be complete, the longest of those; the text before it."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)]
    return text


def naive_held(text, stops):
    """Length of the longest end of the text that is a proper beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Blue ket", "tle si", "ngs lo", "ud"], ["sings loud"], "Blue kettle "),
        (["aaab"], ["aab"], "a"),
        (["a", "a", "a", "b"], ["aab"], "a"),
        (["hello"], ["lo", "hello"], ""),
        (["hello"], ["ell", "hello"], "h"),
        (["stop", " it"], ["stop"], ""),
        (["a", b"\xe9\xbe", b"\x98.", "b"], ["龘."], "a"),
        (["a", b"\xe9", "x"], ["\ufffdx"], "a"),
        (["almost sto", "re"], ["stop"], "almost store"),
        (["a sto"], ["stop"], "a sto"),
        (["a"], [""], "a"),
        (["a", b"\xe9"], ["\ufffd"], "a"),
    ],
)
def test_stop_strings_are_cut(pieces, stops, expected):
    """Nothing of a stop string is shown, wherever its tokens begin; what only resembles one is."""
    assert "".join(deltas(pieces, stops)) == expected


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    places=st.lists(st.integers(0, 30), max_size=12),
)
def test_stops_and_holding_are_exact(text, stops, places):
    """At every moment exactly the longest possible beginning of a stop string is held, and no more."""
    pieces = cut(text.encode(), places)
    detokenizer = IncrementalDetokenizer(Spelled(*pieces), stops)
    seen = shown = ""
    for index, piece in enumerate(pieces):
        seen += piece.decode()
        shown += detokenizer.add(index)
        whole = naive(seen, stops)
        assert detokenizer.has_stopped == (whole != seen)
        assert shown == (whole if whole != seen else seen[: len(seen) - naive_held(seen, stops)])
    assert shown + detokenizer.finish() == naive(text, stops)


def test_nothing_comes_after_a_stop():
    """Once stopped, it takes no more ids and its end is empty."""
    text = IncrementalDetokenizer(Spelled("a", "STOP", "b"), ["STOP"])
    assert [text.add(0), text.add(1), text.has_stopped, text.add(2), text.finish()] == ["a", "", True, "", ""]


@given(data=st.data())
def test_ids_decode_as_the_library_does(tokenizer, data):
    """Any ids, one by one, join to the bytes of all at once; where they are text, the library says the same."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer._bytes) - 1), max_size=20))
    text = IncrementalDetokenizer(tokenizer)
    joined = "".join(map(text.add, ids)) + text.finish()
    whole = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    assert joined == (whole.removeprefix(" ") if tokenizer.strips_first_space else whole)
    if "\ufffd" not in whole and not whole.startswith("  "):  # one decoder drops every space of the first piece
        assert joined == tokenizer._library.decode(ids)


@pytest.mark.parametrize("text", ["Rain falls, then stops", "the  rain\n\n  x", "    if a:\n\tb", "龘é😀 the"])
def test_spaces_are_as_written(tokenizer, text):
    """What was encoded comes back with every space, and none before the first word."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    joined = "".join(map(detokenizer.add, tokenizer.encode(text))) + detokenizer.finish()
    if '"Metaspace"' in tokenizer._library.to_str():
        text = text.removeprefix(" ")  # it puts no space of its own before one, and so can't tell them apart
    assert joined == text


def test_control_tokens_are_not_shown(tokenizer):
    """A control token shows nothing; ordinary text that spells one is shown."""
    spelled = tokenizer.encode("a<|end|>b")
    text = IncrementalDetokenizer(tokenizer)
    assert END not in spelled
    assert "".join(map(text.add, [*spelled, END, *spelled])).replace(" ", "") == "a<|end|>ba<|end|>b"
