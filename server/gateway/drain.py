# SPDX-License-Identifier: Apache-2.0
"""The orderly stop: no new work, running turns end, everyone is told to come back, in jittered batches.

Owns who is still here. Invariant: a member is ended exactly once, as soon as it is idle, or at the deadline,
and `run` returns within the deadline and END_WAIT_S more, whatever a client does. It must never cut a turn
that still has time, and never end all members at once: they would all reconnect at once.

    serving → begin() → draining: doors refuse, idle members end → deadline or hurry() → all end
"""

import asyncio
import logging
import random
from typing import Protocol

from server.core.errors import CLOSE_RESTART, Close, ServerError, error_of

BATCH_SIZE = 100
BATCH_PAUSE_S = (0.05, 0.15)
"""So 5 000 idle sockets take about five seconds, and their clients' own jitter does the rest."""
END_WAIT_S = 2.0
"""How long ended members may take to leave: a Close and its answer, or an abort."""

_log = logging.getLogger(__name__)


class Member(Protocol):
    """What has to end before we may: a socket with its session, or one HTTP turn."""

    def begin_drain(self) -> None:
        """Refuse new turns from now on; running ones go on. Never waits."""

    async def wait_idle(self) -> None:
        """Wait until no turn runs."""

    def end(self, close: Close) -> None:
        """End soon, and `leave` then. Never waits."""


class Drain:
    """Who is here, and whether more may come. Use from one event loop; `begin` and `hurry` from anywhere."""

    def __init__(self, *, deadline_s: float, rng: random.Random) -> None:
        self._deadline_s = deadline_s
        self._rng = rng
        self._members: set[Member] = set()
        self._num_ended = 0
        self._next_batch_at = 0.0
        self._is_hurried = False
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_draining = False

    @property
    def num_members(self) -> int:
        """Sockets and HTTP turns that have not left."""
        return len(self._members)

    def refusal(self) -> ServerError | None:
        """What a door answers to new work; None while we serve."""
        if not self.is_draining:
            return None
        wait_ms = self._rng.randint(1000, 5000)
        return error_of("server_draining", "the server is restarting: connect again", retry_after_ms=wait_ms)

    def enter(self, member: Member) -> None:
        """Count a member in until it leaves."""
        self._members.add(member)
        if self.is_draining:
            member.begin_drain()

    def leave(self, member: Member) -> None:
        """Count a member out; one that is not in is ignored."""
        self._members.discard(member)
        if not self._members:
            self._notify()

    def begin(self) -> None:
        """Take no more work: probes say so at once. Called again, it hurries. Safe in a signal handler."""
        self._is_hurried = self.is_draining
        self.is_draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify)

    async def run(self) -> None:
        """Let the work end, then end everyone. Once; returns when all are gone or have had their time."""
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self.is_draining = True
        num_at_start, started = self.num_members, self._loop.time()
        for member in list(self._members):
            member.begin_drain()
        watchers = [asyncio.create_task(self._end_when_idle(member)) for member in list(self._members)]
        await self._wait_gone(self._deadline_s, may_hurry=True)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        num_cut = self.num_members
        for member in list(self._members):
            member.end(CLOSE_RESTART)
        await self._wait_gone(END_WAIT_S, may_hurry=False)
        _log.info(
            "drained",
            extra={
                "members": num_at_start,
                "cut": num_cut,
                "left": self.num_members,
                "seconds": round(self._loop.time() - started, 3),
            },
        )

    async def _end_when_idle(self, member: Member) -> None:
        await member.wait_idle()
        await self._wait_batch()
        if member in self._members:
            member.end(CLOSE_RESTART)

    async def _wait_batch(self) -> None:
        """Take the next place in the line; a full batch is followed by a pause."""
        now = asyncio.get_running_loop().time()
        if self._num_ended % BATCH_SIZE == 0:
            self._next_batch_at = max(now, self._next_batch_at) + self._rng.uniform(*BATCH_PAUSE_S)
        self._num_ended += 1
        await asyncio.sleep(max(0.0, self._next_batch_at - now))

    async def _wait_gone(self, seconds: float, *, may_hurry: bool) -> None:
        assert self._wake is not None
        try:
            async with asyncio.timeout(seconds):
                while self._members and not (may_hurry and self._is_hurried):
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            pass

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake.set()
