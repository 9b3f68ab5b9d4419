# SPDX-License-Identifier: Apache-2.0
"""A simulated user reports what it saw on the wire, failures included."""

import asyncio
import json

import pytest
from websockets.asyncio.server import serve

from server.cli.bench.clients import CompletionsClient, RealtimeClient, TurnSettings

SETTINGS = TurnSettings(model="m", max_tokens=9, temperature=0.0, api_key="k", timeout_s=5.0)
USAGE = {"input_tokens": 4, "output_tokens": 2, "input_token_details": {"cached_tokens": 3}}


def realtime_answer(event):
    if event["type"] != "response.create":
        return [{"type": "anything.else"}]
    return [
        {"type": "response.output_text.delta", "delta": "Hel"},
        {"type": "response.output_text.delta", "delta": "lo"},
        {"type": "response.done", "response": {"status": "completed", "usage": USAGE}},
    ]


async def realtime_turn(answer):
    async def handle(socket):
        async for message in socket:
            for event in answer(json.loads(message)):
                await socket.send(json.dumps(event))

    async with serve(handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = RealtimeClient(0, f"http://127.0.0.1:{port}/v1", SETTINGS)
        await client.open()
        timing = await client.turn(0, "hi")
        await client.close()
    return timing


async def test_realtime_turn_is_timed_piece_by_piece():
    """Each delta is one arrival; the server's own usage is kept."""
    timing = await realtime_turn(realtime_answer)
    assert ("Hello", 2, 4, 2, 3, None) == (
        timing.text, len(timing.arrivals), timing.input_tokens, timing.output_tokens, timing.cached_tokens,
        timing.error,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"type": "error", "error": {"code": "queue_full"}}, "queue_full"),
        (
            {
                "type": "response.done",
                "response": {"status": "failed", "status_details": {"error": {"code": "engine_error"}}},
            },
            "engine_error",
        ),
    ],
)
async def test_realtime_failure_keeps_its_code(event, error):
    """A refused or failed response is an error by its code."""
    timing = await realtime_turn(lambda sent: [event] if sent["type"] == "response.create" else [])
    assert error == timing.error


async def completions_turn(reply):
    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(size)))
        writer.write(reply)
        await writer.drain()
        writer.close()

    bodies = []
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        client = CompletionsClient(0, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", SETTINGS)
        await client.open()
        timing = await client.turn(0, "hi")
        await client.turn(1, "more")
        await client.close()
    return timing, bodies


def sse(*events):
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    chunks = [body[at : at + 7] for at in range(0, len(body), 7)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed


async def test_completions_turn_reads_chunks_cut_anywhere():
    """Lines split over HTTP chunks are put together; the next turn sends the history."""
    delta = {"choices": [{"delta": {"content": "Hi"}}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    timing, bodies = await completions_turn(sse(delta, usage))
    assert ("Hi", 5, 1, None) == (timing.text, timing.input_tokens, timing.output_tokens, timing.error)
    assert ["user", "assistant", "user"] == [message["role"] for message in bodies[1]["messages"]]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\n\r\n", "http_429"),
        (b"", "IncompleteReadError"),
        (sse({"error": {"code": "engine_error"}}), "engine_error"),
    ],
)
async def test_completions_failure_is_named(reply, error):
    """A refusal, a cut connection and an error in mid-stream are each an error."""
    timing, _ = await completions_turn(reply)
    assert error == timing.error
