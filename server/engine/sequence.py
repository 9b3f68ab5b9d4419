# SPDX-License-Identifier: Apache-2.0
"""The engine's shared words: what is submitted, the row it becomes, one step's plan and what comes out of it.

Pure data: no clock, no arrays, no decisions. Everything frozen may cross processes; `Sequence` alone is
mutable and belongs to the `Scheduler` that made it. Token text never stands here, only ids.
"""

from dataclasses import dataclass, field
from enum import Enum

from server.core.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenParams:
    """How the next token is chosen, in numbers only.

    `temperature` 0 is argmax; `top_k` 0, `top_p` 1 and `min_p` 0 are off. Randomness is a function of
    (`seed`, index of the output token) alone. `max_tokens` counts output tokens, those of an earlier run
    included; it is cut to what the slot holds. A token of `end_token_ids` ends the row and is not delivered.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as token ids.

    `request_id` names it until its one end. `output_ids` were generated before an engine died: they are
    computed again and the text goes on where it stopped; they are not delivered a second time.
    `tenant` groups requests for fair queueing. `max_wait_ms` bounds the time in the queue (None: the
    engine's own bound).
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: TokenParams
    output_ids: tuple[int, ...] = ()
    tenant: str = ""
    max_wait_ms: int | None = None


class SequenceStatus(Enum):
    """Where a row stands: WAITING has no slot, RUNNING, PAUSED and PREEMPTED do not wait, FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One row of tokens; mutated by its Scheduler only, compared by identity.

    `token_ids` is the prompt and every output so far; the first `num_computed_tokens` of them have their
    keys and values in `slot`. `order` numbers arrivals. `deadline` is the clock's second at which a row
    that still waits is given up. `num_skipped_steps` counts the steps in which its prefill stood back.
    """

    submission: Submission
    order: int
    added_at: float
    deadline: float
    num_tokens_max: int
    token_ids: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    started_at: float = 0.0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_skipped_steps: int = 0
    is_cancelled: bool = False

    @property
    def request_id(self) -> str:
        """The submission's name."""
        return self.submission.request_id

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose keys and values are not computed yet; 1 while the row decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_index(self) -> int:
        """Index of the next output token, counted over every run of the request."""
        return len(self.token_ids) - len(self.submission.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """What one row computes in a step: `num_tokens` of its tokens from `start`, in `slot`.

    `is_last` tells that no token of the row is pending after it, so that its logits name the next token.
    """

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMove:
    """Copy the keys and values of `num_tokens` tokens from slot `src` to slot `dst`, before any forward."""

    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step made for one request: new ids, and at its one end the reason.

    `error_code` (a key of `core.errors.CODES`) and `error_message` are set exactly when `reason` is ERROR.
    `num_cached_tokens` counts prompt tokens that needed no computing.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    reason: FinishReason | None = None
    error_code: str | None = None
    error_message: str | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass: first `moves`, then each group of `forwards` as one run of the model.

    A group's rows lie in ascending slots; its run spans the slots from first to last. `ended` are requests
    that ended without computing (cancelled, waited too long): they are to be delivered whatever happens.
    """

    forwards: tuple[tuple[StepRow, ...], ...] = ()
    moves: tuple[SlotMove, ...] = ()
    ended: tuple[StepOutput, ...] = ()

    @property
    def rows(self) -> tuple[StepRow, ...]:
        """Every row of every forward, in the order of computing."""
        return tuple(row for forward in self.forwards for row in forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRow:
    """A row as the runner sees it: compute `token_ids` at positions from `start` in `slot`."""

    slot: int
    start: int
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFault:
    """A row that cannot go on; its neighbours can. `message` holds no user text."""

    message: str


RowResult = int | RowFault | None
"""What sampling made of a row: the next token, a fault, or None while its prompt is still being read."""
