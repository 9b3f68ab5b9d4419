# SPDX-License-Identifier: Apache-2.0
"""The pure machine of one session: its settings, its conversation, and the turns that run in it.

Invariant: every command has its answer at once, every turn that starts ends exactly once, and at most one turn
at a time writes to the conversation. A refused command changed nothing. It must never wait, know a clock or a
socket: time comes as `now` (seconds, any origin), ids from `new_id`, and what it wants done leaves as effects.
`lifecycle` has the life of one turn.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from server.core.errors import CLOSE_SLOW, Close, ServerError, error_of
from server.core.events import (
    CancelResponse,
    Command,
    ConversationReset,
    CreateItem,
    DeleteItem,
    Delta,
    DescribeSession,
    Event,
    Failed,
    ItemAdded,
    ItemDeleted,
    ItemRetrieved,
    ResetConversation,
    RetrieveItem,
    Say,
    SessionCreated,
    SessionDescribed,
    SessionSettings,
    SessionUpdated,
    SettingsPatch,
    StartResponse,
    TurnFinished,
    TurnStarted,
    UpdateSession,
)
from server.core.types import ContentPart, FinishReason, Item, ItemStatus, Role
from server.gateway.session.conversation import Conversation, SessionLimits
from server.gateway.session.lifecycle import OpenTurn, TurnInput, TurnState
from server.gateway.session.outbox import Backlog

DESCRIBED_ITEMS_MAX = 20
DESCRIBED_BYTES_MAX = 65_536
"""How much of a conversation is shown at once: a screen for a person, and a bound for the outbox."""

_DEFAULT_LIMITS = SessionLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Send an event to the client."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTurn:
    """Run a turn over these items; feed its events to `handle_turn`."""

    turn_id: str
    settings: SessionSettings
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTurn:
    """Make a running turn end soon."""

    turn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSocket:
    """End the socket; nothing else follows."""

    close: Close


Effect = Emit | StartTurn | StopTurn | CloseSocket
Effects = tuple[Effect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSnapshot:
    """A session at one moment, for metrics, admin and tests."""

    session_id: str
    num_items: int
    num_bytes: int
    num_turns: int
    is_draining: bool
    is_closed: bool


class Session:
    """Decides for one client.

    Args:
        session_id: its public name.
        settings: what it starts with; `settings.model` must be served.
        new_id: draws a process-unique id from a prefix.
        model_ids: the models a client may name.
        limits: what it may hold.
    """

    def __init__(
        self,
        *,
        session_id: str,
        settings: SessionSettings,
        new_id: Callable[[str], str],
        model_ids: tuple[str, ...],
        limits: SessionLimits = _DEFAULT_LIMITS,
    ) -> None:
        self.session_id = session_id
        self._settings = settings
        self._new_id = new_id
        self._model_ids = model_ids
        self._limits = limits
        self._conversation = Conversation(limits)
        self._turns: dict[str, OpenTurn] = {}
        self._writer: OpenTurn | None = None  # the one turn that writes to the conversation
        self._slow_since: float | None = None
        self._is_draining = False
        self._is_closed = False

    def start(self, now: float) -> Effects:  # noqa: ARG002 - every verb of a machine takes the time
        """Greet. Once, before anything else."""
        return (Emit(event=SessionCreated(session_id=self.session_id, settings=self._settings)),)

    def handle(self, command: Command, now: float) -> Effects:  # noqa: ARG002 - a machine's verb
        """Answer one command; a fault of it is answered too."""
        if self._is_closed:
            return ()
        try:
            return self._answer(command)
        except ServerError as error:
            return (Emit(event=Failed(error=error, event_id=command.event_id)),)

    def handle_turn(self, event: Delta | TurnFinished, now: float) -> Effects:  # noqa: ARG002 - a machine's verb
        """Take what a running turn says. After its TurnFinished a turn must say nothing."""
        turn = self._turns[event.turn_id]
        if isinstance(event, TurnFinished):
            return self._finish(turn, event)
        if turn.advance(TurnInput.DELTA) is TurnState.FORGOTTEN:
            return ()
        turn.num_sent_chars += len(event.text)
        return (Emit(event=event),)

    def handle_backlog(self, backlog: Backlog, now: float) -> Effects:
        """Take how full the outbox is, whenever that may have changed."""
        if backlog is Backlog.NORMAL:
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = now
        return self._close(CLOSE_SLOW) if backlog is Backlog.OVERFLOWN else ()

    def handle_timeout(self, now: float) -> Effects:
        """Act on a deadline that has come; call at `next_deadline()`, too early is harmless."""
        deadline = self.next_deadline()
        return self._close(CLOSE_SLOW) if deadline is not None and now >= deadline else ()

    def next_deadline(self) -> float | None:
        """When `handle_timeout` has something to do, on the clock of `now`."""
        if self._is_closed or self._slow_since is None:
            return None
        return self._slow_since + self._limits.slow_s_max

    def begin_drain(self) -> None:
        """Start no turn from now on."""
        self._is_draining = True

    def snapshot(self) -> SessionSnapshot:
        """How it stands."""
        return SessionSnapshot(
            session_id=self.session_id,
            num_items=len(self._conversation.items),
            num_bytes=self._conversation.num_bytes,
            num_turns=len(self._turns),
            is_draining=self._is_draining,
            is_closed=self._is_closed,
        )

    def check_integrity(self) -> None:
        """Assert what the head of this file promises."""
        self._conversation.check_integrity()
        written = [i.id for i in self._conversation.items if i.status is ItemStatus.IN_PROGRESS]
        assert written == ([self._writer.item_id] if self._writer else []), "an answer without its turn"
        assert self._writer is None or self._turns[self._writer.id] is self._writer
        assert all(turn.state is not TurnState.ENDED for turn in self._turns.values()), "an ended turn is open"

    def _answer(self, command: Command) -> Effects:  # noqa: PLR0911 - the one match over a closed union
        match command:
            case Say():
                return self._say(command)
            case StartResponse():
                return self._start_response(command)
            case CancelResponse():
                return self._cancel(command)
            case UpdateSession():
                self._settings = self._patched(command.patch)
                return (Emit(event=SessionUpdated(session_id=self.session_id, settings=self._settings)),)
            case ResetConversation():
                return self._reset()
            case DescribeSession():
                return (Emit(event=self._described(command.event_id)),)
            case CreateItem() | RetrieveItem() | DeleteItem():
                return (Emit(event=self._item_event(command)),)

    def _item_event(self, command: CreateItem | RetrieveItem | DeleteItem) -> Event:
        match command:
            case CreateItem():
                item = self._named(command.item)
                previous = self._conversation.insert(item, command.previous_item_id)
                return ItemAdded(item=item, previous_item_id=previous)
            case RetrieveItem():
                return ItemRetrieved(item=self._conversation.find(command.item_id))
            case DeleteItem():
                self._conversation.remove(command.item_id)
                return ItemDeleted(item_id=command.item_id)

    def _say(self, command: Say) -> Effects:
        self._check_may_start(is_out_of_band=False)
        item = Item(id=self._new_id("item"), role=Role.USER, parts=(ContentPart(text=command.text),))
        self._conversation.check_room(2, item)
        previous = self._conversation.insert(item)
        added = Emit(event=ItemAdded(item=item, previous_item_id=previous))
        started = self._start(StartResponse(), self._settings, self._conversation.whole_items())
        return (added, *started)

    def _start_response(self, command: StartResponse) -> Effects:
        self._check_may_start(is_out_of_band=command.is_out_of_band)
        settings = self._patched(command.patch)
        items = self._conversation.whole_items()
        if command.input is not None:
            items = tuple(self._resolved(element) for element in command.input)
        if not command.is_out_of_band:
            self._conversation.check_room(1)
        return self._start(command, settings, items)

    def _start(self, command: StartResponse, settings: SessionSettings, items: tuple[Item, ...]) -> Effects:
        """Start a turn that nothing refuses any more."""
        is_out_of_band = command.is_out_of_band
        turn = OpenTurn(id=self._new_id("resp"), item_id=self._new_id("item"), is_out_of_band=is_out_of_band)
        previous = None
        if not is_out_of_band:
            answer = Item(id=turn.item_id, role=Role.ASSISTANT, parts=(), status=ItemStatus.IN_PROGRESS)
            previous = self._conversation.insert(answer)
            self._writer = turn
        self._turns[turn.id] = turn
        started = TurnStarted(
            turn_id=turn.id,
            item_id=turn.item_id,
            previous_item_id=previous,
            settings=settings,
            is_out_of_band=is_out_of_band,
            metadata=command.metadata,
        )
        return Emit(event=started), StartTurn(turn_id=turn.id, settings=settings, items=items)

    def _finish(self, turn: OpenTurn, event: TurnFinished) -> Effects:
        del self._turns[turn.id]
        before = turn.advance(TurnInput.FINISH)
        if before is not TurnState.RUNNING:
            event = replace(event, reason=FinishReason.CANCELLED, error=None)
        if before is TurnState.FORGOTTEN:
            event = replace(event, text=event.text[: turn.num_sent_chars])
        if turn is self._writer:
            self._writer = None
            is_whole = event.reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
            status = ItemStatus.COMPLETED if is_whole else ItemStatus.INCOMPLETE
            parts = (ContentPart(text=event.text),)
            self._conversation.finish(Item(id=turn.item_id, role=Role.ASSISTANT, parts=parts, status=status))
        return () if self._is_closed else (Emit(event=event),)

    def _cancel(self, command: CancelResponse) -> Effects:
        named = command.response_id
        turn = self._writer if named is None else self._turns.get(named)
        if turn is None or not turn.may(TurnInput.CANCEL):
            what = "no response is running" if named is None else f"response '{named}' is not running"
            param = None if named is None else "response_id"
            raise error_of("response_cancel_not_active", f"{what}: there is nothing to cancel", param=param)
        turn.advance(TurnInput.CANCEL)
        return (StopTurn(turn_id=turn.id),)

    def _reset(self) -> Effects:
        stops = self._forget_turns()
        self._writer = None
        self._conversation.clear()
        return (*stops, Emit(event=ConversationReset()))

    def _close(self, close: Close) -> Effects:
        if self._is_closed:
            return ()
        self._is_closed = True
        return (*self._forget_turns(), CloseSocket(close=close))

    def _forget_turns(self) -> Effects:
        before = [(turn, turn.advance(TurnInput.FORGET)) for turn in self._turns.values()]
        return tuple(StopTurn(turn_id=turn.id) for turn, state in before if state is TurnState.RUNNING)

    def _check_may_start(self, *, is_out_of_band: bool) -> None:
        if self._is_draining:
            raise error_of("server_draining", "the server is about to restart: reconnect and ask again")
        if not is_out_of_band and self._writer is not None:
            raise error_of(
                "conversation_already_has_active_response",
                f"the conversation already has an active response: {self._writer.id}. "
                "Wait until it is done, or cancel it.",
            )
        # Turns put away by a reset count here too, so that no client can start them without end.
        num_beside = len(self._turns) - (self._writer is not None)
        if num_beside >= self._limits.num_side_turns_max + (not is_out_of_band):
            message = f"{num_beside} responses already run beside the conversation: wait until one is done"
            raise error_of("rate_limit_exceeded", message)

    def _patched(self, patch: SettingsPatch) -> SessionSettings:
        """The settings with a patch over them; the session's own stay as they are."""
        if patch.model is not None and patch.model not in self._model_ids:
            names = ", ".join(f"'{name}'" for name in self._model_ids)
            message = f"no model is called '{patch.model[:64]}'; here are: {names}"
            raise error_of("model_not_found", message, param="model")
        changes: dict[str, Any] = {
            "model": patch.model,
            "instructions": patch.instructions,
            "truncation": patch.truncation,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        sampling = replace(self._settings.sampling, **dict[str, Any](patch.sampling))
        return replace(self._settings, sampling=sampling, **changes)

    def _resolved(self, element: Item | str) -> Item:
        return self._conversation.find(element) if isinstance(element, str) else self._named(element)

    def _named(self, item: Item) -> Item:
        return item if item.id else replace(item, id=self._new_id("item"))

    def _described(self, event_id: str | None) -> SessionDescribed:
        items = self._conversation.newest(num_items_max=DESCRIBED_ITEMS_MAX, bytes_max=DESCRIBED_BYTES_MAX)
        return SessionDescribed(
            session_id=self.session_id, settings=self._settings, items=items, event_id=event_id
        )
