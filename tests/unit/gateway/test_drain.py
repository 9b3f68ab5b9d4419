# SPDX-License-Identifier: Apache-2.0
"""The stop: no new work, running turns end, everyone leaves in batches, and it takes no longer than it may."""

import asyncio
import itertools
import random

import pytest

from server.core.errors import CLOSE_RESTART
from server.gateway import drain as drain_module
from server.gateway.drain import Drain


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(drain_module, "BATCH_PAUSE_S", (0, 0))
    monkeypatch.setattr(drain_module, "END_WAIT_S", 0.01)


class Guest:
    """A member that is busy until told, and leaves when it is ended unless it is deaf."""

    def __init__(self, drain, *, is_busy=False, is_deaf=False):
        self.drain, self.is_deaf = drain, is_deaf
        self.idle = asyncio.Event()
        self.closes, self.is_refusing = [], False
        if not is_busy:
            self.idle.set()
        drain.enter(self)

    def begin_drain(self):
        self.is_refusing = True

    async def wait_idle(self):
        await self.idle.wait()

    def end(self, close):
        self.closes.append(close)
        if not self.is_deaf:
            self.drain.leave(self)


def drain_of(deadline_s=60):
    return Drain(deadline_s=deadline_s, rng=random.Random(1))


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_idle_ones_leave_and_busy_ones_finish():
    """A running turn keeps its socket until it ends; then it is told to come back like the rest."""
    drain = drain_of()
    idle, busy = Guest(drain), Guest(drain, is_busy=True)
    running = asyncio.create_task(drain.run())
    await settle()
    assert idle.closes == [CLOSE_RESTART]
    assert busy.is_refusing
    assert not busy.closes
    busy.idle.set()
    await running
    assert busy.closes == [CLOSE_RESTART]
    assert drain.num_members == 0


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_the_deadline_ends_the_rest(is_deaf):
    """A turn past the deadline is cut, and one that never leaves is not waited for."""
    drain = drain_of(deadline_s=0.01)
    busy = Guest(drain, is_busy=True, is_deaf=is_deaf)
    await drain.run()
    assert busy.closes == [CLOSE_RESTART]


async def test_a_second_signal_hurries():
    """Asked again, the deadline is not waited for."""
    drain = drain_of()
    busy = Guest(drain, is_busy=True)
    drain.begin()
    running = asyncio.create_task(drain.run())
    await settle()
    assert not busy.closes
    drain.begin()
    await running
    assert busy.closes == [CLOSE_RESTART]


async def test_nobody_here_is_no_wait():
    """An empty house closes at once."""
    await drain_of().run()


async def test_doors_refuse_from_the_first_moment():
    """The flag is set in the signal handler itself, with a retry time of its own for everyone."""
    drain = drain_of()
    assert drain.refusal() is None
    drain.begin()
    assert drain.is_draining
    waits = {drain.refusal().retry_after_ms for _ in range(20)}
    assert drain.refusal().code == "server_draining"
    assert len(waits) > 10
    late = Guest(drain)
    assert late.is_refusing


async def test_members_leave_in_batches(monkeypatch):
    """Between two batches there is a pause, so that not all clients reconnect at once."""
    monkeypatch.setattr(drain_module, "BATCH_SIZE", 3)
    monkeypatch.setattr(drain_module, "BATCH_PAUSE_S", (0.001, 0.001))
    times = []
    drain = drain_of()
    guests = [Guest(drain) for _ in range(9)]
    for guest in guests:
        guest.end = lambda _, guest=guest: (
            times.append(asyncio.get_running_loop().time()),
            drain.leave(guest),
        )
    await drain.run()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len([gap for gap in gaps if gap > 0.0005]) == 2


async def test_one_that_left_by_itself_is_not_ended():
    """A socket that closes while its turn is awaited gets no second close."""
    drain = drain_of()
    busy, other = Guest(drain, is_busy=True), Guest(drain, is_busy=True)
    running = asyncio.create_task(drain.run())
    await settle()
    drain.leave(busy)
    busy.idle.set()
    other.idle.set()
    await running
    assert not busy.closes
