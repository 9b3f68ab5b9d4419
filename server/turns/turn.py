# SPDX-License-Identifier: Apache-2.0
"""Shell 3: runs one turn, from its items to its one end.

Owns the text so far of one turn. Invariant: whatever happens, `events()` yields Delta* and then exactly one
TurnFinished, whose text is the deltas joined, unless its consumer closes it first. It must never raise, never
outlive its consumer, and never leave a generation running behind it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

from server.core.errors import ServerError, error_of
from server.core.events import Delta, SessionSettings, TurnFinished
from server.core.ports import GenerationEvent, GenerationFinished, Generator, TextDelta
from server.core.types import (
    ContentPart,
    FinishReason,
    GenerationRequest,
    Item,
    ModelCard,
    Role,
    Truncation,
    Usage,
)
from server.turns.history import fit

CANCEL_GRACE_S = 2.0
"""How long a cancelled turn waits for the generator to end by itself, which gives exact usage."""

ANSWER_SHARE = 4
"""An answer without a `max_tokens` gets at least 1/4 of the context before old turns are dropped for it."""

_log = logging.getLogger(__name__)
_Awaited = TypeVar("_Awaited")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What a turn answers: `items` in order (the newest last), under `settings`.

    `id` names the turn and its generation, and is unique in the process. The instructions of the settings
    stand before all items; an assistant's item without text is not sent to the model.
    """

    id: str
    settings: SessionSettings
    items: tuple[Item, ...]
    tenant: str = ""


def run_turn(request: TurnRequest, generator: Generator) -> AsyncGenerator[Delta | TurnFinished, None]:
    """Run one turn that ends by itself or by closing the iterator (`aclosing`), which stops the generation.

    Never raises: every fault arrives as `TurnFinished(reason=ERROR, error=…)`.
    """
    return Turn(request, generator).events()


class Turn:
    """One turn that may be cancelled from outside. Use from one event loop; `events()` runs once."""

    def __init__(self, request: TurnRequest, generator: Generator) -> None:
        self._request = request
        self._generator = generator
        self._stream: AsyncIterator[GenerationEvent] | None = None
        self._pieces: list[str] = []
        self._num_chars = 0
        self._num_dropped = 0
        self._num_prompt_tokens = 0
        self._is_cancelled = False
        self._deadline: float | None = None  # loop time; set once, by cancel
        self._waiting: asyncio.Timeout | None = None

    def cancel(self) -> None:
        """Ask for the end: the turn finishes as CANCELLED with its text so far, at most CANCEL_GRACE_S later.

        Works at any moment from before the first `events()` step on; once more, or after the end, is nothing.
        """
        if self._is_cancelled:
            return
        self._is_cancelled = True
        self._deadline = asyncio.get_running_loop().time() + CANCEL_GRACE_S
        # A cancel may come before the generator knows the request (it tokenises first), where it is lost;
        # the deadline is what makes the end sure, the polite way is what makes the usage exact.
        self._generator.cancel(self._request.id)
        if self._waiting is not None:
            self._waiting.reschedule(self._deadline)

    async def events(self) -> AsyncGenerator[Delta | TurnFinished, None]:
        """Yield the text as it comes, then the one end."""
        try:
            while isinstance(event := await self._next(), TextDelta):
                if event.text:
                    yield self._delta_of(event.text)
        finally:
            await self._close()
        yield self._finished(event)

    async def _next(self) -> GenerationEvent | ServerError:
        """The next piece or the end of the generation; a fault is a value here."""
        try:
            if self._stream is None:
                request = None if self._is_cancelled else await self._bounded(self._prompt())
                if request is None or self._is_cancelled:
                    return self._cancelled()
                self._stream = self._generator.generate(request)
            return await self._bounded(anext(self._stream))
        except ServerError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a turn never raises, whatever its generator does
            return self._fault_of(error)

    async def _prompt(self) -> GenerationRequest:
        request, settings = self._request, self._request.settings
        items = tuple(item for item in request.items if item.text or item.role is not Role.ASSISTANT)
        if settings.instructions:
            system = Item(id="instructions", role=Role.SYSTEM, parts=(ContentPart(text=settings.instructions),))
            items = (system, *items)
        card = self._card(settings.model)
        if settings.truncation is Truncation.AUTO:
            share = card.context_length // ANSWER_SHARE
            fitted = await fit(
                items,
                context_length=card.context_length,
                num_reserved=min(settings.sampling.max_tokens or share, share),
                count=lambda kept: self._generator.num_tokens(settings.model, kept),
            )
            items, self._num_dropped = fitted.items, fitted.num_dropped
            self._num_prompt_tokens = fitted.num_tokens
        return GenerationRequest(
            id=request.id,
            model=settings.model,
            items=items,
            sampling=settings.sampling,
            truncation=settings.truncation,
            tenant=request.tenant,
        )

    def _card(self, model: str) -> ModelCard:
        cards = self._generator.models()
        for card in cards:
            if card.id == model:
                return card
        names = ", ".join(card.id for card in cards)
        raise error_of("model_not_found", f"no model is called '{model}'; here are: {names}", param="model")

    async def _bounded(self, awaitable: Awaitable[_Awaited]) -> _Awaited:
        """Await until the cancel deadline, if there is one or while there comes to be one."""
        try:
            async with asyncio.timeout_at(self._deadline) as self._waiting:
                return await awaitable
        finally:
            self._waiting = None

    def _delta_of(self, text: str) -> Delta:
        delta = Delta(turn_id=self._request.id, index=self._num_chars, text=text)
        self._pieces.append(text)
        self._num_chars += len(text)
        return delta

    def _fault_of(self, error: Exception) -> GenerationEvent | ServerError:
        if isinstance(error, TimeoutError) and self._is_cancelled:
            return self._cancelled()
        if isinstance(error, StopAsyncIteration):
            return error_of("internal_error", "the answer stopped without an end")
        _log.error("turn_failed", exc_info=error)
        return error_of("internal_error", "the server failed while answering")

    def _cancelled(self) -> GenerationFinished:
        """The end of a generation that gave none itself."""
        return GenerationFinished(reason=FinishReason.CANCELLED, usage=self._known_usage())

    def _known_usage(self) -> Usage:
        """What was counted before, and one token at least for each piece that was sent."""
        return Usage(input_tokens=self._num_prompt_tokens, output_tokens=len(self._pieces))

    def _finished(self, end: GenerationFinished | ServerError) -> TurnFinished:
        error: ServerError | None = None
        if isinstance(end, ServerError):
            reason, usage, error = FinishReason.ERROR, self._known_usage(), end
        else:
            reason, usage = end.reason, end.usage
        if self._is_cancelled:
            reason, error = FinishReason.CANCELLED, None
        elif reason is FinishReason.ERROR and error is None:
            error = error_of("engine_error", "the model failed while answering")
        return TurnFinished(
            turn_id=self._request.id,
            reason=reason,
            text="".join(self._pieces),
            usage=usage,
            error=error,
            num_dropped_items=self._num_dropped,
        )

    async def _close(self) -> None:
        """Closing a generation early is what cancels it; one that cannot be closed has nothing to stop."""
        aclose = getattr(self._stream, "aclose", None)
        if aclose is None:
            return
        try:
            await aclose()
        except Exception:  # noqa: BLE001 - the turn has its end already, and never raises
            _log.exception("generation_close_failed")
