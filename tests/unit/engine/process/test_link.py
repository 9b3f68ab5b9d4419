# SPDX-License-Identifier: Apache-2.0
"""The link: in order, without waiting, and deaf to nothing."""

import asyncio
import logging

import pytest
import zmq

from server.engine.process import link as link_module
from server.engine.process.link import Link
from server.engine.process.messages import Cancel, Hello, decode, encode

WAIT_MS = 5000


class Engine:
    """A ROUTER that a test drives by hand; it waits in a thread, so the loop goes on."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.socket.bind(address)
        self.peer = None

    async def receive(self):
        self.peer, data = await asyncio.to_thread(self.socket.recv_multipart)
        return decode(data)

    def send(self, *messages):
        for message in messages:
            data = message if isinstance(message, bytes) else encode(message)
            self.socket.send_multipart([self.peer, data])

    def close(self):
        self.socket.close()
        self.context.term()


class Ear:
    """What a link heard."""

    def __init__(self):
        self.heard, self.faults, self.news = [], [], asyncio.Event()

    def receive(self, message):
        self.heard.append(message)
        self.news.set()

    def fault(self, fault):
        self.faults.append(fault)
        self.news.set()

    async def wait_for(self, num_heard, num_faults=0):
        async with asyncio.timeout(WAIT_MS / 1000):
            while len(self.heard) < num_heard or len(self.faults) < num_faults:
                self.news.clear()
                await self.news.wait()


async def said(link, message):
    """Send as soon as the connection stands, a moment after the bind."""
    while not link.send(message):  # noqa: ASYNC110 - ZeroMQ tells nobody when it stands
        await asyncio.sleep(0)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e"


@pytest.fixture
async def ear():
    return Ear()


@pytest.fixture
async def link(address, ear):
    link = Link(address, ear.receive, ear.fault)
    yield link
    link.close()


@pytest.fixture
async def engine(address, link):
    engine = Engine(address)
    await said(link, Hello(epoch=0))
    assert await engine.receive() == Hello(epoch=0)
    yield engine
    engine.close()


async def test_messages_cross_in_order(engine, link, ear, monkeypatch):
    """Hundreds each way, more than a pass takes, arrive as they were sent."""
    monkeypatch.setattr(link_module, "MESSAGES_A_PASS_MAX", 7)
    many = [Cancel(epoch=0, request_id=str(number)) for number in range(300)]
    assert all(link.send(message) for message in many)
    assert [await engine.receive() for _ in many] == many
    engine.send(*many)
    await ear.wait_for(len(many))
    assert ear.heard == many


async def test_sending_hides_nothing_that_comes(engine, link, ear):
    """Messages that come while we send are not left waiting for the next one: each is taken without another."""
    for number in range(100):
        engine.send(Hello(epoch=number))
        link.send(Hello(epoch=number))
        await ear.wait_for(number + 1)


async def test_nobody_there_is_said(link):
    """Without an engine a message is not queued for whoever comes: `send` says no."""
    assert not link.send(Hello(epoch=0))


async def test_another_engine_at_the_address_is_found(engine, address, link, ear):
    """When the engine dies and another one listens there, the link reaches it."""
    engine.close()
    second = Engine(address)
    await said(link, Hello(epoch=7))
    assert await second.receive() == Hello(epoch=7)
    second.send(Hello(epoch=8))
    await ear.wait_for(1)
    second.close()


async def test_a_fault_stops_nothing(engine, link, ear, caplog):
    """Bytes that are no message are reported; a receiver that fails is logged without words; both go on."""

    def receive(message):
        ear.receive(message)
        if message.epoch == 1:
            raise RuntimeError("a bug")

    link._receive = receive
    caplog.set_level(logging.ERROR)
    engine.send(b"nonsense", Hello(epoch=1), Hello(epoch=2))
    await ear.wait_for(2, 1)
    assert [fault.version for fault in ear.faults] == [None]
    assert [record.message for record in caplog.records] == ["engine_message_failed"]


async def test_closing_is_final(engine, link, ear):
    """A closed link, also one closed by who received a message, sends and takes nothing more."""
    link._receive = lambda message: (ear.receive(message), link.close())
    engine.send(Hello(epoch=1), Hello(epoch=2))
    await ear.wait_for(1)
    assert not link.send(Hello(epoch=3))
    link.close()
    await asyncio.sleep(0)
    assert ear.heard == [Hello(epoch=1)]
