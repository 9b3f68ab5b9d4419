# SPDX-License-Identifier: Apache-2.0
"""Times and counts what every door asks of a generator, in one place for all of them.

Invariant: it changes nothing: the same events, faults and cancels pass through, and each request is counted
once, at its end, whichever end that is.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from server.core.errors import ServerError
from server.core.metrics import Metrics
from server.core.ports import GenerationEvent, GenerationFinished, Generator, GeneratorStatus, TextDelta
from server.core.types import FinishReason, GenerationRequest, Item, ModelCard, Usage


class MeasuredGenerator:
    """A Generator of one door.

    Args:
        generator: does the work.
        metrics: where it is counted.
        door: the label; one of ours, never a client's path.
        now: seconds of a clock that only goes forward.
    """

    def __init__(self, generator: Generator, metrics: Metrics, *, door: str, now: Callable[[], float]) -> None:
        self._generator = generator
        self._metrics = metrics
        self._door = door
        self._now = now

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Pass a generation on; one that is closed early counts as cancelled."""
        metrics, door = self._metrics, self._door
        started = last_text = self._now()
        has_text = False
        outcome = FinishReason.CANCELLED.value
        try:
            async with aclosing(self._generator.generate(request)) as events:  # type: ignore[type-var]  # the port promises no aclose, every generator has one
                async for event in events:
                    if isinstance(event, TextDelta):
                        histogram = metrics.inter_token_s if has_text else metrics.first_token_s
                        histogram.labels(door=door).observe(self._now() - last_text)
                        has_text, last_text = True, self._now()
                    elif isinstance(event, GenerationFinished):
                        outcome = event.reason.value
                        self._count_tokens(event.usage)
                    yield event
        except ServerError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = "internal_error"
            raise
        finally:
            metrics.requests.labels(door=door, outcome=outcome).inc()
            metrics.turn_s.labels(door=door).observe(self._now() - started)

    def cancel(self, request_id: str) -> None:
        """Pass it on."""
        self._generator.cancel(request_id)

    async def num_tokens(self, model: str, items: tuple[Item, ...]) -> int:
        """Pass it on."""
        return await self._generator.num_tokens(model, items)

    def models(self) -> tuple[ModelCard, ...]:
        """Pass it on."""
        return self._generator.models()

    def status(self) -> GeneratorStatus:
        """Pass it on."""
        return self._generator.status()

    def _count_tokens(self, usage: Usage) -> None:
        self._metrics.input_tokens.inc(usage.input_tokens)
        self._metrics.cached_tokens.inc(usage.cached_tokens)
        self._metrics.output_tokens.inc(usage.output_tokens)
