# SPDX-License-Identifier: Apache-2.0
"""The Realtime protocol for one connection: reading, spelling, and a name for every frame.

Invariant: every frame has an `event_id` of its own, given in the order the frames are sent.
"""

from collections.abc import Callable

from server.core.events import Command, Event
from server.wire.frames import dump_text
from server.wire.realtime.decode import decode_event
from server.wire.realtime.encode import EventFrames


class RealtimeCodec:
    """Fits `wire.codec.Codec`. `new_id` draws a process-unique id from a prefix."""

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self._frames = EventFrames()

    def decode(self, data: str | bytes) -> list[Command]:
        """Read one client event.

        Raises:
            DecodeFault: the event is wrong; nothing was changed.
        """
        return [decode_event(data)]

    def encode(self, event: Event) -> list[str]:
        """Spell one event as server events."""
        return [dump_text({"event_id": self._new_id("event"), **frame}) for frame in self._frames.frames(event)]
