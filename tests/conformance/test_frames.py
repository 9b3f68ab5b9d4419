# SPDX-License-Identifier: Apache-2.0
"""RFC 6455 by hand, against the real server: each fault has its close code, and everyone else is served."""

import struct

import pytest

from server.gateway import listener
from tests.conformance.raw import BINARY, CLOSE, CONT, PING, PONG, TEXT, frame
from tests.fakes import FakeGenerator

UPDATE = '{"type":"session.update","session":{"type":"realtime","instructions":"%s"}}'
LIMIT = 65_536


async def is_alive(house):
    """Another client is served."""
    sock = await house.greeted()
    sock.say(UPDATE % "x")
    assert "session.updated" in await sock.text()
    sock.close()


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([frame(TEXT, b"x", is_masked=False)], 1002),
        ([frame(TEXT, b"x", rsv=4)], 1002),
        ([frame(TEXT, b"x", rsv=1)], 1002),
        ([frame(3, b"x")], 1002),
        ([frame(PING, b"x", fin=0)], 1002),
        ([frame(PING, b"x" * 126)], 1002),
        ([frame(CONT, b"x")], 1002),
        ([frame(TEXT, b"a", fin=0), frame(TEXT, b"b")], 1002),
        ([frame(CLOSE, b"\x03")], 1002),
        ([frame(CLOSE, struct.pack("!H", 1005))], 1002),
        ([frame(CLOSE, struct.pack("!H", 1000) + b"\xff")], 1007),
        ([frame(TEXT, b"\xc3\x28")], 1007),
        ([frame(TEXT, b"\xed\xa0\x80")], 1007),
        ([frame(TEXT, b"a", fin=0), frame(CONT, b"b", fin=0), frame(CONT, b"\xff")], 1007),
        ([frame(TEXT, b"a" * (LIMIT + 1))], 1009),
        ([frame(TEXT, claimed_size=2**63 - 1)], 1009),
        ([frame(TEXT, b"a" * LIMIT, fin=0), frame(CONT, b"a")], 1009),
        ([frame(CLOSE, struct.pack("!H", 1000) + b"bye")], 1000),
        ([frame(CLOSE)], 1005),
    ],
)
async def test_each_fault_has_its_code(serve, frames, code, caplog):
    """The socket ends with it, nothing of it is logged, and the next client is served."""
    house = await serve()
    sock = await house.greeted()
    sock.send(*frames)
    assert await sock.close_code() == code
    await is_alive(house)
    await house.settles()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("cut", [1, 7, 30_000])
async def test_a_message_may_come_in_any_pieces(serve, cut):
    """Up to the limit, in any fragmenting, a character cut in two and a ping between."""
    house = await serve()
    sock = await house.greeted()
    data = (UPDATE % ("é" * 20_000)).encode()
    first, *rest = (
        [data[at : at + cut] for at in range(0, len(data), cut)]
        if cut > 1
        else [data[:80], *(data[at : at + 1] for at in range(80, 4000)), data[4000:]]
    )
    sock.send(frame(TEXT, first, fin=0), frame(PING, b"?"))
    sock.send(*(frame(CONT, piece, fin=0) for piece in rest), frame(CONT))
    assert await sock.recv() == (PONG, b"?")
    assert "session.updated" in await sock.text()


async def test_exactly_the_limit_is_taken(serve):
    """The bound itself is allowed."""
    house = await serve()
    sock = await house.greeted()
    padding = "x" * (LIMIT - len(UPDATE % ""))
    sock.say(UPDATE % padding)
    answer = await sock.text()
    assert "session.updated" in answer or '"invalid_value"' in answer  # taken and read, whatever it is worth
    await is_alive(house)


async def test_a_binary_message_is_an_error_event(serve):
    """Not a close."""
    house = await serve()
    sock = await house.greeted()
    sock.send(frame(BINARY, b"\x00\xff"))
    assert '"invalid_event"' in await sock.text()
    sock.say(UPDATE % "x")
    assert "session.updated" in await sock.text()


async def test_pings_are_answered_while_an_answer_streams(serve):
    """In order, with their own payload."""
    house = await serve(*"abcdefgh")
    sock = await house.greeted()
    sock.send(frame(PING), frame(PING, b"x" * 125))
    assert [await sock.recv(), await sock.recv()] == [(PONG, b""), (PONG, b"x" * 125)]


async def test_no_extension_is_agreed_to(serve):
    """A client that offers compression talks without it."""
    house = await serve()
    sock = await house.peer(headers=["Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"])
    assert sock.status == 101
    assert "extensions" not in sock.head.lower()


@pytest.mark.parametrize("leave", ["cut", "close"])
async def test_who_goes_is_gone(serve, leave):
    """FIN or RST in mid-answer: the turn is stopped at once."""
    house = await serve(generator=FakeGenerator("a", "b", is_held=True))
    sock = await house.greeted("/chat")
    sock.say("hi")
    await house.runs()
    getattr(sock, leave)()
    await house.settles()


async def test_a_peer_that_never_answers_a_close_is_dropped(serve, monkeypatch):
    """The server waits for the echo only so long."""
    monkeypatch.setattr(listener, "CLOSE_WAIT_S", 0.05)
    house = await serve()
    sock = await house.peer("/v1/realtime?model=none")
    while (received := await sock.recv())[0] != CLOSE:
        assert received[0] == TEXT
    assert await sock.ended()
