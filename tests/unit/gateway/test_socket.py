# SPDX-License-Identifier: Apache-2.0
"""One socket: refused before it is accepted, heard while it is spoken to, and gone without a trace."""

import asyncio
import json
import random

import pytest
from starlette.websockets import WebSocket

from server.core.clock import CountingIds
from server.core.errors import CLOSE_RESTART, error_of
from server.core.events import SessionSettings
from server.core.metrics import Metrics
from server.gateway import socket as module
from server.gateway.access.origins import OriginPolicy
from server.gateway.drain import Drain
from server.gateway.session.conversation import SessionLimits
from server.gateway.session.live import LiveSession
from server.gateway.socket import SocketDoor
from tests.fakes import FakeGenerator


class Peer:
    """The other end of one socket: what it says goes in, what it is sent comes out."""

    def __init__(self, house, path="/v1/realtime", query="", headers=(), subprotocols=()):
        self.house = house
        self.inbox = asyncio.Queue(maxsize=1000)
        self.inbox.put_nowait({"type": "websocket.connect"})
        self.sent, self.accepted, self.denied, self.close = [], None, None, None
        self.takes = asyncio.Event()
        self.takes.set()
        scope = {
            "type": "websocket", "path": path, "query_string": query.encode(), "scheme": "ws", "root_path": "",
            "headers": [(b"host", b"chat.example"), *headers], "subprotocols": list(subprotocols),
            "client": ("192.0.2.1", 1), "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        self.task = asyncio.create_task(house.door.serve(WebSocket(scope, self.inbox.get, self.send)))

    async def send(self, message):
        kind = message["type"]
        if kind == "websocket.close":
            self.close = (message["code"], message["reason"])
            self.inbox.put_nowait({"type": "websocket.disconnect", "code": message["code"]})
            return
        await self.takes.wait()
        if kind == "websocket.accept":
            self.accepted = message
        elif kind == "websocket.http.response.start":
            self.denied = message["status"], dict(message["headers"])
        elif kind == "websocket.send":
            self.sent.append(message["text"])

    def say(self, data):
        text = data if isinstance(data, str | bytes) else json.dumps(data)
        self.inbox.put_nowait(
            {"type": "websocket.receive", "bytes" if isinstance(text, bytes) else "text": text}
        )

    def leave(self, code=1006):
        self.inbox.put_nowait({"type": "websocket.disconnect", "code": code})

    async def gone(self):
        await asyncio.wait_for(self.task, 5)
        assert self.house.door.num_open == 0
        assert self.house.drain.num_members == 0
        assert not self.house.generator.running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    @property
    def events(self):
        return [json.loads(text) for text in self.sent]

    @property
    def kinds(self):
        return [event["type"] for event in self.events]


class House:
    """A door and what stands behind it."""

    def __init__(self, *steps, origins=(), num_sockets_max=10, outbox_bytes_max=65_536, **generator):
        self.generator = FakeGenerator(*steps, **generator)
        self.drain = Drain(deadline_s=1, rng=random.Random(1))
        self.metrics = Metrics()
        self.door = SocketDoor(
            generator=self.generator,
            origins=OriginPolicy.parse(origins),
            drain=self.drain,
            new_id=CountingIds().new_id,
            limits=SessionLimits(),
            settings=SessionSettings(model="", instructions="be brief"),
            num_sockets_max=num_sockets_max,
            outbox_bytes_max=outbox_bytes_max,
            metrics=self.metrics,
        )

    def count(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels)

    async def enter(self, **peer):
        peer = Peer(self, **peer)
        await settle()
        return peer


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


ASK = (
    {"type": "conversation.item.create", "item": {
        "type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}},
    {"type": "response.create"},
)  # fmt: skip


async def test_a_turn_from_greeting_to_goodbye():
    """The whole way of a token, with the house empty afterwards."""
    house = House("Par", "is")
    peer = await house.enter()
    assert peer.kinds == ["session.created"]
    for message in ASK:
        peer.say(message)
    await settle()
    assert peer.events[-1]["type"] == "response.done"
    assert "".join(event.get("delta", "") for event in peer.events) == "Paris"
    peer.leave(1000)
    await peer.gone()
    assert house.count("sampan_sockets_closed_total", code="1000") == 1
    assert house.count("sampan_sockets_open") == 0
    assert house.generator.requests[0].items[0].text == "be brief"


async def test_lines_on_the_plain_door():
    """The path chooses the protocol."""
    peer = await House("Par", "is").enter(path="/chat")
    peer.say("capital of France?")
    await settle()
    assert peer.sent[-3:] == ["Par", "is", ""] or peer.sent[-2:] == ["Paris", ""]
    peer.leave()
    await peer.gone()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"origin", b"https://shop.example")], None),
        ([(b"origin", b"https://chat.example")], None),
        ([], None),
        ([(b"origin", b"https://evil.example")], 403),
        ([(b"origin", b"null")], 403),
        ([(b"origin", b"https://shop.example.evil.example")], 403),
        ([(b"origin", b"https://shop.example"), (b"origin", b"https://shop.example")], 403),
    ],
)
async def test_websites_are_asked_for_before_the_accept(headers, expected):
    """A foreign page makes no session and starts no work."""
    peer = await House(origins=["https://shop.example"]).enter(headers=headers)
    assert (peer.denied and peer.denied[0]) == expected
    assert (peer.accepted is None) is (expected is not None)
    peer.leave()
    await peer.gone()


async def test_one_socket_too_many_is_told_when_to_come_back():
    """503 with Retry-After, and a place that is left is free again."""
    house = House(num_sockets_max=1)
    first = await house.enter()
    second = await house.enter()
    assert second.denied[0] == 503
    assert second.denied[1][b"retry-after"] == b"5"
    first.leave()
    await first.gone()
    third = await house.enter()
    assert third.accepted
    third.leave()
    await third.gone()


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["realtime", "openai-insecure-api-key.SECRET"], "realtime"),
        (["openai-insecure-api-key.SECRET", "realtime"], "realtime"),
        (["openai-insecure-api-key.SECRET"], None),
        ([], None),
    ],
)
async def test_the_subprotocol_is_echoed_and_a_key_never(offered, chosen):
    """Browsers drop a socket without the echo; a key in disguise must not come back."""
    peer = await House().enter(subprotocols=offered)
    assert peer.accepted["subprotocol"] == chosen
    peer.leave()
    await peer.gone()


async def test_an_unknown_model_is_said_after_the_accept():
    """Where a browser can read it; then the socket ends for good."""
    peer = await House().enter(query="model=none")
    assert [event["error"]["code"] for event in peer.events] == ["model_not_found"]
    assert peer.close == (4501, "bad request")
    await peer.gone()


async def test_no_model_yet_is_worth_another_try():
    """Its close code asks to reconnect."""
    house = House()
    house.generator.cards = ()
    peer = await house.enter()
    assert peer.close[0] == 1013
    await peer.gone()


async def test_a_named_model_is_the_sessions():
    """And the default when none is named."""
    peer = await House().enter(query="model=m")
    assert peer.events[0]["session"]["model"] == "m"
    peer.leave()
    await peer.gone()


@pytest.mark.parametrize(
    "message",
    [
        b"\x00\xff",
        "{",
        "[]",
        '{"type": 1}',
        '{"type": "none"}',
        "[" * 5000 + "]" * 5000,
        '{"a": NaN}',
        "\ud800",
    ],
)
async def test_a_bad_message_is_answered_and_nothing_else_changes(message):
    """Binary, no JSON, too deep, half a character: an error event, and the next message works."""
    peer = await House("a").enter()
    peer.say(message)
    await settle()
    assert peer.kinds == ["session.created", "error"]
    for good in ASK:
        peer.say(good)
    await settle()
    assert peer.kinds[-1] == "response.done"
    peer.leave()
    await peer.gone()


async def test_cancel_is_heard_while_an_answer_streams():
    """The reader never rests."""
    house = House("a", "b", "c", is_held=True)
    peer = await house.enter()
    for message in ASK:
        peer.say(message)
    await settle()
    house.generator.release()
    await settle()
    peer.say({"type": "response.cancel"})
    await settle()
    done = peer.events[-1]
    assert (done["type"], done["response"]["status"]) == ("response.done", "cancelled")
    peer.leave()
    await peer.gone()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
async def test_who_leaves_takes_the_turn_along(num_steps):
    """At any moment: no task, no slot and no place is held."""
    house = House("a", "b", is_held=True)
    peer = await house.enter()
    for message in ASK:
        peer.say(message)
    house.generator.release(num_steps)
    await settle()
    peer.leave()
    await peer.gone()


async def test_a_peer_that_takes_nothing_is_closed_to_come_back(monkeypatch):
    """4008, after the time that one frame may take; its turn is stopped."""
    monkeypatch.setattr(module, "SEND_WAIT_S", 0.001)
    house = House("a", "b", is_held=True)
    peer = await house.enter()
    peer.takes.clear()
    for message in ASK:
        peer.say(message)
    await peer.gone()
    assert peer.close == (4008, "slow reader")
    assert house.count("sampan_sockets_closed_total", code="4008") == 1


async def test_a_peer_that_asks_and_never_reads_is_not_heard_any_more(monkeypatch):
    """Answers that nobody takes are bounded: past the bound nothing more is read for them."""
    monkeypatch.setattr(module, "SEND_WAIT_S", 0.01)
    house = House(outbox_bytes_max=4096)
    peer = await house.enter()
    peer.takes.clear()
    for _ in range(900):
        peer.say("{")
    await peer.gone()
    assert peer.close[0] == 4008


async def test_a_drain_says_why_and_closes():
    """An error in the peer's own protocol, for a proxy may lose the code; new turns are refused before."""
    house = House("a", is_held=True)
    peer = await house.enter()
    (member,) = house.drain._members
    member.begin_drain()
    for message in ASK:
        peer.say(message)
    await settle()
    assert peer.events[-1]["error"]["code"] == "server_draining"
    await member.wait_idle()
    member.end(CLOSE_RESTART)
    await peer.gone()
    assert [event["error"]["code"] for event in peer.events[-2:]] == ["server_draining"] * 2
    assert peer.close == (1012, "server restart")


async def test_after_the_end_nothing_is_heard():
    """What a peer says while its goodbye is on the way adds nothing to it."""
    house = House("a")
    peer = await house.enter()
    (member,) = house.drain._members
    peer.takes.clear()
    member.end(CLOSE_RESTART)
    peer.say(ASK[0])
    await settle()
    peer.takes.set()
    await peer.gone()
    assert peer.kinds == ["session.created", "error"]


async def test_a_peer_that_sends_without_a_pause_lets_others_run():
    """Between two messages of one, everyone else has a turn."""
    peer = await House().enter()
    for _ in range(900):
        peer.say("{")
    await settle()
    assert peer.inbox.qsize() > 600
    peer.leave()
    await peer.gone()


async def test_while_draining_nobody_comes_in():
    """503 at the handshake."""
    house = House()
    house.drain.begin()
    peer = await house.enter()
    assert peer.denied[0] == 503
    await peer.gone()


async def test_a_bug_in_one_message_costs_one_message(monkeypatch, caplog):
    """The client learns of it, the log has it, the socket lives."""

    def broken(self, command):
        raise RuntimeError("ours")

    house = House()
    peer = await house.enter()
    with monkeypatch.context() as patched:
        patched.setattr(LiveSession, "receive", broken)
        peer.say(ASK[0])
        await settle()
    assert peer.events[-1]["error"]["code"] == "internal_error"
    assert "message_failed" in [record.msg for record in caplog.records]
    peer.say(ASK[0])
    await settle()
    assert peer.kinds[-1] != "error"
    peer.leave()
    await peer.gone()


async def test_a_bug_in_the_writer_closes_the_socket(monkeypatch, caplog):
    """Never open and silent."""

    async def broken(self):
        raise RuntimeError("ours")

    monkeypatch.setattr(LiveSession, "take", broken)
    peer = await House().enter()
    await peer.gone()
    assert peer.close[0] == 1011
    assert "socket_failed" in [record.msg for record in caplog.records]


async def test_a_cut_from_outside_leaves_nothing():
    """As when the server itself gives up waiting."""
    house = House("a", is_held=True)
    peer = await house.enter()
    for message in ASK:
        peer.say(message)
    await settle()
    peer.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await peer.task
    assert not house.generator.running
    assert (house.door.num_open, house.drain.num_members) == (0, 0)


@pytest.mark.parametrize(("code", "label"), [(1006, "1006"), (1001, "1001"), (4999, "other"), (1004, "other")])
async def test_a_client_can_not_invent_metrics(code, label):
    """Codes that we know have their own count; all others share one."""
    house = House()
    peer = await house.enter()
    peer.leave(code)
    await peer.gone()
    assert house.count("sampan_sockets_closed_total", code=label) == 1


async def test_errors_are_counted_by_code():
    """Refusals, bad messages and failed turns alike."""
    house = House(error_of("engine_error", "failed"), origins=["https://shop.example"])
    await (await house.enter(headers=[(b"origin", b"null")])).gone()
    await (await house.enter(query="model=none")).gone()
    peer = await house.enter()
    peer.say("{")
    for message in ASK:
        peer.say(message)
    await settle()
    peer.leave()
    await peer.gone()
    for code in ("origin_not_allowed", "model_not_found", "invalid_json", "engine_error"):
        assert house.count("sampan_errors_total", code=code) == 1


async def test_what_is_said_is_not_logged(caplog):
    """Ids and codes only."""
    caplog.set_level("DEBUG")
    house = House("SECRET1")
    peer = await house.enter(subprotocols=["openai-insecure-api-key.SECRET2"], query="ticket=SECRET3")
    for message in ASK:
        peer.say(json.dumps(message).replace("hi", "SECRET4"))
    peer.say("SECRET5{")
    await settle()
    peer.leave()
    await peer.gone()
    assert "socket_closed" in caplog.text
    assert "SECRET" not in caplog.text + str([record.__dict__ for record in caplog.records])
