# SPDX-License-Identifier: Apache-2.0
"""Items keep their order and their limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import ServerError
from server.core.types import ContentPart, Item, ItemStatus, Role
from server.gateway.session.conversation import Conversation, SessionLimits, num_bytes

SMALL = SessionLimits(num_items_max=4, item_bytes_max=10, conversation_bytes_max=25)


def item(item_id, text="x", status=ItemStatus.COMPLETED):
    return Item(id=item_id, role=Role.USER, parts=(ContentPart(text=text),), status=status)


def filled(*ids, limits=SMALL):
    conversation = Conversation(limits)
    for item_id in ids:
        conversation.insert(item(item_id))
    return conversation


def ids(conversation):
    conversation.check_integrity()
    return "".join(i.id for i in conversation.items)


def code_of(call, *args):
    with pytest.raises(ServerError) as caught:
        call(*args)
    return caught.value.code


@pytest.mark.parametrize(
    ("previous", "order", "before"),
    [(None, "abz", "b"), ("root", "zab", None), ("a", "azb", "a"), ("b", "abz", "b")],
)
def test_an_item_stands_where_it_was_asked_for(previous, order, before):
    """At the end, at the front or after another; the answer says what stands before it."""
    conversation = filled("a", "b")
    assert before == conversation.insert(item("z"), previous)
    assert (order, order[-1]) == (ids(conversation), conversation.last_id)


def test_the_first_item_has_nothing_before_it():
    """Nor has an empty conversation a last one."""
    conversation = Conversation(SMALL)
    assert conversation.last_id is None
    assert conversation.insert(item("a")) is None


@pytest.mark.parametrize(
    ("new", "previous", "code"),
    [
        (item("a"), None, "item_already_exists"),
        (item("z"), "nobody", "item_not_found"),
        (item("z", "x" * 11), None, "payload_too_large"),
        (item("z", "字字字字"), None, "payload_too_large"),  # twelve bytes
    ],
)
def test_a_refused_item_changes_nothing(new, previous, code):
    """All or nothing."""
    conversation = filled("a", "b")
    assert code == code_of(conversation.insert, new, previous)
    assert "ab" == ids(conversation)


def test_a_conversation_is_full_by_count_and_by_bytes():
    """And room for several can be asked for at once."""
    assert "conversation_full" == code_of(filled("a", "b", "c", "d").insert, item("z"))
    conversation = filled()
    conversation.insert(item("a", "x" * 10))
    conversation.insert(item("b", "x" * 10))
    assert "conversation_full" == code_of(conversation.insert, item("z", "x" * 6))
    conversation.check_room(2, item("z", "x" * 5))
    assert "conversation_full" == code_of(conversation.check_room, 3)


def test_items_are_found_and_removed_by_id():
    """An unknown id is the client's mistake."""
    conversation = filled("a", "b")
    assert "a" == conversation.find("a").id
    conversation.remove("a")
    assert "b" == ids(conversation)
    assert "item_not_found" == code_of(conversation.find, "a")
    assert "item_not_found" == code_of(conversation.remove, "a")


def test_an_answer_being_written_keeps_its_place():
    """It cannot be removed, no model reads it, and its bytes are never refused."""
    conversation = filled("a")
    conversation.insert(Item(id="b", role=Role.ASSISTANT, parts=(), status=ItemStatus.IN_PROGRESS))
    conversation.insert(item("c"))
    assert "invalid_value" == code_of(conversation.remove, "b")
    assert ["a", "c"] == [i.id for i in conversation.whole_items()]
    conversation.finish(item("b", "x" * 99))
    assert "abc" == ids(conversation)
    assert 101 == conversation.num_bytes
    conversation.clear()
    assert ("", 0) == (ids(conversation), conversation.num_bytes)


def test_the_newest_items_are_shown_within_two_bounds():
    """Oldest first, whole ones only."""
    conversation = filled("a", "b", "c")
    assert ["b", "c"] == [i.id for i in conversation.newest(num_items_max=2, bytes_max=9)]
    assert ["c"] == [i.id for i in conversation.newest(num_items_max=9, bytes_max=1)]
    assert () == conversation.newest(num_items_max=9, bytes_max=0)


def test_bytes_are_those_of_utf8():
    """Half a surrogate pair counts too, and raises nothing."""
    assert 3 + 4 + 3 == num_bytes(item("a", "字😀\ud800"))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "remove"]),
        st.sampled_from("abcdef"),
        st.sampled_from([None, "root", "a", "b", "c"]),
        st.text(max_size=6),
    ),
    max_size=30,
)


@given(OPERATIONS)
def test_any_operations_leave_it_whole(operations):
    """Ids unique, bytes counted, limits kept."""
    conversation = Conversation(SMALL)
    for verb, item_id, previous, text in operations:
        try:
            if verb == "insert":
                conversation.insert(item(item_id, text), previous)
            else:
                conversation.remove(item_id)
        except ServerError:
            pass
        conversation.check_integrity()
        assert len(conversation.items) <= 4
        assert conversation.num_bytes <= 25
