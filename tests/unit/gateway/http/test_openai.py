# SPDX-License-Identifier: Apache-2.0
"""One HTTP turn: faults before the first byte are a status, later ones a frame, and who leaves is stopped."""

import asyncio
import json
import random

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from server.core.errors import ServerError, error_of
from server.core.types import FinishReason, SamplingParams
from server.gateway.access.origins import OriginPolicy
from server.gateway.drain import Drain
from server.gateway.http import openai as module
from server.gateway.http.openai import ChatCompletions, Models
from server.gateway.http.replies import Edge, on_http_exception, on_server_error
from tests.fakes import FakeGenerator

ASK = {"messages": [{"role": "user", "content": "hi"}]}


class Client:
    """One door and one client, who may leave. `reply` is what it got, parsed when it is whole."""

    def __init__(self, generator):
        self.generator = generator
        self.drain = Drain(deadline_s=1, rng=random.Random(1))
        self.errors = []
        self.left = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()
        door = ChatCompletions(
            generator=generator, drain=self.drain, new_id="{}_1".format, now=lambda: 7.9,
            sampling=SamplingParams(temperature=0.25), body_bytes_max=1000,
        )  # fmt: skip
        models = Models(generator)
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", door, methods=["POST"]),
                Route("/v1/models", models.list),
                Route("/v1/models/{model_id:path}", models.retrieve),
            ],
            exception_handlers={ServerError: on_server_error, HTTPException: on_http_exception},
            middleware=[
                Middleware(Edge, origins=OriginPolicy(), new_id="{}_1".format, on_error=self.errors.append)
            ],
        )
        self.status, self.headers, self.body, self.is_whole = 0, {}, b"", False

    async def send(self, message):
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self.body += message["body"]
        self.is_whole = not message.get("more_body", False)

    async def ask(self, path="/v1/chat/completions", method="POST", **fields):
        body = json.dumps(ASK | fields).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await self.left.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": method, "path": path, "headers": [], "scheme": "http",
                 "query_string": b"", "client": ("192.0.2.1", 1), "root_path": ""}  # fmt: skip
        await self.app(scope, receive, self.send)
        assert not self.generator.running, "a slot is held for nobody"
        assert self.drain.num_members == 0
        return self

    @property
    def frames(self):
        return [frame.removeprefix("data: ") for frame in self.body.decode().split("\n\n") if frame]

    @property
    def error(self):
        return json.loads(self.body)["error"]


def texts(frames):
    chunks = [json.loads(frame) for frame in frames]
    return [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


async def test_a_whole_answer_is_one_body():
    """Id, text, reason, usage; settings come from the request over the server's own."""
    client = await Client(FakeGenerator("Par", "is")).ask(seed=3)
    answer = json.loads(client.body)
    assert (client.status, client.headers["content-type"]) == (200, "application/json")
    assert (answer["id"], answer["created"], answer["model"]) == ("chatcmpl_1", 7, "m")
    assert answer["choices"][0]["message"]["content"] == "Paris"
    (request,) = client.generator.requests
    assert (request.sampling.seed, request.sampling.temperature, request.tenant) == (3, 0.25, "192.0.2.1")


async def test_a_stream_is_frames_with_one_end():
    """Role, pieces, reason, `[DONE]`, and headers that keep proxies from holding them back."""
    client = await Client(FakeGenerator("Par", "is")).ask(stream=True)
    *chunks, done = client.frames
    assert texts(chunks) == ["", "Par", "is", None]
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "stop"
    assert (done, client.is_whole) == ("[DONE]", True)
    assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert client.headers["x-accel-buffering"] == "no"
    assert client.headers["cache-control"] == "no-cache, no-transform"
    assert client.headers["x-request-id"] == "req_1"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"model": "none"}, 404, "model_not_found", "model"),
        ({"n": 0}, 400, "invalid_value", "n"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"pad": "x" * 1000}, 413, "payload_too_large", None),
    ],
)
async def test_a_bad_request_is_a_status(stream, fields, status, code, param):
    """Also for a stream: its head is not sent yet. Nothing was asked of the engine."""
    client = await Client(FakeGenerator("a")).ask(stream=stream, **fields)
    assert (client.status, client.error["code"], client.error["param"]) == (status, code, param)
    assert not client.generator.requests


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_of_the_engine_is_a_status(stream):
    """A full queue is known before the first byte, so the client can retry by the headers."""
    full = error_of("queue_full", "full", retry_after_ms=1500)
    client = await Client(FakeGenerator(full)).ask(stream=stream)
    assert (client.status, client.error["code"]) == (429, "queue_full")
    assert (client.headers["retry-after"], client.headers["retry-after-ms"]) == ("2", "1500")


async def test_a_failure_in_mid_stream_is_one_error_frame():
    """No finish reason, no `[DONE]`: half a text never looks whole. And no word of Python."""
    client = await Client(FakeGenerator("a", "b", RuntimeError("secret"))).ask(stream=True)
    *chunks, last = client.frames
    assert texts(chunks) == ["", "a", "b"]
    assert json.loads(last)["error"]["code"] == "internal_error"
    assert "secret" not in last
    assert client.errors == ["internal_error"]
    assert client.is_whole


async def test_a_failure_of_a_whole_answer_is_a_status():
    """What was generated so far is not shown."""
    client = await Client(FakeGenerator("a", error_of("engine_error", "failed"))).ask()
    assert (client.status, client.error["code"]) == (500, "engine_error")


async def test_a_stream_that_waits_says_so(monkeypatch):
    """Comments keep proxies from cutting a queued request; they are no data to a client."""
    monkeypatch.setattr(module, "PING_S", 0.001)
    client = Client(FakeGenerator("a", is_held=True))
    asking = asyncio.create_task(client.ask(stream=True))
    while client.body.count(b"\n\n") < 4:  # noqa: ASYNC110 - rounds of the loop, no time
        await asyncio.sleep(0)
    assert client.frames[1].startswith(":")
    client.generator.release(2)
    await asking
    data = [frame for frame in client.frames if not frame.startswith(":")]
    assert texts(data[:-1]) == ["", "a", None]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
async def test_who_leaves_is_stopped(stream, num_steps):
    """At any moment and in either form; nothing more is sent."""
    client = Client(FakeGenerator("a", "b", "c", is_held=True))
    asking = asyncio.create_task(client.ask(stream=stream))
    await settle()
    client.generator.release(num_steps)
    await settle()
    assert client.generator.running
    client.left.set()
    await asking
    assert not client.is_whole


async def test_who_leaves_before_the_body_is_whole_starts_nothing():
    """No turn for half a request."""
    client = Client(FakeGenerator("a"))

    async def receive():
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "root_path": ""}
    await client.app({**scope, "scheme": "http", "query_string": b""}, receive, client.send)
    assert not client.generator.requests
    assert not client.status


async def test_who_takes_nothing_is_stopped(monkeypatch):
    """A stream that nobody reads ends, and its slot is free."""
    monkeypatch.setattr(module, "SEND_WAIT_S", 0.001)
    client = Client(FakeGenerator("a", "b"))
    client.takes.clear()
    await client.ask(stream=True)
    assert not client.status


async def test_a_drain_cuts_with_its_own_words():
    """A turn past the deadline: 503 before the first byte, an error frame after it."""
    for stream in (False, True):
        client = Client(FakeGenerator("a", "b", is_held=True))
        asking = asyncio.create_task(client.ask(stream=stream))
        await settle()
        client.generator.release()
        await settle()
        (member,) = client.drain._members
        member.begin_drain()
        member.end(None)
        await asking
        await member.wait_idle()
        error = json.loads(client.frames[-1])["error"] if stream else client.error
        assert (client.status, error["code"]) == (200 if stream else 503, "server_draining")


async def test_while_draining_there_are_no_new_turns():
    """Refused before the body is read."""
    client = Client(FakeGenerator("a"))
    client.drain.begin()
    await client.ask()
    assert (client.status, client.error["code"]) == (503, "server_draining")
    assert "retry-after" in client.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_not_done_as_asked_is_said(stream):
    """Unknown fields are tolerated, and named in a header."""
    client = await Client(FakeGenerator("a")).ask(stream=stream, hobby="é", max_tokens=10**9)
    assert "hobby" in client.headers["x-sampan-warning"]
    assert "max_tokens lowered" in client.headers["x-sampan-warning"]


async def test_models_are_listed_and_found():
    """By their ids, and a missing one is our kind of 404."""
    client = await Client(FakeGenerator()).ask("/v1/models", "GET")
    assert [model["id"] for model in json.loads(client.body)["data"]] == ["m"]
    client = await Client(FakeGenerator()).ask("/v1/models/m", "GET")
    assert json.loads(client.body)["context_length"] == 512
    client = await Client(FakeGenerator()).ask("/v1/models/a/b", "GET")
    assert (client.status, client.error["code"]) == (404, "model_not_found")


async def test_cut_by_the_length_is_no_failure():
    """The reason is passed on."""
    client = await Client(FakeGenerator("a", reason=FinishReason.LENGTH)).ask()
    assert json.loads(client.body)["choices"][0]["finish_reason"] == "length"
