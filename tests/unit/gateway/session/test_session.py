# SPDX-License-Identifier: Apache-2.0
"""The session machine: every command answered, one writing turn at a time, each turn ended once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import CLOSE_SLOW
from server.core.events import (
    CancelResponse,
    ConversationReset,
    CreateItem,
    DeleteItem,
    Delta,
    DescribeSession,
    Failed,
    ItemAdded,
    ItemDeleted,
    ItemRetrieved,
    ResetConversation,
    RetrieveItem,
    Say,
    SessionCreated,
    SessionDescribed,
    SessionSettings,
    SessionUpdated,
    SettingsPatch,
    StartResponse,
    TurnFinished,
    TurnStarted,
    UpdateSession,
)
from server.core.types import (
    ContentPart,
    FinishReason,
    Item,
    ItemStatus,
    Role,
    SamplingParams,
    Truncation,
    Usage,
)
from server.gateway.session.conversation import SessionLimits
from server.gateway.session.outbox import Backlog
from server.gateway.session.session import CloseSocket, Emit, Session, StartTurn, StopTurn
from server.wire.realtime.encode import EventFrames
from tests.data.realtime_order import RealtimeOrder

SETTINGS = SessionSettings(model="m")
LIMITS = SessionLimits(num_items_max=6, item_bytes_max=20, conversation_bytes_max=50, num_side_turns_max=2)


def item(item_id, text="x", role=Role.USER):
    return Item(id=item_id, role=role, parts=(ContentPart(text=text),))


class Driver:
    """A session with its shell played by hand: records effects, checks integrity after each."""

    def __init__(self, limits=LIMITS):
        numbers = itertools.count()
        self.session = Session(
            session_id="sess_1", settings=SETTINGS, new_id=lambda prefix: f"{prefix}_{next(numbers)}",
            model_ids=("m", "n"), limits=limits,
        )  # fmt: skip
        self.running = {}  # StartTurn by id, of turns whose end is due

    def did(self, effects):
        for effect in effects:
            if isinstance(effect, StartTurn):
                self.running[effect.turn_id] = effect
        self.session.check_integrity()
        return list(effects)

    def send(self, command):
        return self.did(self.session.handle(command, 0.0))

    def start(self, **changes):
        """Start a turn and return its TurnStarted and StartTurn."""
        emit, turn = self.send(StartResponse(**changes))
        return emit.event, turn

    def say(self, turn_id, text, index=0):
        return self.did(self.session.handle_turn(Delta(turn_id=turn_id, index=index, text=text), 0.0))

    def finish(self, turn_id, text="", reason=FinishReason.STOP):
        del self.running[turn_id]
        end = TurnFinished(turn_id=turn_id, reason=reason, text=text, usage=Usage())
        return self.did(self.session.handle_turn(end, 0.0))

    def items(self):
        (emit,) = self.send(DescribeSession())
        return [(i.text, i.status) for i in emit.event.items]


def code_of(effects):
    """The code of the one Failed."""
    (effect,) = effects
    assert isinstance(effect.event, Failed)
    return effect.event.error.code


def test_it_greets_first():
    """With the effective settings."""
    (effect,) = Driver().session.start(0.0)
    assert SessionCreated(session_id="sess_1", settings=SETTINGS) == effect.event


def test_saying_adds_the_words_and_starts_a_turn_over_all_of_them():
    """The answer stands after the question, and becomes an item when it is whole."""
    driver = Driver()
    added, started, turn = driver.send(Say(text="hi"))
    assert (None, "hi") == (added.event.previous_item_id, added.event.item.text)
    assert (added.event.item.id, False) == (started.event.previous_item_id, started.event.is_out_of_band)
    assert ["hi"] == [i.text for i in turn.items]
    assert [Emit(event=Delta(turn_id=turn.turn_id, index=0, text="yo"))] == driver.say(turn.turn_id, "yo")
    (emit,) = driver.finish(turn.turn_id, "yo")
    assert (FinishReason.STOP, "yo") == (emit.event.reason, emit.event.text)
    assert [("hi", ItemStatus.COMPLETED), ("yo", ItemStatus.COMPLETED)] == driver.items()
    assert ["hi", "yo", "more"] == [i.text for i in driver.send(Say(text="more"))[2].items]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.STOP, ItemStatus.COMPLETED),
        (FinishReason.LENGTH, ItemStatus.INCOMPLETE),
        (FinishReason.CANCELLED, ItemStatus.INCOMPLETE),
        (FinishReason.ERROR, ItemStatus.INCOMPLETE),
    ],
)
def test_an_unfinished_answer_stays_as_an_incomplete_item(reason, status):
    """The partial text is part of the conversation."""
    driver = Driver()
    _, turn = driver.start()
    driver.finish(turn.turn_id, "half", reason)
    assert [("half", status)] == driver.items()


def test_client_items_are_placed_and_named():
    """An id left out is drawn; one given is kept."""
    driver = Driver()
    (a,) = driver.send(CreateItem(item=item("a")))
    (b,) = driver.send(CreateItem(item=item("b"), previous_item_id="root"))
    (c,) = driver.send(CreateItem(item=item(""), previous_item_id="b"))
    assert ItemAdded(item=item("a"), previous_item_id=None) == a.event
    assert (None, "b") == (b.event.previous_item_id, c.event.previous_item_id)
    assert c.event.item.id.startswith("item_")


def test_items_are_retrieved_and_deleted():
    """An unknown one is an error with the command's event_id."""
    driver = Driver()
    driver.send(CreateItem(item=item("a")))
    assert [Emit(event=ItemRetrieved(item=item("a")))] == driver.send(RetrieveItem(item_id="a"))
    assert [Emit(event=ItemDeleted(item_id="a"))] == driver.send(DeleteItem(item_id="a"))
    (effect,) = driver.send(DeleteItem(item_id="a", event_id="mine"))
    assert ("item_not_found", "mine") == (effect.event.error.code, effect.event.event_id)


def test_an_item_beside_a_running_answer_stands_after_it():
    """And is read by the next turn, as is the answer, not by this one."""
    driver = Driver()
    started, turn = driver.start()
    (added,) = driver.send(CreateItem(item=item("a", "later")))
    assert started.item_id == added.event.previous_item_id
    driver.finish(turn.turn_id, "now")
    assert ["now", "later"] == [i.text for i in driver.start()[1].items]


def test_settings_change_wholly_or_not_at_all():
    """A patch names what changes; a None inside the sampling is a value."""
    driver = Driver()
    patch = SettingsPatch(model="n", instructions="x", sampling=(("seed", 7), ("max_tokens", 5)))
    (effect,) = driver.send(UpdateSession(patch=patch))
    wanted = SessionSettings(model="n", instructions="x", sampling=SamplingParams(seed=7, max_tokens=5))
    assert SessionUpdated(session_id="sess_1", settings=wanted) == effect.event
    refused = SettingsPatch(model="other", instructions="y")
    assert "model_not_found" == code_of(driver.send(UpdateSession(patch=refused)))
    patch = SettingsPatch(instructions="", sampling=(("max_tokens", None),), truncation=Truncation.DISABLED)
    (effect,) = driver.send(UpdateSession(patch=patch))
    assert SamplingParams(seed=7) == effect.event.settings.sampling
    assert ("n", "", Truncation.DISABLED) == (
        effect.event.settings.model, effect.event.settings.instructions, effect.event.settings.truncation
    )  # fmt: skip


def test_a_turns_own_settings_leave_the_sessions_alone():
    """A patch of response.create is for that response."""
    driver = Driver()
    started, turn = driver.start(patch=SettingsPatch(instructions="once"), metadata=(("k", "v"),))
    assert "once" == started.settings.instructions == turn.settings.instructions
    assert (("k", "v"),) == started.metadata
    driver.finish(turn.turn_id)
    assert "" == driver.start()[1].settings.instructions


def test_input_replaces_the_conversation_for_one_turn():
    """Items and references in order; nothing of it is added."""
    driver = Driver()
    driver.send(CreateItem(item=item("a", "old")))
    _, turn = driver.start(input=(item("", "new"), "a"), is_out_of_band=True)
    assert ["new", "old"] == [i.text for i in turn.items]
    assert all(i.id for i in turn.items)
    assert () == driver.start(input=())[1].items
    failed = driver.send(StartResponse(input=("nobody",), is_out_of_band=True))
    assert "item_not_found" == code_of(failed)


# ---- one writing turn, and cancel ------------------------------------------------------------------------


def test_a_second_turn_is_refused_by_the_first_ones_name():
    """Whether asked for or said, running or stopping; nothing is added."""
    driver = Driver()
    _, turn = driver.start()
    for _ in range(2):
        for command in (StartResponse(event_id="e"), Say(text="hi", event_id="e")):
            (effect,) = driver.send(command)
            assert "conversation_already_has_active_response" == effect.event.error.code
            assert turn.turn_id in effect.event.error.message
        driver.send(CancelResponse())
    assert [] == driver.items()


def test_out_of_band_turns_run_beside_in_bounded_number():
    """They leave the conversation alone."""
    driver = Driver()
    driver.start()
    turns = [driver.start(is_out_of_band=True)[1] for _ in range(LIMITS.num_side_turns_max)]
    assert "rate_limit_exceeded" == code_of(driver.send(StartResponse(is_out_of_band=True)))
    (emit,) = driver.finish(turns[0].turn_id, "aside")
    assert "aside" == emit.event.text
    assert [] == driver.items()
    started, _ = driver.start(is_out_of_band=True)
    assert started.previous_item_id is None


def test_the_conversation_answers_while_all_side_turns_run():
    """Its own turn has a place of its own."""
    driver = Driver()
    for _ in range(LIMITS.num_side_turns_max):
        driver.start(is_out_of_band=True)
    driver.start()


@pytest.mark.parametrize("is_named", [True, False])
def test_cancel_right_after_create_ends_it_as_cancelled(is_named):
    """Before any word; whatever reason the generator gives in the same moment."""
    driver = Driver()
    _, turn = driver.start()
    named = turn.turn_id if is_named else None
    assert [StopTurn(turn_id=turn.turn_id)] == driver.send(CancelResponse(response_id=named))
    driver.say(turn.turn_id, "half")
    (emit,) = driver.finish(turn.turn_id, "half", FinishReason.STOP)
    assert (FinishReason.CANCELLED, None, "half") == (emit.event.reason, emit.event.error, emit.event.text)
    assert [("half", ItemStatus.INCOMPLETE)] == driver.items()
    driver.start()


def test_cancel_with_nothing_to_cancel_is_an_error_and_no_more():
    """Nothing active, twice, after the end, another's id: the running turn is untouched."""
    driver = Driver()
    assert "response_cancel_not_active" == code_of(driver.send(CancelResponse()))
    _, turn = driver.start()
    (effect,) = driver.send(CancelResponse(response_id="resp_x", event_id="e"))
    assert ("response_id", "e") == (effect.event.error.param, effect.event.event_id)
    driver.send(CancelResponse())
    assert "response_cancel_not_active" == code_of(driver.send(CancelResponse()))
    driver.finish(turn.turn_id)
    named = CancelResponse(response_id=turn.turn_id)
    assert "response_cancel_not_active" == code_of(driver.send(named))


def test_cancel_without_a_name_means_the_conversations_own():
    """Never a side turn; that one is cancelled by name."""
    driver = Driver()
    _, side = driver.start(is_out_of_band=True)
    assert "response_cancel_not_active" == code_of(driver.send(CancelResponse()))
    assert [StopTurn(turn_id=side.turn_id)] == driver.send(CancelResponse(response_id=side.turn_id))


def test_reset_forgets_items_and_silences_what_runs():
    """A new turn may start at once; the old one ends with the text that was sent."""
    driver = Driver()
    _, old = driver.send(Say(text="hi"))[1:]
    driver.say(old.turn_id, "ab")
    stop, emit = driver.send(ResetConversation())
    assert (StopTurn(turn_id=old.turn_id), ConversationReset()) == (stop, emit.event)
    assert [] == driver.say(old.turn_id, "cd", 2)
    _, _, new = driver.send(Say(text="again"))
    (emit,) = driver.finish(old.turn_id, "abcd")
    assert (FinishReason.CANCELLED, "ab") == (emit.event.reason, emit.event.text)
    driver.finish(new.turn_id, "yo")
    assert ["again", "yo"] == [text for text, _ in driver.items()]


def test_resets_do_not_let_turns_pile_up():
    """Turns that were put away count until they have ended."""
    driver = Driver()
    for _ in range(LIMITS.num_side_turns_max + 1):
        driver.send(Say(text="x"))
        driver.send(ResetConversation())
    assert "rate_limit_exceeded" == code_of(driver.send(Say(text="x")))


# ---- limits ----------------------------------------------------------------------------------------------


def test_a_full_conversation_refuses_whole_commands():
    """Neither half of a Say happens."""
    driver = Driver()
    for number in range(5):
        driver.send(CreateItem(item=item(str(number))))
    assert "conversation_full" == code_of(driver.send(Say(text="x")))
    assert 5 == driver.session.snapshot().num_items
    driver.send(CreateItem(item=item("z")))
    assert "conversation_full" == code_of(driver.send(StartResponse()))
    driver.start(is_out_of_band=True)
    assert 6 == driver.session.snapshot().num_items


def test_an_item_has_a_size():
    """In bytes of its text."""
    assert "payload_too_large" == code_of(Driver().send(Say(text="字" * 7)))


def test_a_description_is_bounded_and_tells_settings_and_items():
    """With the command's own event_id."""
    driver = Driver(SessionLimits())
    for number in range(30):
        driver.send(CreateItem(item=item(str(number), "x" * 9000)))
    (effect,) = driver.send(DescribeSession(event_id="history"))
    assert isinstance(effect.event, SessionDescribed)
    assert ("history", SETTINGS) == (effect.event.event_id, effect.event.settings)
    assert [str(n) for n in range(23, 30)] == [i.id for i in effect.event.items]


# ---- slow readers and the end ----------------------------------------------------------------------------


def test_a_slow_reader_is_closed_after_its_time_and_not_before():
    """The clock starts once, and stops when the reader catches up."""
    session = Driver().session
    assert () == session.handle_backlog(Backlog.SLOW, 10.0)
    assert () == session.handle_backlog(Backlog.SLOW, 12.0)
    assert 15.0 == session.next_deadline()
    assert () == session.handle_timeout(14.9)
    session.handle_backlog(Backlog.NORMAL, 14.9)
    assert session.next_deadline() is None
    assert () == session.handle_timeout(99.0)
    session.handle_backlog(Backlog.SLOW, 20.0)
    assert (CloseSocket(close=CLOSE_SLOW),) == session.handle_timeout(25.0)
    assert session.next_deadline() is None


def test_an_overflown_outbox_closes_at_once_and_stops_every_turn():
    """After that the session is silent, whatever comes."""
    driver = Driver()
    _, turn = driver.start()
    _, side = driver.start(is_out_of_band=True)
    driver.send(CancelResponse())
    effects = driver.did(driver.session.handle_backlog(Backlog.OVERFLOWN, 1.0))
    assert [StopTurn(turn_id=side.turn_id), CloseSocket(close=CLOSE_SLOW)] == effects
    assert () == driver.session.handle_backlog(Backlog.OVERFLOWN, 2.0)
    assert [] == driver.send(Say(text="x"))
    assert [] == driver.say(turn.turn_id, "x")
    assert [] == driver.finish(turn.turn_id, "x") + driver.finish(side.turn_id)
    assert driver.session.snapshot().is_closed


def test_a_draining_session_starts_nothing():
    """What runs goes on, and other commands are answered."""
    driver = Driver()
    _, turn = driver.start()
    driver.session.begin_drain()
    for command in (Say(text="x"), StartResponse(is_out_of_band=True)):
        assert "server_draining" == code_of(driver.send(command))
    assert [Emit(event=Delta(turn_id=turn.turn_id, index=0, text="a"))] == driver.say(turn.turn_id, "a")
    assert driver.session.snapshot().is_draining


def test_a_turn_says_nothing_after_its_end():
    """That would be the shell's mistake."""
    driver = Driver()
    _, turn = driver.start()
    driver.finish(turn.turn_id)
    with pytest.raises(KeyError):
        driver.say(turn.turn_id, "x")


# ---- any order of anything -------------------------------------------------------------------------------

COMMANDS = st.one_of(
    st.just(StartResponse()),
    st.just(StartResponse(is_out_of_band=True)),
    st.just(StartResponse(input=("a",))),
    st.just(CancelResponse()),
    st.integers(0, 12).map(lambda n: CancelResponse(response_id=f"resp_{n}")),
    st.just(Say(text="hi")),
    st.sampled_from("abc").map(lambda i: CreateItem(item=item(i))),
    st.sampled_from("abc").map(lambda i: DeleteItem(item_id=i)),
    st.integers(0, 12).map(lambda n: DeleteItem(item_id=f"item_{n}")),
    st.just(UpdateSession(patch=SettingsPatch(model="n"))),
)
TURN_STEPS = st.tuples(st.sampled_from(["delta", "finish"]), st.integers(0, 3))


def play(driver, steps):
    """Play commands and turn events in order; every turn ends at last. Yields every event."""
    told = {}
    for step in steps:
        if not isinstance(step, tuple):
            yield from events_of(driver.send(step))
        elif driver.running:
            turn_id = sorted(driver.running)[step[1] % len(driver.running)]
            text = told.setdefault(turn_id, "")
            if step[0] == "delta":
                told[turn_id] += "x"
                yield from events_of(driver.say(turn_id, "x", len(text)))
            else:
                yield from events_of(driver.finish(turn_id, text))
    for turn_id in sorted(driver.running):
        yield from events_of(driver.finish(turn_id, told.get(turn_id, "")))


def events_of(effects):
    return [effect.event for effect in effects if isinstance(effect, Emit)]


@given(st.lists(COMMANDS | TURN_STEPS, max_size=40))
def test_no_order_of_commands_breaks_the_order_of_events(steps):
    """At most one turn writes, and the Realtime frames of all stay valid to the last."""
    driver, encoder, order = Driver(), EventFrames(), RealtimeOrder()
    events = [*events_of(driver.session.start(0.0)), *play(driver, steps)]
    for number, frame in enumerate(frame for event in events for frame in encoder.frames(event)):
        order.feed({"event_id": str(number), **frame})
    order.finish()


@given(st.lists(COMMANDS | TURN_STEPS | st.just(ResetConversation()), max_size=40))
def test_every_turn_that_starts_ends_once(steps):
    """Through any cancels and resets; nothing is left open."""
    driver = Driver()
    events = list(play(driver, steps))
    started = [event.turn_id for event in events if isinstance(event, TurnStarted)]
    finished = [event.turn_id for event in events if isinstance(event, TurnFinished)]
    assert sorted(started) == sorted(finished)
    assert 0 == driver.session.snapshot().num_turns
