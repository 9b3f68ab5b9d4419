# SPDX-License-Identifier: Apache-2.0
"""The supervisor: one process, started again whatever ends it, killed when silent, gone at the end."""

import asyncio
import os
import sys

import pytest

from server.engine.process import supervisor as module
from server.engine.process.supervisor import Supervisor, engine_command

LIVES = "import sys; sys.stdin.read()"
DIES = "raise SystemExit(3)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); signal.pause()"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "WATCH_S", 0.005)
    monkeypatch.setattr(module, "BACKOFF_S_MIN", 0.001)
    monkeypatch.setattr(module, "STOP_S", 0.2)


@pytest.fixture
async def keep():
    """Starts a supervisor over a Python program and returns it with the list of the process's ends."""
    kept = []

    async def start(program, *, hang_timeout_s=60.0, start_timeout_s=60.0):
        command = program if isinstance(program, tuple) else (sys.executable, "-S", "-c", program)
        supervisor = Supervisor(command, hang_timeout_s=hang_timeout_s, start_timeout_s=start_timeout_s)
        ends = []
        supervisor.start(lambda: ends.append(supervisor.snapshot()))
        kept.append(supervisor)
        return supervisor, ends

    yield start
    for each in kept:
        await each.close()
        assert each.snapshot().pid is None


async def wait_until(is_true):
    async with asyncio.timeout(20):
        while not is_true():  # noqa: ASYNC110 - what happens to a process sets no event
            await asyncio.sleep(0)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_what_ends_is_started_again(keep):
    """A process that ends is replaced, and each end is told, when there is no process any more."""
    supervisor, ends = await keep(DIES)
    await wait_until(lambda: len(ends) >= 3)
    assert supervisor.snapshot().num_starts >= 3
    assert {each.pid for each in ends} == {None}
    assert supervisor.snapshot().num_hangs == 0


async def test_a_command_that_cannot_start_is_tried_again(keep, caplog):
    """No program at all, or no memory for one, is logged and tried again, not the end of all trying."""
    supervisor, ends = await keep(("/nonexistent/engine",))
    await wait_until(lambda: supervisor.snapshot().num_starts >= 3)
    assert ends == []
    assert "engine_cannot_start" in [record.message for record in caplog.records]


async def test_pauses_grow_and_shrink_again(keep, monkeypatch):
    """Each early end doubles the pause up to a bound; an engine that lived long starts from the shortest."""
    pauses = []
    real = asyncio.wait_for

    async def noting(waiting, seconds):
        pauses.append(seconds)
        return await real(waiting, 0)

    monkeypatch.setattr(asyncio, "wait_for", noting)
    monkeypatch.setattr(module, "BACKOFF_S_MAX", 0.006)
    supervisor, _ = await keep(("/nonexistent/engine",))
    await wait_until(lambda: len(pauses) >= 5)
    assert pauses[:5] == [0.002, 0.004, 0.006, 0.006, 0.006]
    monkeypatch.setattr(module, "STABLE_S", -1.0)
    await wait_until(lambda: pauses[-1] == 0.001)
    assert supervisor.snapshot().pid is None


async def test_silence_is_death(keep):
    """A process that was heard and then is silent for too long is killed, even a stopped one, and replaced."""
    supervisor, ends = await keep(STOPPED, hang_timeout_s=0.05)
    await wait_until(lambda: supervisor.snapshot().pid)
    first = supervisor.snapshot().pid
    supervisor.heard()
    await wait_until(lambda: ends)
    assert supervisor.snapshot().num_hangs == 1
    assert not is_alive(first)
    await wait_until(lambda: supervisor.snapshot().pid not in (None, first))


async def test_signs_of_life_are_believed(keep):
    """A process that is heard in time lives on; one that still loads has its own, longer time."""
    supervisor, ends = await keep(LIVES, hang_timeout_s=0.1)
    await wait_until(lambda: supervisor.snapshot().pid)
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + 0.3
    while loop.time() < ends_at:
        supervisor.heard()
        await asyncio.sleep(0)
    assert ends == []
    slow, slow_ends = await keep(LIVES, hang_timeout_s=0.001, start_timeout_s=0.05)
    await wait_until(lambda: slow_ends)
    assert slow.snapshot().num_hangs == 1


async def test_our_own_sleep_is_not_its_silence(keep, monkeypatch):
    """When this process stood still itself, the engine is not blamed for the silence."""
    times = iter(range(0, 10_000, 50))
    monkeypatch.setattr(module, "monotonic", lambda: next(times))  # each look comes 50 seconds after the last
    supervisor, ends = await keep(LIVES, hang_timeout_s=60.0)
    await wait_until(lambda: supervisor.snapshot().pid)
    supervisor.heard()
    for _ in range(50):
        await asyncio.sleep(0)
    await wait_until(lambda: next(times) > 2000)
    assert ends == []


async def test_closing_stops_it(keep):
    """`close` leaves no process, whatever it was doing, also one that ignores a polite word or is stopped."""
    for program in (LIVES, DEAF, STOPPED):
        supervisor, ends = await keep(program)
        await wait_until(lambda one=supervisor: one.snapshot().pid)
        pid = supervisor.snapshot().pid
        await supervisor.close()
        assert not is_alive(pid)
        assert len(ends) == 1


async def test_closing_at_any_moment(keep):
    """Closed while it starts, or in a pause, there is none afterwards."""
    for num_turns in range(0, 60, 3):
        supervisor, _ = await keep(DIES if num_turns % 2 else LIVES)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await supervisor.close()
        assert supervisor.snapshot().pid is None
    await Supervisor(("x",), hang_timeout_s=1).close()  # never started


async def test_the_child_sees_our_end(keep):
    """Its standard input ends with us: the pipe is there, and nothing is ever written into it."""
    supervisor, _ = await keep(LIVES)
    await wait_until(lambda: supervisor._process)
    supervisor._process.stdin.close()
    await wait_until(lambda: supervisor.snapshot().num_starts == 2)


def test_the_command_runs_us():
    """The engine is this very program in this very interpreter."""
    assert engine_command("--child") == (sys.executable, "-m", "server", "engine", "--child")
