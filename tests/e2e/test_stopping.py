# SPDX-License-Identifier: Apache-2.0
"""A real stop by a real signal: turns end, sockets are told, the status is 0, and no process is left."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.conformance.raw import RawSocket
from tests.e2e.observe import engine_pid, metric, wait_until

pytestmark = pytest.mark.slow

ASK = {"messages": [{"role": "user", "content": "Count to twenty."}], "max_tokens": 60, "temperature": 0}


@pytest.fixture
def server(smollm2, start_server):
    """A server of this test's own, as it will be gone."""
    smollm2("w8a8")
    return start_server("--server.drain-timeout-s", "20")


async def wait_running(server, count):
    for _ in range(500):
        if await asyncio.to_thread(metric, server, "sampan_running_rows") >= count:
            return
        await asyncio.sleep(0.02)
    pytest.fail("nothing runs")


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_turns_end(server, sig):
    """A stream is whole, an idle socket gets 1012, and both processes are gone."""
    engine = engine_pid(server)
    idle = await RawSocket.open(server.port, "/v1/realtime")
    async with httpx.AsyncClient(timeout=60) as client:
        url = f"{server.url}/v1/chat/completions"
        whole = (await client.post(url, json=ASK)).json()["choices"][0]["message"]["content"]
        asking = asyncio.create_task(client.post(url, json={**ASK, "stream": True}))
        await wait_running(server, 1)
        server.process.send_signal(sig)
        assert await idle.close_code() == 1012
        text = (await asking).text
    assert text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert await asyncio.to_thread(server.process.wait, 30) == 0
    wait_until(lambda: not _is_alive(engine))
    assert "ERROR" not in server.log_text()
    idle.close()


async def test_a_second_signal_is_quick(server):
    """The running turn is cut with a word, within seconds."""
    peer = await RawSocket.open(server.port, "/chat")
    peer.say("Tell me a very long story about the sea, the wind and the stars.")
    await wait_running(server, 1)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert await peer.close_code() == 1012
    assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert time.monotonic() - started < 6
    peer.close()


def test_a_busy_port_is_one_line(server, smollm2, sampan_home, tmp_path):
    """A second server on the same port says so, and does not start an engine."""
    command = [
        sys.executable,
        "-m",
        "server",
        "serve",
        "--port",
        str(server.port),
        "--engine.home",
        str(sampan_home),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "cannot listen" in line]
    assert "another program listens there" in line
    assert "Traceback" not in done.stderr
    assert "engine_started" not in done.stderr


def _is_alive(pid):
    return Path(f"/proc/{pid}").exists()
