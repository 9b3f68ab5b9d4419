# SPDX-License-Identifier: Apache-2.0
"""The gateway's socket to one engine: messages out, messages in, in order, never blocking the loop.

A message that the engine's socket cannot take now is dropped and `send` says so; whoever sent it decides.
"""

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from server.engine.process.messages import Message, MessageFault, decode, encode

QUEUE_MESSAGES_MAX = 10_000  # in each direction; an engine that lags further is restarted long before

_log = logging.getLogger(__name__)


class Link:
    """One DEALER socket. Made and used on one event loop.

    Args:
        address: where the engine listens, such as `ipc:///run/sampan/engine`.
        receive: called for every message, in order, on the loop; must not raise.
    """

    def __init__(self, address: str, receive: Callable[[Message], None]) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        # While nobody listens nothing is queued: requests go to an engine that said it is ready.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._receive = receive
        self._socket.connect(address)
        self._sender: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._task = asyncio.create_task(self._run(), name="engine link")

    def send(self, message: Message) -> bool:
        """Send without waiting; False when the engine cannot take it now."""
        try:
            self._sender.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def close(self) -> None:
        """Stop receiving and free the socket."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _run(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                message = decode(data)
            except MessageFault as fault:
                _log.warning("engine_message_unreadable", extra={"reason": str(fault)})
                continue
            self._receive(message)
