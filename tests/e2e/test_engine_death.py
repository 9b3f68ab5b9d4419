# SPDX-License-Identifier: Apache-2.0
"""An engine that is killed in mid-answer is a pause to its clients: the same text, nothing lost or doubled."""

import asyncio
import json
import os
import signal

import httpx
import pytest

from tests.conformance.raw import RawSocket
from tests.e2e.observe import engine_pid, metric

pytestmark = pytest.mark.slow

ASK = {
    "messages": [{"role": "user", "content": "Count from one to thirty."}],
    "max_tokens": 80, "temperature": 0.7, "seed": 7,
}  # fmt: skip


async def read_stream(client, server, kill_after=None):
    """The text of one stream; `kill_after` kills the engine when that many pieces have come."""
    text, num_pieces = "", 0
    async with client.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**ASK, "stream": True}
    ) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            text += chunk["choices"][0]["delta"].get("content", "")
            num_pieces += 1
            if num_pieces == kill_after:
                os.kill(engine_pid(server), signal.SIGKILL)
    return text


async def test_a_killed_engine_loses_no_text(server_process):
    """Streams go on with the same words; sockets stay; readiness tells the truth meanwhile; it is counted."""
    server = server_process
    before = metric(server, "sampan_engine_restarts_total")
    idle = await RawSocket.open(server.port, "/v1/realtime")
    async with httpx.AsyncClient(timeout=120) as client:
        alone = await read_stream(client, server)
        killed, beside = await asyncio.gather(
            read_stream(client, server, kill_after=8), read_stream(client, server)
        )
        assert killed == beside == alone
        assert metric(server, "sampan_engine_restarts_total") == before + 1
        idle.say('{"type": "session.update", "session": {"type": "realtime", "instructions": "x"}}')
        assert "session.created" in await idle.text()
        assert "session.updated" in await idle.text()
        assert (await client.get(f"{server.url}/readyz")).status_code == 200
    idle.close()


async def test_a_hanging_engine_is_replaced(smollm2, start_server):
    """Stopped in its tracks it looks alive; its silence is what tells, and readiness with it."""
    smollm2("w8a8")
    # A step must be shorter than a hang, so it is given less to do.
    steps = ("--engine.max-num-seqs", "4", "--engine.prefill-chunk-tokens", "32")
    steps = (*steps, "--engine.max-num-batched-tokens", "64")
    server = start_server("--engine.hang-timeout-s", "2", *steps)
    async with httpx.AsyncClient(timeout=120) as client:
        alone = await read_stream(client, server)
        os.kill(engine_pid(server), signal.SIGSTOP)
        asking = asyncio.create_task(read_stream(client, server))
        for _ in range(200):
            ready = await client.get(f"{server.url}/readyz")
            assert (await client.get(f"{server.url}/livez")).status_code == 200
            if ready.status_code == 503:
                break
            await asyncio.sleep(0.05)
        assert ready.status_code == 503
        assert ready.json()["reason"]
        assert await asking == alone
