# SPDX-License-Identifier: Apache-2.0
"""What a wire protocol is to the rest of the server, and which one a path speaks.

Invariant: one codec object serves one connection, in order, and holds nothing but what its protocol needs to
spell the next frame (open turns). It must never decide anything: limits of a conversation, whether a turn may
start and what fails belong to the session.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from server.core.events import Command, Event
from server.wire.plain import PlainCodec
from server.wire.realtime.codec import RealtimeCodec

NewId = Callable[[str], str]
"""Draws a process-unique id from a prefix: `new_id("event")` → `"event_…"`."""


class Codec(Protocol):
    """One wire protocol over one connection."""

    def decode(self, data: str | bytes) -> list[Command]:
        """Read one WebSocket message (`str` a text frame, `bytes` a binary one) as commands, maybe none.

        Raises:
            DecodeFault: the message is wrong; answer with `LiveSession.refuse(fault.error, fault.event_id)`
                and go on. Nothing was changed.
        """

    def encode(self, event: Event) -> list[str]:
        """Spell one event as text frames, in order, maybe none. Never raises for any text."""


CODECS: Mapping[str, Callable[[NewId], Codec]] = {
    "/v1/realtime": RealtimeCodec,
    "/chat": PlainCodec,
}
"""Path → what to build once per connection; the socket routes exactly these paths."""
