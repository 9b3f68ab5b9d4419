# SPDX-License-Identifier: Apache-2.0
"""What waits for a client keeps its order, merges what may be merged, and says how full it is."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import error_of
from server.core.events import (
    ConversationReset,
    Delta,
    Failed,
    ItemAdded,
    ItemDeleted,
    ItemRetrieved,
    SessionCreated,
    SessionDescribed,
    SessionSettings,
    TurnFinished,
    TurnStarted,
)
from server.core.types import ContentPart, FinishReason, Item, Role, Usage
from server.gateway.session.outbox import BATCH_BYTES, EVENT_BYTES, PIECES_MAX, Backlog, Outbox

SETTINGS = SessionSettings(model="m", instructions="12345")
ITEM = Item(id="i", role=Role.USER, parts=(ContentPart(text="1234567"),))


def delta(text, index=0, turn_id="t"):
    return Delta(turn_id=turn_id, index=index, text=text)


def finished(text="", turn_id="t"):
    return TurnFinished(turn_id=turn_id, reason=FinishReason.STOP, text=text, usage=Usage())


def started(turn_id="t"):
    return TurnStarted(
        turn_id=turn_id, item_id="i", previous_item_id=None, settings=SETTINGS, is_out_of_band=True
    )


def filled(*events, bytes_max=10_000):
    outbox = Outbox(bytes_max)
    for event in events:
        outbox.add(event)
        outbox.check_integrity()
    return outbox


def test_deltas_of_a_turn_wait_as_one():
    """With the first one's offset, however other turns' deltas stand between."""
    outbox = filled(delta("a"), delta("x", turn_id="u"), delta("b", 1), delta("y", 1, "u"), delta("c", 2))
    assert [delta("abc"), delta("xy", turn_id="u")] == outbox.take()


def test_nothing_else_merges_and_order_stays():
    """A Delta after a take begins anew."""
    events = [started(), delta("a"), finished("a"), ConversationReset(), ConversationReset()]
    outbox = filled(*events)
    assert events == outbox.take()
    outbox.add(delta("b", 1))
    assert [delta("b", 1)] == outbox.take()
    assert [] == outbox.take()


def test_a_batch_is_bounded_but_never_empty():
    """One larger event goes alone."""
    big = finished("x" * BATCH_BYTES)
    outbox = filled(ConversationReset(), big, ConversationReset(), bytes_max=10**6)
    assert [[ConversationReset()], [big], [ConversationReset()]] == [outbox.take() for _ in range(3)]
    assert [1, 1] == [len(filled(*[ConversationReset()] * 2).take(bytes_max=1)) for _ in range(2)]


@pytest.mark.parametrize(
    ("event", "text_bytes"),
    [
        (delta("字"), 3),
        (finished("12"), 2),
        (ItemAdded(item=ITEM, previous_item_id=None), 7),
        (ItemRetrieved(item=ITEM), 7),
        (SessionDescribed(session_id="s", settings=SETTINGS, items=(ITEM, ITEM)), 19),
        (SessionCreated(session_id="s", settings=SETTINGS), 5),
        (started(), 5),
        (ItemDeleted(item_id="i"), 0),
        (Failed(error=error_of("internal_error", "x")), 0),
    ],
)
def test_every_event_costs_its_text_and_a_share(event, text_bytes):
    """So that many small ones are bounded as well as few large ones."""
    outbox = filled(event)
    assert EVENT_BYTES + text_bytes == outbox.num_bytes
    outbox.take()
    assert (0, 0) == (outbox.num_bytes, len(outbox))


def test_the_backlog_says_how_full_it_is():
    """Within the bound, over it, and at twice it."""
    outbox = Outbox(EVENT_BYTES * 2)
    seen = []
    for _ in range(6):
        outbox.add(ConversationReset())
        seen.append(outbox.backlog)
    assert [(Backlog.NORMAL, 2), (Backlog.SLOW, 2), (Backlog.OVERFLOWN, 2)] == [
        (backlog, len(list(group))) for backlog, group in groupby(seen)
    ]
    outbox.take()
    assert Backlog.NORMAL is outbox.backlog


def test_a_client_that_does_not_read_costs_its_text_once():
    """Pieces of one byte are joined now and then, not kept as objects."""
    outbox = filled(bytes_max=10**6)
    for index in range(PIECES_MAX * 4 + 3):
        outbox.add(delta("x", index))
    assert EVENT_BYTES + PIECES_MAX * 4 + 3 == outbox.num_bytes
    outbox.check_integrity()
    assert [delta("x" * (PIECES_MAX * 4 + 3))] == outbox.take()


def test_half_a_surrogate_pair_is_counted_like_any_text():
    """No text of a model raises."""
    assert EVENT_BYTES + 3 == filled(delta("\ud800")).num_bytes


STEPS = st.lists(st.sampled_from(["t", "u", "v", "end", "reset", "take"]), max_size=60)


@given(STEPS, st.integers(1, 3000))
def test_each_turn_reads_the_same_through_any_outbox(steps, batch):
    """Whenever it is emptied, a turn's text, offsets and place among whole events are what was put in."""
    outbox, given_events, taken, lengths = Outbox(10**6), [], [], {"t": 0, "u": 0, "v": 0}
    for number, step in enumerate(steps):
        if step == "take":
            taken += outbox.take(batch)
            continue
        event = {"end": finished(str(number)), "reset": ConversationReset()}.get(step)
        if event is None:
            event = delta(str(number), lengths[step], step)
            lengths[step] += len(event.text)
        outbox.add(event)
        outbox.check_integrity()
        given_events.append(event)
    while len(outbox):
        taken += outbox.take(batch)

    def whole(events):
        return [event for event in events if not isinstance(event, Delta)]

    def text(events, turn_id):
        pieces = [event for event in events if isinstance(event, Delta) and event.turn_id == turn_id]
        assert all(p.index == sum(len(q.text) for q in pieces[:n]) for n, p in enumerate(pieces))
        return "".join(piece.text for piece in pieces)

    assert whole(given_events) == whole(taken)
    assert all(text(given_events, turn_id) == text(taken, turn_id) for turn_id in lengths)
