# SPDX-License-Identifier: Apache-2.0
"""What travels between a client and its session, free of any protocol's spelling.

A codec turns bytes into a `Command` and an `Event` into frames. Both unions are closed: a session matches
every Command in one place, a codec every Event in one place.

Order that a session keeps, and every codec relies on:
    SessionCreated first; per turn TurnStarted, Delta*, TurnFinished, exactly one of each end;
    an item's ItemAdded before its ItemDone; a Failed answers the command whose `event_id` it carries.
"""

from dataclasses import dataclass, field

from server.core.errors import ServerError
from server.core.types import FinishReason, Item, SamplingParams, Truncation, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """The effective settings of a session; a turn starts from them and may override any."""

    model: str
    instructions: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    truncation: Truncation = Truncation.AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsPatch:
    """Changes to settings: None leaves a value as it is, `""` clears the instructions.

    `sampling` holds only the fields that change, by their `SamplingParams` names; a `max_tokens` of None
    there is a value (no bound), not an absence.
    """

    model: str | None = None
    instructions: str | None = None
    sampling: tuple[tuple[str, object], ...] = ()
    truncation: Truncation | None = None


# ---- commands: client → us -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSession:
    """Change settings; all of it or nothing."""

    patch: SettingsPatch
    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateItem:
    """Add an item after `previous_item_id` (None: at the end, `"root"`: at the front).

    An item whose id is `""` is named by the session.
    """

    item: Item
    previous_item_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieveItem:
    """Send one item back."""

    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteItem:
    """Remove one item."""

    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResponse:
    """Start a turn over the conversation, or over `input` alone.

    `input` None reads the conversation; a tuple replaces it for this turn (an element is an Item or, as a
    string, the id of an item of the conversation). `is_out_of_band` keeps the answer out of the
    conversation and lets it run beside another turn.
    """

    patch: SettingsPatch = SettingsPatch()
    input: tuple[Item | str, ...] | None = None
    is_out_of_band: bool = False
    metadata: tuple[tuple[str, str], ...] = ()
    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelResponse:
    """Stop a turn: the named one, or the conversation's own when `response_id` is None."""

    response_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Add a user's message and answer it: the whole of what a person by hand can mean."""

    text: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetConversation:
    """Stop what runs and forget every item; settings stay."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeSession:
    """Send the settings and the newest items: what a person asks to see. Changes nothing."""

    event_id: str | None = None


Command = (
    UpdateSession
    | CreateItem
    | RetrieveItem
    | DeleteItem
    | StartResponse
    | CancelResponse
    | Say
    | ResetConversation
    | DescribeSession
)


# ---- events: us → client ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCreated:
    """The first event of every session."""

    session_id: str
    settings: SessionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUpdated:
    """The full effective settings after a change."""

    session_id: str
    settings: SessionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationReset:
    """Every item is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAdded:
    """A client's item entered the conversation after `previous_item_id` (None: it is the first)."""

    item: Item
    previous_item_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRetrieved:
    """The answer to RetrieveItem."""

    item: Item


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemDeleted:
    """The answer to DeleteItem."""

    item_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDescribed:
    """The answer to DescribeSession: the newest items, oldest first; `event_id` is the command's own."""

    session_id: str
    settings: SessionSettings
    items: tuple[Item, ...]
    event_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """A turn was accepted; its answer will be item `item_id`."""

    turn_id: str
    item_id: str
    previous_item_id: str | None
    settings: SessionSettings
    is_out_of_band: bool
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next piece of a turn's text. `index` is its offset in the whole text, in code points."""

    turn_id: str
    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFinished:
    """The one end of a turn. `text` is the whole answer; `error` is set exactly when `reason` is ERROR.

    `num_dropped_items` tells how many of the oldest items did not fit the context.
    """

    turn_id: str
    reason: FinishReason
    text: str
    usage: Usage
    error: ServerError | None = None
    num_dropped_items: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A command was refused and changed nothing. `event_id` is the command's own."""

    error: ServerError
    event_id: str | None = None


Event = (
    SessionCreated
    | SessionUpdated
    | ConversationReset
    | ItemAdded
    | ItemRetrieved
    | ItemDeleted
    | SessionDescribed
    | TurnStarted
    | Delta
    | TurnFinished
    | Failed
)
