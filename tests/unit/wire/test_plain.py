# SPDX-License-Identifier: Apache-2.0
"""Plain lines: what a person types, and what comes back piece by piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import error_of
from server.core.events import (
    CancelResponse,
    ConversationReset,
    Delta,
    DescribeSession,
    Failed,
    ItemAdded,
    ResetConversation,
    Say,
    SessionCreated,
    SessionDescribed,
    SessionSettings,
    SessionUpdated,
    SettingsPatch,
    TurnFinished,
    TurnStarted,
    UpdateSession,
)
from server.core.types import ContentPart, FinishReason, Item, Role, Usage
from server.wire.frames import DecodeFault
from server.wire.plain import HELP, PlainCodec

SETTINGS = SessionSettings(model="m")


def codec():
    return PlainCodec(lambda prefix: prefix)


def sent(*events, made=None):
    made = made or codec()
    return [message for event in events for message in made.encode(event)]


def started(turn_id="t"):
    return TurnStarted(
        turn_id=turn_id, item_id="i", previous_item_id=None, settings=SETTINGS, is_out_of_band=False
    )


def delta(text, turn_id="t"):
    return Delta(turn_id=turn_id, index=0, text=text)


def finished(turn_id="t", reason=FinishReason.STOP, **changes):
    return TurnFinished(turn_id=turn_id, reason=reason, text="", usage=Usage(), **changes)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("你好, мир, नमस्ते 👩‍👩‍👧", Say(text="你好, мир, नमस्ते 👩‍👩‍👧")),
        ("  indented\r\n", Say(text="  indented")),
        ("two\nlines", Say(text="two\nlines")),
        ("//etc/hosts", Say(text="/etc/hosts")),
        ("/stop", CancelResponse()),
        ("/STOP ", CancelResponse()),
        ("/new", ResetConversation()),
        ("/system  Be brief. ", UpdateSession(patch=SettingsPatch(instructions="Be brief."))),
        ("/system", UpdateSession(patch=SettingsPatch(instructions=""))),
        ("/model big", UpdateSession(patch=SettingsPatch(model="big"))),
        ("/model", DescribeSession(event_id="model")),
        ("/history", DescribeSession(event_id="history")),
        ("/help", DescribeSession(event_id="help")),
    ],
)
def test_a_line_is_said_unless_it_is_a_command(line, command):
    """Any script, any inner newline; a doubled slash says one."""
    assert [command] == codec().decode(line)


@pytest.mark.parametrize("line", ["", "   ", "\n"])
def test_blank_lines_are_ignored(line):
    """A second Enter asks nothing."""
    assert [] == codec().decode(line)


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"hi", "invalid_event"), ("/dance", "invalid_value"), ("字" * 30_000, "payload_too_large")],
)
def test_what_is_no_line_is_refused(data, code):
    """With words that say what to do."""
    with pytest.raises(DecodeFault) as caught:
        codec().decode(data)
    assert code == caught.value.error.code


def test_an_answer_comes_piece_by_piece_and_ends_with_an_empty_message():
    """Pieces are the text unchanged, so a script joins them."""
    assert ["Hel", "lo\n", "  x", ""] == sent(started(), delta("Hel"), delta("lo\n"), delta("  x"), finished())


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (finished(reason=FinishReason.CANCELLED), "# stopped"),
        (finished(reason=FinishReason.LENGTH), "# cut"),
        (finished(reason=FinishReason.ERROR, error=error_of("engine_error", "it broke")), "# error: it broke"),
        (finished(num_dropped_items=3), "# the 3 oldest messages"),
    ],
)
def test_an_unusual_end_is_told(end, words):
    """In a line of its own, before the empty message."""
    line, empty = sent(started(), end)
    assert line.startswith(words)
    assert "" == empty


def test_an_error_beside_an_answer_does_not_end_it():
    """The empty message belongs to the answer alone."""
    failed = Failed(error=error_of("conversation_already_has_active_response", "wait"))
    assert ["a", "# error: wait", "b", ""] == sent(started(), delta("a"), failed, delta("b"), finished())
    assert ["# error: wait", ""] == sent(failed)


def test_a_forgotten_answer_is_silent():
    """After /new nothing of the old answer appears, nor its end."""
    messages = sent(
        started("old"), delta("a", "old"), ConversationReset(), delta("b", "old"),
        started("new"), finished("old"), delta("c", "new"), finished("new"),
    )  # fmt: skip
    assert ["a", "# new conversation", "", "c", ""] == messages


def test_the_session_speaks_in_marked_lines():
    """Greeting, settings, history, model and help; items a person typed are not repeated."""
    item = Item(id="i", role=Role.USER, parts=(ContentPart(text="hi"),))
    told = SessionSettings(model="m", instructions="Be brief.")

    def described(view, *items):
        return SessionDescribed(session_id="s", settings=SETTINGS, items=items, event_id=view)

    assert [] == sent(ItemAdded(item=item, previous_item_id=None))
    assert ["# m, told: Be brief.", ""] == sent(SessionUpdated(session_id="s", settings=told))
    assert ["# m, told nothing", ""] == sent(SessionUpdated(session_id="s", settings=SETTINGS))
    assert ["# user: hi\n# user: hi", ""] == sent(described("history", item, item))
    assert ["# nothing was said yet", ""] == sent(described("history"))
    assert ["# m, temperature 0.7, top_p 1", ""] == sent(described("model"))
    assert [HELP, ""] == sent(described("help"))
    assert "/help" in sent(SessionCreated(session_id="s", settings=SETTINGS))[0]


def test_help_names_every_command():
    """Nothing can be typed that help does not teach."""
    for line in HELP.splitlines()[1:]:
        word = line.removeprefix("# ").split()[0]
        assert codec().decode(word)


@given(st.text(st.characters(categories=None), max_size=30))
def test_any_text_is_commands_or_a_fault(text):
    """Lone surrogates included."""
    try:
        commands = codec().decode(text)
    except DecodeFault:
        assert text.startswith("/")
    else:
        assert commands or not text.strip()
