# SPDX-License-Identifier: Apache-2.0
"""The shell performs what the session decides, and leaves nothing running."""

import asyncio
import itertools
import json

import pytest

from server.core.errors import CLOSE_DONE, CLOSE_RESTART, CLOSE_SERVER_ERROR, CLOSE_SLOW, error_of
from server.core.events import (
    CancelResponse,
    Delta,
    DescribeSession,
    Failed,
    RetrieveItem,
    Say,
    SessionCreated,
    SessionSettings,
    StartResponse,
    TurnFinished,
    TurnStarted,
)
from server.core.types import FinishReason
from server.gateway.session.conversation import SessionLimits
from server.gateway.session.live import LiveSession
from server.gateway.session.session import Session
from server.wire.frames import DecodeFault
from server.wire.realtime.codec import RealtimeCodec
from tests.data.realtime_order import RealtimeOrder
from tests.fakes import FakeGenerator


def ids():
    numbers = itertools.count()
    return lambda prefix: f"{prefix}_{next(numbers)}"


class Client:
    """A live session with its socket played by hand; `seen` is everything taken."""

    def __init__(self, generator, *, limits=None, **options):
        session = Session(
            session_id="sess_1", settings=SessionSettings(model="m"), new_id=ids(), model_ids=("m",),
            limits=limits or SessionLimits(),
        )  # fmt: skip
        self.generator = generator
        self.live = LiveSession(session, generator, **options)
        self.seen = []

    async def __aenter__(self):
        self.live.start()
        return self

    async def __aexit__(self, *_):
        await self.live.close()
        self.live.check_integrity()
        assert not self.generator.running
        assert 0 == self.live.snapshot().num_tasks

    async def until(self, kind):
        """Take events until one of a kind has come; return it."""
        while True:
            events = await self.live.take()
            assert events, f"the session ended before a {kind.__name__}"
            self.live.check_integrity()
            self.seen += events
            for event in events:
                if isinstance(event, kind):
                    return event


async def test_a_said_line_is_answered_to_its_end():
    """Greeting, item, start, text, end: in this order, whole."""
    async with Client(FakeGenerator("Hel", "lo"), tenant="acme") as client:
        client.live.receive(Say(text="hi"))
        end = await client.until(TurnFinished)
        assert (FinishReason.STOP, "Hello") == (end.reason, end.text)
        assert SessionCreated is type(client.seen[0])
        assert "Hello" == "".join(event.text for event in client.seen if isinstance(event, Delta))
        assert ("sess_1", "acme") == (client.live.session_id, client.generator.requests[0].tenant)
        await client.live.wait_idle()


async def test_pieces_merge_while_nobody_reads():
    """The client that was away gets them as one; an awake one gets each."""
    generator = FakeGenerator("a", "b", "c", is_held=True)
    async with Client(generator) as client:
        client.live.receive(StartResponse())
        await client.until(TurnStarted)
        generator.release()
        assert "a" == (await client.until(Delta)).text
        generator.release(3)
        await client.live.wait_idle()
        assert "bc" == (await client.until(Delta)).text


async def test_a_refused_message_is_answered_in_order():
    """As an error with the client's own event_id."""
    async with Client(FakeGenerator()) as client:
        client.live.refuse(error_of("invalid_json", "not valid JSON"), "mine")
        failed = await client.until(Failed)
        assert ("invalid_json", "mine") == (failed.error.code, failed.event_id)


async def test_cancel_in_the_same_breath_as_create():
    """Exactly one end, cancelled, whatever the generator had begun."""
    generator = FakeGenerator("a", is_held=True)
    async with Client(generator) as client:
        client.live.receive(StartResponse())
        client.live.receive(CancelResponse())
        assert FinishReason.CANCELLED is (await client.until(TurnFinished)).reason
        client.live.receive(StartResponse())
        await client.until(TurnStarted)


async def test_cancel_mid_way_keeps_the_text_so_far():
    """And the next turn may start right after its end."""
    generator = FakeGenerator("a", "b", is_held=True)
    async with Client(generator) as client:
        client.live.receive(StartResponse())
        generator.release()
        await client.until(Delta)
        client.live.receive(CancelResponse())
        end = await client.until(TurnFinished)
        assert (FinishReason.CANCELLED, "a") == (end.reason, end.text)


async def test_closing_ends_every_turn_and_every_wait():
    """A socket that breaks leaves nothing behind, and close may come twice."""
    generator = FakeGenerator("a", is_held=True)
    async with Client(generator) as client:
        for is_out_of_band in (False, True):
            client.live.receive(StartResponse(is_out_of_band=is_out_of_band))
        await generator.has_started.wait()
        await client.until(TurnStarted)
        taking = asyncio.create_task(client.live.take())
        await asyncio.sleep(0)
        await client.live.close()
        assert [] == await taking
        client.live.receive(Say(text="too late"))
        client.live.refuse(error_of("invalid_json", "too late"), None)
        assert [] == await client.live.take()
        await client.live.wait_idle()


async def test_closing_before_a_turns_first_step_closes_it_too():
    """A task that never ran is gone as well."""
    async with Client(FakeGenerator("a")) as client:
        client.live.receive(StartResponse())
        await client.live.close()
        assert [] == client.generator.requests


async def test_an_end_lets_what_waits_be_sent():
    """The first reason stays."""
    async with Client(FakeGenerator()) as client:
        client.live.end(CLOSE_RESTART)
        client.live.end(CLOSE_DONE)
        assert [SessionCreated] == [type(event) for event in await client.live.take()]
        assert [] == await client.live.take()
        assert CLOSE_RESTART == client.live.close_reason == await client.live.wait_close()


async def test_draining_refuses_new_turns_and_waits_for_old_ones():
    """`wait_idle` is the drain's own wait."""
    generator = FakeGenerator("a", is_held=True)
    async with Client(generator) as client:
        client.live.receive(StartResponse())
        client.live.begin_drain()
        client.live.receive(StartResponse(is_out_of_band=True))
        assert "server_draining" == (await client.until(Failed)).error.code
        waiting = asyncio.create_task(client.live.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        generator.release(9)
        await waiting


async def test_a_client_that_only_asks_is_closed_without_delay():
    """What waited is dropped, its turns are stopped, and its writer is told."""
    generator = FakeGenerator("a", is_held=True)
    async with Client(generator, outbox_bytes_max=4_000) as client:
        client.live.receive(StartResponse())
        for _ in range(20):
            client.live.receive(DescribeSession())
        assert CLOSE_SLOW == await client.live.wait_close()
        assert [] == await client.live.take()
        await client.live.wait_idle()
        assert 0 == client.live.snapshot().outbox_bytes


async def test_a_slow_client_is_closed_by_the_timer():
    """Over its bound for longer than the limit allows."""
    async with Client(FakeGenerator(), outbox_bytes_max=1_000, limits=SessionLimits(slow_s_max=0.0)) as client:
        client.live.receive(DescribeSession())
        assert CLOSE_SLOW == await client.live.wait_close()


async def test_a_client_that_catches_up_stays():
    """The timer is put away."""
    async with Client(FakeGenerator(), outbox_bytes_max=1_000, limits=SessionLimits(slow_s_max=0.01)) as client:
        client.live.receive(DescribeSession())
        await client.live.take()
        client.live.receive(RetrieveItem(item_id="nobody"))
        await client.until(Failed)
        assert client.live.close_reason is None
        assert client.live._timer is None


async def test_closing_puts_the_timer_away():
    """Nothing of a session is left on the loop."""
    async with Client(FakeGenerator(), outbox_bytes_max=1_000) as client:
        client.live.receive(DescribeSession())
        assert client.live._timer is not None
        await client.live.close()
        assert client.live._timer is None


async def test_a_mistake_of_ours_ends_this_socket_alone(monkeypatch):
    """The client is told to come back."""
    async with Client(FakeGenerator("a")) as client:
        client.live.receive(StartResponse())

        def broken(*_):
            raise AssertionError

        monkeypatch.setattr(Session, "handle_turn", broken)
        assert CLOSE_SERVER_ERROR == await client.live.wait_close()


class RealtimeClient(Client):
    """The same over the Realtime codec, with every frame checked."""

    def __init__(self, generator):
        super().__init__(generator)
        self.codec, self.order, self.frames = RealtimeCodec(ids()), RealtimeOrder(), []

    def send(self, *messages):
        for message in messages:
            data = message if isinstance(message, str | bytes) else json.dumps(message)
            try:
                for command in self.codec.decode(data):
                    self.live.receive(command)
            except DecodeFault as fault:
                self.live.refuse(fault.error, fault.event_id)

    async def read(self, kind):
        """Read frames until one of a type has come."""
        while True:
            new = [json.loads(text) for event in await self.live.take() for text in self.codec.encode(event)]
            for frame in new:
                self.order.feed(frame)
            self.frames += new
            found = [frame for frame in new if frame["type"] == kind]
            if found:
                return found[-1]


def create(event_id="create"):
    return {"type": "response.create", "event_id": event_id}


def cancel(event_id="cancel", **more):
    return {"type": "response.cancel", "event_id": event_id, **more}


@pytest.mark.parametrize(
    ("messages", "codes", "statuses"),
    [
        ([cancel()], ["response_cancel_not_active"], []),
        ([create(), cancel()], [], ["cancelled"]),
        ([create(), cancel(), cancel()], ["response_cancel_not_active"], ["cancelled"]),
        ([create(), cancel(response_id="resp_x")], ["response_cancel_not_active"], ["completed"]),
        ([create(), create()], ["conversation_already_has_active_response"], ["completed"]),
        ([create(), b"\x00"], ["invalid_event"], ["completed"]),
        ([create(), {"type": "session.dance"}], ["invalid_value"], ["completed"]),
        ([create(), {"event_id": "x"}], ["missing_required_parameter"], ["completed"]),
        ([create(), "[" * 9_000], ["invalid_json"], ["completed"]),
        ([create(), {"type": "input_audio_buffer.commit"}], ["unsupported_modality"], ["completed"]),
    ],
)
async def test_a_harmless_fault_never_ends_a_session(messages, codes, statuses):
    """Errors are events with the client's event_id; every response ends once, and the next one works."""
    async with RealtimeClient(FakeGenerator("Hel", "lo")) as client:
        client.send(*messages)
        await client.live.wait_idle()
        client.send(create("last"))
        await client.live.wait_idle()
        client.live.end(CLOSE_DONE)
        while client.live.snapshot().num_waiting_events:
            await client.read("response.done")
        client.order.finish()
        errors = [frame["error"] for frame in client.frames if frame["type"] == "error"]
        assert codes == [error["code"] for error in errors]
        sent = [m.get("event_id") for m in messages if isinstance(m, dict)]
        assert all(error["event_id"] in [*sent, None] for error in errors)
        assert [*statuses, "completed"] == list(client.order.statuses.values())


async def test_cancel_in_the_same_moment_as_done():
    """Either it was too late, or the response is cancelled: never both, never neither."""
    for num_steps in range(12):
        async with RealtimeClient(FakeGenerator("a")) as client:
            client.send(create())
            for _ in range(num_steps):
                await asyncio.sleep(0)
            client.send(cancel())
            await client.live.wait_idle()
            client.live.end(CLOSE_DONE)
            while client.live.snapshot().num_waiting_events:
                await client.read("response.done")
            client.order.finish()
            (status,) = client.order.statuses.values()
            errors = [frame for frame in client.frames if frame["type"] == "error"]
            assert (status, len(errors)) in {("cancelled", 0), ("completed", 1)}
