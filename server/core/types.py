# SPDX-License-Identifier: Apache-2.0
"""The nouns: items of a conversation, what a turn asks of a model, what it used, and why it ended.

Every value is frozen and compared by content, so it can cross tasks and processes without a lock. Enums live
here and inside the server only; their spelling in each protocol belongs to `wire`.
"""

from dataclasses import dataclass, field
from enum import Enum


class Role(Enum):
    """Who speaks in an item."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ItemStatus(Enum):
    """Whether an item is whole: a cancelled or cut answer stays in the conversation as INCOMPLETE."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


class FinishReason(Enum):
    """Why a turn ended. Each protocol spells it its own way; the mapping lives in that protocol's codec."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    FILTERED = "filtered"
    ERROR = "error"


class Truncation(Enum):
    """What happens to a conversation longer than the context: drop whole oldest turns, or refuse."""

    AUTO = "auto"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPart:
    """One part of an item. Text only: other kinds are refused where they enter."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One message of a conversation, in order.

    `id` is unique within its conversation and may be the client's own.
    """

    id: str
    role: Role
    parts: tuple[ContentPart, ...]
    status: ItemStatus = ItemStatus.COMPLETED

    @property
    def text(self) -> str:
        """All parts joined, as the model reads them."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Ranges are checked where values enter (`wire`), never here.

    `temperature` 0 is argmax. `top_k` 0 is off. `seed` None lets the server draw one per request.
    `max_tokens` None means whatever the context still holds. `stop` strings are cut from the text.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a turn asks of any tier: a whole prompt as items, and how to continue it.

    `id` names the request until it ends and must be unique in the process. `tenant` groups requests for
    fair queueing. With `truncation` DISABLED an over-long prompt is refused (`context_length_exceeded`);
    with AUTO the caller has already trimmed it, and a prompt that still does not fit is refused as well.
    """

    id: str
    model: str
    items: tuple[Item, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    truncation: Truncation = Truncation.AUTO
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens read and written by one request. `cached_tokens` of the input needed no computing."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a client may know of a served model. `created` is a Unix time in seconds."""

    id: str
    created: int
    context_length: int
    quantization: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks: `tenant` owns sessions and budgets, `subject` is the key or user within it."""

    tenant: str = "default"
    subject: str = "anonymous"
