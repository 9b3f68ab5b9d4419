# SPDX-License-Identifier: Apache-2.0
"""A whole gateway on a loopback port, in the test's own loop, with a generator that recites."""

import asyncio
import contextlib
import random
import socket

import pytest
import uvloop

from server.core.config import Config, ServerConfig
from server.gateway.app import build_app
from server.gateway.drain import Drain
from server.gateway.listener import GatewayServer, ListenConfig
from tests.conformance.raw import RawSocket
from tests.fakes import FakeGenerator

HERE = "127.0.0.1"


def pytest_asyncio_loop_factories(config, item):
    """These tests run on the loop that serves in production."""
    return {"uvloop": uvloop.new_event_loop}


class House:
    """A running gateway: where it listens, what answers in it, and what it holds."""

    def __init__(self, generator, port, drain, server):
        self.generator, self.port, self.drain, self.server = generator, port, drain, server
        self.http, self.ws = f"http://{HERE}:{port}", f"ws://{HERE}:{port}"
        self.peers = []

    async def peer(self, path="/v1/realtime", **more):
        """Open a socket by hand; it is cut at the end of the test."""
        peer = await RawSocket.open(self.port, path, **more)
        self.peers.append(peer)
        return peer

    async def greeted(self, path="/v1/realtime", **more):
        """Open a socket and read its greeting."""
        peer = await self.peer(path, **more)
        assert peer.status == 101
        assert await peer.text()
        if path == "/chat":
            assert await peer.text() == ""
        return peer

    async def connection(self, **more):
        """Open only a TCP connection."""
        peer = await RawSocket.connect(self.port, **more)
        self.peers.append(peer)
        return peer

    async def until(self, is_so):
        """Wait for what no event of ours tells; the test fails if it does not come."""
        async with asyncio.timeout(5):
            while not is_so():  # noqa: ASYNC110 - said above
                await asyncio.sleep(0.002)

    async def runs(self, count=1):
        """Wait until so many answers are being made."""
        await self.until(lambda: len(self.generator.running) >= count)

    async def settles(self):
        """Wait until nobody is here and nothing runs."""
        await self.until(lambda: not (self.generator.running or self.drain.num_members))


@pytest.fixture
async def serve():
    """Start gateways that recite: pieces of text, then settings by name. All stop at the end, leak-free."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*steps, generator=None, drain_s=1.0, **settings):
            recites = generator or FakeGenerator(*steps)
            return await stack.enter_async_context(_house(recites, drain_s, settings))

        yield start


@contextlib.asynccontextmanager
async def _house(generator, drain_s, settings):
    config = Config(server=ServerConfig(**({"allowed_origins": ("https://shop.example",)} | settings)))
    drain = Drain(deadline_s=drain_s, rng=random.Random(1))
    app = build_app(config, generator, drain=drain)
    listener = socket.create_server((HERE, 0))
    listening = ListenConfig(app, config.server)
    server = GatewayServer(listening, on_stop=drain.begin, drain=drain.run)
    # By hand what `run` does, less its signals, which belong to pytest, and its pace of ten looks a second.
    listening.load()
    server.lifespan = listening.lifespan_class(listening)
    await server.startup(sockets=[listener])
    house = House(generator, listener.getsockname()[1], drain, server)
    try:
        yield house
    finally:
        for peer in house.peers:
            peer.cut()
        await asyncio.wait_for(server.shutdown(sockets=[listener]), drain_s + 15)
    assert not generator.running
    assert not server.server_state.connections
    assert not server.server_state.tasks
