# SPDX-License-Identifier: Apache-2.0
"""A default server speaks to this machine alone, and is quick to say that it lives while it computes."""

import asyncio
import time

import httpx
import pytest

from tests.e2e.observe import engine_pid, inet_addresses

pytestmark = pytest.mark.slow

ASK = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 48}
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
NOBODY = {"00000000", "00000000000000000000000000000000"}


async def test_under_load_it_answers_probes_and_stays_on_loopback(server_process):
    """With every row busy the loop still turns, and neither process holds a socket to anywhere else."""
    server = server_process
    slowest, seen = 0.0, []
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as client:
        url = f"{server.url}/v1/chat/completions"
        asking = asyncio.gather(*(client.post(url, json=ASK) for _ in range(20)))
        while not asking.done():
            started = time.monotonic()
            assert (await client.get(f"{server.url}/livez")).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            assert (await client.get(f"{server.url}/readyz")).status_code == 200, "a full queue is ready"
            for pid in (server.pid, engine_pid(server)):
                seen += inet_addresses(pid)
            await asyncio.sleep(0.02)
        assert {reply.status_code for reply in await asking} == {200}
    assert slowest < 0.5
    assert seen, "the listener at least"
    for _, local, remote in seen:
        assert local.split(":")[0] in LOOPBACK
        assert remote.split(":")[0] in LOOPBACK | NOBODY
    assert not inet_addresses(engine_pid(server)), "the engine needs no network at all"
