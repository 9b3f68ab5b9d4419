# SPDX-License-Identifier: Apache-2.0
"""What waits for one client, bounded by bytes. Pure.

Owns the events between a session and its socket's writer. Invariant: order is kept, except that a Delta joins
the waiting Delta of its own turn, which no event of that turn can stand behind: so a turn waits as at most one
Delta, however long its client does not read, and no other kind is ever merged. It never drops an event: it
says how full it is, and the session decides.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from server.core.events import (
    Delta,
    Event,
    ItemAdded,
    ItemRetrieved,
    SessionCreated,
    SessionDescribed,
    SessionUpdated,
    TurnFinished,
    TurnStarted,
)
from server.gateway.session.conversation import num_bytes, text_bytes

EVENT_BYTES = 512
"""What an event costs besides its text: its objects here, its braces on the wire."""

BATCH_BYTES = 16_384
"""A writer takes this much at once, so that what is beyond our count stays small."""

PIECES_MAX = 256
"""Pieces of a merged Delta are joined at this number: a token of one byte is an object of fifty."""

OVERFLOW_FACTOR = 2
"""At this multiple of the bound a client that only asks and never reads is closed without a delay."""


class Backlog(Enum):
    """How much waits: within the bound, over it, or far over it."""

    NORMAL = "normal"
    SLOW = "slow"
    OVERFLOWN = "overflown"


@dataclass(slots=True)
class _Merged:
    """Deltas of one turn on their way to be one; joined once, when taken."""

    turn_id: str
    index: int
    pieces: list[str]
    num_bytes: int


class Outbox:
    """The queue of one client. Bounded by its owner, which closes the socket when `backlog` says so.

    Args:
        bytes_max: above it the backlog is SLOW; above OVERFLOW_FACTOR times it, OVERFLOWN.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._waiting: deque[tuple[Event | _Merged, int]] = deque()  # with what each costs, if it is whole
        self._deltas: dict[str, _Merged] = {}

    def __len__(self) -> int:
        """How many events wait, merged ones as one."""
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """What waits, in bytes of text and EVENT_BYTES for each event."""
        return self._num_bytes

    @property
    def backlog(self) -> Backlog:
        """How full it is."""
        if self._num_bytes <= self._bytes_max:
            return Backlog.NORMAL
        return Backlog.OVERFLOWN if self._num_bytes > self._bytes_max * OVERFLOW_FACTOR else Backlog.SLOW

    def add(self, event: Event) -> None:
        """Queue one event."""
        if isinstance(event, Delta):
            self._add_delta(event)
            return
        size = EVENT_BYTES + _payload_bytes(event)
        self._waiting.append((event, size))
        self._num_bytes += size

    def take(self, bytes_max: int = BATCH_BYTES) -> list[Event]:
        """Take events in order, up to `bytes_max` of them or a single larger one; none when none waits."""
        taken: list[Event] = []
        while self._waiting:
            entry, size = self._waiting[0]
            size = entry.num_bytes if isinstance(entry, _Merged) else size
            if taken and size > bytes_max:
                break
            self._waiting.popleft()
            self._num_bytes -= size
            bytes_max -= size
            taken.append(self._joined(entry) if isinstance(entry, _Merged) else entry)
        return taken

    def check_integrity(self) -> None:
        """Assert that every byte is counted once."""
        sizes = [entry.num_bytes if isinstance(entry, _Merged) else size for entry, size in self._waiting]
        assert self._num_bytes == sum(sizes), "bytes are miscounted"
        merged = [entry for entry, _ in self._waiting if isinstance(entry, _Merged)]
        assert {id(entry) for entry in merged} == {id(entry) for entry in self._deltas.values()}

    def _add_delta(self, event: Delta) -> None:
        merged = self._deltas.get(event.turn_id)
        size = text_bytes(event.text)
        if merged is None:
            size += EVENT_BYTES
            merged = _Merged(turn_id=event.turn_id, index=event.index, pieces=[], num_bytes=0)
            self._deltas[event.turn_id] = merged
            self._waiting.append((merged, 0))
        merged.pieces.append(event.text)
        if len(merged.pieces) >= PIECES_MAX:
            merged.pieces[:] = ["".join(merged.pieces)]
        merged.num_bytes += size
        self._num_bytes += size

    def _joined(self, merged: _Merged) -> Delta:
        del self._deltas[merged.turn_id]
        return Delta(turn_id=merged.turn_id, index=merged.index, text="".join(merged.pieces))


def _payload_bytes(event: Event) -> int:
    """Bytes of the text an event carries; what has a small bound of its own is in EVENT_BYTES."""
    match event:
        case ItemAdded() | ItemRetrieved():
            return num_bytes(event.item)
        case SessionDescribed():
            return text_bytes(event.settings.instructions) + sum(map(num_bytes, event.items))
        case SessionCreated() | SessionUpdated() | TurnStarted():
            return text_bytes(event.settings.instructions)
        case TurnFinished():
            return text_bytes(event.text)
        case _:
            return 0
