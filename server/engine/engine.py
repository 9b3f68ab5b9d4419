# SPDX-License-Identifier: Apache-2.0
"""Shell 4, in the gateway: a request goes out as ids and comes back as text, whatever happens to the engine.

    items → template, tokenizer → Submit ─▶ engine process ─▶ Outputs → detokenizer → TextDelta

Invariant: every generation ends exactly once and leaves no entry here. When the engine says Ready it holds
none of our requests, so each running one is submitted again with the ids that already came; sampling
depends on nothing but the request, so the text goes on as if nothing had happened.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from time import monotonic

from server.core.errors import ServerError, error_of
from server.core.ports import GenerationEvent, GenerationFinished, GeneratorStatus, TextDelta
from server.core.types import FinishReason, GenerationRequest, Item, ModelCard, Usage
from server.engine.process.link import Link
from server.engine.process.messages import (
    VERSION,
    Cancel,
    Heartbeat,
    Hello,
    Message,
    Outputs,
    Ready,
    Refused,
    Submit,
)
from server.engine.process.supervisor import Supervisor, SupervisorSnapshot
from server.engine.sequence import StepOutput, Submission, TokenParams
from server.engine.text.detokenizer import IncrementalDetokenizer
from server.engine.text.template import ChatTemplate
from server.engine.text.tokenizer import Tokenizer
from server.models.package import ModelPackage

INLINE_CHARS_MAX = 4096  # longer texts are rendered and tokenised on a thread: the loop never computes
TICK_S = 0.25
SEED_BITS = 63

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """What the gateway knows of its engine: last heartbeat, process, and requests held here."""

    ready: Ready | None
    heartbeat: Heartbeat | None
    process: SupervisorSnapshot | None
    num_pending: int
    num_resubmitted: int


class _Pending:
    """One request between its first and its last token."""

    __slots__ = (
        "error",
        "has_news",
        "is_cancelled",
        "is_sent",
        "num_cached",
        "output_ids",
        "reason",
        "submission",
    )

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.output_ids: list[int] = []
        self.num_cached = 0
        self.reason: FinishReason | None = None
        self.error: ServerError | None = None
        self.is_sent = False
        self.is_cancelled = False
        self.has_news = asyncio.Event()

    def take(self, output: StepOutput) -> None:
        self.output_ids += output.token_ids
        self.num_cached = max(self.num_cached, output.num_cached_tokens)
        if output.error_code is not None:
            self.fail(error_of(output.error_code, output.error_message or "the engine failed"))
        elif output.reason is not None:
            self.end(output.reason)
        else:
            self.has_news.set()

    def end(self, reason: FinishReason) -> None:
        self.reason = self.reason or reason
        self.has_news.set()

    def fail(self, error: ServerError) -> None:
        self.error = self.error or error
        self.end(FinishReason.ERROR)

    @property
    def usage(self) -> Usage:
        num_input = len(self.submission.token_ids)
        return Usage(input_tokens=num_input, output_tokens=len(self.output_ids), cached_tokens=self.num_cached)


class Engine:
    """The Generator over one engine process. Use from one event loop: `start`, then anything, then `close`.

    Args:
        package: the model that the engine serves; its tokenizer and template work here.
        address: where the engine listens.
        max_model_len: tokens of prompt and answer together.
        supervisor: keeper of the process; None when the engine is run by others.
        hang_timeout_s: silence after which the engine counts as gone.
        unavailable_timeout_s: how long a request waits for an engine that is gone.

    Raises:
        PackageError: the tokenizer or template of the package cannot be used.
    """

    def __init__(
        self,
        package: ModelPackage,
        address: str,
        *,
        max_model_len: int,
        supervisor: Supervisor | None,
        hang_timeout_s: float,
        unavailable_timeout_s: float = 60.0,
    ) -> None:
        self._package = package
        self._address = address
        self._max_model_len = max_model_len
        self._supervisor = supervisor
        self._hang_timeout_s = hang_timeout_s
        self._unavailable_timeout_s = unavailable_timeout_s
        self._tokenizer = Tokenizer.of(package)
        self._template = ChatTemplate(package.chat_template, self._tokenizer, package.manifest)
        self._pending: dict[str, _Pending] = {}
        self._link: Link | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._ready: Ready | None = None
        self._fault = "the engine is starting"
        self._heartbeat: Heartbeat | None = None
        self._heard_at = self._lost_at = monotonic()
        self._num_resubmitted = 0

    # ---- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process, if it is ours, and begin to greet it; returns at once."""
        if self._supervisor is not None:
            self._supervisor.start()
        self._link = Link(self._address, self._receive)
        self._ticker = asyncio.create_task(self._tick(), name="engine greeting")

    async def close(self) -> None:
        """End every request as failed, then the link and our process."""
        for pending in self._pending.values():
            pending.fail(error_of("server_draining", "the server is shutting down"))
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
        if self._supervisor is not None:
            await self._supervisor.close()

    # ---- the port --------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `core.ports.Generator`."""
        self._refuse_unknown(request.model)
        token_ids = await self._encode(request.items)
        pending = _Pending(self._submission(request, token_ids))
        text = IncrementalDetokenizer(self._tokenizer, request.sampling.stop)
        self._pending[request.id] = pending
        try:
            self._send(pending)
            async for piece in self._pieces(pending, text):
                yield TextDelta(text=piece)
            if pending.error is not None:
                raise pending.error
            assert pending.reason is not None
            yield GenerationFinished(reason=pending.reason, usage=pending.usage)
        finally:
            del self._pending[request.id]
            if pending.is_sent and (pending.reason is None or text.has_stopped):
                self._transmit(Cancel(request_id=request.id))

    def cancel(self, request_id: str) -> None:
        """See `core.ports.Generator`."""
        pending = self._pending.get(request_id)
        if pending is None:
            return
        pending.is_cancelled = True
        if not pending.is_sent or self._ready is None or not self._transmit(Cancel(request_id=request_id)):
            pending.end(FinishReason.CANCELLED)

    async def num_tokens(self, model: str, items: tuple[Item, ...]) -> int:
        """See `core.ports.Generator`."""
        self._refuse_unknown(model)
        return len(await self._encode(items))

    def models(self) -> tuple[ModelCard, ...]:
        """The one model of the package."""
        manifest = self._package.manifest
        card = ModelCard(
            id=manifest.model_id,
            created=manifest.created,
            context_length=self._max_model_len,
            quantization=manifest.quantization,
            fingerprint=manifest.fingerprint,
        )
        return (card,)

    def status(self) -> GeneratorStatus:
        """Whether the engine answers, and its queue as of the last heartbeat."""
        beat = self._heartbeat
        return GeneratorStatus(
            is_ready=self._ready is not None,
            reason="" if self._ready else self._fault,
            num_running=beat.num_running if beat else 0,
            num_waiting=beat.num_waiting if beat else 0,
            num_waiting_tokens=beat.num_waiting_tokens if beat else 0,
        )

    def snapshot(self) -> EngineSnapshot:
        """Everything for metrics and tests."""
        return EngineSnapshot(
            ready=self._ready,
            heartbeat=self._heartbeat,
            process=self._supervisor.snapshot() if self._supervisor else None,
            num_pending=len(self._pending),
            num_resubmitted=self._num_resubmitted,
        )

    # ---- a request -------------------------------------------------------------------------------------

    def _refuse_unknown(self, model: str) -> None:
        own = self._package.manifest.model_id
        if model != own:
            raise error_of("model_not_found", f"model {model!r} is not served here; use {own!r}", param="model")

    async def _encode(self, items: tuple[Item, ...]) -> list[int]:
        if sum(len(item.text) for item in items) <= INLINE_CHARS_MAX:
            return self._template.encode(items)
        return await asyncio.to_thread(self._template.encode, items)

    def _submission(self, request: GenerationRequest, token_ids: list[int]) -> Submission:
        sampling, limit = request.sampling, self._max_model_len
        room = limit - len(token_ids)
        if room < 1:
            raise error_of(
                "context_length_exceeded",
                f"the messages take {len(token_ids)} tokens, but the context holds {limit} with the answer",
                param="messages",
            )
        params = TokenParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            # Drawn here, once: a request that is submitted again must go on with the same numbers.
            seed=secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed,
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            end_token_ids=self._package.manifest.end_token_ids,
        )
        return Submission(
            request_id=request.id, token_ids=tuple(token_ids), params=params, tenant=request.tenant
        )

    async def _pieces(self, pending: _Pending, text: IncrementalDetokenizer) -> AsyncIterator[str]:
        """The text as it becomes certain; sets the end when a stop string comes."""
        num_read = 0
        while pending.reason is None:
            await pending.has_news.wait()
            pending.has_news.clear()
            piece, num_read = _decode(pending, text, num_read)
            if piece:
                yield piece
            if text.has_stopped:
                del pending.output_ids[num_read:]  # computed beyond the stop string, and not delivered
                pending.reason = FinishReason.STOP
                return
        rest = text.finish()
        if rest:
            yield rest
        if text.has_stopped:
            pending.reason = FinishReason.STOP

    def _send(self, pending: _Pending) -> None:
        """Submit, or leave it to the next Ready when the engine cannot take it now."""
        if pending.is_cancelled:
            pending.end(FinishReason.CANCELLED)
        elif self._ready is not None:
            rest = replace(pending.submission, output_ids=tuple(pending.output_ids))
            pending.is_sent = self._transmit(Submit(submission=rest)) or pending.is_sent

    # ---- the engine ------------------------------------------------------------------------------------

    def _transmit(self, message: Message) -> bool:
        return self._link is not None and self._link.send(message)

    def _receive(self, message: Message) -> None:
        self._heard_at = monotonic()
        if self._supervisor is not None:
            self._supervisor.heard()
        match message:
            case Outputs():
                for output in message.outputs:
                    if output.request_id in self._pending:
                        self._pending[output.request_id].take(output)
            case Heartbeat():
                self._heartbeat = message
            case Ready():
                self._greet(message)
            case Refused():
                self._refused(message)
            case _:
                pass

    def _greet(self, ready: Ready) -> None:
        own = self._package.manifest
        if ready.version != VERSION or ready.fingerprint != own.fingerprint:
            self._fault = (
                f"the engine at {self._address} speaks version {ready.version} and serves {ready.model_id} "
                f"({ready.fingerprint}); this gateway needs version {VERSION} and {own.fingerprint}"
            )
            _log.error("engine_mismatch", extra={"reason": self._fault})
            return
        _log.info("engine_connected", extra={"engine_id": ready.engine_id, "num_pending": len(self._pending)})
        self._ready = ready
        self._max_model_len = min(self._max_model_len, ready.max_model_len)
        for pending in self._pending.values():
            if pending.reason is None:
                self._num_resubmitted += pending.is_sent
                self._send(pending)

    def _refused(self, refusal: Refused) -> None:
        pending = self._pending.get(refusal.request_id)
        if pending is None:
            return
        if refusal.retry_after_ms is not None and pending.output_ids:
            # It was accepted once and the client has a part of it: it queues again rather than ends.
            loop = asyncio.get_running_loop()
            loop.call_later(refusal.retry_after_ms / 1000, self._send_again, refusal.request_id)
            return
        pending.fail(
            error_of(refusal.code, refusal.message, param=refusal.param, retry_after_ms=refusal.retry_after_ms)
        )

    def _send_again(self, request_id: str) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and pending.reason is None:
            self._send(pending)

    async def _tick(self) -> None:
        """Greet all the time; notice silence; give up requests that waited too long for an engine."""
        while True:
            now = monotonic()
            if self._ready is not None and now - self._heard_at > self._hang_timeout_s:
                self._ready, self._lost_at, self._fault = None, now, "the engine does not answer"
                _log.error("engine_lost", extra={"num_pending": len(self._pending)})
            if self._ready is None and now - self._lost_at > self._unavailable_timeout_s:
                for pending in self._pending.values():
                    pending.fail(error_of("engine_unavailable", self._fault, retry_after_ms=5000))
            self._transmit(Hello(is_new=self._ready is None))
            await asyncio.sleep(TICK_S)


def _decode(pending: _Pending, text: IncrementalDetokenizer, num_read: int) -> tuple[str, int]:
    """Text of the ids after `num_read`, up to a stop string, and how many ids are read then."""
    pieces = []
    while num_read < len(pending.output_ids) and not text.has_stopped:
        pieces.append(text.add(pending.output_ids[num_read]))
        num_read += 1
    return "".join(pieces), num_read
