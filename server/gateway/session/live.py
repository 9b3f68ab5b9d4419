# SPDX-License-Identifier: Apache-2.0
"""Shell 2: performs what a session decides. Runs its turns, arms its one timer, keeps its outbox.

Invariant: every StartTurn becomes one task that feeds exactly one TurnFinished back, and after `close()`
nothing started here is running. Decides nothing by itself. Use from one event loop.
"""

from server.core.errors import Close, ServerError
from server.core.events import Command, Event
from server.core.ports import Generator
from server.gateway.session.session import Session


class LiveSession:
    """One client's session while it lives.

    A socket uses it so: one reader calls `receive` or `refuse` for each message; one writer loops over
    `take` until it returns nothing, then closes with `close_reason`; at the end, `close`.

    Args:
        session: the machine; this object is its only user from now on.
        generator: answers the turns.
        outbox_bytes_max: how much may wait for the client before it counts as slow.
        tenant: for fair queueing.
    """

    def __init__(
        self, session: Session, generator: Generator, *, outbox_bytes_max: int = 262_144, tenant: str = ""
    ) -> None:
        raise NotImplementedError

    @property
    def session_id(self) -> str:
        """The public name of the session."""
        raise NotImplementedError

    @property
    def close_reason(self) -> Close | None:
        """How the socket has to end; None until the session or its owner asks for it."""
        raise NotImplementedError

    def start(self) -> None:
        """Queue the greeting. Once, before anything else."""

    def receive(self, command: Command) -> None:
        """Hand one command to the session. Never waits; answers come through `take`."""

    def refuse(self, error: ServerError, event_id: str | None) -> None:
        """Answer a message that was no command (a DecodeFault) with an error event."""

    def begin_drain(self) -> None:
        """Refuse new turns from now on; running ones go on."""

    async def wait_idle(self) -> None:
        """Wait until no turn runs."""

    def end(self, close: Close) -> None:
        """Let the writer send what waits, then end the socket so."""

    async def take(self) -> list[Event]:
        """Wait for events and take a batch in order; an empty list means: close with `close_reason`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel every turn and wait until they are gone. May be called twice; `take` then ends."""
