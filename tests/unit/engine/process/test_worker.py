# SPDX-License-Identifier: Apache-2.0
"""The worker: many gateways, one loop; whoever is slow, gone or wrong loses what is theirs and nothing else."""

import os
import stat
import subprocess
import sys

import pytest
import zmq

from server.core.clock import ManualClock
from server.core.types import FinishReason
from server.engine.admission import SchedulerLimits
from server.engine.loop import EngineLoop
from server.engine.process import worker as module
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
    decode,
    encode,
)
from server.engine.process.worker import GATEWAY_SILENCE_S, HEARTBEAT_S, Worker, bind, open_socket
from server.engine.scheduler import Scheduler
from server.engine.sequence import Submission, TokenParams
from tests.fakes import FakeRunner

READY = Ready(
    epoch=0,
    engine_id="e1",
    model_id="m",
    quantization="fp32",
    fingerprint="fp_1",
    max_model_len=64,
    num_slots=2,
)
LIMITS = SchedulerLimits(
    max_num_seqs=2, max_model_len=64, max_num_batched_tokens=18, prefill_chunk_tokens=16, queue_max=2,
    queue_tokens_max=256,
)  # fmt: skip


class House:
    """A worker over a model without arithmetic, and its gateways, in one process on one clock."""

    def __init__(self, queue_max=1000):
        self.clock = ManualClock()
        self.context = zmq.Context()
        self.socket = open_socket(self.context)
        self.socket.setsockopt(zmq.SNDHWM, queue_max)
        self.socket.bind("inproc://engine")
        self.loop = EngineLoop(FakeRunner(num_slots=2), Scheduler(LIMITS), clock=self.clock.now)
        self.worker = Worker(self.loop, READY, self.socket, clock=self.clock.now)
        self.sockets = []

    def gateway(self, **options):
        return Gateway(self, **options)

    def turn(self, times=1):
        for _ in range(times):
            self.worker.turn(0)
            self.loop.check_integrity()

    def close(self):
        for each in (*self.sockets, self.socket):
            each.close(0)
        self.context.term()


class Gateway:
    """The other end: what it received stands in `heard`; `epoch` follows each Ready."""

    def __init__(self, house, **options):
        self.house, self.heard, self.epoch = house, [], 0
        self.socket = house.context.socket(zmq.DEALER)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect("inproc://engine")
        house.sockets.append(self.socket)

    def hello(self):
        self.say(Hello(epoch=self.epoch))
        self.house.turn()
        self.listen()
        return self

    def say(self, *messages):
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    def submit(self, request_id, seed=1, max_tokens=5, output_ids=(), epoch=None):
        params = TokenParams(
            temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=max_tokens, end_token_ids=()
        )
        submission = Submission(
            request_id=request_id, token_ids=(3, 4, 5), params=params, output_ids=output_ids
        )
        self.say(Submit(epoch=self.epoch if epoch is None else epoch, submission=submission))

    def listen(self):
        """Everything new."""
        new = []
        while self.socket.poll(0):
            new.append(decode(self.socket.recv()))
        for message in new:
            if isinstance(message, Ready):
                self.epoch = message.epoch
        self.heard += new
        return new

    def outputs(self, request_id):
        """Ids and reasons of one request."""
        self.listen()
        mine = [
            o for m in self.heard if isinstance(m, Outputs) for o in m.outputs if o.request_id == request_id
        ]
        return [token for output in mine for token in output.token_ids], [o.reason for o in mine if o.reason]

    def all_of(self, kind):
        self.listen()
        return [message for message in self.heard if isinstance(message, kind)]


@pytest.fixture
def house(request):
    house = House(getattr(request, "param", 1000))
    yield house
    house.close()


@pytest.fixture
def gateway(house):
    return house.gateway().hello()


def test_a_greeting_is_answered(house, gateway):
    """A new gateway is told who we are and its epoch; one that says this epoch is only heard."""
    (told,) = gateway.all_of(Ready)
    assert told.epoch > 0
    assert told.engine_id == "e1"
    gateway.hello()
    assert len(gateway.all_of(Ready)) == 1


def test_a_request_is_answered_step_by_step(house, gateway):
    """One Outputs message a step, the end once, and the row's slot is free again."""
    gateway.submit("r")
    house.turn(8)
    tokens, reasons = gateway.outputs("r")
    assert len(tokens) == 5
    assert reasons == [FinishReason.LENGTH]
    assert len(gateway.all_of(Outputs)) == 5
    assert house.loop.snapshot().num_free_slots == 2
    assert gateway.all_of(Outputs)[0].epoch == gateway.epoch


def test_gateways_share_nothing(house):
    """Two gateways with the same id for different requests each get their own, one message a step each."""
    one, two = house.gateway().hello(), house.gateway().hello()
    one.submit("r", seed=1)
    two.submit("r", seed=2)
    house.turn(8)
    assert one.outputs("r")[0] != two.outputs("r")[0]
    assert (len(one.outputs("r")[0]), len(two.outputs("r")[0])) == (5, 5)
    one.say(Cancel(epoch=two.epoch, request_id="r"))
    assert one.epoch != two.epoch


def test_a_cancelled_request_is_silent(house, gateway):
    """After a Cancel nothing more comes, the slot is free, and its id can be used at once."""
    gateway.submit("r", max_tokens=50)
    house.turn(3)
    num_before = len(gateway.outputs("r")[0])
    gateway.say(Cancel(epoch=gateway.epoch, request_id="r"))
    gateway.submit("r", seed=9, max_tokens=2)
    gateway.say(Cancel(epoch=gateway.epoch, request_id="unknown"))
    house.turn(6)
    tokens, reasons = gateway.outputs("r")
    assert len(tokens) == num_before + 2
    assert reasons == [FinishReason.LENGTH]
    assert house.loop.snapshot().num_free_slots == 2


@pytest.mark.parametrize("num_known", [0, 1, 3])
def test_the_same_text_after_a_new_greeting(house, gateway, num_known):
    """A gateway that greets anew and submits with the ids it has gets the rest of the very same text."""
    gateway.submit("r", max_tokens=8)
    house.turn(12)
    whole, _ = gateway.outputs("r")
    again = house.gateway().hello()
    again.submit("r", max_tokens=8, output_ids=tuple(whole[:num_known]))
    house.turn(12)
    assert again.outputs("r")[0] == whole[num_known:]


def test_a_new_epoch_begins_empty(house, gateway):
    """A gateway that lost track and asks anew holds nothing here; what the old epoch still says is dropped."""
    gateway.submit("r", max_tokens=50)
    house.turn(3)
    old = gateway.epoch
    gateway.say(Hello(epoch=0))
    house.turn()
    gateway.listen()
    assert gateway.epoch > old
    num_before = len(gateway.outputs("r")[0])
    gateway.submit("s", epoch=old)
    gateway.say(Cancel(epoch=old, request_id="r"))
    house.turn(3)
    assert gateway.outputs("s") == ([], [])
    assert len(gateway.outputs("r")[0]) == num_before
    assert house.loop.snapshot().num_free_slots == 2


def test_who_did_not_greet_is_not_served(house):
    """Without a greeting there is no epoch, and without an epoch no request."""
    stranger = house.gateway()
    stranger.submit("r", epoch=0)
    stranger.say(
        Cancel(epoch=0, request_id="r"),
        Heartbeat(**dict.fromkeys(Heartbeat.__dataclass_fields__, 0) | {"engine_id": "x"}),
    )
    house.turn(5)
    assert stranger.listen() == []
    assert not house.loop.has_work


def test_refusals_name_the_request(house, gateway):
    """A full queue, a prompt that is none and an id in use are refused with code and retry time."""
    for number in range(5):
        gateway.submit(f"r{number}", max_tokens=50)
    gateway.submit("r0")
    gateway.submit("bad", output_ids=(10**6,))
    house.turn()
    refusals = {each.request_id: each for each in gateway.all_of(Refused)}
    assert {name: each.code for name, each in refusals.items()} == {
        "r4": "queue_full", "r0": "invalid_value", "bad": "invalid_value",
    }  # fmt: skip
    assert refusals["r4"].retry_after_ms > 0
    assert refusals["r0"].param == "request_id"
    assert {each.epoch for each in refusals.values()} == {gateway.epoch}


def test_a_gateway_that_is_gone_is_noticed(house, gateway):
    """One whose socket is closed loses its rows at the next word to it; the others go on."""
    other = house.gateway().hello()
    gateway.submit("r", max_tokens=50)
    other.submit("s", max_tokens=20)
    house.turn(3)
    gateway.socket.close(0)
    house.turn(5)
    assert house.loop.snapshot().num_running == 1
    house.turn(20)
    assert len(other.outputs("s")[0]) == 20


def test_a_silent_gateway_is_given_up(house, gateway):
    """One that does not greet for a while loses its rows, though its socket is open; greeting, it is new."""
    gateway.submit("r", max_tokens=60)
    house.turn(2)
    house.clock.advance(GATEWAY_SILENCE_S + 0.1)
    house.turn(2)
    assert house.loop.snapshot().num_free_slots == 2
    old = gateway.epoch
    gateway.hello()
    assert gateway.epoch > old


@pytest.mark.parametrize("house", [2], indirect=True)
def test_a_slow_gateway_has_no_gap(house):
    """When its queue is full it loses everything from there on and is told of a new epoch: never a hole."""
    slow, other = house.gateway(RCVHWM=1).hello(), house.gateway(RCVHWM=1000).hello()
    slow.submit("r", max_tokens=40)
    other.submit("s", max_tokens=40)
    for _ in range(45):
        house.turn()
        other.listen()
    assert len(other.outputs("s")[0]) == 40
    old = slow.epoch
    got, reasons = slow.outputs("r")
    assert len(got) < 40
    assert reasons == []
    slow.hello()
    assert slow.epoch > old
    slow.submit("r", max_tokens=40, output_ids=tuple(got))
    for _ in range(45):
        house.turn()
        slow.listen()
    assert slow.outputs("r")[0] == other.outputs("s")[0]


def test_heartbeats_come_in_time(house, gateway):
    """Each gateway hears how the engine stands, at most every fifth of a second, working or idle."""
    gateway.submit("r", max_tokens=50)
    for _ in range(20):
        house.clock.advance(HEARTBEAT_S * 0.55)
        house.turn()
    beats = gateway.all_of(Heartbeat)
    assert 9 <= len(beats) <= 11
    assert beats[-1].num_running == 1
    assert beats[-1].num_steps > beats[0].num_steps
    assert beats[-1].resident_bytes > 1_000_000
    assert beats[-1].engine_id == "e1"


def test_nonsense_is_ignored(house, gateway, caplog):
    """Bytes that are no message, or no single one, change nothing and are logged."""
    gateway.say(b"", b"nonsense")
    gateway.socket.send_multipart([b"two", b"frames"])
    gateway.submit("r")
    house.turn(6)
    assert len(gateway.outputs("r")[0]) == 5
    assert [record.message for record in caplog.records] == ["gateway_message_unreadable"] * 2


def test_another_release_is_told_ours(house, caplog, monkeypatch):
    """A gateway of another version gets one message of ours, by which it learns; the log says it once."""
    stranger = house.gateway()
    with monkeypatch.context() as patch:
        patch.setattr("server.engine.process.messages.VERSION", VERSION + 1)
        stranger.say(Hello(epoch=0), Hello(epoch=0))
    house.turn()
    with monkeypatch.context() as patch:
        patch.setattr("server.engine.process.messages.VERSION", VERSION + 1)
        with pytest.raises(MessageFault) as caught:
            stranger.listen()
    assert caught.value.version == VERSION
    assert len(caplog.records) == 1


def test_a_flood_of_commands_does_not_stop_the_steps(house, gateway, monkeypatch):
    """Between two steps only so many commands are read."""
    monkeypatch.setattr(module, "COMMANDS_A_STEP_MAX", 10)
    gateway.submit("r", max_tokens=50)
    house.turn(2)
    num_before = len(gateway.outputs("r")[0])
    for _ in range(95):
        gateway.say(Cancel(epoch=gateway.epoch, request_id="x"))
    house.turn(5)
    assert len(gateway.outputs("r")[0]) == num_before + 5


def test_the_end_of_the_parent_is_ours(house):
    """When the file that ties us to the process that started us comes to its end, we stop."""
    here, there = os.pipe()
    worker = Worker(house.loop, READY, house.socket, parent=here, clock=house.clock.now)
    worker.turn(0)
    assert not worker.is_stopping
    os.close(there)
    worker.run()
    assert worker.is_stopping
    os.close(here)


def test_a_socket_file_is_private(house, tmp_path):
    """Only our own user may connect."""
    socket = open_socket(house.context)
    bind(socket, f"ipc://{tmp_path}/e")
    assert stat.S_IMODE((tmp_path / "e").stat().st_mode) == 0o600
    socket.close(0)


@pytest.mark.parametrize(
    "listen", ["tcp://0.0.0.0:5999", "tcp://*:5999", "tcp://192.0.2.1:5999", "tcp://[::]:5999"]
)
def test_a_network_is_not_listened_on(house, listen):
    """Nobody is asked who they are, so only this machine can reach us."""
    socket = open_socket(house.context)
    with pytest.raises(zmq.ZMQError, match="not on a network"):
        bind(socket, listen)
    socket.close(0)


def test_loopback_is(house):
    """A port on this machine is fine."""
    socket = open_socket(house.context)
    bind(socket, "tcp://127.0.0.1:*")
    socket.close(0)


def test_the_tie_is_a_pipe():
    """Our standard input counts when it is a pipe, and not when it is a terminal or a file."""
    code = "from server.engine.process.worker import _tie_to_parent as tie; print(tie())"
    piped = subprocess.run([sys.executable, "-c", code], input=b"", capture_output=True, check=True)
    file = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    assert (piped.stdout, file.stdout) == (b"0\n", b"None\n")
