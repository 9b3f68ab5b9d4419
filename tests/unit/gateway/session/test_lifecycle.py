# SPDX-License-Identifier: Apache-2.0
"""The life of a turn is one table, and its picture is true."""

import itertools
import re

import pytest

from server.gateway.session import lifecycle
from server.gateway.session.lifecycle import TRANSITIONS, OpenTurn, TurnInput, TurnState


def test_the_docstring_shows_the_table():
    """A reader may trust the picture."""
    rows = re.findall(r"^ {4}([A-Z]+) +([a-z]+) +([A-Z]+)$", lifecycle.__doc__, re.MULTILINE)
    shown = {(TurnState[a], TurnInput[given.upper()]): TurnState[b] for a, given, b in rows}
    assert shown == TRANSITIONS


def test_what_is_not_in_the_table_cannot_happen():
    """`may` and `advance` agree on every pair."""
    for state, given in itertools.product(TurnState, TurnInput):
        turn = OpenTurn(id="t", item_id="i", is_out_of_band=False, state=state)
        assert turn.may(given) == ((state, given) in TRANSITIONS)
        if turn.may(given):
            assert (state, TRANSITIONS[state, given]) == (turn.advance(given), turn.state)
        else:
            with pytest.raises(KeyError):
                turn.advance(given)


def test_every_state_leads_to_the_end_and_the_end_is_final():
    """A turn can always finish, once."""
    live = set(TurnState) - {TurnState.ENDED}
    assert all(TRANSITIONS[state, TurnInput.FINISH] is TurnState.ENDED for state in live)
    assert not any(state is TurnState.ENDED for state, _ in TRANSITIONS)


def test_a_turn_can_be_cancelled_once():
    """The second time there is nothing to cancel any more."""
    cancellable = [state for state in TurnState if (state, TurnInput.CANCEL) in TRANSITIONS]
    assert [TurnState.RUNNING] == cancellable
