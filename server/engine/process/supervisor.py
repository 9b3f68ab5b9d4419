# SPDX-License-Identifier: Apache-2.0
"""Starts the engine's process, watches it and starts it again: a crash or a hang is a pause, not an end.

Invariant: at most one engine process of ours is alive, and none after `close`. It never touches requests;
whoever holds them sees a new `engine_id` in the next Ready and submits them again.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 10.0
STABLE_S = 30.0  # an engine that lived so long starts with the shortest pause again
STOP_S = 5.0  # from SIGTERM to SIGKILL
WATCH_S = 0.25

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSnapshot:
    """The process now; `pid` None while there is none."""

    pid: int | None
    num_starts: int
    num_hangs: int


class Supervisor:
    """Keeper of one engine process.

    Args:
        command: what to run; its standard output and error are ours.
        hang_timeout_s: silence after which a started engine is killed; longer than its longest step.
        start_timeout_s: silence that is allowed from start to first sign of life, while the model loads.
    """

    def __init__(
        self, command: Sequence[str], *, hang_timeout_s: float, start_timeout_s: float = 120.0
    ) -> None:
        self._command = tuple(command)
        self._hang_timeout_s = hang_timeout_s
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._heard_at: float | None = None
        self._started_at = 0.0
        self._num_starts = 0
        self._num_hangs = 0

    def start(self) -> None:
        """Begin to keep the process alive."""
        self._task = asyncio.create_task(self._keep(), name="engine supervisor")

    def heard(self) -> None:
        """The engine gave a sign of life."""
        self._heard_at = monotonic()

    def snapshot(self) -> SupervisorSnapshot:
        """How the process stands."""
        pid = self._process.pid if self._process and self._process.returncode is None else None
        return SupervisorSnapshot(pid=pid, num_starts=self._num_starts, num_hangs=self._num_hangs)

    async def close(self) -> None:
        """Stop the process, politely first, and keep it stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._stop()

    async def _keep(self) -> None:
        pause_s = BACKOFF_S_MIN
        while True:
            await self._spawn()
            await self._watch()
            lived_s = monotonic() - self._started_at
            pause_s = BACKOFF_S_MIN if lived_s > STABLE_S else min(pause_s * 2, BACKOFF_S_MAX)
            await asyncio.sleep(pause_s)

    async def _spawn(self) -> None:
        self._started_at, self._heard_at = monotonic(), None
        self._num_starts += 1
        # Its own session: Ctrl-C at the terminal is the gateway's to handle, which then stops the engine.
        self._process = await asyncio.create_subprocess_exec(*self._command, start_new_session=True)
        _log.info("engine_started", extra={"pid": self._process.pid, "num_starts": self._num_starts})

    async def _watch(self) -> None:
        """Return when the process has ended, by itself or killed for its silence."""
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        while not ended.done():
            await asyncio.wait({ended}, timeout=WATCH_S)
            if not ended.done() and self._is_silent():
                self._num_hangs += 1
                _log.error("engine_hangs", extra={"pid": self._process.pid})
                self._process.kill()
                await ended
        _log.warning("engine_ended", extra={"pid": self._process.pid, "status": ended.result()})

    def _is_silent(self) -> bool:
        if self._heard_at is None:
            return monotonic() - self._started_at > self._start_timeout_s
        return monotonic() - self._heard_at > self._hang_timeout_s

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # a stopped process takes no other signal
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def engine_command(*arguments: str) -> tuple[str, ...]:
    """The command line of an engine process with these flags, in this interpreter."""
    return (sys.executable, "-m", "server", "engine", *arguments)
