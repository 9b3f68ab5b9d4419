# SPDX-License-Identifier: Apache-2.0
"""Shell 2: performs what a session decides. Runs its turns, arms its one timer, keeps its outbox.

Invariant: every StartTurn becomes one task that feeds exactly one TurnFinished back, and after `close()`
nothing started here is running. It decides nothing by itself. Use from one event loop; only `take`, the
`wait_…` methods and `close` wait.
"""

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass

from server.core.errors import CLOSE_SERVER_ERROR, Close, ServerError
from server.core.events import Command, Event, Failed
from server.core.ports import Generator
from server.gateway.session.outbox import Outbox
from server.gateway.session.session import (
    CloseSocket,
    Effects,
    Emit,
    Session,
    SessionSnapshot,
    StartTurn,
    StopTurn,
)
from server.turns.turn import Turn, TurnRequest

OUTBOX_BYTES_MAX = 262_144
"""What may wait for one client; over it for some seconds, its socket is closed and it may come back."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSnapshot:
    """A live session at one moment, for metrics, admin and tests."""

    session: SessionSnapshot
    num_tasks: int
    num_waiting_events: int
    outbox_bytes: int


class LiveSession:
    """One client's session while it lives.

    A socket uses it so: `start`; one reader calls `receive` or `refuse` for each message; one writer loops
    over `take` until it returns nothing, then closes the socket as `close_reason` says; a watcher of
    `wait_close` breaks a writer that is stuck in a send; at the end, whatever happened, `close`.

    Args:
        session: the machine; this object is its only user from now on.
        generator: answers the turns.
        outbox_bytes_max: how much may wait for the client before it counts as slow.
        tenant: for fair queueing.
    """

    def __init__(
        self,
        session: Session,
        generator: Generator,
        *,
        outbox_bytes_max: int = OUTBOX_BYTES_MAX,
        tenant: str = "",
    ) -> None:
        self._session = session
        self._generator = generator
        self._tenant = tenant
        self._outbox_bytes_max = outbox_bytes_max
        self._outbox = Outbox(outbox_bytes_max)
        self._turns: dict[str, tuple[Turn, asyncio.Task[None]]] = {}
        self._has_news = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_closing = asyncio.Event()
        self._is_over = False
        self._close_reason: Close | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def session_id(self) -> str:
        """The public name of the session."""
        return self._session.session_id

    @property
    def close_reason(self) -> Close | None:
        """How the socket has to end; None until the session or its owner asks for it."""
        return self._close_reason

    def start(self) -> None:
        """Queue the greeting. Once, before anything else."""
        self._perform(self._session.start(_now()))

    def receive(self, command: Command) -> None:
        """Hand one command to the session; its answer comes through `take`."""
        if not self._is_over:
            self._perform(self._session.handle(command, _now()))

    def refuse(self, error: ServerError, event_id: str | None) -> None:
        """Answer a message that was no command (a DecodeFault) with an error event."""
        if not self._is_over and self._close_reason is None:
            self._perform((Emit(event=Failed(error=error, event_id=event_id)),))

    def begin_drain(self) -> None:
        """Refuse new turns from now on; running ones go on."""
        self._session.begin_drain()

    def end(self, close: Close) -> None:
        """Let the writer send what waits now, then end the socket so. The first reason given stays."""
        self._session.begin_drain()
        if self._close_reason is None:
            self._close_reason = close
            self._is_closing.set()
            self._has_news.set()

    async def take(self) -> list[Event]:
        """Wait for events and take a batch in order; an empty list means: close with `close_reason`."""
        while not len(self._outbox):
            if self._is_over or self._close_reason is not None:
                return []
            self._has_news.clear()
            await self._has_news.wait()
        events = self._outbox.take()
        self._weigh()
        return events

    async def wait_close(self) -> Close:
        """Wait until the socket has to end, however stuck its writer is."""
        await self._is_closing.wait()
        assert self._close_reason is not None
        return self._close_reason

    async def wait_idle(self) -> None:
        """Wait until no turn runs."""
        await self._is_idle.wait()

    async def close(self) -> None:
        """Cancel every turn and wait until they are gone; `take` ends. May be called twice."""
        self._is_over = True
        tasks = [task for _, task in self._turns.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._arm()
        self._has_news.set()

    def snapshot(self) -> LiveSnapshot:
        """How it stands."""
        return LiveSnapshot(
            session=self._session.snapshot(),
            num_tasks=len(self._turns),
            num_waiting_events=len(self._outbox),
            outbox_bytes=self._outbox.num_bytes,
        )

    def check_integrity(self) -> None:
        """Assert what the machine and the outbox promise."""
        self._session.check_integrity()
        self._outbox.check_integrity()

    def _perform(self, effects: Effects) -> None:
        self._do(effects)
        self._weigh()

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self._outbox.add(effect.event)
                case StartTurn():
                    self._start_turn(effect)
                case StopTurn():
                    self._turns[effect.turn_id][0].cancel()
                case CloseSocket():
                    self._outbox = Outbox(self._outbox_bytes_max)  # nobody reads it any more
                    self.end(effect.close)

    def _weigh(self) -> None:
        """Tell the session how full the outbox is, and wake whom that concerns."""
        self._do(self._session.handle_backlog(self._outbox.backlog, _now()))
        self._arm()
        if len(self._outbox):
            self._has_news.set()

    def _arm(self) -> None:
        deadline = None if self._is_over else self._session.next_deadline()
        if self._timer is not None and (deadline is None or deadline != self._timer.when()):
            self._timer.cancel()
            self._timer = None
        if deadline is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._perform(self._session.handle_timeout(_now()))

    def _start_turn(self, effect: StartTurn) -> None:
        request = TurnRequest(
            id=effect.turn_id, settings=effect.settings, items=effect.items, tenant=self._tenant
        )
        turn = Turn(request, self._generator)
        task = asyncio.create_task(self._run(effect.turn_id, turn), name=f"turn {effect.turn_id}")
        self._turns[effect.turn_id] = (turn, task)
        self._is_idle.clear()
        # Not in the coroutine: a task cancelled before its first step never enters it.
        task.add_done_callback(lambda _: self._forget(effect.turn_id))

    async def _run(self, turn_id: str, turn: Turn) -> None:
        try:
            async with aclosing(turn.events()) as events:
                async for event in events:
                    self._perform(self._session.handle_turn(event, _now()))
        except Exception:  # noqa: BLE001 - whatever it is, the socket has to learn of it
            # Our mistake: this client's state cannot be trusted, everybody else's can.
            _log.exception("session_broken", extra={"session_id": self.session_id, "turn_id": turn_id})
            self.end(CLOSE_SERVER_ERROR)

    def _forget(self, turn_id: str) -> None:
        del self._turns[turn_id]
        if not self._turns:
            self._is_idle.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
