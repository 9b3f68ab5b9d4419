# SPDX-License-Identifier: Apache-2.0
"""The client side of one conversation, against a socket that recites."""

import json
from collections import deque

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidURI
from websockets.frames import Close

from server.cli.chat import talk as module
from server.cli.chat.talk import Talk, TalkError, TalkSettings

CREATED = {"type": "session.created", "session": {"model": "m"}}
UPDATED = {"type": "session.updated"}
ADDED = {"type": "conversation.item.done"}
LOST = ConnectionClosedError(Close(1012, "server restart"), None)


def delta(text):
    return {"type": "response.output_text.delta", "delta": text}


def done(status="completed", **more):
    return {"type": "response.done", "response": {"status": status, **more}}


def refused(message, event_id):
    return {"type": "error", "error": {"message": message, "event_id": event_id}}


class ReciterSocket:
    """Gives the next of its steps at each `recv`; an exception is raised. Keeps what was sent."""

    def __init__(self, *steps):
        self.steps, self.sent, self.is_closed = deque(steps), [], False

    def recv(self, timeout):
        step = self.steps.popleft()
        if isinstance(step, Exception):
            raise step
        return json.dumps(step)

    def send(self, text):
        self.sent.append(json.loads(text))

    def close(self):
        self.is_closed = True

    @property
    def kinds(self):
        return [event["type"] for event in self.sent]


@pytest.fixture
def dial(monkeypatch):
    """A Talk whose connections are these sockets, one after another; `dial.urls` were asked for."""
    urls = []

    def connect_to(*sockets, **settings):
        waiting = deque(sockets)

        def connect(url, **_):
            urls.append(url)
            socket = waiting.popleft()
            if isinstance(socket, Exception):
                raise socket
            return socket

        monkeypatch.setattr(module, "connect", connect)
        return Talk(TalkSettings(**{"url": "http://h.example:1", **settings}))

    connect_to.urls = urls
    return connect_to


def ask(talk, text="hi", is_stopped=lambda: False):
    pieces = []
    return talk.ask(text, pieces.append, is_stopped), pieces


def test_a_question_and_its_answer(dial):
    """The item, then the response; each piece is handed on as it comes."""
    started = {"type": "response.created"}
    socket = ReciterSocket(CREATED, ADDED, started, delta("Hel"), delta("lo"), done(usage={"x": 1}))
    with dial(socket) as talk:
        answer, pieces = ask(talk)
    assert (answer.status, answer.text, pieces, answer.usage) == ("completed", "Hello", ["Hel", "lo"], {"x": 1})
    assert socket.kinds == ["conversation.item.create", "response.create"]
    assert socket.sent[0]["item"]["content"] == [{"type": "input_text", "text": "hi"}]
    assert socket.is_closed


@pytest.mark.parametrize(
    ("url", "model", "dialled"),
    [
        ("http://h:1", None, "ws://h:1/v1/realtime"),
        ("https://h/x", None, "wss://h/v1/realtime"),
        ("ws://h", "a b", "ws://h/v1/realtime?model=a%20b"),
        ("h:1", None, "ws://h:1/v1/realtime"),
    ],
)
def test_addresses(dial, url, model, dialled):
    """A page's address, with or without a scheme, leads to the door of sockets."""
    with dial(ReciterSocket(CREATED), url=url, model=model):
        assert dial.urls == [dialled]


def test_settings_are_sent_once(dial):
    """Only what was asked for is changed, before the first question."""
    socket = ReciterSocket(CREATED, UPDATED)
    with dial(socket, instructions="Be brief.", temperature=0.0, max_tokens=5):
        (event,) = socket.sent
    assert event["session"] == {
        "type": "realtime", "instructions": "Be brief.", "temperature": 0.0, "max_output_tokens": 5,
    }  # fmt: skip


def test_stopping_asks_once(dial):
    """Once stopped, the server is told so once, and the answer ends when the server says so."""
    socket = ReciterSocket(CREATED, ADDED, delta("a"), TimeoutError(), delta("b"), done("cancelled"))
    with dial(socket) as talk:
        answer, _ = ask(talk, is_stopped=lambda: True)
    assert (answer.status, answer.text) == ("cancelled", "ab")
    assert socket.kinds.count("response.cancel") == 1


def test_a_late_refusal_of_a_stop_is_no_fault(dial):
    """The answer ended before the stop arrived: the next question does not stumble over its refusal."""
    late = refused("nothing to stop", "chat_3")
    socket = ReciterSocket(CREATED, ADDED, done(), late, ADDED, late, delta("x"), done())
    with dial(socket) as talk:
        ask(talk, is_stopped=lambda: True)
        assert ask(talk)[0].text == "x"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([refused("too long", "chat_1")], "too long"),
        ([ADDED, refused("busy", "chat_2")], "busy"),
        ([ADDED, done("failed", status_details={"error": {"message": "engine died"}})], "engine died"),
        ([ADDED, done("failed", status_details=None)], "the answer failed"),
        ([TimeoutError()], "does not answer"),
        ([ADDED, delta("a"), LOST], "the connection was lost: server restart"),
        ([ADDED, ConnectionClosedError(None, None)], "the server is gone"),
    ],
)
def test_what_goes_wrong_is_said(dial, steps, said):
    """A refusal, a failure and a lost connection are each told in words."""
    with dial(ReciterSocket(CREATED, *steps)) as talk, pytest.raises(TalkError, match=said):
        ask(talk)


@pytest.mark.parametrize(
    "socket",
    [ConnectionRefusedError(), InvalidURI("x", "bad"), ReciterSocket(LOST), ReciterSocket(TimeoutError())],
)
def test_no_server_is_said_with_the_way_out(dial, socket):
    """Where no server answers, the message says how to start one."""
    with pytest.raises(TalkError, match="start one with `sampan serve`"), dial(socket):
        pass


def test_a_refused_session_is_said(dial):
    """A server that turns us away, for an unknown model say, is quoted."""
    with pytest.raises(TalkError, match="no such model"), dial(ReciterSocket(refused("no such model", None))):
        pass


def test_after_a_restart_everything_is_told_again(dial):
    """A connection that died between two questions is made anew, with settings and messages, in order."""
    first = ReciterSocket(CREATED, UPDATED, ADDED, delta("one"), done(), LOST)
    again = ReciterSocket(CREATED, UPDATED, ADDED, ADDED, ADDED, delta("two"), done())
    with dial(first, again, instructions="Be brief.") as talk:
        ask(talk, "1")
        assert ask(talk, "2")[0].text == "two"
    items = [(e["item"]["role"], e["item"]["content"][0]["text"]) for e in again.sent if "item" in e]
    assert items == [("user", "1"), ("assistant", "one"), ("user", "2")]
    assert again.sent[0]["session"]["instructions"] == "Be brief."


def test_resetting_opens_a_new_session(dial):
    """A new conversation is a new session with the settings of the old one, and nothing said."""
    first, again = ReciterSocket(CREATED, UPDATED), ReciterSocket(CREATED, UPDATED)
    with dial(first, again) as talk:
        talk.instruct("Be a pirate.")
        talk.reset()
    assert first.is_closed
    assert again.sent[0]["session"]["instructions"] == "Be a pirate."


def test_recalling_puts_messages_back(dial):
    """Earlier messages enter the conversation with their roles before the next question."""
    socket = ReciterSocket(CREATED, ADDED, ADDED)
    with dial(socket) as talk:
        talk.recall([("user", "a"), ("assistant", "b")])
    assert [event["item"]["content"][0]["type"] for event in socket.sent] == ["input_text", "output_text"]
