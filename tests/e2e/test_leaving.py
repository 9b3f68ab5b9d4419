# SPDX-License-Identifier: Apache-2.0
"""Clients that vanish at any moment, by FIN or RST, leave slots, files and memory as they were."""

import asyncio
import json
import random

import pytest

from tests.conformance.raw import RawSocket
from tests.e2e.observe import engine_pid, metric, num_files, resident_mib, wait_until

pytestmark = pytest.mark.slow

NUM_CLIENTS, NUM_AT_ONCE = 200, 16
ASK = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 200}


async def vanish(server, rng):
    """One client: a door, a question, and a moment to leave."""
    door = rng.choice(["/v1/realtime", "/chat", "sse", "whole"])
    delay = rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 1.5)])
    if door.startswith("/"):
        peer = await RawSocket.open(server.port, door)
        if door == "/chat":
            peer.say("Tell me a long story.")
        else:
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A story."}]}
            peer.say(json.dumps({"type": "conversation.item.create", "item": item}))
            peer.say('{"type": "response.create"}')
    else:
        peer = await RawSocket.connect(server.port)
        body = json.dumps({**ASK, "stream": door == "sse"})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        peer.send(head.encode(), body.encode())
    await asyncio.sleep(delay)
    rng.choice([peer.cut, peer.close])()


async def crowd(server, seed, num_clients):
    """Many of them, a few at a time."""
    rng = random.Random(seed)
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def one():
        async with places:
            await vanish(server, rng)

    await asyncio.gather(*(one() for _ in range(num_clients)))


async def test_two_hundred_who_vanish_leave_nothing(server_process):
    """After a first crowd that warms what is kept, the second costs nothing that stays."""
    server, engine = server_process, engine_pid(server_process)
    seen = []
    for seed, num_clients in ((1, 50), (2, NUM_CLIENTS)):
        await crowd(server, seed, num_clients)
        wait_until(lambda: metric(server, "sampan_sockets_open") == 0)
        # Two seconds on a free machine, of which a heartbeat takes one; a busy one computes its step longer.
        wait_until(lambda: metric(server, "sampan_running_rows") == 0, seconds=15)
        assert metric(server, "sampan_queue_length") == 0
        pids = (server.pid, engine)
        await asyncio.sleep(0.2)
        seen.append([(num_files(pid), resident_mib(pid)) for pid in pids])
    assert engine == engine_pid(server), "the engine was restarted"
    for (files_before, mib_before), (files_after, mib_after) in zip(*seen, strict=True):
        assert files_after <= files_before + 2
        assert mib_after < mib_before + 24
    assert "ERROR" not in server.log_text()
