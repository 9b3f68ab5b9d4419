# SPDX-License-Identifier: Apache-2.0
"""One conversation over `/v1/realtime`: a question out, a streamed answer in.

Owns the socket and a copy of what was said. Invariant: when the server went away and came back, it is told
everything again before the next question, so a restart in the middle of a chat costs a pause. It must never
send the same question twice by itself: an answer that was cut stays cut.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from server.cli.options import CommandError

FRAME_BYTES_MAX = 16_777_216
OPEN_TIMEOUT_S = 10.0
POLL_S = 0.1
"""How long a Ctrl-C may wait to be noticed between two pieces of text."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PART = {"user": "input_text", "assistant": "output_text", "system": "input_text"}


class TalkError(CommandError):
    """The server is not there, went away, or said no; the message is for the person who asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkSettings:
    """Where the server is, and what a session starts with; None leaves the choice to the server."""

    url: str
    model: str | None = None
    instructions: str | None = None
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a question ended. `status` is completed, cancelled, incomplete or failed."""

    status: str
    text: str
    usage: dict[str, Any] = field(default_factory=dict)


class Talk:
    """A conversation with a server. Use from one thread, inside `with`."""

    def __init__(self, settings: TalkSettings) -> None:
        self._settings = settings
        self._socket: ClientConnection | None = None
        self._said: list[tuple[str, str]] = []
        self._num_sent = 0
        self.model = settings.model or ""
        self.instructions = settings.instructions

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            TalkError: no server there.
        """
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say good-bye."""
        if self._socket is not None:
            self._socket.close()

    def recall(self, said: list[tuple[str, str]]) -> None:
        """Put earlier messages, as (role, text), before the next question.

        Raises:
            TalkError: the server does not take them.
        """
        for role, text in said:
            self._create_item(role, text)
        self._said += said

    def instruct(self, text: str) -> None:
        """Change what the model is told before the conversation."""
        self.instructions = text
        self._update(instructions=text)

    def reset(self) -> None:
        """Begin anew, with the same settings."""
        self._said.clear()
        self._open()

    def ask(self, text: str, on_text: Callable[[str], None], is_stopped: Callable[[], bool]) -> Answer:
        """Send a question and read its answer.

        Args:
            text: the question.
            on_text: called with each piece of the answer as it comes.
            is_stopped: asked between pieces; once true, the server is told to stop.

        Raises:
            TalkError: the question was refused, or the connection was lost before the answer's end.
        """
        try:
            self._create_item("user", text)
        except ConnectionClosed:
            self._reopen()
            self._create_item("user", text)
        self._said.append(("user", text))
        try:
            answer = self._answer(self._send("response.create"), on_text, is_stopped)
        except ConnectionClosed as error:
            raise TalkError(f"the connection was lost: {_why(error)}") from error
        if answer.text:
            self._said.append(("assistant", answer.text))
        return answer

    # ---- the socket ------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._socket is not None:
            self._socket.close()
        parts = urlsplit(self._settings.url if "://" in self._settings.url else f"http://{self._settings.url}")
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        query = f"?model={quote(self._settings.model)}" if self._settings.model else ""
        headers = {"Authorization": f"Bearer {self._settings.api_key}"} if self._settings.api_key else {}
        try:
            self._socket = connect(
                f"{scheme}://{parts.netloc}/v1/realtime{query}",
                additional_headers=headers,
                compression=None,
                max_size=FRAME_BYTES_MAX,
                open_timeout=OPEN_TIMEOUT_S,
                proxy=None if parts.hostname in LOOPBACK else True,
            )
            created = self._read(OPEN_TIMEOUT_S)
        except (OSError, InvalidHandshake, InvalidURI, ConnectionClosed, ValueError) as error:
            raise TalkError(
                f"no server answers at {self._settings.url} ({error}); start one with `sampan serve`"
            ) from error
        if created["type"] == "error":
            raise TalkError(created["error"]["message"])
        self.model = created["session"]["model"]
        self._update(
            instructions=self.instructions,
            temperature=self._settings.temperature,
            seed=self._settings.seed,
            max_output_tokens=self._settings.max_tokens,
        )

    def _reopen(self) -> None:
        said, self._said = self._said, []
        self._open()
        self.recall(said)

    def _update(self, **changes: Any) -> None:
        changes = {name: value for name, value in changes.items() if value is not None}
        if changes:
            event_id = self._send("session.update", session={"type": "realtime", **changes})
            self._until("session.updated", event_id)

    def _create_item(self, role: str, text: str) -> None:
        item = {"type": "message", "role": role, "content": [{"type": _PART[role], "text": text}]}
        event_id = self._send("conversation.item.create", item=item)
        self._until("conversation.item.done", event_id)

    def _answer(self, event_id: str, on_text: Callable[[str], None], is_stopped: Callable[[], bool]) -> Answer:
        pieces: list[str] = []
        has_stopped = False
        while True:
            if is_stopped() and not has_stopped:
                has_stopped = True
                self._send("response.cancel")
            try:
                event = self._read(POLL_S)
            except TimeoutError:
                continue
            if event["type"] == "response.output_text.delta":
                pieces.append(event["delta"])
                on_text(event["delta"])
            elif event["type"] == "response.done":
                response = event["response"]
                _raise_failed(response)
                return Answer(
                    status=response["status"], text="".join(pieces), usage=response.get("usage") or {}
                )
            else:
                _raise_refused(event, event_id)

    def _until(self, kind: str, event_id: str) -> None:
        while True:
            try:
                event = self._read(OPEN_TIMEOUT_S)
            except TimeoutError as error:
                raise TalkError("the server does not answer") from error
            if event["type"] == kind:
                return
            _raise_refused(event, event_id)

    def _send(self, kind: str, **more: Any) -> str:
        assert self._socket is not None, "a Talk is used inside `with`"
        self._num_sent += 1
        event_id = f"chat_{self._num_sent}"
        self._socket.send(json.dumps({"type": kind, "event_id": event_id, **more}))
        return event_id

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._socket is not None, "a Talk is used inside `with`"
        event: dict[str, Any] = json.loads(self._socket.recv(timeout=timeout_s))
        return event


def _raise_refused(event: dict[str, Any], event_id: str) -> None:
    if event["type"] == "error" and event["error"].get("event_id") in (event_id, None):
        raise TalkError(event["error"]["message"])


def _raise_failed(response: dict[str, Any]) -> None:
    if response["status"] == "failed":
        details = response.get("status_details") or {}
        raise TalkError((details.get("error") or {}).get("message") or "the answer failed")


def _why(error: ConnectionClosed) -> str:
    return error.rcvd.reason or str(error.rcvd.code) if error.rcvd else "the server is gone"
