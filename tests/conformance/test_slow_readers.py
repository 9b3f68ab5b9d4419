# SPDX-License-Identifier: Apache-2.0
"""Clients that stop reading cost a bounded number of bytes, are closed to come back, and slow nobody else."""

import asyncio
import time
from pathlib import Path

from server.core.ports import GenerationFinished, TextDelta
from server.core.types import FinishReason, Usage
from server.gateway import socket as door
from tests.fakes import FakeGenerator

NUM_SLOW, NUM_FINE = 20, 5
PIECE = "x" * 2_000


class Flood(FakeGenerator):
    """Talks without an end, but lets others run: a piece a round of the loop to each."""

    async def generate(self, request):
        self.running.add(request.id)
        try:
            while request.id not in self.cancelled:
                await asyncio.sleep(0.001)
                yield TextDelta(text=PIECE)
            yield GenerationFinished(reason=FinishReason.CANCELLED, usage=Usage())
        finally:
            self.running.discard(request.id)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_memory_is_bounded_and_others_are_served(serve, monkeypatch):
    """Their answers go on being made, so what waits for them must not grow with the answer."""
    monkeypatch.setattr(door, "SEND_WAIT_S", 1.0)
    house = await serve(generator=Flood(), slow_reader_timeout_s=1.0)
    slow = [await house.greeted("/chat", receive_bytes=4096) for _ in range(NUM_SLOW)]
    fine = [await house.greeted("/chat") for _ in range(NUM_FINE)]
    before = resident_bytes()
    for peer in slow + fine:
        peer.say("talk")
    gaps = await asyncio.gather(*(longest_gap(peer, seconds=2.5) for peer in fine))
    assert resident_bytes() - before < NUM_SLOW * 2 * 262_144
    assert max(gaps) < 0.5
    await house.until(lambda: house.drain.num_members <= NUM_FINE)
    assert len(house.generator.running) == NUM_FINE
    assert await slow[0].close_code() in (4008, None)  # the code itself may be stuck behind what it never read
    for peer in fine:
        peer.say("/stop")
    async with asyncio.timeout(5):
        while house.generator.running:
            await asyncio.gather(*(peer.recv() for peer in fine))


async def longest_gap(peer, *, seconds):
    ends_at = last = time.monotonic()
    ends_at += seconds
    gap = 0.0
    while (now := time.monotonic()) < ends_at:
        await peer.text()
        gap, last = max(gap, now - last), now
    return gap


async def test_a_pause_in_reading_loses_nothing(serve):
    """A phone in a tunnel for a moment: every character arrives, in order, merged."""
    text = [f"{number} " for number in range(20_000)]
    house = await serve(*text)
    peer = await house.greeted("/chat", receive_bytes=4096)
    peer.say("count")
    await asyncio.sleep(0.3)
    received, num_frames = "", 0
    while piece := await peer.text():
        received += piece
        num_frames += 1
    assert received == "".join(text)
    assert num_frames < len(text) / 2


async def test_a_flood_of_questions_is_bounded(serve, monkeypatch):
    """A client that only asks is read no further than its answers are taken, and closed."""
    monkeypatch.setattr(door, "SEND_WAIT_S", 0.2)
    house = await serve()
    before = resident_bytes()
    peer = await house.greeted(receive_bytes=4096)
    asking = asyncio.create_task(ask_without_end(peer))
    await asyncio.wait_for(house.settles(), 10)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert resident_bytes() - before < 16 * 1024 * 1024


async def ask_without_end(peer):
    while True:
        peer.say('{"type": "nothing at all"}' * 20)
        await peer.writer.drain()
