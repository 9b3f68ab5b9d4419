# SPDX-License-Identifier: Apache-2.0
"""The network edge bounds time and memory of every connection, whatever its peer sends or does not."""

import asyncio
import logging
import os
import signal
import socket
import struct

import pytest
import uvicorn
from uvicorn.server import ServerState

from server.core.config import ServerConfig
from server.gateway import listener
from server.gateway.listener import (
    BoundedTransport,
    ClientNoise,
    GatewayServer,
    HttpProtocol,
    ListenConfig,
    SocketProtocol,
    bind,
)

HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


class Wire(asyncio.Transport):
    """A transport in memory: what was written, and whether it was paused, closed or aborted."""

    def __init__(self):
        super().__init__()
        self.sent = b""
        self.is_paused = self.is_closed = self.is_aborted = False
        self.protocol = None
        self.tuned = {}

    def get_extra_info(self, name, default=None):
        return self if name == "socket" else default

    family = socket.AF_INET

    def setsockopt(self, level, option, value):
        self.tuned[(level, option)] = value

    def getpeername(self):
        return ("10.0.0.1", 5000)

    def getsockname(self):
        return ("10.0.0.2", 80)

    def set_write_buffer_limits(self, high=None, low=None):
        self.high = high

    def set_protocol(self, protocol):
        self.protocol = protocol

    def write(self, data):
        self.sent += bytes(data)

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False

    def is_closing(self):
        return self.is_closed

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_aborted = self.is_closed = True


class App:
    """Accepts sockets, keeps what it receives, and reads no more than `num_reads` messages until told."""

    def __init__(self):
        self.messages = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            await self.answer(receive, send)
            return
        self.send = send
        await receive()
        await send({"type": "websocket.accept"})
        while True:
            await self.gate.wait()
            message = await receive()
            self.messages.append(message)
            if message["type"] == "websocket.disconnect":
                return

    async def answer(self, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def config_of(app, **changes):
    config = ListenConfig(app, ServerConfig(**changes))
    config.load()
    return config


def connect(app, **changes):
    state = ServerState()
    wire = Wire()
    protocol = HttpProtocol(config=config_of(app, **changes), server_state=state, app_state={})
    wire.protocol = protocol
    protocol.connection_made(wire)
    return wire, state


async def open_socket(app, **changes):
    wire, state = connect(app, **changes)
    wire.protocol.data_received(HANDSHAKE + b"\r\n")
    await settle()
    assert wire.sent.startswith(b"HTTP/1.1 101 ")
    wire.sent = b""
    return wire, state


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def frame(opcode, data=b"", *, fin=1, rsv=0):
    mask = os.urandom(4)
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return (
        bytes([fin << 7 | rsv << 4 | opcode]) + size + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data))
    )


def close_code(sent):
    assert sent[0] == 0x88
    return struct.unpack("!H", sent[2:4])[0]


# ---- HTTP ------------------------------------------------------------------------------------------------


async def test_a_request_is_answered_and_the_head_timer_is_gone():
    """A whole head stops its clock."""
    wire, _ = connect(App())
    wire.protocol.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await settle()
    assert wire.sent.endswith(b"ok")
    assert b"\r\nserver:" not in wire.sent
    assert wire.protocol._head_timer is None


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"\r\n"])
async def test_half_a_head_is_cut(monkeypatch, sent):
    """Nothing, half a head, or stray bytes after an answer: the connection ends in HEAD_WAIT_S."""
    wire, _ = connect(App())
    wire.protocol.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await settle()
    monkeypatch.setattr(listener, "HEAD_WAIT_S", 0)
    wire.protocol.data_received(sent)
    await settle()
    assert wire.is_closed


@pytest.mark.parametrize("piece", [b"x: %s\r\n" % (b"a" * 9000), b"a" * 9000])
async def test_an_endless_head_is_refused(piece):
    """Headers, or one header, past HEAD_BYTES_MAX get 431 in our form."""
    wire, _ = connect(App())
    wire.protocol.data_received(b"GET / HTTP/1.1\r\nx: ")
    while not wire.is_closed:
        wire.protocol.data_received(piece)
    assert wire.sent.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in wire.sent


async def test_bytes_that_are_no_http_get_json():
    """Garbage is answered in the error form, once."""
    wire, _ = connect(App())
    wire.protocol.data_received(b"\x16\x03\x01 hello\r\n\r\n")
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_http"' in wire.sent
    assert wire.is_closed


async def test_trailers_are_not_kept():
    """Headers behind a body have no bound, so they are dropped."""
    wire, _ = connect(App())
    wire.protocol.data_received(
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: 1\r\ny: 2\r\n\r\n"
    )
    assert [b"host", b"transfer-encoding"] == [name for name, _ in wire.protocol.headers]
    await settle()


async def test_one_connection_too_many_is_cut():
    """Past connections_max nothing is parsed or answered."""
    app = App()
    wire, state = connect(app, connections_max=1)
    late = Wire()
    HttpProtocol(config=config_of(app, connections_max=1), server_state=state, app_state={}).connection_made(
        late
    )
    assert late.is_aborted
    assert not late.sent
    assert not wire.is_closed


async def test_a_lost_connection_leaves_no_timer():
    """Whatever ended it, no timer keeps a connection's memory."""
    wire, state = connect(App())
    wire.protocol.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await settle()
    wire.protocol.connection_lost(ConnectionResetError())
    assert wire.protocol.timeout_keep_alive_task is None
    assert wire.protocol._head_timer is None
    assert not state.connections


async def test_a_lost_connection_is_not_aborted_later():
    """Both protocols let go of the timer that a close armed."""
    wire, _ = connect(App())
    wire.protocol.data_received(b"garbage\r\n\r\n")
    socket_wire, _ = await open_socket(App())
    socket_wire.protocol.data_received(b"\x83\x80mask")
    await settle()
    for each in (wire, socket_wire):
        assert not each.protocol.transport._abort_timer.cancelled()
        each.protocol.connection_lost(None)
        assert each.protocol.transport._abort_timer.cancelled()


async def test_sockets_are_tuned():
    """Dead peers are noticed by the kernel; unsent text stays with us."""
    wire, _ = connect(App())
    assert wire.tuned[(socket.SOL_SOCKET, socket.SO_KEEPALIVE)] == 1
    assert wire.tuned[(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)] == listener.WRITE_BUFFER_BYTES
    assert wire.high == listener.WRITE_BUFFER_BYTES


# ---- transports ------------------------------------------------------------------------------------------


async def test_a_close_that_is_not_taken_becomes_an_abort(monkeypatch):
    """A peer that reads nothing can't keep a closed connection."""
    monkeypatch.setattr(listener, "ABORT_AFTER_S", 0)
    wire = Wire()
    BoundedTransport(wire, asyncio.get_running_loop()).close()
    assert wire.is_closed
    assert not wire.is_aborted
    await settle()
    assert wire.is_aborted


async def test_a_lost_transport_is_not_aborted(monkeypatch):
    """Once lost, the timer is gone."""
    monkeypatch.setattr(listener, "ABORT_AFTER_S", 0)
    wire = Wire()
    transport = BoundedTransport(wire, asyncio.get_running_loop())
    transport.close()
    transport.forget()
    await settle()
    assert not wire.is_aborted


# ---- WebSocket -------------------------------------------------------------------------------------------


async def test_text_and_binary_reach_the_app_in_any_fragmenting():
    """A character may be cut between two fragments."""
    app = App()
    wire, _ = await open_socket(app)
    text = "é龘😀".encode()
    wire.protocol.data_received(frame(1, text[:1], fin=0) + frame(0, text[1:4], fin=0) + frame(0, text[4:]))
    wire.protocol.data_received(frame(2, b"\xff", fin=0) + frame(9, b"p") + frame(0, b"\x00"))
    await settle()
    assert app.messages == [
        {"type": "websocket.receive", "text": "é龘😀"},
        {"type": "websocket.receive", "bytes": b"\xff\x00"},
    ]
    assert wire.protocol._message_timer is None


@pytest.mark.parametrize(
    "frames",
    [
        frame(1, b"\xc3\x28"),
        frame(1, b"\xc0\xaf"),
        frame(1, b"\xed\xa0\x80"),
        frame(1, b"a", fin=0) + frame(0, b"\xff"),
    ],
)
async def test_text_that_is_not_utf8_ends_with_1007(frames, caplog):
    """The socket ends, the app is told, and nothing is logged."""
    app = App()
    wire, _ = await open_socket(app)
    wire.protocol.data_received(frames)
    await settle()
    assert close_code(wire.sent) == 1007
    assert app.messages[-1]["code"] == 1007
    assert wire.is_closed
    assert not caplog.records


@pytest.mark.parametrize(
    "frames",
    [
        frame(1, b"x", rsv=4),
        frame(9, b"x", fin=0),
        frame(9, b"x" * 126),
        frame(0, b"x"),
        frame(3, b"x"),
        frame(1, b"a", fin=0) + frame(1, b"b"),
        b"\x81\x01a",
    ],
)
async def test_broken_frames_end_with_1002(frames):
    """Reserved bits, broken control frames, stray or nested fragments, no mask."""
    app = App()
    wire, _ = await open_socket(app)
    wire.protocol.data_received(frames)
    await settle()
    assert close_code(wire.sent) == 1002
    assert app.messages[-1]["code"] == 1002


@pytest.mark.parametrize(
    "frames",
    [
        b"\x81\xff" + struct.pack("!Q", 2**62) + b"mask",
        frame(1, b"a" * 40, fin=0) + frame(0, b"a" * 30),
    ],
)
async def test_too_much_ends_with_1009(frames):
    """The claim of a header is enough, and fragments are summed."""
    app = App()
    wire, _ = await open_socket(app, frame_bytes_max=64)
    wire.protocol.data_received(frames)
    await settle()
    assert close_code(wire.sent) == 1009
    assert app.messages[-1]["code"] == 1009


async def test_an_unfinished_message_is_cut(monkeypatch):
    """Pongs and further fragments do not reset its clock."""
    monkeypatch.setattr(listener, "MESSAGE_WAIT_S", 0)
    app = App()
    wire, _ = await open_socket(app)
    wire.protocol.data_received(frame(1, b"a", fin=0) + frame(0, b"a", fin=0))
    await settle()
    assert close_code(wire.sent) == 1002
    assert wire.is_closed


async def test_fragments_cost_their_bytes():
    """One buffer, however small the fragments."""
    wire, _ = await open_socket(App())
    wire.protocol.data_received(frame(1, b"a", fin=0) + frame(0, b"a", fin=0) * 500)
    assert [bytearray(b"a" * 501)] == wire.protocol.frames
    wire.protocol.connection_lost(None)
    assert wire.protocol._message_timer is None
    await settle()


async def test_a_flood_of_messages_waits_unparsed():
    """A reader that is behind has a bounded queue, its bytes wait, and nothing is lost."""
    app = App()
    wire, _ = await open_socket(app)
    app.gate.clear()
    await settle()
    wire.protocol.data_received(b"".join(frame(1, b"%d" % n) for n in range(5000)))
    most = listener.UNREAD_MESSAGES_MAX + listener.PARSE_BYTES // 7
    assert wire.protocol.queue.qsize() <= most
    assert wire.is_paused
    app.gate.set()
    while len(app.messages) < 5000:
        await asyncio.sleep(0)
        assert wire.protocol.queue.qsize() <= most
    assert [str(n) for n in range(5000)] == [message["text"] for message in app.messages]


async def test_pings_of_a_peer_that_reads_nothing_are_not_answered():
    """A flood of pings can't fill the write buffer."""
    wire, _ = await open_socket(App())
    wire.protocol.data_received(frame(9, b"one"))
    assert wire.sent == b"\x8a\x03one"
    wire.protocol.pause_writing()
    wire.protocol.data_received(frame(9, b"two") * 1000)
    assert wire.sent == b"\x8a\x03one"
    wire.protocol.resume_writing()
    wire.protocol.data_received(frame(9, b"three"))
    assert wire.sent == b"\x8a\x03one\x8a\x05three"


async def test_a_close_does_not_wait_for_a_slow_peer():
    """The close frame is written behind what waits; the transport's bound does the rest."""
    app = App()
    wire, _ = await open_socket(app)
    wire.protocol.pause_writing()
    await app.send({"type": "websocket.close", "code": 4008, "reason": "slow"})
    assert close_code(wire.sent) == 4008


async def test_a_peer_without_pongs_is_reported_at_once():
    """The app hears of a dead peer even if its last bytes are stuck."""
    app = App()
    wire, _ = await open_socket(app)
    wire.protocol.pause_writing()
    wire.protocol.keepalive_timeout()
    await settle()
    assert app.messages[-1]["code"] == 1011
    assert wire.is_closed


@pytest.mark.parametrize(
    "head",
    [
        HANDSHAKE + b"X-Long: " + b"a" * 9000 + b"\r\n\r\n",
        HANDSHAKE + b"X: 1\r\n" * 200 + b"\r\n",
        HANDSHAKE.replace(b"/ws", b"/ws?\xff") + b"\r\n",
        HANDSHAKE.replace(b"Version: 13", b"Version: 12") + b"\r\n",
        HANDSHAKE.replace(b"Sec-WebSocket-Key", b"Sec-Nothing") + b"\r\n",
    ],
)
async def test_a_broken_handshake_is_refused(head):
    """No connection is left waiting, and no app is started."""
    app = App()
    wire, state = connect(app)
    wire.protocol.data_received(head)
    await settle()
    assert wire.sent.startswith(b"HTTP/1.1 4")
    assert wire.is_closed
    wire.protocol.connection_lost(None)
    assert not state.connections
    assert not app.messages


async def test_no_compression_is_agreed_to():
    """An offer of permessage-deflate is left unanswered."""
    wire, _ = connect(App())
    wire.protocol.data_received(HANDSHAKE + b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n")
    await settle()
    assert b"extensions" not in wire.sent.lower()
    assert isinstance(wire.protocol, SocketProtocol)


# ---- the server ------------------------------------------------------------------------------------------


async def test_stop_drains_before_the_listeners_close(monkeypatch):
    """A signal only sets flags; the drain runs while we still listen; a second signal is passed on."""
    order = []

    async def drained():
        order.append("drained")

    async def closed(self, sockets=None):
        order.append("closed")

    monkeypatch.setattr(uvicorn.Server, "shutdown", closed)
    server = GatewayServer(config_of(App()), on_stop=lambda: order.append("asked"), drain=drained)
    server.handle_exit(signal.SIGTERM, None)
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit
    assert not server.force_exit
    assert not server._captured_signals
    await server.shutdown()
    assert order == ["asked", "asked", "drained", "closed"]


async def test_a_drain_that_breaks_still_closes(monkeypatch):
    """The listeners and the engine are not left behind by a bug of ours."""
    closed = []

    async def broken():
        raise RuntimeError("ours")

    async def close(self, sockets=None):
        closed.append(True)

    monkeypatch.setattr(uvicorn.Server, "shutdown", close)
    with pytest.raises(RuntimeError):
        await GatewayServer(config_of(App()), on_stop=lambda: None, drain=broken).shutdown()
    assert closed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ASGI callable returned without completing handshake.", False),
        ("Invalid HTTP request received.", False),
        ("Exception in ASGI application\n", True),
    ],
)
def test_what_any_client_can_cause_is_not_logged(line, expected):
    """Our own faults still are."""
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, line, (), None)
    assert ClientNoise().filter(record) is expected


# ---- binding ---------------------------------------------------------------------------------------------


def test_a_port_is_bound_before_anything_else():
    """0 lets the system choose; both families work."""
    for host in ("127.0.0.1", "::1"):
        with bind(ServerConfig(host=host, port=0)) as listener:
            assert listener.getsockname()[1] > 0


def test_a_busy_port_says_what_to_do():
    """One sentence: where, why, and the way out."""
    with bind(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="another program listens there") as caught:
            bind(ServerConfig(port=port))
    assert caught.value.strerror.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert "--server.port" in caught.value.strerror


@pytest.mark.parametrize("host", ["203.0.113.1", "nowhere.invalid"])
def test_an_address_that_is_not_ours_says_so(host):
    """The system's own reason, with the address."""
    with pytest.raises(OSError, match=f"cannot listen on {host}:0: "):
        bind(ServerConfig(host=host, port=0))


def test_a_socket_file_is_replaced_when_nobody_listens(tmp_path):
    """A killed server leaves its file behind; a living one keeps it."""
    path = str(tmp_path / "s")
    bind(ServerConfig(uds=path)).close()
    with bind(ServerConfig(uds=path)), pytest.raises(OSError, match="another program listens there"):
        bind(ServerConfig(uds=path))
    with pytest.raises(OSError, match="cannot listen on"):
        bind(ServerConfig(uds=str(tmp_path / "none" / "s")))


def test_a_file_that_is_no_socket_is_not_touched(tmp_path):
    """A wrong path must not cost a file."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OSError, match="cannot listen"):
        bind(ServerConfig(uds=str(tmp_path / "notes")))
    assert (tmp_path / "notes").read_text() == "mine"
