# SPDX-License-Identifier: Apache-2.0
"""One simulated user over one door: sends a turn, times every piece of the answer, keeps its history.

Knows two doors that any OpenAI-compatible server may have: Realtime over a WebSocket, where the server
keeps the history, and chat completions over HTTP/1.1 with server-sent events, where the client sends it
again. Must never retry or hide a failure: a failed turn is a `TurnTiming` with `error` set.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

HEADER_BYTES_MAX = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTiming:
    """What one turn took. Times are seconds of `time.perf_counter`.

    `arrivals` are the times at which pieces of text came; `output_tokens` is the server's own count, or
    the number of pieces when it gives none.
    """

    client: int
    turn: int
    started_at: float
    arrivals: tuple[float, ...]
    ended_at: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    text: str
    error: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending to the first piece of text."""
        return self.arrivals[0] - self.started_at if self.arrivals else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between neighbouring pieces."""
        return tuple(b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSettings:
    """What every turn asks for."""

    model: str
    max_tokens: int
    temperature: float
    api_key: str
    timeout_s: float


class Client(Protocol):
    """A user at one door."""

    async def open(self) -> None:
        """Connect and be ready to send."""

    async def turn(self, index: int, prompt: str) -> TurnTiming:
        """Send one prompt and read its answer to the end; never raises for a failed turn."""

    async def close(self) -> None:
        """Leave nothing open."""


@dataclass(slots=True)
class _Answer:
    """The answer while it arrives."""

    started_at: float
    arrivals: list[float]
    pieces: list[str]
    usage: dict[str, Any]
    error: str | None = None

    def add(self, piece: str) -> None:
        if piece:
            self.arrivals.append(time.perf_counter())
            self.pieces.append(piece)

    def timing(self, client: int, turn: int, names: tuple[str, str, str]) -> TurnTiming:
        inputs, outputs, details = names
        return TurnTiming(
            client=client,
            turn=turn,
            started_at=self.started_at,
            arrivals=tuple(self.arrivals),
            ended_at=time.perf_counter(),
            input_tokens=int(self.usage.get(inputs) or 0),
            output_tokens=int(self.usage.get(outputs) or len(self.pieces)),
            cached_tokens=int((self.usage.get(details) or {}).get("cached_tokens") or 0),
            text="".join(self.pieces),
            error=self.error,
        )


def _answer() -> _Answer:
    return _Answer(time.perf_counter(), [], [], {})


class RealtimeClient:
    """A user of `/v1/realtime`."""

    NAMES = ("input_tokens", "output_tokens", "input_token_details")

    def __init__(self, number: int, url: str, settings: TurnSettings) -> None:
        self.number = number
        self.settings = settings
        self.url = f"{url.replace('http', 'ws', 1).rstrip('/')}/realtime?model={settings.model}"
        self.socket: ClientConnection | None = None

    async def open(self) -> None:
        """Connect and set the session's sampling.

        Raises:
            OSError, WebSocketException, TimeoutError: the server cannot be reached.
        """
        headers = {"Authorization": f"Bearer {self.settings.api_key}"}
        self.socket = await connect(
            self.url, additional_headers=headers, compression=None, max_size=None, ping_interval=None
        )
        session = {
            "type": "realtime",
            "output_modalities": ["text"],
            "temperature": self.settings.temperature,
            "max_output_tokens": self.settings.max_tokens,
        }
        await self._send({"type": "session.update", "session": session})

    async def turn(self, index: int, prompt: str) -> TurnTiming:
        """Create the item and the response; read up to `response.done`."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": prompt}]}
        answer = _answer()
        try:
            await self._send({"type": "conversation.item.create", "item": item})
            await self._send({"type": "response.create"})
            async with asyncio.timeout(self.settings.timeout_s):
                await self._read(answer)
        except (OSError, WebSocketException, TimeoutError) as error:
            answer.error = type(error).__name__
        return answer.timing(self.number, index, self.NAMES)

    async def close(self) -> None:
        """Close the socket."""
        if self.socket is not None:
            await self.socket.close()

    async def _send(self, event: dict[str, Any]) -> None:
        assert self.socket is not None, "open() first"
        await self.socket.send(json.dumps(event))

    async def _read(self, answer: _Answer) -> None:
        assert self.socket is not None, "open() first"
        while True:
            event = json.loads(await self.socket.recv())
            kind = event["type"]
            if kind == "response.output_text.delta":
                answer.add(event["delta"])
            elif kind == "error":
                answer.error = str(event["error"].get("code"))
                return
            elif kind == "response.done":
                response = event["response"]
                answer.usage = response.get("usage") or {}
                if response["status"] == "failed":
                    answer.error = str(response["status_details"]["error"]["code"])
                return


class CompletionsClient:
    """A user of `/v1/chat/completions` with `stream: true`, one connection a request."""

    NAMES = ("prompt_tokens", "completion_tokens", "prompt_tokens_details")

    def __init__(self, number: int, url: str, settings: TurnSettings) -> None:
        self.number = number
        self.settings = settings
        self.target = urlsplit(f"{url.rstrip('/')}/chat/completions")
        self.messages: list[dict[str, str]] = []

    async def open(self) -> None:
        """Nothing to do: every turn opens its own connection."""

    async def turn(self, index: int, prompt: str) -> TurnTiming:
        """Send the whole history and read the stream to its end."""
        self.messages.append({"role": "user", "content": prompt})
        answer = _answer()
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                await self._stream(answer)
        except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
            answer.error = answer.error or type(error).__name__
        timing = answer.timing(self.number, index, self.NAMES)
        self.messages.append({"role": "assistant", "content": timing.text})
        return timing

    async def close(self) -> None:
        """Nothing stays open."""

    def _request(self) -> bytes:
        body = json.dumps(
            {
                "model": self.settings.model,
                "messages": self.messages,
                "max_tokens": self.settings.max_tokens,
                "temperature": self.settings.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST {self.target.path} HTTP/1.1\r\nHost: {self.target.netloc}\r\n"
            f"Authorization: Bearer {self.settings.api_key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def _stream(self, answer: _Answer) -> None:
        port = self.target.port or 80
        reader, writer = await asyncio.open_connection(self.target.hostname, port, limit=HEADER_BYTES_MAX)
        try:
            writer.write(self._request())
            status, is_chunked = await _read_head(reader)
            if status != 200:  # noqa: PLR2004  # the one status that streams
                answer.error = f"http_{status}"
                return
            async for line in _lines(reader, is_chunked=is_chunked):
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    _take(answer, json.loads(line[6:]))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _take(answer: _Answer, chunk: dict[str, Any]) -> None:
    if chunk.get("error"):
        answer.error = str(chunk["error"].get("code") or chunk["error"].get("type"))
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk.get("choices") or ():
        answer.add(choice["delta"].get("content") or "")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("response head too long") from error
    status = int(head.split(b" ", 2)[1])
    return status, b"transfer-encoding: chunked" in head.lower()


async def _lines(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    """Yield the body's lines without their ends, with chunk framing taken off."""
    rest = b""
    while True:
        if is_chunked:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            data = (await reader.readexactly(size + 2))[:-2]
        else:
            data = await reader.read(HEADER_BYTES_MAX)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
