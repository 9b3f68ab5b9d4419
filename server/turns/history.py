# SPDX-License-Identifier: Apache-2.0
"""Which items of a conversation a model reads: as many of the newest turns as the context holds.

Invariant: what is kept is every system item and whole turns, newest last; a turn is a user's item with all
that follows it up to the next user's item, so an answer never stays without its question. The newest turn is
always kept. It must never cut inside an item, and never drop in silence: the number dropped is returned.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from server.core.errors import ServerError, error_of
from server.core.types import Item, Role

CountTokens = Callable[[tuple[Item, ...]], Awaitable[int]]
"""Tokens of these items as a whole prompt, generation mark included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The items to send, how many were left out, and what the rest counts in tokens."""

    items: tuple[Item, ...]
    num_dropped: int
    num_tokens: int


async def fit(items: tuple[Item, ...], *, context_length: int, num_reserved: int, count: CountTokens) -> Fitted:
    """Drop whole oldest turns until the prompt leaves `num_reserved` tokens of the context for the answer.

    The reserve is a wish: a newest turn that fits the context with room for one token is sent even if it
    leaves less. Counts once when nothing has to go, else about log2(turns) times more.

    Raises:
        ServerError: `context_length_exceeded`, with both numbers, when the system items and the newest
            turn alone leave no room for one token.
    """
    room = context_length - max(1, num_reserved)
    whole = await count(items)
    if whole <= room:
        return Fitted(items=items, num_dropped=0, num_tokens=whole)
    starts = _turn_starts(items)
    # Smallest number of dropped turns that fits: the count falls as turns go, so bisection finds it.
    low, high = 1, max(len(starts) - 1, 0)
    best: Fitted | None = None
    while low <= high:
        middle = (low + high) // 2
        kept = _without_turns(items, starts[middle])
        num_tokens = await count(kept)
        if num_tokens <= room:
            best = Fitted(items=kept, num_dropped=len(items) - len(kept), num_tokens=num_tokens)
            high = middle - 1
        else:
            low = middle + 1
    return best or await _newest_alone(items, starts, context_length, count)


async def _newest_alone(
    items: tuple[Item, ...], starts: list[int], context_length: int, count: CountTokens
) -> Fitted:
    kept = _without_turns(items, starts[-1]) if starts else items
    num_tokens = await count(kept)
    if num_tokens >= context_length:
        raise _too_long(num_tokens, context_length)
    return Fitted(items=kept, num_dropped=len(items) - len(kept), num_tokens=num_tokens)


def _turn_starts(items: tuple[Item, ...]) -> list[int]:
    """Indexes where turns begin. What stands before the first question (a greeting) is a turn of its own."""
    starts: list[int] = []
    for index, item in enumerate(items):
        if item.role is Role.USER or (not starts and item.role is not Role.SYSTEM):
            starts.append(index)
    return starts


def _without_turns(items: tuple[Item, ...], start: int) -> tuple[Item, ...]:
    """The items from `start` on, and every system item before it."""
    return tuple(item for item in items[:start] if item.role is Role.SYSTEM) + items[start:]


def _too_long(num_tokens: int, context_length: int) -> ServerError:
    return error_of(
        "context_length_exceeded",
        f"the newest message with the system text takes {num_tokens} tokens, and the model holds "
        f"{context_length} with at least one for the answer: shorten it by {num_tokens - context_length + 1}",
    )
