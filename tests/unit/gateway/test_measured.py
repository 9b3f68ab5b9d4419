# SPDX-License-Identifier: Apache-2.0
"""Every generation is timed and counted once, at whichever end, and passes through unchanged."""

from contextlib import aclosing

import pytest

from server.core.clock import ManualClock
from server.core.errors import error_of
from server.core.metrics import Metrics
from server.core.ports import GenerationFinished, TextDelta
from server.core.types import ContentPart, FinishReason, GenerationRequest, Item, Role
from server.gateway.measured import MeasuredGenerator
from tests.fakes import FakeGenerator

REQUEST = GenerationRequest(
    id="r", model="m", items=(Item(id="i", role=Role.USER, parts=(ContentPart(text="hi"),)),)
)


class Book:
    """A measured generator whose pieces take a second each, and its books."""

    def __init__(self, *steps, **more):
        self.clock, self.metrics = ManualClock(), Metrics()
        self.inner = FakeGenerator(*steps, **more)
        self.outer = MeasuredGenerator(self.inner, self.metrics, door="d", now=self.clock.now)

    async def events(self, num_max=100):
        found = []
        async with aclosing(self.outer.generate(REQUEST)) as events:
            async for event in events:
                found.append(event)
                self.clock.advance(1)
                if len(found) == num_max:
                    break
        return found

    def count(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"sampan_{name}", labels)


async def test_events_pass_unchanged():
    """Text, end and usage are the inner generator's."""
    *deltas, end = await Book("a", "b").events()
    assert deltas == [TextDelta(text="a"), TextDelta(text="b")]
    assert isinstance(end, GenerationFinished)


async def test_times_and_tokens_are_booked():
    """First text, gaps between texts, the whole, and what was read and written."""
    book = Book("a", "b", "c")
    await book.events()
    assert book.count("requests_total", door="d", outcome="stop") == 1
    assert book.count("time_to_first_token_seconds_sum", door="d") == 0
    assert book.count("inter_token_seconds_sum", door="d") == 2
    assert book.count("inter_token_seconds_count", door="d") == 2
    assert book.count("turn_seconds_sum", door="d") == 4
    assert (book.count("input_tokens_total"), book.count("output_tokens_total")) == (4, 3)


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ((error_of("queue_full", "full"),), "queue_full"),
        (("a", RuntimeError("x")), "internal_error"),
    ],
)
async def test_failures_are_booked_by_code_and_passed_on(steps, outcome):
    """Whoever asked still sees the fault."""
    book = Book(*steps)
    with pytest.raises(Exception) as caught:
        await book.events()
    assert caught.value is steps[-1]
    assert book.count("requests_total", door="d", outcome=outcome) == 1


async def test_one_that_is_closed_early_is_cancelled_and_stopped():
    """Nobody is left generating behind it."""
    book = Book("a", "b")
    await book.events(num_max=1)
    assert book.count("requests_total", door="d", outcome="cancelled") == 1
    assert not book.inner.running


async def test_the_reason_is_the_outcome():
    """Of a closed set."""
    book = Book("a", reason=FinishReason.LENGTH)
    await book.events()
    assert book.count("requests_total", door="d", outcome="length") == 1


async def test_the_rest_of_the_port_is_the_inner_one():
    """Cancel, counts, models, status."""
    book = Book("a", is_held=True)
    assert book.outer.models() == book.inner.models()
    assert book.outer.status() == book.inner.status()
    assert await book.outer.num_tokens("m", REQUEST.items) == 4
    book.inner.running.add("r")
    book.outer.cancel("r")
    assert book.inner.cancelled == {"r"}
