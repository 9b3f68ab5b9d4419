# SPDX-License-Identifier: Apache-2.0
"""Plain text for a person with `wscat` or a script of three lines: a message in, its answer out as it comes.

    you send                       you get
    a line                         the answer piece by piece, one text message a piece, then one empty message
    /command                       a line that begins with "# ", then one empty message

So a script reads until the empty message; the text is all pieces joined. A piece is never empty. While an
answer runs, a "# " line may stand between its pieces (an error about another line) without an empty message
of its own. A line that must begin with "/" is written with "//". Blank lines are ignored.

Invariant: nothing of an answer is changed. It must never end a socket: every fault is a "# " line.
"""

from collections.abc import Callable, Mapping

from server.core.errors import error_of
from server.core.events import (
    CancelResponse,
    Command,
    ConversationReset,
    Delta,
    DescribeSession,
    Event,
    Failed,
    ItemAdded,
    ItemDeleted,
    ItemRetrieved,
    ResetConversation,
    Say,
    SessionCreated,
    SessionDescribed,
    SessionUpdated,
    SettingsPatch,
    TurnFinished,
    TurnStarted,
    UpdateSession,
)
from server.core.types import FinishReason
from server.wire.frames import MESSAGE_BYTES_MAX, DecodeFault

END = ""
"""The message that ends every answer."""

HELP = """\
# Type a line and press Enter: the answer comes piece by piece and ends with an empty message.
# /stop          stop the answer that is being written
# /new           forget the conversation and begin again
# /system TEXT   tell the model who it is; without TEXT, nothing
# /history       show the conversation
# /model [NAME]  show the model, or choose another
# /help          show this
# //TEXT         say a line that begins with a slash"""

_ENDINGS: Mapping[FinishReason, str] = {
    FinishReason.LENGTH: "# cut: the answer reached its longest length",
    FinishReason.CANCELLED: "# stopped",
    FinishReason.FILTERED: "# stopped: the answer was filtered",
}


class PlainCodec:
    """Fits `wire.codec.Codec`. Needs no ids, as nothing here has a name."""

    def __init__(self, _new_id: Callable[[str], str]) -> None:
        self._open_turn: str | None = None

    def decode(self, data: str | bytes) -> list[Command]:
        """Read one line.

        Raises:
            DecodeFault: a binary message, one that is too long, or an unknown command.
        """
        if isinstance(data, bytes):
            raise DecodeFault(error_of("invalid_event", "send text messages; binary ones are not supported"))
        if len(data.encode("utf-8", "replace")) > MESSAGE_BYTES_MAX:
            raise DecodeFault(error_of("payload_too_large", f"a line has at most {MESSAGE_BYTES_MAX} bytes"))
        line = data.rstrip("\r\n")
        if not line.strip():
            return []
        if line.startswith("//"):
            return [Say(text=line[1:])]
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            return [_command(name.strip().lower(), rest.strip())]
        return [Say(text=line)]

    def encode(self, event: Event) -> list[str]:
        """Spell one event as text messages."""
        match event:
            case Delta():
                # A piece of a turn that /new put away belongs to no answer on the screen.
                return [event.text] if event.turn_id == self._open_turn else []
            case TurnStarted():
                self._open_turn = event.turn_id
                return []
            case TurnFinished():
                return self._finished(event)
            case _:
                if isinstance(event, ConversationReset):
                    self._open_turn = None
                notice = _notice(event)
                return [] if notice is None else [notice] if self._open_turn else [notice, END]

    def _finished(self, event: TurnFinished) -> list[str]:
        if event.turn_id != self._open_turn:
            return []
        self._open_turn = None
        lines = [f"# error: {event.error.message}"] if event.error else []
        if event.reason in _ENDINGS:
            lines.append(_ENDINGS[event.reason])
        if event.num_dropped_items:
            lines.append(f"# the {event.num_dropped_items} oldest messages no longer fit and were not read")
        return [*lines, END]


def _command(name: str, rest: str) -> Command:
    match name:
        case "stop":
            return CancelResponse()
        case "new":
            return ResetConversation()
        case "system":
            return UpdateSession(patch=SettingsPatch(instructions=rest))
        case "model" if rest:
            return UpdateSession(patch=SettingsPatch(model=rest))
        case "help" | "history" | "model":
            return DescribeSession(event_id=name)  # comes back with the answer and says what to show
        case _:
            message = f"there is no command /{name[:40]}; /help shows them all, and //{name[:40]} says it"
            raise DecodeFault(error_of("invalid_value", message))


def _notice(event: Event) -> str | None:  # the one match over the closed union
    """What a person is told besides answers; None for what they need not see."""
    match event:
        case SessionCreated():
            return f"# {event.settings.model} is listening; /help shows the commands"
        case SessionUpdated():
            told = f"told: {event.settings.instructions}" if event.settings.instructions else "told nothing"
            return f"# {event.settings.model}, {told}"
        case SessionDescribed():
            return _description(event)
        case Failed():
            return f"# error: {event.error.message}"
        case ItemAdded() | ItemDeleted() | ItemRetrieved() | TurnStarted() | Delta() | TurnFinished():
            return None
        case ConversationReset():
            return "# new conversation"


def _description(event: SessionDescribed) -> str:
    if event.event_id == "history":
        lines = [f"# {item.role.value}: {item.text}" for item in event.items]
        return "\n".join(lines) or "# nothing was said yet"
    if event.event_id == "model":
        sampling = event.settings.sampling
        return f"# {event.settings.model}, temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
    return HELP
