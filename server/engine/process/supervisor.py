# SPDX-License-Identifier: Apache-2.0
"""Starts the engine's process, watches it and starts it again: a crash or a hang is a pause, not an end.

Invariant: at most one engine process of ours is alive, and none after `close`. It never touches requests;
whoever holds them is told by `on_end`, sees a new `engine_id` in the next Ready and submits them again.
The child reads the end of its standard input as the end of this process.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
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
        self._is_closing = asyncio.Event()
        self._on_end: Callable[[], None] = lambda: None
        self._has_been_heard = False
        self._heard_at = self._started_at = 0.0
        self._num_starts = 0
        self._num_hangs = 0

    def start(self, on_end: Callable[[], None]) -> None:
        """Begin to keep the process alive; `on_end` is called each time that it has ended."""
        self._on_end = on_end
        self._task = asyncio.create_task(self._keep(), name="engine supervisor")

    def heard(self) -> None:
        """The engine gave a sign of life."""
        self._has_been_heard = True
        self._heard_at = monotonic()

    def snapshot(self) -> SupervisorSnapshot:
        """How the process stands."""
        pid = self._process.pid if self._process and self._process.returncode is None else None
        return SupervisorSnapshot(pid=pid, num_starts=self._num_starts, num_hangs=self._num_hangs)

    async def close(self) -> None:
        """Stop the process, politely first, and keep it stopped."""
        self._is_closing.set()
        if self._task is not None:
            await self._task

    async def _keep(self) -> None:
        """Start, watch, wait, again; leaves no process behind when it returns."""
        pause_s = BACKOFF_S_MIN
        while not self._is_closing.is_set():
            self._process = await self._spawn()
            if self._process is not None:
                await self._watch(self._process)
            pause_s = BACKOFF_S_MIN if monotonic() - self._started_at > STABLE_S else pause_s * 2
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closing.wait(), min(pause_s, BACKOFF_S_MAX))

    async def _spawn(self) -> asyncio.subprocess.Process | None:
        """Start the process; None when the machine could not."""
        self._started_at = self._heard_at = monotonic()
        self._has_been_heard = False
        self._num_starts += 1
        try:
            # Its own session: Ctrl-C at the terminal is the gateway's to handle, which then stops the engine.
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            _log.error("engine_cannot_start", extra={"reason": error.strerror, "num_starts": self._num_starts})
            return None
        _log.info("engine_started", extra={"pid": process.pid, "num_starts": self._num_starts})
        return process

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Return when the process has ended: by itself, killed for its silence, or stopped by `close`."""
        ended = asyncio.create_task(process.wait())
        closing = asyncio.create_task(self._is_closing.wait())
        looked_at = monotonic()
        while not ended.done() and not closing.done():
            await asyncio.wait({ended, closing}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            now = monotonic()
            # Silence while this process itself stood still is not the engine's.
            self._heard_at += max(0.0, now - looked_at - 2 * WATCH_S)
            looked_at = now
            if not ended.done() and self._is_silent(now):
                self._num_hangs += 1
                _log.error("engine_hangs", extra={"pid": process.pid})
                process.kill()
                await ended
        closing.cancel()
        if not ended.done():
            await _stop(process)
        else:
            _log.warning("engine_ended", extra={"pid": process.pid, "status": await ended})
        self._on_end()

    def _is_silent(self, now: float) -> bool:
        limit_s = self._hang_timeout_s if self._has_been_heard else self._start_timeout_s
        return now - self._heard_at > limit_s


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and after a while SIGKILL; returns when the process has ended."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # a stopped process takes no other signal
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def engine_command(*arguments: str) -> tuple[str, ...]:
    """The command line of an engine process with these flags, in this interpreter."""
    return (sys.executable, "-m", "server", "engine", *arguments)
