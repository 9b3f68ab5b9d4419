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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from time import monotonic

from server.core.errors import ServerError, error_of
from server.core.ports import GenerationEvent, GenerationFinished, GeneratorStatus, TextDelta
from server.core.types import FinishReason, GenerationRequest, Item, ModelCard, Usage
from server.engine.process.connection import TICK_S, Connection
from server.engine.process.messages import Heartbeat, Outputs, Ready, Refused
from server.engine.process.supervisor import Supervisor, SupervisorSnapshot
from server.engine.sequence import StepOutput, Submission, TokenParams
from server.engine.text.detokenizer import IncrementalDetokenizer
from server.engine.text.template import ChatTemplate
from server.engine.text.tokenizer import Tokenizer
from server.models.package import ModelPackage

INLINE_CHARS_MAX = 512  # a longer chat, a millisecond or more, is rendered and tokenised on a thread
WAITING_MAX = 1024  # requests held while there is no engine; one that is there has its own bounds
CRASHES_MAX = 3  # engines that one request may see die without a token of its own: it may be the cause
RETRY_MS = 5000
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


class _Answer:
    """One request from its submission to its end: ids that came, and the text made of them.

    `reason` is set once, at its end. `engine_id` names the engine that has it, if one has.
    """

    def __init__(self, submission: Submission, text: IncrementalDetokenizer) -> None:
        self.submission = submission
        self.output_ids: list[int] = []
        self.reason: FinishReason | None = None
        self.error: ServerError | None = None
        self.engine_id: str | None = None
        self.is_at_engine = False
        self.is_read = False
        self.num_submitted = 0
        self.num_crashes = 0
        self.retries_until: float | None = None
        self.has_news = asyncio.Event()
        self._text = text
        self._num_read = 0
        self._num_cached = 0

    def take(self, output: StepOutput) -> None:
        """Add what a step made."""
        if self.reason is not None:
            return
        self.output_ids += output.token_ids
        if output.token_ids:
            self.num_crashes = 0
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        if output.error_code is not None:
            self.fail(error_of(output.error_code, output.error_message or "the engine failed"))
        elif output.reason is FinishReason.ERROR:
            self.fail(error_of("engine_error", "the engine failed"))
        elif output.reason is not None:
            self.end(output.reason)
        self.is_at_engine &= output.reason is None
        self.has_news.set()

    def end(self, reason: FinishReason) -> None:
        """Set the end, unless there is one."""
        self.reason = self.reason or reason
        self.has_news.set()

    def fail(self, error: ServerError) -> None:
        """End by an error, unless it has ended."""
        if self.reason is None:
            self.error = error
        self.end(FinishReason.ERROR)

    def read(self) -> str:
        """Text that has become certain since the last time; sets `is_read` with the last of it."""
        pieces = []
        while self._num_read < len(self.output_ids) and not self._text.has_stopped:
            pieces.append(self._text.add(self.output_ids[self._num_read]))
            self._num_read += 1
        if self.reason is not None and not self._text.has_stopped:
            pieces.append(self._text.finish())
        if self._text.has_stopped:
            del self.output_ids[self._num_read :]  # computed beyond the stop string, and not delivered
            self.reason, self.error = FinishReason.STOP, None
        self.is_read = self.reason is not None
        return "".join(pieces)

    @property
    def usage(self) -> Usage:
        """Tokens read and written up to now."""
        num_input = len(self.submission.token_ids)
        return Usage(input_tokens=num_input, output_tokens=len(self.output_ids), cached_tokens=self._num_cached)


class Engine:
    """The Generator over one engine process. Use from one event loop: `start`, then anything, then `close`.

    Args:
        package: the model that the engine serves; its tokenizer and template work here.
        address: where the engine listens.
        max_model_len: tokens of prompt and answer together.
        supervisor: keeper of the process; None when the engine is run by others.
        hang_timeout_s: silence after which the engine counts as gone.
        unavailable_timeout_s: how long a request waits for an engine that is gone.
        now: seconds of a clock that only goes forward.

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
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._package = package
        self._own_model_len = max_model_len
        self._supervisor = supervisor
        self._unavailable_timeout_s = unavailable_timeout_s
        self._now = now
        self._tokenizer = Tokenizer.of(package)
        self._template = ChatTemplate(package.chat_template, self._tokenizer, package.manifest)
        self._answers: dict[str, _Answer] = {}
        self._connection = Connection(
            address,
            package.manifest.fingerprint,
            self._receive,
            supervisor=supervisor,
            hang_timeout_s=hang_timeout_s,
            now=now,
        )
        self._ticker: asyncio.Task[None] | None = None
        self._num_resubmitted = 0

    # ---- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process, if it is ours, and begin to greet it; returns at once."""
        self._connection.start()
        self._ticker = asyncio.create_task(self._tick_always(), name="engine greeting")

    async def close(self) -> None:
        """End every request as failed, then the link and our process."""
        for answer in self._answers.values():
            answer.fail(error_of("server_draining", "the server is shutting down"))
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._connection.close()

    def tick(self) -> None:
        """Greet the engine, notice its silence, give up requests that waited too long for one."""
        self._connection.tick()
        error = self._unavailable()
        if error is not None:
            for answer in self._answers.values():
                answer.fail(error)

    async def _tick_always(self) -> None:
        while True:
            try:
                self.tick()
            except Exception:  # noqa: BLE001 - a gateway that stops greeting loses its engine
                _log.exception("tick_failed")
            await asyncio.sleep(TICK_S)

    # ---- the port --------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `core.ports.Generator`."""
        self._refuse_unknown(request.model)
        answer = self._accept(request, await self._encode(request.items))
        try:
            while not answer.is_read:
                await answer.has_news.wait()
                answer.has_news.clear()
                text = answer.read()
                if text:
                    yield TextDelta(text=text)
        finally:
            del self._answers[request.id]
            self._stop(answer)
        if answer.error is not None:
            raise answer.error
        assert answer.reason is not None
        yield GenerationFinished(reason=answer.reason, usage=answer.usage)

    def cancel(self, request_id: str) -> None:
        """See `core.ports.Generator`. It ends at once; the engine follows at its next step."""
        answer = self._answers.get(request_id)
        if answer is not None:
            answer.end(FinishReason.CANCELLED)
            self._stop(answer)

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
        beat, is_ready = self._connection.heartbeat, self._connection.ready is not None
        return GeneratorStatus(
            is_ready=is_ready,
            reason="" if is_ready else self._connection.fault,
            num_running=beat.num_running if beat else 0,
            num_waiting=beat.num_waiting if beat else 0,
            num_waiting_tokens=beat.num_waiting_tokens if beat else 0,
        )

    def snapshot(self) -> EngineSnapshot:
        """Everything for metrics and tests."""
        return EngineSnapshot(
            ready=self._connection.ready,
            heartbeat=self._connection.heartbeat,
            process=self._supervisor.snapshot() if self._supervisor else None,
            num_pending=len(self._answers),
            num_resubmitted=self._num_resubmitted,
        )

    # ---- a request -------------------------------------------------------------------------------------

    @property
    def _max_model_len(self) -> int:
        ready = self._connection.ready
        return min(self._own_model_len, ready.max_model_len) if ready else self._own_model_len

    def _refuse_unknown(self, model: str) -> None:
        own = self._package.manifest.model_id
        if model != own:
            raise error_of("model_not_found", f"model {model!r} is not served here; use {own!r}", param="model")

    async def _encode(self, items: tuple[Item, ...]) -> list[int]:
        if sum(len(item.text) for item in items) <= INLINE_CHARS_MAX:
            return self._template.encode(items)
        return await asyncio.to_thread(self._template.encode, items)

    def _accept(self, request: GenerationRequest, token_ids: list[int]) -> _Answer:
        """Take a request in and submit it; without an engine it waits for the next one.

        Raises:
            ServerError: it is refused; nothing is kept of it.
        """
        if request.id in self._answers:
            raise error_of("invalid_value", "this request id is in use", param="id")
        if self._connection.ready is None and len(self._answers) >= WAITING_MAX:
            raise error_of("queue_full", self._connection.fault, retry_after_ms=RETRY_MS)
        if (error := self._unavailable()) is not None:
            raise error
        submission = self._submission(request, token_ids)
        answer = _Answer(submission, IncrementalDetokenizer(self._tokenizer, request.sampling.stop))
        self._answers[request.id] = answer
        self._submit(answer)
        return answer

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

    def _submit(self, answer: _Answer) -> None:
        """Hand to the engine, with the ids that an earlier one made; else it waits for the next Ready."""
        whole = replace(answer.submission, output_ids=tuple(answer.output_ids))
        answer.is_at_engine = self._connection.submit(whole)
        if answer.is_at_engine and self._connection.ready is not None:
            answer.num_submitted += 1
            answer.engine_id = self._connection.ready.engine_id

    def _stop(self, answer: _Answer) -> None:
        """Let the engine know of an end that it did not make."""
        if answer.is_at_engine:
            answer.is_at_engine = False
            self._connection.cancel(answer.submission.request_id)

    def _unavailable(self) -> ServerError | None:
        """What to tell requests while an engine has been gone for too long."""
        connection = self._connection
        if connection.ready is not None or self._now() - connection.lost_at <= self._unavailable_timeout_s:
            return None
        return error_of("engine_unavailable", connection.fault, retry_after_ms=RETRY_MS)

    # ---- the engine ------------------------------------------------------------------------------------

    def _receive(self, message: Ready | Outputs | Refused) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    if output.request_id in self._answers:
                        self._answers[output.request_id].take(output)
            case Ready():
                for answer in self._answers.values():
                    if answer.reason is None:
                        self._submit_again(answer, message)
            case Refused():
                self._refused(message)

    def _submit_again(self, answer: _Answer, ready: Ready) -> None:
        """After a Ready nobody has the request: hand it over, unless it saw too many engines die."""
        if answer.engine_id is not None:
            self._num_resubmitted += 1
            answer.num_crashes += answer.engine_id != ready.engine_id
        if answer.num_crashes > CRASHES_MAX:
            _log.error("request_given_up", extra={"num_crashes": answer.num_crashes})
            answer.is_at_engine = False
            answer.fail(error_of("engine_error", "the engine failed each time it took this request"))
        else:
            self._submit(answer)

    def _refused(self, refusal: Refused) -> None:
        answer = self._answers.get(refusal.request_id)
        if answer is None or not answer.is_at_engine:
            return
        answer.is_at_engine = False
        if refusal.retry_after_ms is not None and self._may_retry(answer):
            loop = asyncio.get_running_loop()
            loop.call_later(refusal.retry_after_ms / 1000, self._submit_later, answer)
            return
        answer.fail(
            error_of(refusal.code, refusal.message, param=refusal.param, retry_after_ms=refusal.retry_after_ms)
        )

    def _may_retry(self, answer: _Answer) -> bool:
        """Whether a full queue is kept from the client: an engine took the request once, and died with it."""
        if answer.num_submitted < 2:  # noqa: PLR2004 - the second time is the first again
            return False
        if answer.retries_until is None:
            answer.retries_until = self._now() + self._unavailable_timeout_s
        return self._now() < answer.retries_until

    def _submit_later(self, answer: _Answer) -> None:
        if self._answers.get(answer.submission.request_id) is answer and answer.reason is None:
            self._submit(answer)
