# SPDX-License-Identifier: Apache-2.0
"""The engine's OS process: one thread that reads commands, computes a step, sends what came out, again.

Invariant: a gateway that is slow, gone or talks nonsense never stops the others. A gateway that cannot be
reached, or was silent for `GATEWAY_SILENCE_S`, is forgotten with all its requests; should it live, it greets
again, is told of a new epoch and submits again. So what a gateway receives within one epoch has no gap. This
process must never outlive the gateway that started it.
"""

import ctypes
import errno
import gc
import logging
import os
import secrets
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import zmq

from server.core.errors import ServerError, error_of
from server.engine.admission import SchedulerLimits
from server.engine.compute.runner import Runner
from server.engine.loop import EngineLoop
from server.engine.process.messages import (
    MESSAGE_BYTES_MAX,
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
LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Gateway:
    """One peer: its epoch, when it last spoke, and its requests' names in the loop by their ids."""

    epoch: int
    heard_at: float
    names: dict[str, str] = field(default_factory=dict)


class Worker:
    """The process's sockets and its loop.

    Args:
        loop: what computes.
        ready: what a gateway is told; its `engine_id` must be new.
        socket: a bound ROUTER that says when a peer cannot be reached.
        parent: a file that becomes readable when the process must end, or None.
        clock: seconds.
    """

    def __init__(
        self,
        loop: EngineLoop,
        ready: Ready,
        socket: "zmq.Socket[bytes]",
        *,
        parent: int | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._loop = loop
        self._ready = ready
        self._socket = socket
        self._parent = parent
        self._clock = clock
        self._poller = zmq.Poller()
        for each in (socket, parent):
            if each is not None:
                self._poller.register(each, zmq.POLLIN)
        self._gateways: dict[bytes, _Gateway] = {}
        self._owners: dict[str, tuple[bytes, str]] = {}  # a name in the loop → its gateway and its own id there
        self._num_submitted = 0
        self._last_epoch = secrets.randbits(48)  # so that an earlier engine's epochs are not this one's
        self._odd_version: int | None = None
        self._beaten_at = 0.0
        self.is_stopping = False

    def run(self) -> None:
        """Turn until `is_stopping`."""
        while not self.is_stopping:
            self.turn(IDLE_MS)

    def turn(self, wait_ms: int) -> None:
        """One pass: read commands (waiting only when there is no work), compute a step, send."""
        events = dict(self._poller.poll(0 if self._loop.has_work else wait_ms))
        if self._parent in events:
            self.is_stopping = True
        if self._socket in events:
            self._read()
        if self._loop.has_work:
            self._deliver(self._loop.step())
        now = self._clock()
        if now - self._beaten_at >= HEARTBEAT_S:
            self._beaten_at = now
            self._beat(now)

    # ---- commands --------------------------------------------------------------------------------------

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
                self._misread(peer, fault)

    def _handle(self, peer: bytes, message: Message) -> None:
        gateway = self._gateways.get(peer)
        match message:
            case Hello():
                if gateway is None or message.epoch != gateway.epoch:
                    self._greet(peer)
                else:
                    gateway.heard_at = self._clock()
            case Submit() if gateway is not None and message.epoch == gateway.epoch:
                self._submit(peer, gateway, message)
            case Cancel() if gateway is not None and message.epoch == gateway.epoch:
                self._cancel(gateway, message.request_id)
            case _:
                pass  # of an epoch that is over

    def _greet(self, peer: bytes) -> None:
        """Begin a new epoch with this gateway: it has no requests here."""
        self._forget(peer, "greets anew")
        self._last_epoch += 1
        self._gateways[peer] = _Gateway(self._last_epoch, self._clock())
        self._send(peer, replace(self._ready, epoch=self._last_epoch))

    def _submit(self, peer: bytes, gateway: _Gateway, message: Submit) -> None:
        submission = message.submission
        if submission.request_id in gateway.names:
            in_use = error_of("invalid_value", "this request id is in use", param="request_id")
            self._refuse(peer, gateway, submission.request_id, in_use)
            return
        # A name of our own: two gateways may use one id, and an id may come back before its row has ended.
        self._num_submitted += 1
        name = str(self._num_submitted)
        try:
            self._loop.submit(replace(submission, request_id=name))
        except ServerError as error:
            self._refuse(peer, gateway, submission.request_id, error)
            return
        gateway.names[submission.request_id] = name
        self._owners[name] = peer, submission.request_id

    def _refuse(self, peer: bytes, gateway: _Gateway, request_id: str, error: ServerError) -> None:
        refusal = Refused(
            epoch=gateway.epoch,
            request_id=request_id,
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after_ms=error.retry_after_ms,
        )
        self._send(peer, refusal)

    def _cancel(self, gateway: _Gateway, request_id: str) -> None:
        """Drop a request: who cancelled it hears no more of it."""
        name = gateway.names.pop(request_id, None)
        if name is not None:
            del self._owners[name]
            self._loop.cancel(name)

    def _misread(self, peer: bytes, fault: MessageFault) -> None:
        """Bytes that are no message. A gateway of another release is told ours: any message of ours does."""
        if fault.version is not None:
            with suppress(zmq.ZMQError):
                self._socket.send_multipart([peer, encode(self._ready)], zmq.NOBLOCK)
            if fault.version == self._odd_version:
                return
            self._odd_version = fault.version
        _log.warning("gateway_message_unreadable", extra={"reason": str(fault)})

    # ---- what comes out --------------------------------------------------------------------------------

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """One message a gateway and step."""
        batches: dict[bytes, list[StepOutput]] = {}
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue
            peer, request_id = owner
            batches.setdefault(peer, []).append(replace(output, request_id=request_id))
            if output.reason is not None:
                del self._owners[output.request_id]
                del self._gateways[peer].names[request_id]
        for peer, batch in batches.items():
            self._send(peer, Outputs(epoch=self._gateways[peer].epoch, outputs=tuple(batch)))

    def _beat(self, now: float) -> None:
        beat = self._heartbeat()
        for peer, gateway in list(self._gateways.items()):
            if now - gateway.heard_at > GATEWAY_SILENCE_S:
                self._forget(peer, "is silent")
            else:
                self._send(peer, beat)

    def _send(self, peer: bytes, message: Message) -> None:
        """Send, or forget a gateway that is gone or far behind: what it receives in an epoch has no gap."""
        try:
            self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            self._forget(peer, "is too slow")
        except zmq.ZMQError:
            self._forget(peer, "cannot be reached")

    def _forget(self, peer: bytes, reason: str) -> None:
        """Drop a gateway and its requests."""
        gateway = self._gateways.pop(peer, None)
        if gateway is None:
            return
        _log.info("gateway_lost", extra={"reason": reason, "num_requests": len(gateway.names)})
        for name in gateway.names.values():
            del self._owners[name]
            self._loop.cancel(name)

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
        zmq.ZMQError: the address cannot be bound, or lies open to a network.
    """
    parent = _tie_to_parent() if dies_with_parent else None
    package = ModelPackage.load(package_path)
    with zmq.Context() as context, open_socket(context) as socket:
        runner = Runner(
            package,
            num_slots=limits.max_num_seqs,
            max_len=limits.max_model_len,
            num_threads=num_threads,
            can_spin=can_spin,
        )
        bind(socket, listen)
        ready = Ready(
            epoch=0,
            engine_id=engine_id,
            model_id=package.manifest.model_id,
            quantization=package.manifest.quantization,
            fingerprint=package.manifest.fingerprint,
            max_model_len=limits.max_model_len,
            num_slots=limits.max_num_seqs,
        )
        worker = Worker(EngineLoop(runner, Scheduler(limits)), ready, socket, parent=parent)

        def stop(_signal: int, _frame: object) -> None:
            worker.is_stopping = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        _log.info("engine_ready", extra={"engine_id": engine_id, "model": package.manifest.model_id})
        gc.freeze()  # what is loaded stays: full collections need not walk it
        worker.run()
    return 0


def open_socket(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A ROUTER with every bound set."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a gateway that has gone is an error, not a silence
    return socket


def bind(socket: "zmq.Socket[bytes]", listen: str) -> None:
    """Bind, and keep other users of the machine away from a socket file.

    Raises:
        zmq.ZMQError: the address cannot be bound; or it is open to other machines, and nothing here asks who
            they are.
    """
    if listen.startswith("tcp://") and not listen.startswith(LOOPBACK):
        raise zmq.ZMQError(errno.EACCES, f"{listen}: listen on ipc:// or tcp://127.0.0.1, not on a network")
    old_mask = os.umask(0o177)
    try:
        socket.bind(listen)
    finally:
        os.umask(old_mask)


def _tie_to_parent() -> int | None:
    """End when the process that started this one does, however it ends.

    Linux kills us with it, even where we hang. Anywhere, and if it had ended before we could ask for that,
    our standard input comes to its end; returns its file if it is a pipe.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError, ValueError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            return sys.stdin.fileno()
    return None


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
