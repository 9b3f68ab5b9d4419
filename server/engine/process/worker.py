# SPDX-License-Identifier: Apache-2.0
"""The engine's OS process: one thread that reads commands, computes a step, sends what came out, again.

Invariant: a gateway that is slow, gone or talks nonsense never stops the others. Requests of a gateway that
has been silent for `GATEWAY_SILENCE_S` are cancelled; a gateway whose queue is full loses the message, sees
no further output, and submits again after it has noticed. It must never outlive the gateway that started it.
"""

import ctypes
import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import zmq

from server.core.errors import ServerError
from server.engine.admission import SchedulerLimits
from server.engine.compute.runner import Runner
from server.engine.loop import EngineLoop
from server.engine.process.messages import (
    VERSION,
    Cancel,
    Heartbeat,
    Hello,
    Message,
    MessageFault,
    Outputs,
    Ready,
    Refused,
    Submit,
    decode,
    encode,
)
from server.engine.scheduler import Scheduler
from server.engine.sequence import StepOutput
from server.models.package import ModelPackage

HEARTBEAT_S = 0.2
IDLE_MS = 500
GATEWAY_SILENCE_S = 15.0
QUEUE_MESSAGES_MAX = 10_000
COMMANDS_A_STEP_MAX = 256  # a flood of commands must not keep a step from being computed
PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Gateway:
    """One peer: when it last spoke, and its requests that have not ended."""

    heard_at: float
    requests: set[str] = field(default_factory=set)


class Worker:
    """The process's sockets and its loop.

    Args:
        loop: what computes.
        ready: what a gateway is told; its `engine_id` must be new.
        socket: a bound ROUTER.
        clock: seconds.
    """

    def __init__(
        self,
        loop: EngineLoop,
        ready: Ready,
        socket: "zmq.Socket[bytes]",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._loop = loop
        self._ready = ready
        self._socket = socket
        self._clock = clock
        self._gateways: dict[bytes, _Gateway] = {}
        self._owners: dict[str, bytes] = {}
        self._beaten_at = 0.0
        self.is_stopping = False

    def run(self) -> None:
        """Turn until `is_stopping`."""
        while not self.is_stopping:
            self.turn(IDLE_MS)

    def turn(self, wait_ms: int) -> None:
        """One pass: read commands (waiting only when there is no work), compute a step, send."""
        if self._loop.has_work or self._socket.poll(wait_ms):
            self._read()
        self._deliver(self._loop.step() if self._loop.has_work else [])
        now = self._clock()
        if now - self._beaten_at >= HEARTBEAT_S:
            self._beaten_at = now
            self._beat(now)

    def _read(self) -> None:
        for _ in range(COMMANDS_A_STEP_MAX):
            try:
                peer, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:  # not two frames: no gateway of ours
                continue
            try:
                self._handle(peer, decode(data))
            except MessageFault as fault:
                _log.warning("gateway_message_unreadable", extra={"reason": str(fault)})

    def _handle(self, peer: bytes, message: Message) -> None:
        gateway = self._gateways.get(peer)
        match message:
            case Hello():
                if gateway is None or message.is_new:
                    self._send(peer, self._ready)
                if message.version == VERSION:
                    self._gateways.setdefault(peer, _Gateway(0.0)).heard_at = self._clock()
            case Submit() if gateway is not None:
                self._submit(peer, gateway, message)
            case Cancel() if gateway is not None and self._owners.get(message.request_id) == peer:
                self._loop.cancel(message.request_id)
            case _:
                pass  # from a gateway that has not greeted, or a request that has ended

    def _submit(self, peer: bytes, gateway: _Gateway, message: Submit) -> None:
        request_id = message.submission.request_id
        if self._owners.get(request_id) == peer:
            return  # sent again by a gateway that greeted while we had it already
        try:
            self._loop.submit(message.submission)
        except ServerError as error:
            self._send(
                peer,
                Refused(
                    request_id=request_id,
                    code=error.code,
                    message=error.message,
                    param=error.param,
                    retry_after_ms=error.retry_after_ms,
                ),
            )
            return
        self._owners[request_id] = peer
        gateway.requests.add(request_id)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """One message a gateway and step."""
        batches: dict[bytes, list[StepOutput]] = {}
        for output in outputs:
            peer = self._owners.get(output.request_id)
            if peer is None:
                continue
            batches.setdefault(peer, []).append(output)
            if output.reason is not None:
                del self._owners[output.request_id]
                self._gateways[peer].requests.discard(output.request_id)
        for peer, batch in batches.items():
            self._send(peer, Outputs(outputs=tuple(batch)))

    def _beat(self, now: float) -> None:
        beat = self._heartbeat()
        for peer, gateway in list(self._gateways.items()):
            if now - gateway.heard_at > GATEWAY_SILENCE_S:
                self._forget(peer)
            else:
                self._send(peer, beat)

    def _forget(self, peer: bytes) -> None:
        gateway = self._gateways.pop(peer)
        _log.warning("gateway_lost", extra={"num_requests": len(gateway.requests)})
        for request_id in gateway.requests:
            self._owners.pop(request_id, None)
            self._loop.cancel(request_id)

    def _heartbeat(self) -> Heartbeat:
        now = self._loop.snapshot()
        return Heartbeat(
            engine_id=self._ready.engine_id,
            num_steps=now.num_steps,
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            num_waiting_tokens=now.num_waiting_tokens,
            num_free_slots=now.num_free_slots,
            num_prompt_tokens=now.num_prompt_tokens,
            num_output_tokens=now.num_output_tokens,
            num_failed_forwards=now.num_failed_forwards,
            num_fault_rows=now.num_fault_rows,
            resident_bytes=_resident_bytes(),
        )

    def _send(self, peer: bytes, message: Message) -> None:
        """Send or drop: a gateway that is gone or far behind must not hold the others up."""
        with suppress(zmq.Again, zmq.ZMQError):
            self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)


def run_worker(
    *,
    package_path: Path,
    listen: str,
    engine_id: str,
    limits: SchedulerLimits,
    num_threads: int,
    can_spin: bool,
    dies_with_parent: bool,
) -> int:
    """Load the model, listen at `listen` and serve until SIGTERM; returns the exit status.

    `dies_with_parent` is for the engine that a gateway started for itself.

    Raises:
        PackageError: the package is missing or damaged.
        zmq.ZMQError: the address cannot be bound.
    """
    if dies_with_parent:
        _die_with_parent()
    package = ModelPackage.load(package_path)
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    runner = Runner(
        package,
        num_slots=limits.max_num_seqs,
        max_len=limits.max_model_len,
        num_threads=num_threads,
        can_spin=can_spin,
    )
    runner.warm()
    _bind(socket, listen)
    ready = Ready(
        engine_id=engine_id,
        version=VERSION,
        model_id=package.manifest.model_id,
        quantization=package.manifest.quantization,
        fingerprint=package.manifest.fingerprint,
        max_model_len=limits.max_model_len,
        num_slots=limits.max_num_seqs,
    )
    worker = Worker(EngineLoop(runner, Scheduler(limits)), ready, socket)

    def stop(_signal: int, _frame: object) -> None:
        worker.is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _log.info("engine_ready", extra={"engine_id": engine_id, "model": package.manifest.model_id})
    gc.freeze()  # what is loaded stays: full collections need not walk it
    worker.run()
    socket.close()
    context.term()
    return 0


def _bind(socket: "zmq.Socket[bytes]", listen: str) -> None:
    """Bind, and keep other users of the machine away from a socket file."""
    old_mask = os.umask(0o177)
    try:
        socket.bind(listen)
    finally:
        os.umask(old_mask)


def _die_with_parent() -> None:
    """Linux: get SIGTERM when the process that started this one ends, however it ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
