# SPDX-License-Identifier: Apache-2.0
"""What a turn needs from the world, as Protocols. The engine, an upstream and the tests' fakes fit them.

A port is the only way from `turns` and `gateway` to anything that computes.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from server.core.types import FinishReason, GenerationRequest, Item, ModelCard, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of generated text: whole characters only, no control token, no part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished:
    """The last thing a generation yields."""

    reason: FinishReason
    usage: Usage


GenerationEvent = TextDelta | GenerationFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorStatus:
    """How a generator stands now; `reason` says in words why it is not ready."""

    is_ready: bool
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0


class Generator(Protocol):
    """Turns a whole prompt into a stream of text."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield TextDelta* then one GenerationFinished; closing the iterator early cancels the request.

        Raises:
            ServerError: before the first event when the request is refused (`queue_full` with a retry
                time, `context_length_exceeded`, `model_not_found`), or later when it fails.
        """

    def cancel(self, request_id: str) -> None:
        """Ask a running request to end as CANCELLED; unknown ids are ignored."""

    async def num_tokens(self, model: str, items: tuple[Item, ...]) -> int:
        """Count the tokens of these items as a prompt, generation mark included."""

    def models(self) -> tuple[ModelCard, ...]:
        """The models that can be named in a request; the first is the default."""

    def status(self) -> GeneratorStatus:
        """A snapshot for probes and metrics; never waits."""
