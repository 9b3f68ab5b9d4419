# SPDX-License-Identifier: Apache-2.0
"""The real model through every door: the same question has the same answer, alone and in a crowd."""

import asyncio
import json

import httpx
import openai
import pytest
import websockets

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France? Answer in one sentence."
SAMPLING = {"temperature": 0, "max_tokens": 24}


@pytest.fixture
async def client(server_process):
    """The official SDK at a real server."""
    async with openai.AsyncOpenAI(base_url=f"{server_process.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def over_http(client, question=QUESTION, **more):
    answer = await client.chat.completions.create(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": question}], **SAMPLING | more
    )
    return answer.choices[0].message.content


async def over_sse(client, question=QUESTION):
    stream = await client.chat.completions.create(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": question}], **SAMPLING, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def over_realtime(client, question=QUESTION):
    async with client.realtime.connect(model="smollm2-135m-instruct") as connection:
        content = [{"type": "input_text", "text": question}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        await connection.send(
            {"type": "response.create", "response": {"temperature": 0, "max_output_tokens": 24}}
        )
        async for event in connection:
            assert event.type != "error", event
            if event.type == "response.done":
                return event.response.output[0].content[0].text
    raise AssertionError("no end")


async def test_paris_through_every_door(client):
    """SDK whole, SDK stream and SDK realtime say the same, and it is right."""
    answers = [await over_http(client), await over_sse(client), await over_realtime(client)]
    assert len(set(answers)) == 1
    assert "Paris" in answers[0]


async def test_a_line_by_hand(start_server, smollm2):
    """The plain door, at temperature 0 by the server's own settings, says the same."""
    smollm2("w8a8")
    server = start_server("--sampling.temperature", "0", "--sampling.max-tokens", "24")
    async with websockets.connect(f"{server.ws_url}/chat") as socket:
        assert "is listening" in await socket.recv()
        assert await socket.recv() == ""
        await socket.send(QUESTION)
        text = ""
        while piece := await socket.recv():
            text += piece if not piece.startswith("# ") else ""
    async with httpx.AsyncClient() as http:
        body = {"messages": [{"role": "user", "content": QUESTION}]}
        reply = await http.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert text == json.loads(reply.content)["choices"][0]["message"]["content"]
    assert "Paris" in text


async def test_a_crowd_changes_no_answer(client):
    """Sixteen at once, each the same text as alone: also the seeded ones."""
    questions = [f"Say something about the number {number}." for number in range(16)]
    more = [{"temperature": 0.8, "seed": number} if number % 2 else {} for number in range(16)]
    crowd = await asyncio.gather(*(over_http(client, q, **m) for q, m in zip(questions, more, strict=True)))
    alone = [await over_http(client, q, **m) for q, m in zip(questions[:4], more[:4], strict=True)]
    assert alone == crowd[:4]
    assert len(set(crowd)) > 8
