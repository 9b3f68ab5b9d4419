# SPDX-License-Identifier: Apache-2.0
"""OpenAI's HTTP doors: chat completions, whole or streamed, and the models.

Owns one HTTP turn from its body to its last byte. Invariant: a fault known before the first byte is an HTTP
status, a later one is the stream's one error frame; a stream ends once, and a client that leaves, at any
moment and in either form, has its turn stopped at once. It must never hold a slot for nobody.

What we did not do as asked (a field we do not know, a value we lowered) stands in `x-sampan-warning`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.core.errors import Close, error_of
from server.core.events import Delta, TurnFinished
from server.core.ports import Generator
from server.core.types import FinishReason, SamplingParams
from server.gateway.access.callers import tenant_of
from server.gateway.drain import Drain
from server.gateway.http.replies import ERROR_CODE, json_response, read_body
from server.turns.turn import Turn, TurnRequest
from server.wire.completions import Completion, CompletionEncoder, decode_completion
from server.wire.frames import SSE_COMMENT
from server.wire.unary import model_body, models_body

PING_S = 10.0
"""A stream that has nothing to say says so this often; proxies cut silent ones after 60 s or less."""
SEND_WAIT_S = 30.0
"""A client that takes no byte of its stream for so long has left, whatever its connection says."""
WARNING_HEADER = "x-sampan-warning"

TurnEvents = AsyncGenerator[Delta | TurnFinished, None]


class ChatCompletions:
    """`POST /v1/chat/completions`; an ASGI app of its own, as it watches for the client's going.

    Args:
        generator: answers the turns.
        drain: told of every turn; refuses new ones while it drains.
        new_id: draws a process-unique id from a prefix.
        now: the Unix time in seconds.
        sampling: how to sample where the request says nothing.
        body_bytes_max: of a request.
    """

    def __init__(
        self,
        *,
        generator: Generator,
        drain: Drain,
        new_id: Callable[[str], str],
        now: Callable[[], float],
        sampling: SamplingParams,
        body_bytes_max: int,
    ) -> None:
        self._generator = generator
        self._drain = drain
        self._new_id = new_id
        self._now = now
        self._sampling = sampling
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ServerError: before the first byte; the floor spells it.
            ClientDisconnect: the client left.
        """
        refusal = self._drain.refusal()
        if refusal is not None:
            raise refusal
        body = await read_body(Request(scope, receive), self._body_bytes_max)
        completion = decode_completion(body, self._generator.models(), self._sampling)
        turn_id = self._new_id("chatcmpl")
        encoder = CompletionEncoder(completion, completion_id=turn_id, created=int(self._now()))
        turn = self._turn(turn_id, completion, tenant_of(scope.get("client")))
        answer = HttpTurn(turn, encoder, completion.warnings)
        self._drain.enter(answer)
        try:
            async with aclosing(watched(turn.events(), receive)) as events:
                if completion.is_stream:
                    end = await answer.stream(events, send)
                    if end.error is not None:
                        scope[ERROR_CODE] = end.error.code
                else:
                    response = await answer.whole(events)
                    await response(scope, receive, send)
        finally:
            answer.finish()
            self._drain.leave(answer)

    def _turn(self, turn_id: str, completion: Completion, tenant: str) -> Turn:
        request = TurnRequest(id=turn_id, settings=completion.settings, items=completion.items, tenant=tenant)
        return Turn(request, self._generator)


class Models:
    """`GET /v1/models` and `GET /v1/models/{model_id}`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def list(self, _: Request) -> Response:
        """Every served model, the default first."""
        return json_response(models_body(self._generator.models()))

    async def retrieve(self, request: Request) -> Response:
        """One model.

        Raises:
            ServerError: `model_not_found`.
        """
        return json_response(model_body(self._generator.models(), request.path_params["model_id"]))


class HttpTurn:
    """One turn and the answer it becomes. To the drain it is busy until it is over, or cut."""

    def __init__(self, turn: Turn, encoder: CompletionEncoder, warnings: tuple[str, ...]) -> None:
        self._turn = turn
        self._encoder = encoder
        self._headers = {WARNING_HEADER: "; ".join(warnings)} if warnings else {}
        self._is_over = asyncio.Event()
        self._is_cut = False

    def begin_drain(self) -> None:
        """Nothing to refuse: a request asks for one turn only."""

    async def wait_idle(self) -> None:
        """Wait until the turn is over."""
        await self._is_over.wait()

    def end(self, _: Close) -> None:
        """Stop the turn; its client is told why."""
        self._is_cut = True
        self._turn.cancel()

    def finish(self) -> None:
        """The turn is over."""
        self._is_over.set()

    async def whole(self, events: AsyncGenerator[Delta | TurnFinished | None, None]) -> Response:
        """Wait for the end and make one body of it.

        Raises:
            ServerError: the turn failed.
        """
        end: TurnFinished | None = None
        async for event in events:
            end = event if isinstance(event, TurnFinished) else None
        assert end is not None, "a turn has an end"
        return json_response(self._encoder.body(self._explained(end)), headers=self._headers)

    async def stream(
        self, events: AsyncGenerator[Delta | TurnFinished | None, None], send: Send
    ) -> TurnFinished:
        """Write the events as they come; returns the end. The head waits for the first event, or for PING_S.

        Raises:
            ServerError: the turn failed before there was anything to write.
            ClientDisconnect: the client takes nothing.
        """
        event = await anext(events)
        if isinstance(event, TurnFinished) and (error := self._explained(event).error) is not None:
            raise error
        await _send(send, {"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
        await _write(send, self._encoder.start())
        while not isinstance(event, TurnFinished):
            await _write(send, SSE_COMMENT if event is None else self._encoder.delta(event))
            event = await anext(events)
        end = self._explained(event)
        await _write(send, self._encoder.end(end), is_last=True)
        return end

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache, no-transform",
            "x-accel-buffering": "no",
            **self._headers,
        }
        return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]

    def _explained(self, end: TurnFinished) -> TurnFinished:
        """The end in the words of who caused it: a turn that the drain cut says so."""
        if not (self._is_cut and end.reason is FinishReason.CANCELLED):
            return end
        error = error_of("server_draining", "the server is restarting: try again", retry_after_ms=2_000)
        return replace(end, reason=FinishReason.ERROR, error=error)


async def watched(turn: TurnEvents, receive: Receive) -> AsyncGenerator[Delta | TurnFinished | None, None]:
    """Yield a turn's events, and None whenever PING_S pass without one. Closing it stops the turn.

    Raises:
        ClientDisconnect: the client left; the turn is stopped.
    """
    gone = asyncio.create_task(_wait_gone(receive))
    step: asyncio.Task[Delta | TurnFinished] | None = None
    try:
        while True:
            step = step or asyncio.create_task(_next(turn))
            await asyncio.wait({step, gone}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnect
            if not step.done():
                yield None
                continue
            event, step = step.result(), None
            yield event
            if isinstance(event, TurnFinished):
                return
    finally:
        # The step first: a generator that still runs can't be closed.
        waiting: list[asyncio.Task[Any]] = [gone] if step is None else [gone, step]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await turn.aclose()


async def _next(turn: TurnEvents) -> Delta | TurnFinished:
    return await anext(turn)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _write(send: Send, body: bytes, *, is_last: bool = False) -> None:
    await _send(send, {"type": "http.response.body", "body": body, "more_body": not is_last})


async def _send(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(SEND_WAIT_S):
            await send(message)
    except TimeoutError:
        raise ClientDisconnect from None
