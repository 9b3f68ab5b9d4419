# SPDX-License-Identifier: Apache-2.0
"""The gateway's standing with one engine: whether it answers, as whom, and since when not.

    unknown ──Ready that fits──▶ ready ──silence, end of the process, bytes that are no message──▶ unknown

Invariant: while `ready` is set, every request submitted since that Ready is the engine's, and everything it
said of them has been handed on; whatever else it says is dropped. It never holds a request itself.
"""

import logging
from collections.abc import Callable

from server.engine.process.link import Link
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
)
from server.engine.process.supervisor import Supervisor
from server.engine.sequence import Submission

TICK_S = 0.25  # how often `tick` is to be called

_log = logging.getLogger(__name__)


class Connection:
    """One engine as its gateway knows it. Use from one event loop.

    Args:
        address: where the engine listens.
        fingerprint: of the package that it must serve.
        receive: told of each Ready that fits (submit everything again), of Outputs and refusals.
        supervisor: keeper of the process; None when the engine is run by others.
        hang_timeout_s: silence after which the engine counts as gone.
        now: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        address: str,
        fingerprint: str,
        receive: Callable[[Ready | Outputs | Refused], None],
        *,
        supervisor: Supervisor | None,
        hang_timeout_s: float,
        now: Callable[[], float],
    ) -> None:
        self._address = address
        self._fingerprint = fingerprint
        self._receive = receive
        self._supervisor = supervisor
        self._hang_timeout_s = hang_timeout_s
        self._now = now
        self._link: Link | None = None
        self._ticked_at = self._heard_at = now()
        self.ready: Ready | None = None
        self.heartbeat: Heartbeat | None = None
        self.fault = "the engine is starting"  # why it is not ready
        self.lost_at = now()  # while it is not ready: since when

    def start(self) -> None:
        """Open the link, and start the process if it is ours."""
        self.lost_at = self._ticked_at = self._now()
        self._link = Link(self._address, self._take, self._misread)
        if self._supervisor is not None:
            self._supervisor.start(self._ended)

    async def close(self) -> None:
        """Close the link, then stop the process."""
        if self._link is not None:
            self._link.close()
        if self._supervisor is not None:
            await self._supervisor.close()

    def submit(self, submission: Submission) -> bool:
        """Hand a request to the engine; False when it is to wait for the next Ready."""
        return self.ready is not None and self._send(Submit(epoch=self.ready.epoch, submission=submission))

    def cancel(self, request_id: str) -> None:
        """Tell the engine to drop a request; one that is gone has dropped it already."""
        if self.ready is not None:
            self._send(Cancel(epoch=self.ready.epoch, request_id=request_id))

    def tick(self) -> None:
        """Greet, and notice silence: to be called every `TICK_S`."""
        now = self._now()
        # Silence while this process itself stood still is not the engine's: what it said may wait in the link.
        self._heard_at += max(0.0, now - self._ticked_at - 2 * TICK_S)
        self._ticked_at = now
        if self.ready is not None and now - self._heard_at > self._hang_timeout_s:
            self._lose("the engine does not answer")
        self._send(Hello(epoch=self.ready.epoch if self.ready else 0))

    def _send(self, message: Message) -> bool:
        return self._link is not None and self._link.send(message)

    def _take(self, message: Message) -> None:
        match message:
            case Ready():
                self._greeted(message)
            case Outputs() | Refused() if self.ready and message.epoch == self.ready.epoch:
                self._heard()
                self._receive(message)
            case Heartbeat() if self.ready and message.engine_id == self.ready.engine_id:
                self._heard()
                self.heartbeat = message
            case _:
                pass  # of an engine or an epoch that is over

    def _greeted(self, ready: Ready) -> None:
        self._heard()
        if ready.fingerprint != self._fingerprint:
            self._lose(
                f"the engine at {self._address} serves {ready.model_id} {ready.quantization} "
                f"({ready.fingerprint}), this gateway needs {self._fingerprint}"
            )
            return
        if self.ready is None or ready.engine_id != self.ready.engine_id:
            _log.info("engine_connected", extra={"engine_id": ready.engine_id})
        self.ready = ready
        self._receive(ready)

    def _heard(self) -> None:
        self._heard_at = self._now()
        if self._supervisor is not None:
            self._supervisor.heard()

    def _misread(self, fault: MessageFault) -> None:
        """Something the engine said is lost: begin again, from what has surely come."""
        if fault.version is None:
            self._lose(f"the engine at {self._address} cannot be understood: {fault}")
            return
        self._heard()
        self._lose(
            f"the engine at {self._address} speaks version {fault.version} of the messages, this gateway "
            f"version {VERSION}: run both from one release"
        )

    def _ended(self) -> None:
        self._lose("the engine has ended and is being started again")

    def _lose(self, fault: str) -> None:
        """Be without an engine, for this reason; says so once."""
        if self.ready is not None:
            self.lost_at = self._now()
        if self.ready is not None or fault != self.fault:
            _log.warning("engine_lost", extra={"reason": fault})
        self.ready, self.heartbeat, self.fault = None, None, fault
