# SPDX-License-Identifier: Apache-2.0
"""The official `openai` SDK, unmodified, through every door that it has here."""

import asyncio

import openai
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from server.core.errors import error_of
from tests.fakes import FakeGenerator

ASK = {"model": "m", "messages": [{"role": "user", "content": "capital of France?"}]}
SAID = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "capital of France?"}]}


@pytest.fixture
async def client_of():
    """An AsyncOpenAI for a gateway, closed at the end."""
    clients = []

    def make(house, **more):
        client = openai.AsyncOpenAI(base_url=f"{house.http}/v1", api_key="sk-none", max_retries=0, **more)
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


# ---- chat completions ------------------------------------------------------------------------------------


async def test_a_whole_completion(serve, client_of):
    """Text, reason, usage and model as the SDK types them."""
    client = client_of(await serve("Par", "is"))
    answer = await client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "Paris"
    assert (answer.choices[0].finish_reason, answer.model, answer.object) == ("stop", "m", "chat.completion")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id.startswith("req_")


async def test_a_streamed_completion(serve, client_of):
    """Pieces joined are the text; usage comes last when asked for."""
    client = client_of(await serve("Par", "is"))
    stream = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert "".join(piece or "" for piece in pieces) == "Paris"
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 2)


async def test_the_stream_helper(serve, client_of):
    """The SDK's own accumulator finds nothing to object to."""
    client = client_of(await serve("Par", "is"))
    async with client.chat.completions.stream(**ASK) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Paris"
    assert "content.done" in kinds


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"model": "none"}, openai.NotFoundError, "model_not_found"),
        ({"n": 2}, openai.BadRequestError, "invalid_value"),
        ({"messages": []}, openai.BadRequestError, "invalid_value"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 300_000}]},
            openai.APIStatusError,
            "payload_too_large",
        ),
    ],
)
async def test_a_bad_request_raises(serve, client_of, fields, error, code):
    """The SDK's class for its status, with our code; for a stream as well, before it begins."""
    client = client_of(await serve("a"))
    for stream in (True, False):
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**ASK | fields, stream=stream)
        assert caught.value.code == code


async def test_retries_follow_our_headers(serve, client_of):
    """A full queue is asked again by the SDK itself, when we said."""
    generator = FakeGenerator(error_of("queue_full", "full", retry_after_ms=5))
    client = client_of(await serve(generator=generator)).with_options(max_retries=2)
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(**ASK)
    assert len(generator.requests) == 3


async def test_a_failure_in_mid_stream_raises(serve, client_of):
    """Never an answer that looks whole, and no Python in the message."""
    client = client_of(await serve("a", RuntimeError("secret")))
    stream = await client.chat.completions.create(**ASK, stream=True)
    with pytest.raises(openai.APIError, match="server failed") as caught:
        _ = [chunk async for chunk in stream]
    assert "secret" not in str(caught.value.body)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_is_stopped(serve, client_of, stream):
    """The slot is free at once, though nobody cancelled by name."""
    house = await serve(generator=FakeGenerator("a", "b", is_held=True))
    asking = asyncio.create_task(_read(client_of(house), stream))
    await house.runs()
    house.generator.release()
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await house.settles()


async def _read(client, stream):
    answer = await client.chat.completions.create(**ASK, stream=stream)
    if stream:
        async with answer:
            return [chunk async for chunk in answer]
    return answer


async def test_models(serve, client_of):
    """Listed, found, and missing."""
    client = client_of(await serve())
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).created == 7
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("org/none")


# ---- realtime --------------------------------------------------------------------------------------------


async def turn(connection, **response):
    """Start a response and collect its events up to its end."""
    await connection.response.create(**({"response": response} if response else {}))
    events = []
    async for event in connection:
        events.append(event)
        if event.type == "response.done":
            return events
    raise AssertionError("the socket ended before the response")


async def test_a_realtime_turn(serve, client_of):
    """The README's own use: session, item, response, deltas, done, in the protocol's order."""
    client = client_of(await serve("Par", "is"))
    async with client.realtime.connect(model="m") as connection:
        assert (await connection.recv()).type == "session.created"
        await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        assert (await connection.recv()).session.output_modalities == ["text"]
        await connection.conversation.item.create(item=SAID)
        assert [(await connection.recv()).type for _ in range(2)] == [
            "conversation.item.added", "conversation.item.done"]  # fmt: skip
        events = await turn(connection)
        kinds = [event.type for event in events if event.type != "response.output_text.delta"]
        assert kinds == [
            "response.created", "response.output_item.added", "conversation.item.added",
            "response.content_part.added", "response.output_text.done", "response.content_part.done",
            "conversation.item.done", "response.output_item.done", "response.done",
        ]  # fmt: skip
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Paris"
        done = events[-1].response
        assert (done.status, done.output[0].content[0].text, done.usage.output_tokens) == (
            "completed",
            "Paris",
            2,
        )


async def test_a_second_turn_hears_the_first(serve, client_of):
    """The conversation is the session's."""
    house = await serve("Par", "is")
    async with client_of(house).realtime.connect(model="m") as connection:
        await connection.conversation.item.create(item=SAID)
        await turn(connection)
        await connection.conversation.item.create(item=SAID)
        await turn(connection)
    assert [item.text for item in house.generator.requests[1].items] == [
        "capital of France?", "Paris", "capital of France?"]  # fmt: skip


async def test_cancel(serve, client_of):
    """One `response.done` with the text so far; the session goes on."""
    house = await serve(generator=FakeGenerator("Par", "is", is_held=True))
    async with client_of(house).realtime.connect(model="m") as connection:
        await connection.conversation.item.create(item=SAID)
        await connection.response.create()
        house.generator.release()
        async for event in connection:
            if event.type == "response.output_text.delta":
                await connection.response.cancel()
            if event.type == "response.done":
                break
        assert (event.response.status, event.response.status_details.reason) == (
            "cancelled",
            "client_cancelled",
        )
        assert event.response.output[0].content[0].text == "Par"
        house.generator.release(10)
        assert (await turn(connection))[-1].response.status == "completed"


async def test_faults_are_events(serve, client_of):
    """A needless cancel, a second response, an unknown field: each answered by name, none ends the session."""
    house = await serve(generator=FakeGenerator("a", is_held=True))
    async with client_of(house).realtime.connect(model="m") as connection:
        await connection.recv()
        await connection.response.cancel(event_id="e1")
        error = (await connection.recv()).error
        assert (error.code, error.event_id) == ("response_cancel_not_active", "e1")
        await connection.send_raw('{"type": "nothing", "event_id": "e2"}')
        assert (await connection.recv()).error.event_id == "e2"
        await connection.send_raw(b"\x00")
        assert (await connection.recv()).error.code == "invalid_event"
        await connection.response.create()
        await connection.response.create(event_id="e3")
        async for event in connection:
            if event.type == "error":
                break
        assert event.error.code == "conversation_already_has_active_response"
        house.generator.release(5)
        async for event in connection:
            if event.type == "response.done":
                break
        assert event.response.status == "completed"


async def test_a_failed_turn_is_a_done(serve, client_of):
    """Status failed, with our code, and the session goes on."""
    client = client_of(await serve("a", error_of("engine_error", "the model failed")))
    async with client.realtime.connect(model="m") as connection:
        done = (await turn(connection))[-1].response
        assert (done.status, done.status_details.error.code) == ("failed", "engine_error")


async def test_an_unknown_model_ends_the_socket(serve, client_of):
    """An error event first, then a final close code."""
    client = client_of(await serve())
    async with client.realtime.connect(model="none") as connection:
        assert (await connection.recv()).error.code == "model_not_found"
        with pytest.raises(ConnectionClosedError) as caught:
            await connection.recv()
    assert caught.value.rcvd.code == 4501


async def test_no_place_is_a_status(serve, client_of):
    """503 with Retry-After at the handshake."""
    client = client_of(await serve(sockets_max=1))
    async with client.realtime.connect(model="m"):
        with pytest.raises(InvalidStatus) as caught:
            async with client.realtime.connect(model="m"):
                pass
    assert (caught.value.response.status_code, caught.value.response.headers["retry-after"]) == (503, "5")


async def test_an_unknown_socket_path_is_404(serve, client_of):
    """Not the 403 that reads as a missing right."""
    house = await serve()
    client = client_of(house, websocket_base_url=f"{house.ws}/nothing")
    with pytest.raises(InvalidStatus) as caught:
        async with client.realtime.connect(model="m"):
            pass
    assert caught.value.response.status_code == 404
    assert b'"not_found"' in caught.value.response.body
