# SPDX-License-Identifier: Apache-2.0
"""A turn yields its text and exactly one end, whatever its generator does and whenever it is stopped."""

import asyncio
from contextlib import aclosing

import pytest

from server.core.errors import error_of
from server.core.events import Delta, SessionSettings, TurnFinished
from server.core.types import ContentPart, FinishReason, Item, Role, SamplingParams, Truncation, Usage
from server.turns import turn as turn_module
from server.turns.turn import Turn, TurnRequest, run_turn
from tests.fakes import FakeGenerator


def said(text, role=Role.USER):
    return Item(id=text[:8], role=role, parts=(ContentPart(text=text),))


def request(*items, **settings):
    given = SessionSettings(**{"model": "m", **settings})
    return TurnRequest(id="t", settings=given, items=items or (said("hi"),), tenant="acme")


async def events_of(turn):
    async with aclosing(turn) as stream:
        return [event async for event in stream]


async def run(generator, *items, **settings):
    """Run a turn; its end is checked against its deltas, and nothing may be left running."""
    *deltas, end = await events_of(run_turn(request(*items, **settings), generator))
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert isinstance(end, TurnFinished)
    assert end.text == "".join(delta.text for delta in deltas)
    assert (end.error is not None) == (end.reason is FinishReason.ERROR)
    assert not generator.running
    return deltas, end


async def test_deltas_carry_their_offsets_in_code_points():
    """Not bytes, not UTF-16; an empty piece is none."""
    deltas, end = await run(FakeGenerator("a😀", "", "é", "字x", "!"))
    assert [(0, "a😀"), (2, "é"), (3, "字x"), (5, "!")] == [(d.index, d.text) for d in deltas]
    assert (FinishReason.STOP, Usage(input_tokens=4, output_tokens=5)) == (end.reason, end.usage)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.FILTERED, FinishReason.TOOL_CALLS])
async def test_the_generators_reason_is_the_turns(reason):
    """Mapped nowhere on the way."""
    assert reason is (await run(FakeGenerator("a", reason=reason)))[1].reason


async def test_the_prompt_is_instructions_then_items():
    """An answer that never got a word is not read back; everything else goes as it is."""
    generator = FakeGenerator("a")
    sampling = SamplingParams(seed=7)
    items = (said("q"), Item(id="e", role=Role.ASSISTANT, parts=(ContentPart(text=""),)), said("r"))
    await run(generator, *items, instructions="be brief", sampling=sampling, truncation=Truncation.DISABLED)
    (made,) = generator.requests
    assert ["be brief", "q", "r"] == [item.text for item in made.items]
    assert Role.SYSTEM is made.items[0].role
    assert ("t", "m", sampling, "acme", Truncation.DISABLED) == (
        made.id, made.model, made.sampling, made.tenant, made.truncation
    )  # fmt: skip
    assert 0 == generator.num_counts, "an over-long prompt is the generator's to refuse"


async def test_a_long_conversation_loses_its_oldest_turns_and_says_how_many():
    """With a quarter of the context kept for the answer, or what the answer may take if that is less."""
    generator = FakeGenerator("a", context_length=40)
    items = (said("x" * 10), said("y" * 9, Role.ASSISTANT), said("z" * 8))
    _, end = await run(generator, *items)
    assert (2, [items[2]]) == (end.num_dropped_items, list(generator.requests[0].items))
    _, end = await run(generator, *items, sampling=SamplingParams(max_tokens=1))
    assert 0 == end.num_dropped_items


@pytest.mark.parametrize(
    ("generator", "settings", "code"),
    [
        (FakeGenerator("a"), {"model": "other"}, "model_not_found"),
        (FakeGenerator("a", context_length=3), {}, "context_length_exceeded"),
        (FakeGenerator("a", error_of("queue_full", "later", retry_after_ms=5)), {}, "queue_full"),
        (FakeGenerator("a", RuntimeError("secret")), {}, "internal_error"),
        (FakeGenerator("a", TimeoutError()), {}, "internal_error"),
        (FakeGenerator("a", reason=FinishReason.ERROR), {}, "engine_error"),
    ],
)
async def test_every_fault_is_an_end_and_not_an_exception(generator, settings, code):
    """With the text so far, and no words of an unexpected exception."""
    _, end = await run(generator, **settings)
    assert (FinishReason.ERROR, code) == (end.reason, end.error.code)
    assert "secret" not in end.error.message


async def test_a_generator_that_just_stops_is_a_fault():
    """A text without an end never looks whole."""
    generator = FakeGenerator()

    async def generate(_):
        for event in ():
            yield event

    generator.generate = generate
    assert "internal_error" == (await run(generator))[1].error.code


async def test_a_generator_that_fails_to_close_is_still_closed():
    """Its fault is logged and not raised."""
    generator = FakeGenerator()

    async def generate(_):
        try:
            yield turn_module.GenerationFinished(reason=FinishReason.STOP, usage=Usage())
        finally:
            raise RuntimeError

    generator.generate = generate
    assert FinishReason.STOP is (await run(generator))[1].reason


async def test_cancel_ends_with_the_text_so_far_and_exact_usage():
    """The generator ends by itself, so it can count."""
    generator = FakeGenerator("a", "b", "c", is_held=True)
    turn = Turn(request(), generator)
    generator.release(2)
    stream = turn.events()
    assert ["a", "b"] == [(await anext(stream)).text, (await anext(stream)).text]
    turn.cancel()
    turn.cancel()
    (end,) = [event async for event in stream]
    assert (FinishReason.CANCELLED, "ab", 2) == (end.reason, end.text, end.usage.output_tokens)
    assert not generator.running


async def test_cancel_while_waiting_wakes_the_turn():
    """Mid-wait, by the generator's own end."""
    generator = FakeGenerator("a", is_held=True)
    turn = Turn(request(), generator)
    task = asyncio.create_task(events_of(turn.events()))
    await generator.has_started.wait()
    turn.cancel()
    (end,) = await task
    assert (FinishReason.CANCELLED, "") == (end.reason, end.text)


@pytest.mark.parametrize("num_steps", range(6))
async def test_a_lost_cancel_still_ends_the_turn(num_steps, monkeypatch):
    """By its deadline, at whatever moment it came, and the generation is closed."""
    monkeypatch.setattr(turn_module, "CANCEL_GRACE_S", 0.0)
    generator = FakeGenerator("a", "b", is_held=True, is_deaf=True)
    turn = Turn(request(), generator)
    task = asyncio.create_task(events_of(turn.events()))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    turn.cancel()
    *_, end = await task
    assert (FinishReason.CANCELLED, None) == (end.reason, end.error)
    assert not generator.running


async def test_cancel_before_the_start_asks_the_generator_nothing():
    """Not even to count."""
    generator = FakeGenerator("a")
    turn = Turn(request(), generator)
    turn.cancel()
    (end,) = await events_of(turn.events())
    assert (FinishReason.CANCELLED, [], 0) == (end.reason, generator.requests, generator.num_counts)


async def test_cancel_while_counting_never_starts_the_generation():
    """The prompt may be ready, but nobody wants the answer."""
    generator = FakeGenerator("a")
    turn = Turn(request(), generator)
    real_count = generator.num_tokens

    async def num_tokens(model, items):
        turn.cancel()
        return await real_count(model, items)

    generator.num_tokens = num_tokens
    (end,) = await events_of(turn.events())
    assert (FinishReason.CANCELLED, []) == (end.reason, generator.requests)


async def test_a_failure_after_cancel_is_a_cancelled_end():
    """The client asked for an end and gets it."""
    generator = FakeGenerator("a", RuntimeError())
    turn = Turn(request(), generator)
    stream = turn.events()
    await anext(stream)
    generator.is_deaf = True
    turn.cancel()
    (end,) = [event async for event in stream]
    assert (FinishReason.CANCELLED, None, "a") == (end.reason, end.error, end.text)


async def test_closing_early_stops_the_generation():
    """As a door does whose client has gone."""
    generator = FakeGenerator("a", "b", is_held=True)
    generator.release()
    async with aclosing(run_turn(request(), generator)) as stream:
        await anext(stream)
        assert generator.running
    assert not generator.running


async def test_a_killed_task_leaves_nothing_running():
    """Cancelling the task that runs a turn is no end of the turn: it is raised, after the closing."""
    generator = FakeGenerator("a", is_held=True)
    task = asyncio.create_task(events_of(run_turn(request(), generator)))
    await generator.has_started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not generator.running
