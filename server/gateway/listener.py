# SPDX-License-Identifier: Apache-2.0
"""The network edge: uvicorn with the bounds it lacks, and a stop that first lets turns end.

Owns what happens to bytes before and after the ASGI app. Invariant: every connection ends: a peer that sends
half a request, half a message or nothing, and a peer that takes no byte and answers no Close, is gone within
the times below, its transport aborted. Nothing here buffers without a bound, logs a client's bytes, or knows
what a turn is.
"""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from server.core.config import ServerConfig
from server.core.errors import CODES, error_of
from server.wire.unary import error_body

HEAD_WAIT_S = 10.0
"""A request's head arrives within this of the connection, or of its own first byte."""
HEAD_BYTES_MAX = 32 * 1024
"""Request line and headers together, give or take one read."""
MESSAGE_WAIT_S = 30.0
"""A fragmented message is whole within this of its first fragment."""
CLOSE_WAIT_S = 3.0
"""The peer answers our Close within this."""
ABORT_AFTER_S = 2.0
"""A closed transport whose last bytes the peer does not take within this is aborted."""
UNREAD_MESSAGES_MAX = 32
"""Messages of one socket waiting for its reader; past that its bytes stay unparsed and reading pauses."""
PARSE_BYTES = 4096
"""Bytes parsed at a time, so that one large read can't become thousands of waiting messages."""
WRITE_BUFFER_BYTES = 16 * 1024
"""Bytes that wait in the process for a slow peer before writers wait; the outbox above merges meanwhile."""
BACKLOG = 2048
"""Connections that the kernel holds until we take them; a reconnecting crowd comes all at once."""
SOCKET_OPTIONS = (
    # A peer that vanished without a FIN is noticed within 20 + 2 x 10 s, on HTTP as on WebSocket.
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 20),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 2),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 40_000),
    # Keeps unsent text in the outbox, which can merge it, and out of the kernel, which can't.
    (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", WRITE_BUFFER_BYTES),
)

_log = logging.getLogger(__name__)


class ListenConfig(uvicorn.Config):
    """uvicorn's settings from ours: which protocols, no compression, no log of paths.

    Args:
        app: the ASGI app.
        settings: the bounds that an owner may choose.
    """

    def __init__(self, app: Any, settings: ServerConfig) -> None:
        super().__init__(
            app,
            loop="uvloop",
            http=HttpProtocol,
            ws=SocketProtocol,
            ws_max_size=settings.frame_bytes_max,
            ws_ping_interval=settings.ping_interval_s,
            ws_ping_timeout=settings.ping_timeout_s,
            ws_per_message_deflate=False,
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=list(settings.trusted_proxies),
            server_header=False,
            # Longer than the 60 s a proxy keeps its connections, so that the proxy always closes first.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
        self.connections_max = settings.connections_max


def bind(settings: ServerConfig) -> socket.socket:
    """Bind the socket of the settings, before anything else is opened. The caller closes it.

    A socket file that nobody listens on any more is replaced; one that is in use is not.

    Raises:
        OSError: it can't be; `strerror` is a sentence that says where, why and what to do.
    """
    where = settings.uds or f"{settings.host}:{settings.port}"
    setting = "--server.uds" if settings.uds else "--server.port"
    try:
        if settings.uds:
            return _bind_file(settings.uds)
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = f"another program listens there: stop it, or choose another with {setting}"
        elif error.errno == errno.EACCES:
            why = f"this user may not: choose another with {setting}"
        raise OSError(error.errno, f"cannot listen on {where}: {why}") from error


def _bind_file(path: str) -> socket.socket:
    file = Path(path)
    if file.is_socket() and not _is_answered(path):
        file.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        # As open as a loopback port; who may reach it is the folder's to say.
        file.chmod(0o666)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


class BoundedTransport(asyncio.Transport):
    """A transport whose `close` becomes an `abort` if the peer does not take the last bytes in time."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._abort_timer: asyncio.TimerHandle | None = None
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        _tune(transport.get_extra_info("socket"))

    def close(self) -> None:
        """Flush and close, for at most ABORT_AFTER_S."""
        if self._abort_timer is None:
            self._abort_timer = self._loop.call_later(ABORT_AFTER_S, self._transport.abort)
        self._transport.close()

    def forget(self) -> None:
        """Drop the timer: the connection is lost and nothing is left to abort."""
        if self._abort_timer is not None:
            self._abort_timer.cancel()

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send or buffer."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether `close` or `abort` was called, or the connection is lost."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Stop calling `data_received`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on calling `data_received`."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection to another protocol."""
        self._transport.set_protocol(protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Ask the real transport."""
        return self._transport.get_extra_info(name, default)


def _tune(peer: socket.socket) -> None:
    """Set what this system and this kind of socket know; TCP_NODELAY is the loop's own default."""
    if peer.family == socket.AF_UNIX:
        return
    for level, name, value in SOCKET_OPTIONS:
        if hasattr(socket, name):
            peer.setsockopt(level, getattr(socket, name), value)


def _forget(transport: asyncio.Transport) -> None:
    if isinstance(transport, BoundedTransport):
        transport.forget()


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose heads are bounded in size and time, and whose own refusals are JSON."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Take a connection, or cut it when there are too many: no answer costs less than any."""
        super().connection_made(BoundedTransport(transport, self.loop))
        if isinstance(self.config, ListenConfig) and len(self.connections) > self.config.connections_max:
            _log.warning("too_many_connections", extra={"count": len(self.connections)})
            transport.abort()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of every timer."""
        super().connection_lost(exc)
        self._head_arrived()
        # uvicorn keeps this timer, and with it the connection's memory, when the connection broke.
        self._unset_keepalive_if_required()
        _forget(self.transport)

    def data_received(self, data: bytes) -> None:
        """Parse; a head that grows past its bound ends the connection."""
        super().data_received(data)
        is_upgraded = self not in self.connections
        if is_upgraded or self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse("headers_too_large", f"a request's head takes at most {HEAD_BYTES_MAX} bytes")
        elif self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """Start the clock of this head."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers behind a body are not kept, for their number has no bound."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        self._head_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's words are not for clients
        """Refuse what is not HTTP."""
        self._refuse("invalid_http", "the bytes received are not an HTTP/1.1 request")

    def _refuse(self, code: str, message: str) -> None:
        if self.transport.is_closing():
            return
        body = error_body(error_of(code, message))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[CODES[code].http_status] + head + body)
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_WAIT_S, self.transport.close)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class SocketProtocol(WebSocketsSansIOProtocol):
    """RFC 6455 with bounds on time and memory: fragments, floods, deaf peers; no log line per bad byte."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = CLOSE_WAIT_S
        self._unparsed = bytearray()
        self._message_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of every timer and byte."""
        super().connection_lost(exc)
        self._message_ended()
        self._unparsed.clear()
        _forget(self.transport)

    def data_received(self, data: bytes) -> None:
        """Parse as much as the reader has room for."""
        self._unparsed += data
        self._parse()

    async def receive(self) -> Any:
        """Wait for the next message for the app; makes room for the bytes behind it."""
        message = await super().receive()
        self._parse()
        return message

    async def send(self, message: Any) -> None:
        """Send; a close does not wait for a peer that reads nothing: the transport's own bound ends that."""
        if message["type"] == "websocket.close":
            self.writable.set()
        await super().send(message)

    def _parse(self) -> None:
        while self._unparsed and self.queue.qsize() < UNREAD_MESSAGES_MAX and not self.transport.is_closing():
            piece = bytes(self._unparsed[:PARSE_BYTES])
            del self._unparsed[:PARSE_BYTES]
            super().data_received(piece)
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                self._reject_handshake()

    def _reject_handshake(self) -> None:
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        self.transport.write(self.conn.reject(400, "the handshake's head could not be read\n").serialize())
        self.transport.close()

    def handle_text(self, event: Frame) -> None:
        """Begin a text message."""
        super().handle_text(event)
        self._message_begun(event)

    def handle_bytes(self, event: Frame) -> None:
        """Begin a binary message."""
        super().handle_bytes(event)
        self._message_begun(event)

    def handle_cont(self, event: Frame) -> None:
        """Go on with the message."""
        self.frames[0] += event.data
        if event.fin:
            self._message_ended()
            self.send_receive_event_to_app()

    def _message_begun(self, event: Frame) -> None:
        if not event.fin:
            # One growing buffer: a list of one-byte fragments would hold many times their bytes.
            self.frames = [bytearray(event.data)]  # type: ignore[list-item]  # made bytes when whole
            self._message_timer = self.loop.call_later(MESSAGE_WAIT_S, self._message_late)

    def _message_ended(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _message_late(self) -> None:
        self._message_timer = None
        if not self.close_sent and not self.transport.is_closing():
            self._fail(1002, "a fragmented message was not finished in time")

    def send_receive_event_to_app(self) -> None:
        """Hand over a whole message; text that is not UTF-8 ends the connection with 1007."""
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_utf8(self.frames[0]):
            self.frames = []
            self._fail(1007, "text is not UTF-8")
            return
        self.frames = [bytes(self.frames[0])]
        super().send_receive_event_to_app()

    def _fail(self, code: int, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def handle_ping(self) -> None:
        """Answer; while the peer takes no bytes the answer is dropped, so a flood of pings can't fill us."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def keepalive_timeout(self) -> None:
        """The peer is dead: tell the app now, not when the last bytes are given up."""
        was_open = not self.close_sent
        super().keepalive_timeout()
        if was_open and self.close_sent:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": 1011, "reason": "no pong"})


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class GatewayServer(uvicorn.Server):
    """uvicorn that stops in two steps: `drain` first, while it still listens, then its own shutdown.

    Args:
        config: how to listen.
        on_stop: called in the signal handler, between two instructions of the main thread: it only sets flags.
        drain: lets the work end; awaited once, before the listeners close.

    Neither signal is raised again at the end, so a stop that was asked for exits with 0.
    """

    def __init__(
        self, config: ListenConfig, *, on_stop: Callable[[], None], drain: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # a handler's shape
        """Begin to stop at the first signal; a second one hurries."""
        _log.info("stop_asked", extra={"signal": signal.Signals(sig).name, "is_again": self.should_exit})
        self.should_exit = True
        self._on_stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close the listeners and end the lifespan, whatever became of the drain."""
        try:
            await self._drain()
        finally:
            await super().shutdown(sockets)


class ClientNoise(logging.Filter):
    """Drops uvicorn's lines that any client can cause at will, and the traceback of what it reports itself.

    Each such request has its own answer and its metric; a line each would let anybody fill a disk.
    """

    PREFIXES = (
        "ASGI callable returned without completing",  # a refused handshake; a stream whose client left
        "Invalid UTF-8",
        "Invalid HTTP request",
        "Unsupported upgrade request",
        "No supported WebSocket library",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line may pass."""
        return not record.msg.startswith(self.PREFIXES) if isinstance(record.msg, str) else True
