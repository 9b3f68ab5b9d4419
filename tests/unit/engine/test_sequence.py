# SPDX-License-Identifier: Apache-2.0
"""The engine's shared words: what can be read off a row, and what cannot be changed."""

from dataclasses import FrozenInstanceError, replace

import pytest

from server.engine.sequence import Sequence, Step, StepOutput, StepRow, Submission, TokenParams

PARAMS = TokenParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, max_tokens=4, end_token_ids=())
SUBMISSION = Submission(request_id="a", token_ids=(5, 6, 7), params=PARAMS, output_ids=(8,))


def sequence():
    return Sequence(
        submission=SUBMISSION,
        order=0,
        added_at=0.0,
        deadline=1.0,
        num_tokens_max=7,
        token_ids=[5, 6, 7, 8],
        num_computed_tokens=2,
    )


def test_a_row_knows_what_is_pending_and_which_output_comes_next():
    """Pending are the tokens without keys and values; outputs are counted over every run of the request."""
    row = sequence()
    assert (row.request_id, row.num_pending_tokens, row.output_index) == ("a", 2, 1)


def test_rows_are_compared_by_identity():
    """Two rows of equal content are two rows."""
    assert sequence() != sequence()


def test_a_step_lists_its_rows_in_the_order_of_computing():
    """Whatever the forwards, `rows` is what results are matched with."""
    rows = [StepRow(sequence=sequence(), slot=slot, start=0, num_tokens=1, is_last=True) for slot in (3, 1, 2)]
    assert Step(forwards=((rows[0],), (rows[1], rows[2]))).rows == tuple(rows)
    assert Step().rows == ()


def test_what_crosses_processes_is_frozen_and_compared_by_content():
    """A message cannot be changed on its way, and equals what it was decoded from."""
    assert replace(SUBMISSION) == SUBMISSION
    assert StepOutput(request_id="a") == StepOutput(request_id="a")
    with pytest.raises(FrozenInstanceError):
        SUBMISSION.tenant = "b"
