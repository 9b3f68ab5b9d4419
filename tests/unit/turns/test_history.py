# SPDX-License-Identifier: Apache-2.0
"""What a model reads of a long conversation: the system text, whole newest turns, always the question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import ServerError
from server.core.types import ContentPart, Item, Role
from server.turns.history import fit

LETTERS = {"s": Role.SYSTEM, "u": Role.USER, "a": Role.ASSISTANT, "t": Role.TOOL}


class Counter:
    """A token a character, and one more an item."""

    def __init__(self):
        self.num_calls = 0

    async def __call__(self, items):
        self.num_calls += 1
        return sum(len(item.text) + 1 for item in items) + 1


def conversation(*words):
    """Items from words like "u5": a user's message of five tokens, costing six."""
    return tuple(
        Item(id=f"{i}:{word}", role=LETTERS[word[0]], parts=(ContentPart(text="x" * int(word[1:])),))
        for i, word in enumerate(words)
    )


async def fitted(*words, context, reserve=0):
    found = await fit(conversation(*words), context_length=context, num_reserved=reserve, count=Counter())
    assert len(words) == len(found.items) + found.num_dropped
    return [item.id.split(":")[1] for item in found.items]


async def test_what_fits_is_left_alone_and_counted_once():
    """The common case costs one count."""
    count = Counter()
    items = conversation("s4", "u4", "a4", "u4")
    found = await fit(items, context_length=22, num_reserved=0, count=count)
    assert (items, 0, 21, 1) == (found.items, found.num_dropped, found.num_tokens, count.num_calls)


@pytest.mark.parametrize(
    ("words", "context", "kept"),
    [
        (["s4", "u4", "a4", "u3", "a3", "u2"], 22, ["s4", "u3", "a3", "u2"]),
        (["s4", "u4", "a4", "u3", "a3", "u2"], 16, ["s4", "u2"]),
        (["u9", "a9", "a9", "u2"], 15, ["u2"]),  # never an answer without its question
        (["a9", "u9", "a9", "u2", "a2", "u2"], 15, ["u2", "a2", "u2"]),  # a greeting is a turn of its own
        (["u1", "s3", "a9", "u2"], 12, ["s3", "u2"]),  # a late system text stays
        (["u1", "t9", "a1", "u2"], 8, ["u2"]),  # tools belong to their turn
        (["u5", "a5", "u99", "a5", "u5", "a5", "u5"], 30, ["u5", "a5", "u5"]),  # the great one goes as well
    ],
)
async def test_whole_oldest_turns_go(words, context, kept):
    """Never half a turn; the system text and the newest question always stay."""
    assert kept == await fitted(*words, context=context)


async def test_room_for_the_answer_is_kept_by_dropping_turns():
    """But a newest turn that fits only without it is sent all the same."""
    assert ["u4", "a4", "u4"] == await fitted("u4", "a4", "u4", context=20, reserve=4)
    assert ["u4"] == await fitted("u4", "a4", "u4", context=20, reserve=5)
    assert ["u9"] == await fitted("u4", "a4", "u9", context=12, reserve=10)


@pytest.mark.parametrize(("size", "fits"), [(7, True), (8, True), (9, False), (500, False)])
async def test_the_edge_leaves_one_token_for_the_answer(size, fits):
    """A prompt of context - 1 goes; of context, or more, not."""
    if fits:
        assert [f"u{size}"] == await fitted(f"u{size}", context=11)
    else:
        with pytest.raises(ServerError, match=rf"{size + 2} tokens.* 11 "):
            await fitted(f"u{size}", context=11)


@pytest.mark.parametrize("words", [["u1", "a1", "u500"], ["s500", "u1", "a1", "u1"], ["s500"], ["a500"]])
async def test_what_can_never_fit_is_refused_with_both_numbers(words):
    """The newest message alone, or the system text alone."""
    with pytest.raises(ServerError, match=r"50[0-9] tokens.* 60 ") as caught:
        await fitted(*words, context=60)
    assert "context_length_exceeded" == caught.value.code


async def test_nothing_is_a_conversation_too():
    """An empty prompt is the generator's to judge."""
    assert [] == await fitted(context=5)


async def test_a_long_conversation_needs_few_counts():
    """Bisection: about log2 of the turns."""
    count = Counter()
    items = conversation(*["u10", "a10"] * 500, "u10")
    found = await fit(items, context_length=300, num_reserved=50, count=count)
    assert count.num_calls <= 12
    assert found.num_tokens <= 250
    assert found.num_tokens + 22 > 250, "one more turn would have fitted"


@pytest.mark.parametrize("num_kept", range(1, 12))
async def test_no_turn_more_than_needed_is_dropped(num_kept):
    """At every depth."""
    words = [word for number in range(12) for word in (f"u{number}", "a0")]
    kept = words[-2 * num_kept :]
    size = await Counter()(conversation(*kept))
    assert kept == await fitted(*words, context=size + 1)


WORDS = st.lists(st.tuples(st.sampled_from("suat"), st.integers(0, 30)), max_size=30)


@given(WORDS, st.integers(2, 200), st.integers(0, 60))
async def test_whatever_is_kept_is_a_whole_suffix_and_the_most_that_fits(words, context, reserve):
    """Against the obvious way: drop turns one by one from the front."""
    items = conversation(*[f"{letter}{size}" for letter, size in words])
    starts = [i for i, item in enumerate(items) if item.role is Role.USER]
    first = next((i for i, item in enumerate(items) if item.role is not Role.SYSTEM), None)
    if first is not None and items[first].role is not Role.USER:
        starts = [first, *starts]
    choices = [items] + [
        (*[item for item in items[:start] if item.role is Role.SYSTEM], *items[start:]) for start in starts[1:]
    ]
    count = Counter()
    sizes = [await count(choice) for choice in choices]
    good = [c for c, size in zip(choices, sizes, strict=True) if size <= context - max(1, reserve)]
    try:
        found = await fit(items, context_length=context, num_reserved=reserve, count=count)
    except ServerError:
        assert not good
        assert sizes[-1] >= context
    else:
        assert found.items == (good[0] if good else choices[-1])
