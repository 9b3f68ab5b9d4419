# SPDX-License-Identifier: Apache-2.0
"""The whole stop with real sockets: refuse, let turns end, tell everyone, close with 1012, never 1006."""

import asyncio
import signal

import httpx

from tests.fakes import FakeGenerator

ASK = {"messages": [{"role": "user", "content": "hi"}]}


async def stop(house, sig=signal.SIGTERM):
    """What a signal sets off, as a task that ends with the server."""
    house.server.handle_exit(sig, None)
    stopping = asyncio.create_task(house.server.shutdown())
    await asyncio.sleep(0.01)
    return stopping


async def test_turns_end_and_everyone_is_told(serve):
    """Probes and doors say no at once, idle sockets leave, a running turn ends whole and its socket leaves."""
    house = await serve(generator=FakeGenerator("Par", "is", is_held=True), drain_s=10)
    idle, busy = await house.greeted(), await house.greeted("/chat")
    busy.say("hi")
    await house.runs()
    stopping = await stop(house)
    async with httpx.AsyncClient() as client:
        ready = await client.get(f"{house.http}/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (await client.get(f"{house.http}/livez")).status_code == 200
        refused = await client.post(f"{house.http}/v1/chat/completions", json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
    late = await house.peer()
    assert late.status == 503
    assert "retry-after" in late.head
    assert '"server_draining"' in await idle.text()
    assert await idle.close_code() == 1012
    house.generator.release(5)
    assert [await busy.text(), await busy.text(), await busy.text()][:2] in (["Par", "is"], ["Paris", ""])
    assert await busy.close_code() == 1012
    await asyncio.wait_for(stopping, 10)


async def test_the_deadline_cuts_but_never_without_a_word(serve):
    """A turn that does not end is stopped: 1012 on sockets, an error frame in streams."""
    house = await serve(generator=FakeGenerator("a", "b", is_held=True), drain_s=0.2)
    busy = await house.greeted("/chat")
    busy.say("hi")
    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(
            client.post(f"{house.http}/v1/chat/completions", json={**ASK, "stream": True})
        )
        await house.runs(2)
        house.generator.release(2)
        stopping = await stop(house)
        assert await busy.close_code() == 1012
        *_, last = (await asking).text.strip().split("\n\n")
    assert '"server_draining"' in last
    await asyncio.wait_for(stopping, 10)


async def test_a_second_signal_is_quick(serve):
    """The drain is cut short; everyone is still told."""
    house = await serve(generator=FakeGenerator("a", is_held=True), drain_s=600)
    busy = await house.greeted("/chat")
    busy.say("hi")
    await house.runs()
    stopping = await stop(house)
    house.server.handle_exit(signal.SIGTERM, None)
    assert await busy.close_code() == 1012
    await asyncio.wait_for(stopping, 10)


async def test_a_client_that_never_closes_is_not_waited_for(serve):
    """Its transport is cut; the server is gone in seconds."""
    house = await serve(drain_s=10)
    deaf = await house.greeted(receive_bytes=4096)
    stopping = await stop(house)
    await asyncio.wait_for(stopping, 10)
    assert not house.server.server_state.connections
    assert '"server_draining"' in await deaf.text()
