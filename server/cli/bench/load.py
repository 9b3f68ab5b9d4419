# SPDX-License-Identifier: Apache-2.0
"""Many simulated users at once, in a closed loop or an open one.

Closed: each user sends the next turn when the last one ended. Open: conversations arrive at random with a
given rate, whatever the server does. Bounded in count and time by its arguments. Prompts are ours, each with
its own number, so that no server answers from a cache of whole prompts.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from server.cli.bench.clients import Client, TurnTiming

TOPICS = (
    "a ferry that crosses the harbour at night",
    "a small tea shop on a steep street",
    "the first typhoon of the summer",
    "a fishing village that becomes a city",
    "a tram driver who collects old maps",
    "a school garden on a rooftop",
    "the market before the new year",
    "a lighthouse keeper and a lost letter",
)
FIRST = (
    "You are talking with reader number {number}. Write a long and detailed story about {topic}. "
    "Describe the place, the weather, the people and what they say to each other. Tell what happens in "
    "the morning, at noon and in the evening, and do not stop before the day is over."
)
LATER = "Go on with the story, reader {number} wants to know what happens next, in many sentences."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How much to send. `rate` None is a closed loop; else conversations per second on average."""

    clients: int
    conversations: int
    turns: int
    rate: float | None
    seed: int


def prompt(number: int, turn: int) -> str:
    """Return what user `number` says in turn `turn`."""
    text = FIRST if turn == 0 else LATER
    return text.format(number=number, topic=TOPICS[number % len(TOPICS)])


def arrivals(plan: LoadPlan) -> list[float]:
    """Seconds at which conversations start: all at once, or exponential gaps from the plan's seed."""
    if plan.rate is None:
        return [0.0] * plan.conversations
    chance = random.Random(plan.seed)  # noqa: S311  # a load, not a secret
    times, now = [], 0.0
    for _ in range(plan.conversations):
        times.append(now)
        now += chance.expovariate(plan.rate)
    return times


async def run_load(plan: LoadPlan, make_client: Callable[[int], Client]) -> list[TurnTiming]:
    """Run every conversation of the plan and return the timing of each turn, in order of their end.

    At most `plan.clients` conversations run at once.
    """
    timings: list[TurnTiming] = []
    places = asyncio.Semaphore(plan.clients)

    async def converse(number: int, delay: float) -> None:
        await asyncio.sleep(delay)
        async with places:
            timings.extend(await _conversation(make_client(number), number, plan.turns))

    async with asyncio.TaskGroup() as group:
        for number, delay in enumerate(arrivals(plan)):
            group.create_task(converse(number, delay))
    return sorted(timings, key=lambda timing: timing.ended_at)


async def _conversation(client: Client, number: int, turns: int) -> list[TurnTiming]:
    timings: list[TurnTiming] = []
    try:
        await client.open()
        for turn in range(turns):
            timings.append(await client.turn(turn, prompt(number, turn)))
            if timings[-1].error:
                break
    finally:
        await client.close()
    return timings
