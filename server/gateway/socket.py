# SPDX-License-Identifier: Apache-2.0
"""Shell 1: one WebSocket, from its handshake to its last byte.

Owns the socket's two loops: a reader that never rests, so that pongs, cancels and the peer's going are seen
while an answer streams, and a writer that takes what the session has for it. Invariant: when `serve` returns,
both are over, the session is closed with every turn of its own, and the socket is counted out. It must never
accept before origin, capacity and drain were asked, and never log what is said.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from server.core.errors import (
    CLOSE_BAD_REQUEST,
    CLOSE_SERVER_ERROR,
    CLOSE_SLOW,
    CLOSE_TRY_LATER,
    Close,
    ServerError,
    error_of,
)
from server.core.events import Failed, SessionSettings, TurnFinished
from server.core.metrics import Metrics
from server.core.ports import Generator
from server.core.types import ModelCard
from server.gateway.access.callers import tenant_of
from server.gateway.access.origins import OriginPolicy
from server.gateway.drain import Drain
from server.gateway.http.replies import error_response
from server.gateway.session.conversation import SessionLimits
from server.gateway.session.live import LiveSession
from server.gateway.session.session import Session
from server.wire.codec import CODECS, Codec
from server.wire.frames import DecodeFault
from server.wire.unary import find_card

SEND_WAIT_S = 10.0
"""A peer that has no room for one more frame for so long is slow. With an empty path a frame takes none."""
SUBPROTOCOL = "realtime"
"""The one we answer to. Others that are offered beside it (a key in disguise) are never repeated."""

_log = logging.getLogger(__name__)


KNOWN_CODES = frozenset({*range(1000, 1004), *range(1005, 1008), *range(1009, 1014), 4008, 4501})
"""Close codes with a metric of their own; a client may invent thousands of others."""


class SocketDoor:
    """Serves WebSockets of every path in CODECS. One per process; use from one event loop.

    Args:
        generator: answers the turns.
        origins: which websites may connect.
        drain: told of every socket; refuses handshakes while it drains.
        new_id: draws a process-unique id from a prefix.
        limits: what one session may hold.
        settings: how a session begins, its model aside.
        num_sockets_max: one more is refused at its handshake.
        outbox_bytes_max: of what may wait for one client.
        metrics: where sockets and errors are counted.
    """

    def __init__(
        self,
        *,
        generator: Generator,
        origins: OriginPolicy,
        drain: Drain,
        new_id: Callable[[str], str],
        limits: SessionLimits,
        settings: SessionSettings,
        num_sockets_max: int,
        outbox_bytes_max: int,
        metrics: Metrics,
    ) -> None:
        self._generator = generator
        self._origins = origins
        self._drain = drain
        self._new_id = new_id
        self._limits = limits
        self._settings = settings
        self._num_sockets_max = num_sockets_max
        self._outbox_bytes_max = outbox_bytes_max
        self._metrics = metrics
        self._num_open = 0
        metrics.sockets_open.set_function(lambda: float(self._num_open))

    @property
    def num_open(self) -> int:
        """Sockets accepted and not yet ended."""
        return self._num_open

    async def serve(self, websocket: WebSocket) -> None:
        """Run one socket to its end; never raises for what a client does."""
        refusal = self._refusal(websocket)
        if refusal is not None:
            self._count_error(refusal)
            await websocket.send_denial_response(error_response(refusal))
            return
        self._num_open += 1
        code = CLOSE_SERVER_ERROR.code
        try:
            offered = websocket.scope["subprotocols"]
            await websocket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
            code = await self._converse(websocket)
        except WebSocketDisconnect as gone:
            code = gone.code
        finally:
            self._num_open -= 1
            self._metrics.sockets_closed.labels(code=code if code in KNOWN_CODES else "other").inc()

    def _refusal(self, websocket: WebSocket) -> ServerError | None:
        headers = websocket.headers
        if not self._origins.allows(
            headers.getlist("origin"), hosts=headers.getlist("host"), scheme=websocket.scope["scheme"]
        ):
            return error_of(
                "origin_not_allowed", "this website may not connect: add its origin to the settings"
            )
        draining = self._drain.refusal()
        if draining is not None:
            return draining
        if self._num_open >= self._num_sockets_max:
            return error_of(
                "connection_limit_reached", "too many connections: try again soon", retry_after_ms=5_000
            )
        return None

    async def _converse(self, websocket: WebSocket) -> int:
        """Talk until either side ends it; returns the close code."""
        codec = CODECS[websocket.url.path](self._new_id)
        try:
            card = find_card(self._generator.models(), websocket.query_params.get("model"))
        except ServerError as error:
            self._count_error(error)
            return await _turn_away(websocket, codec, error)
        live = self._session(card, tenant_of(websocket.scope.get("client")))
        member = SocketMember(live)
        live.start()
        self._drain.enter(member)
        writer = asyncio.create_task(_write(websocket, codec, live, self._count_error))
        _log.info("socket_opened", extra={"session_id": live.session_id, "path": websocket.url.path})
        try:
            code = await _read(websocket, codec, live)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await live.close()
            self._drain.leave(member)
        _log.info("socket_closed", extra={"session_id": live.session_id, "code": code})
        return code

    def _count_error(self, error: ServerError) -> None:
        self._metrics.errors.labels(code=error.code).inc()

    def _session(self, card: ModelCard, tenant: str) -> LiveSession:
        session = Session(
            session_id=self._new_id("sess"),
            settings=replace(self._settings, model=card.id),
            new_id=self._new_id,
            model_ids=tuple(known.id for known in self._generator.models()),
            limits=self._limits,
        )
        return LiveSession(session, self._generator, outbox_bytes_max=self._outbox_bytes_max, tenant=tenant)


class SocketMember:
    """A socket as the drain sees it: ended, it is told why in its own protocol before the close."""

    def __init__(self, live: LiveSession) -> None:
        self._live = live

    def begin_drain(self) -> None:
        """Refuse new turns."""
        self._live.begin_drain()

    async def wait_idle(self) -> None:
        """Wait for the running turns."""
        await self._live.wait_idle()

    def end(self, close: Close) -> None:
        """Say why, then close: a proxy may lose the code, never the message."""
        self._live.refuse(error_of("server_draining", "the server is restarting: connect again"), None)
        self._live.end(close)


async def _read(websocket: WebSocket, codec: Codec, live: LiveSession) -> int:
    """Feed the session until the socket is over; returns the code it ended with."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return int(message.get("code") or 1005)
        if live.close_reason is None:
            _receive(codec, live, message)
        # A peer that sends without a pause must not keep the loop from everyone else.
        await asyncio.sleep(0)


def _receive(codec: Codec, live: LiveSession, message: Message) -> None:
    text = message.get("text")
    try:
        for command in codec.decode(message["bytes"] if text is None else text):
            live.receive(command)
    except DecodeFault as fault:
        live.refuse(fault.error, fault.event_id)
    except Exception as error:  # noqa: BLE001 - our bug answers one message; the socket and its turn go on
        _log.error("message_failed", extra={"session_id": live.session_id}, exc_info=error)
        live.refuse(error_of("internal_error", "the server failed on this message"), None)


async def _write(
    websocket: WebSocket, codec: Codec, live: LiveSession, on_error: Callable[[ServerError], None]
) -> None:
    """Send what the session has until it has nothing more, then close; the reader sees the close and ends."""
    close = CLOSE_SERVER_ERROR
    try:
        while events := await live.take():
            for event in events:
                if isinstance(event, Failed | TurnFinished) and event.error is not None:
                    on_error(event.error)
                await _send(websocket, codec.encode(event))
        close = live.close_reason or CLOSE_SERVER_ERROR
    except TimeoutError:
        close = live.close_reason or CLOSE_SLOW
        live.end(close)
    except WebSocketDisconnect:
        return  # the reader is told as well
    except Exception as error:  # noqa: BLE001 - whatever it is, the socket must not stay open and silent
        _log.error("socket_failed", extra={"session_id": live.session_id}, exc_info=error)
    with suppress(WebSocketDisconnect, RuntimeError):
        await websocket.close(close.code, close.reason)


async def _send(websocket: WebSocket, frames: list[str]) -> None:
    """Send frames.

    Raises:
        TimeoutError: the peer took nothing for SEND_WAIT_S.
        WebSocketDisconnect: the peer is gone.
    """
    for frame in frames:
        async with asyncio.timeout(SEND_WAIT_S):
            await websocket.send_text(frame)


async def _turn_away(websocket: WebSocket, codec: Codec, error: ServerError) -> int:
    """Refuse after the handshake, where browsers can read why."""
    close = CLOSE_TRY_LATER if error.is_retryable else CLOSE_BAD_REQUEST
    await _send(websocket, codec.encode(Failed(error=error)))
    await websocket.close(close.code, close.reason)
    return close.code
