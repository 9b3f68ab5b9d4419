# SPDX-License-Identifier: Apache-2.0
"""The gateway's socket to one engine: messages out, messages in, in order, never blocking the loop.

A message that the engine's socket cannot take now is dropped and `send` says so; whoever sent it decides.
ZeroMQ announces on its file descriptor only that something has changed, once: after every call on the socket
it must be asked again whether messages wait.
"""

import asyncio
import logging
from collections.abc import Callable

import zmq

from server.engine.process.messages import MESSAGE_BYTES_MAX, Message, MessageFault, decode, encode

QUEUE_MESSAGES_MAX = 10_000  # in each direction; an engine that lags further is restarted long before
MESSAGES_A_PASS_MAX = 64  # then the loop's other work has its turn
RECONNECT_MS, RECONNECT_MS_MAX = 20, 500

_log = logging.getLogger(__name__)


class Link:
    """One DEALER socket. Made, used and closed on one event loop.

    Args:
        address: where the engine listens, such as `ipc:///run/sampan/engine`.
        receive: called for every message, in order, on the loop.
        fault: called for bytes that are no message: something may be lost.
    """

    def __init__(
        self, address: str, receive: Callable[[Message], None], fault: Callable[[MessageFault], None]
    ) -> None:
        self._receive = receive
        self._fault = fault
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        # While nobody listens nothing is queued: requests go to an engine that said it is ready.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        self._socket.connect(address)
        self._file = int(self._socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self.receive_waiting)
        self._again: asyncio.Handle | None = self._loop.call_soon(self.receive_waiting)

    def send(self, message: Message) -> bool:
        """Send without waiting; False when the engine cannot take it now, or the link is closed."""
        if self._socket.closed:
            return False
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._look_again()
        return True

    def receive_waiting(self) -> None:
        """Take the messages that have come; a great many in portions."""
        self._again = None
        for _ in range(MESSAGES_A_PASS_MAX):
            if self._socket.closed:  # by who received the last one
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(data)
        self._look_again()

    def close(self) -> None:
        """Free the socket; messages that wait are dropped."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._file)
        if self._again is not None:
            self._again.cancel()
        self._socket.close()
        self._context.term()

    def _take(self, data: bytes) -> None:
        try:
            message = decode(data)
        except MessageFault as fault:
            self._fault(fault)
            return
        try:
            self._receive(message)
        except Exception:  # noqa: BLE001 - a fault of ours in one request must not deafen all others
            _log.exception("engine_message_failed", extra={"kind": type(message).__name__})

    def _look_again(self) -> None:
        if self._again is None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._again = self._loop.call_soon(self.receive_waiting)
