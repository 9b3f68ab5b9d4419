# SPDX-License-Identifier: Apache-2.0
"""The connection: ready or not, and why; what an epoch that is over says is not heard."""

import pytest

from server.core.clock import ManualClock
from server.engine.process import connection as module
from server.engine.process.connection import TICK_S, Connection
from server.engine.process.messages import (
    VERSION,
    Cancel,
    Heartbeat,
    Hello,
    MessageFault,
    Outputs,
    Ready,
    Refused,
    Submit,
)
from server.engine.sequence import Submission, TokenParams

PARAMS = TokenParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=1, max_tokens=5, end_token_ids=())
SUBMISSION = Submission(request_id="r", token_ids=(1,), params=PARAMS)


class FakeLink:
    """Where messages go: `sent`; the test speaks by `receive` and `fault`."""

    def __init__(self, address, receive, fault):
        self.address, self.receive, self.fault = address, receive, fault
        self.sent, self.can_send, self.is_closed = [], True, False

    def send(self, message):
        if self.can_send:
            self.sent.append(message)
        return self.can_send

    def close(self):
        self.is_closed = True


class FakeSupervisor:
    """Counts signs of life; `end` is the death of the process."""

    def __init__(self):
        self.num_heard, self.end, self.is_closed = 0, None, False

    def start(self, on_end):
        self.end = on_end

    def heard(self):
        self.num_heard += 1

    async def close(self):
        self.is_closed = True


def ready(epoch=1, engine_id="e1", fingerprint="fp_1"):
    return Ready(
        epoch=epoch, engine_id=engine_id, model_id="m", quantization="w8a8", fingerprint=fingerprint,
        max_model_len=64, num_slots=2,
    )  # fmt: skip


def beat(engine_id="e1"):
    return Heartbeat(**dict.fromkeys(Heartbeat.__dataclass_fields__, 0) | {"engine_id": engine_id})


def refused(epoch):
    return Refused(epoch=epoch, request_id="r", code="queue_full", message="m", param=None, retry_after_ms=1)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def supervisor():
    return FakeSupervisor()


@pytest.fixture
def received():
    return []


@pytest.fixture
def connection(monkeypatch, clock, supervisor, received):
    monkeypatch.setattr(module, "Link", FakeLink)
    connection = Connection(
        "ipc:///e", "fp_1", received.append, supervisor=supervisor, hang_timeout_s=10, now=clock.now
    )
    connection.start()
    return connection


@pytest.fixture
def link(connection):
    return connection._link


def test_it_greets_until_it_is_answered(connection, link, received):
    """Each tick asks for a Ready; with one it says which epoch it is in, and requests can go."""
    connection.tick()
    assert connection.ready is None
    assert "starting" in connection.fault
    assert not connection.submit(SUBMISSION)
    link.receive(ready(epoch=5))
    connection.tick()
    assert connection.submit(SUBMISSION)
    connection.cancel("r")
    assert link.sent == [
        Hello(epoch=0), Hello(epoch=5), Submit(epoch=5, submission=SUBMISSION), Cancel(epoch=5, request_id="r")
    ]  # fmt: skip
    assert received == [ready(epoch=5)]


def test_only_the_epoch_is_heard(connection, link, supervisor, received):
    """Outputs and refusals of another epoch, and heartbeats of another engine, are not taken for news."""
    outputs = [Outputs(epoch=epoch, outputs=()) for epoch in (1, 2)]
    link.receive(outputs[0])
    link.receive(beat())
    assert (received, supervisor.num_heard) == ([], 0)
    link.receive(ready(epoch=2))
    for message in (*outputs, refused(1), refused(2), beat("e0"), beat(), Hello(epoch=2)):
        link.receive(message)
    assert received == [ready(epoch=2), outputs[1], refused(2)]
    assert supervisor.num_heard == 4
    assert connection.heartbeat == beat()


def test_a_full_or_missing_link_is_said(connection, link):
    """What the link does not take was not submitted."""
    link.receive(ready())
    link.can_send = False
    assert not connection.submit(SUBMISSION)
    connection.cancel("r")
    connection.tick()


def test_silence_is_noticed(connection, link, clock):
    """After the timeout without a word it is not ready, says since when, and asks anew."""
    link.receive(ready())
    for _ in range(45):
        clock.advance(TICK_S)
        connection.tick()
    assert connection.ready is None
    assert "does not answer" in connection.fault
    assert connection.lost_at == pytest.approx(10 + TICK_S)
    assert link.sent[-1] == Hello(epoch=0)
    link.receive(ready(epoch=2))
    assert connection.ready == ready(epoch=2)


def test_words_are_signs_of_life(connection, link, clock):
    """Anything of the epoch keeps it ready."""
    link.receive(ready())
    for number in range(100):
        clock.advance(TICK_S)
        link.receive((beat(), Outputs(epoch=1, outputs=()))[number % 2])
        connection.tick()
    assert connection.ready


def test_our_own_sleep_is_not_its_silence(connection, link, clock):
    """A gateway that stood still for a minute first hears what the engine said meanwhile."""
    link.receive(ready())
    clock.advance(60)
    connection.tick()
    assert connection.ready


def test_the_end_of_the_process_is_noticed_at_once(connection, link, supervisor, clock):
    """No timeout is waited for when the process is known to be gone."""
    link.receive(ready())
    link.receive(beat())
    clock.advance(1)
    supervisor.end()
    assert (connection.ready, connection.heartbeat, connection.lost_at) == (None, None, 1)
    assert "started again" in connection.fault
    clock.advance(1)
    supervisor.end()
    assert connection.lost_at == 1  # since the first time


def test_another_model_is_refused(connection, link, received, caplog):
    """An engine with another package is not used, is named in words, and once in the log."""
    for epoch in range(5):
        link.receive(ready(epoch=epoch, fingerprint="fp_2"))
    assert connection.ready is None
    assert received == []
    assert "fp_2" in connection.fault
    assert "fp_1" in connection.fault
    assert len(caplog.records) == 1
    link.receive(ready())
    link.receive(ready(epoch=2, engine_id="e2", fingerprint="fp_2"))
    assert connection.ready is None


def test_another_release_is_refused(connection, link, supervisor):
    """An engine of another version lives, but is not used; both versions are named."""
    link.receive(ready())
    link.fault(MessageFault("x", VERSION + 1))
    assert connection.ready is None
    assert f"version {VERSION + 1}" in connection.fault
    assert supervisor.num_heard == 2


def test_a_garbled_message_begins_anew(connection, link, received):
    """What cannot be read may have been tokens: everything is asked for again."""
    link.receive(ready())
    link.fault(MessageFault("not a message"))
    assert connection.ready is None
    connection.tick()
    assert link.sent[-1] == Hello(epoch=0)
    link.receive(ready(epoch=2))
    assert received[-1] == ready(epoch=2)


async def test_closing_closes_both(connection, link, supervisor):
    """Link and process are closed, in this order; one that never started closes too."""
    await connection.close()
    assert link.is_closed
    assert supervisor.is_closed
    alone = Connection("x", "fp_1", print, supervisor=None, hang_timeout_s=1, now=lambda: 0.0)
    assert not alone.submit(SUBMISSION)
    await alone.close()
