# SPDX-License-Identifier: Apache-2.0
"""A load sends exactly what its plan says and never more at once."""

import asyncio

import pytest

from server.cli.bench.clients import TurnTiming
from server.cli.bench.load import LoadPlan, arrivals, prompt, run_load


class CountingClient:
    """Notes how many conversations are open at once."""

    open_now = 0
    open_max = 0
    prompts = ()

    def __init__(self, number, fails_at=None):
        self.number = number
        self.fails_at = fails_at

    async def open(self):
        kind = type(self)
        kind.open_now += 1
        kind.open_max = max(kind.open_max, kind.open_now)

    async def turn(self, index, text):
        await asyncio.sleep(0)
        type(self).prompts += (text,)
        error = "boom" if index == self.fails_at else None
        return TurnTiming(
            client=self.number, turn=index, started_at=0.0, arrivals=(), ended_at=float(index), input_tokens=0,
            output_tokens=0, cached_tokens=0, text="", error=error,
        )  # fmt: skip

    async def close(self):
        type(self).open_now -= 1


@pytest.fixture(autouse=True)
def _reset():
    CountingClient.open_now = CountingClient.open_max = 0
    CountingClient.prompts = ()


def plan(**changes):
    return LoadPlan(**({"clients": 3, "conversations": 7, "turns": 2, "rate": None, "seed": 1} | changes))


async def test_every_conversation_runs_with_bounded_users():
    """All turns run, never more conversations at once than users, and every client is closed."""
    timings = await run_load(plan(), CountingClient)
    assert (14, 3, 0) == (len(timings), CountingClient.open_max, CountingClient.open_now)


async def test_a_failed_turn_ends_its_conversation_only():
    """After an error the user leaves; the others go on."""
    timings = await run_load(plan(), lambda n: CountingClient(n, fails_at=0 if n == 2 else None))
    assert 13 == len(timings)


def test_prompts_differ_between_users():
    """No two users send the same first prompt, so no cache of whole prompts can answer."""
    assert 50 == len({prompt(number, 0) for number in range(50)})


def test_open_loop_arrivals_follow_the_rate_and_the_seed():
    """Arrivals are the same for a seed and come at about the given rate."""
    times = arrivals(plan(conversations=2000, rate=10.0))
    assert times == arrivals(plan(conversations=2000, rate=10.0)) == sorted(times)
    assert 150 < times[-1] < 250
