# SPDX-License-Identifier: Apache-2.0
"""The life of one turn as its session sees it. Pure.

TRANSITIONS holds the same as these lines; a test compares them:

    RUNNING    delta   RUNNING
    RUNNING    cancel  STOPPING
    RUNNING    forget  FORGOTTEN
    RUNNING    finish  ENDED
    STOPPING   delta   STOPPING
    STOPPING   forget  FORGOTTEN
    STOPPING   finish  ENDED
    FORGOTTEN  delta   FORGOTTEN
    FORGOTTEN  forget  FORGOTTEN
    FORGOTTEN  finish  ENDED

Invariant: a turn that left RUNNING was asked to stop once, and ends as CANCELLED whatever its generator says.
A FORGOTTEN turn belongs to a conversation that was reset or a socket that is closed: its text goes nowhere any
more. What is not in the table is a command to refuse, or the shell's mistake.
"""

from dataclasses import dataclass
from enum import Enum


class TurnState(Enum):
    """Where a turn stands."""

    RUNNING = "running"
    STOPPING = "stopping"
    FORGOTTEN = "forgotten"
    ENDED = "ended"


class TurnInput(Enum):
    """What can happen to a turn."""

    DELTA = "delta"
    CANCEL = "cancel"
    FORGET = "forget"
    FINISH = "finish"


TRANSITIONS: dict[tuple[TurnState, TurnInput], TurnState] = {
    (TurnState.RUNNING, TurnInput.DELTA): TurnState.RUNNING,
    (TurnState.RUNNING, TurnInput.CANCEL): TurnState.STOPPING,
    (TurnState.RUNNING, TurnInput.FORGET): TurnState.FORGOTTEN,
    (TurnState.RUNNING, TurnInput.FINISH): TurnState.ENDED,
    (TurnState.STOPPING, TurnInput.DELTA): TurnState.STOPPING,
    (TurnState.STOPPING, TurnInput.FORGET): TurnState.FORGOTTEN,
    (TurnState.STOPPING, TurnInput.FINISH): TurnState.ENDED,
    (TurnState.FORGOTTEN, TurnInput.DELTA): TurnState.FORGOTTEN,
    (TurnState.FORGOTTEN, TurnInput.FORGET): TurnState.FORGOTTEN,
    (TurnState.FORGOTTEN, TurnInput.FINISH): TurnState.ENDED,
}


@dataclass(slots=True, kw_only=True)
class OpenTurn:
    """One turn between its start and its end; `num_sent_chars` of its text went to the client."""

    id: str
    item_id: str
    is_out_of_band: bool
    state: TurnState = TurnState.RUNNING
    num_sent_chars: int = 0

    def may(self, given: TurnInput) -> bool:
        """Whether the table has a step for this."""
        return (self.state, given) in TRANSITIONS

    def advance(self, given: TurnInput) -> TurnState:
        """Take one step and return the state that was left.

        Raises:
            KeyError: the table has no such step: our mistake, never a client's.
        """
        before, self.state = self.state, TRANSITIONS[self.state, given]
        return before
