# SPDX-License-Identifier: Apache-2.0
"""OpenAI chat completions over HTTP: a body → what a turn needs; a turn's events → a body or SSE frames.

Owns the spelling only. Every fault of a body is found here, before the first byte of an answer.
"""

from dataclasses import dataclass

from server.core.events import Delta, SessionSettings, TurnFinished
from server.core.types import Item, ModelCard, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One request, read. `warnings` (unknown fields, lowered values) belong in a `Warning` header each."""

    card: ModelCard
    settings: SessionSettings
    items: tuple[Item, ...]
    is_stream: bool
    has_usage_chunk: bool
    warnings: tuple[str, ...]


def decode_completion(
    body: bytes, cards: tuple[ModelCard, ...], defaults: SamplingParams = SamplingParams()
) -> Completion:
    """Read a request body; the first of `cards` answers when no model is named.

    Raises:
        ServerError: with `param` naming the field.
    """
    raise NotImplementedError


class CompletionEncoder:
    """Spells the answer to one request. `created` is a Unix time in seconds.

    Streaming: `start()`, then `delta(event)` for each Delta, then `end(finished)`; each returns bytes to
    write. After an error frame no `[DONE]` follows. Not streaming: `body(finished)`; when its reason is
    ERROR or CANCELLED raise/answer `finished_error(finished)` instead.
    """

    def __init__(self, completion: Completion, *, completion_id: str, created: int) -> None:
        raise NotImplementedError

    def start(self) -> bytes:
        """The first chunk: the role."""
        raise NotImplementedError

    def delta(self, event: Delta) -> bytes:
        """One piece of text."""
        raise NotImplementedError

    def end(self, event: TurnFinished) -> bytes:
        """The last frames: finish reason, usage when asked for, `[DONE]`; or one error frame alone."""
        raise NotImplementedError

    def body(self, event: TurnFinished) -> bytes:
        """The whole answer as one JSON body.

        Raises:
            ServerError: the turn failed; answer with its status and `error_body`.
        """
        raise NotImplementedError
