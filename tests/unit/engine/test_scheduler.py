# SPDX-License-Identifier: Apache-2.0
"""The scheduler without a model: whatever comes in any order, nobody is lost, doubled, starved or favoured."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from server.core.errors import ServerError
from server.core.types import FinishReason
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.sequence import RowFault, Submission, TokenParams

END = 9
PARAMS = TokenParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, max_tokens=4, end_token_ids=(END,))
LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_model_len=40,
    max_num_batched_tokens=20,
    prefill_chunk_tokens=8,
    queue_max=6,
    queue_tokens_max=120,
    queue_timeout_ms=5000,
)


def submission(name, num_tokens=3, *, tenant="", max_tokens=4, output_ids=(), max_wait_ms=None):
    return Submission(
        request_id=str(name),
        token_ids=(1,) * num_tokens,
        params=replace(PARAMS, max_tokens=max_tokens),
        output_ids=output_ids,
        tenant=tenant,
        max_wait_ms=max_wait_ms,
    )


def run_step(scheduler, now=0.0, token=2):
    """Plan and commit one step in which every finished row gets `token`."""
    step = scheduler.schedule(now)
    outputs = scheduler.commit(step, [token if row.is_last else None for row in step.rows], now)
    scheduler.check_integrity()
    return step, [*step.ended, *outputs]


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of add, cancel, time, steps and faults; the twin knows what each slot holds."""

    def __init__(self):
        super().__init__()
        self.scheduler, self.now = Scheduler(LIMITS), 0.0
        self.ends, self.num_added = Counter(), 0
        self.live, self.cancelled, self.over, self.refusals = {}, set(), set(), set()
        self.held = {}  # slot → [request, tokens computed]

    @rule(
        num_tokens=st.integers(1, 45),
        max_tokens=st.integers(1, 60),
        num_known=st.integers(0, 5),
        tenant=st.sampled_from("abc"),
        wait=st.sampled_from([None, 0, 2000]),
    )
    def add(self, num_tokens, max_tokens, num_known, tenant, wait):
        name = str(self.num_added)
        num_known = min(num_known, max_tokens)
        known = (2,) * num_known
        request = submission(
            name, num_tokens, tenant=tenant, max_tokens=max_tokens, output_ids=known, max_wait_ms=wait
        )
        refused = "context_length_exceeded" if num_tokens >= LIMITS.max_model_len else "queue_full"
        try:
            self.scheduler.add(request, self.now)
        except ServerError as error:
            self.refusals.add((refused, error.code))
            return
        self.num_added += 1
        self.live[name] = request
        if num_known == max_tokens or num_tokens + num_known >= LIMITS.max_model_len:
            self.over.add(name)  # it has ended already, and is told so in the next step

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.cancel(name)
        self.cancelled.add(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(data=st.data())
    def step(self, data):
        step = self.scheduler.schedule(self.now)
        self.take(step.ended)
        for move in step.moves:
            assert move.dst not in self.held, "a move lands on a row"
            self.held[move.dst] = self.held.pop(move.src)
            assert move.num_tokens == self.held[move.dst][1]
        self.check_plan(step)
        if data.draw(st.booleans()) and step.rows:
            name = data.draw(st.sampled_from(step.rows)).sequence.request_id
            self.scheduler.cancel(name)  # it leaves while its forward runs
            self.cancelled.add(name)
        results = [
            data.draw(st.sampled_from([2, 2, 2, END, RowFault(message="x")])) if row.is_last else None
            for row in step.rows
        ]
        self.take(self.scheduler.commit(step, results, self.now))
        self.scheduler.check_integrity()

    def check_plan(self, step):
        rows = step.rows
        assert len({row.slot for row in rows}) == len(rows), "a slot is shared"
        assert sum(row.num_tokens for row in rows) <= LIMITS.max_num_batched_tokens
        for forward in step.forwards:
            slots = [row.slot for row in forward]
            assert slots == sorted(slots)
            assert len({row.num_tokens == 1 for row in forward}) == 1, "single tokens run apart"
        for row in rows:
            name, num_computed = self.held.setdefault(row.slot, [row.sequence.request_id, 0])
            assert (name, num_computed) == (row.sequence.request_id, row.start), "a row lost its slot's content"
            assert name not in self.ends, "an ended row computes"
            assert row.start + row.num_tokens <= LIMITS.max_model_len
            self.held[row.slot][1] += row.num_tokens

    def take(self, outputs):
        for each in outputs:
            assert each.request_id not in self.ends, "an output after the end"
            assert (each.reason is FinishReason.ERROR) == (each.error_code is not None)
            if each.reason is not None:
                self.ends[each.request_id] += 1
                request = self.live.pop(each.request_id)
                if each.request_id in self.cancelled - self.over:
                    assert (each.reason, each.token_ids) == (FinishReason.CANCELLED, ())
                self.held = {slot: held for slot, held in self.held.items() if held[0] != request.request_id}

    def teardown(self):
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            step = self.scheduler.schedule(self.now)
            self.take(step.ended)
            self.take(self.scheduler.commit(step, [2 if row.is_last else None for row in step.rows], self.now))
        assert not self.scheduler.has_work
        assert all(expected == code for expected, code in self.refusals)
        assert self.ends == Counter(map(str, range(self.num_added))), "each ends exactly once"
        snapshot = self.scheduler.snapshot()
        assert (snapshot.num_free_slots, snapshot.num_waiting_tokens) == (LIMITS.max_num_seqs, 0)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_decode_rows_go_first_and_a_prompt_reads_one_chunk_beside_them():
    """While anybody streams, a step reads at most one chunk of prompts; alone, prompts fill the budget."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(submission("stream", 2, max_tokens=30), 0.0)
    run_step(scheduler)
    for name in "ab":
        scheduler.add(submission(name, 30), 0.0)
    step, _ = run_step(scheduler)
    assert [[row.num_tokens for row in forward] for forward in step.forwards] == [[1], [8]]
    scheduler.cancel("stream")
    step, _ = run_step(scheduler)
    assert [row.num_tokens for row in step.rows] == [8, 8]


@pytest.mark.parametrize(
    ("num_tokens", "chunks"),
    [(1, [1]), (2, [2]), (8, [8]), (9, [7, 2]), (10, [8, 2]), (17, [8, 7, 2]), (24, [8, 8, 8])],
)
def test_chunk_borders_depend_on_the_prompt_alone(num_tokens, chunks):
    """Borders are multiples of the chunk; a token is never read alone unless it is the whole prompt."""
    scheduler, seen = Scheduler(LIMITS), []
    scheduler.add(submission("a", num_tokens, max_tokens=1), 0.0)
    while scheduler.has_work:
        step, _ = run_step(scheduler)
        seen += [row.num_tokens for row in step.rows]
    assert seen == chunks


def test_a_newcomer_passes_a_long_prompt_but_not_for_ever():
    """The shorter goes first; a long prompt that stood back as often as it has chunks stands back no more."""
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=3, max_model_len=400, queue_tokens_max=400))
    scheduler.add(submission("stream", 2, max_tokens=300), 0.0)
    run_step(scheduler)
    scheduler.add(submission("long", 80), 0.0)
    num_steps = 0
    while True:  # there is always a new short prompt
        if not scheduler.snapshot().num_waiting:
            scheduler.add(submission(f"short{num_steps}", 8, max_tokens=1), 0.0)
        _, outputs = run_step(scheduler)
        num_steps += 1
        if any(each.request_id == "long" for each in outputs):
            break
        assert num_steps < 50, "the long prompt starves"
    assert num_steps == pytest.approx(20, abs=2)  # ten chunks, and at most as many steps back


def test_short_prompts_of_neighbours_share_a_forward():
    """Prompts of like length run together within a chunk's worth; unlike ones would be mostly padding."""
    scheduler = Scheduler(replace(LIMITS, max_num_batched_tokens=40, prefill_chunk_tokens=16))
    for name, num_tokens in enumerate([4, 5, 4, 16]):
        scheduler.add(submission(name, num_tokens), 0.0)
    step, _ = run_step(scheduler)
    assert [[row.num_tokens for row in forward] for forward in step.forwards] == [[4, 5, 4], [16]]


def test_prompts_share_a_forward_only_side_by_side():
    """Much padding, or a slot of somebody else between them, keeps prompts apart."""
    scheduler = Scheduler(replace(LIMITS, max_num_batched_tokens=60, prefill_chunk_tokens=48))
    scheduler.add(submission("a", 16), 0.0)
    scheduler.add(submission("b", 1, max_tokens=9), 0.0)
    scheduler.add(submission("c", 16), 0.0)
    scheduler.add(submission("d", 4), 0.0)
    step, _ = run_step(scheduler)
    assert [[row.num_tokens for row in forward] for forward in step.forwards] == [[1], [16], [16], [4]]


def test_a_hole_is_filled_when_nobody_waits():
    """The last decode row moves into the first hole, so that the next forward spans no idle slot."""
    scheduler = Scheduler(LIMITS)
    for name in range(4):
        scheduler.add(submission(name, 2, max_tokens=20), 0.0)
    run_step(scheduler)
    scheduler.cancel("1")
    step, _ = run_step(scheduler)
    assert [(move.src, move.dst, move.num_tokens) for move in step.moves] == [(3, 1, 2)]
    assert [row.slot for row in step.rows] == [0, 1, 2]
    assert [row.sequence.request_id for row in step.rows] == ["0", "3", "2"]


def test_a_waiter_fills_the_hole_instead():
    """While somebody waits for the slot, nothing is copied."""
    scheduler = Scheduler(LIMITS)
    for name in range(5):
        scheduler.add(submission(name, 2, max_tokens=20), 0.0)
    run_step(scheduler)
    scheduler.cancel("1")
    step, _ = run_step(scheduler)
    assert (step.moves, [row.slot for row in step.rows]) == ((), [0, 2, 3, 1])


@pytest.mark.parametrize(("num_tokens", "is_refused"), [(38, False), (39, False), (40, True), (41, True)])
def test_a_prompt_must_leave_room_for_one_token(num_tokens, is_refused):
    """A prompt that cannot fit is refused with both numbers; one that just fits gets its one token."""
    scheduler = Scheduler(LIMITS)
    if is_refused:
        with pytest.raises(ServerError, match=f"{num_tokens} tokens.* 40") as caught:
            scheduler.add(submission("a", num_tokens), 0.0)
        assert caught.value.code == "context_length_exceeded"
        return
    scheduler.add(submission("a", num_tokens, max_tokens=10**8), 0.0)
    outputs = []
    while scheduler.has_work:
        outputs += run_step(scheduler)[1]
    assert outputs[-1].reason is FinishReason.LENGTH
    assert sum(len(each.token_ids) for each in outputs) == 40 - num_tokens


def test_a_request_id_in_use_is_refused():
    """Two live requests cannot share a name; after the end it is free again."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(submission("a"), 0.0)
    with pytest.raises(ServerError, match="in use"):
        scheduler.add(submission("a"), 0.0)
    scheduler.cancel("a")
    run_step(scheduler)
    scheduler.add(submission("a"), 0.0)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_cancel_ends_in_the_next_step_whatever_the_phase(num_steps):
    """Waiting, in the middle of a prompt or of an answer: one CANCELLED, and the slot is free."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(submission("a", 20, max_tokens=9), 0.0)
    for _ in range(num_steps):
        run_step(scheduler)
    scheduler.cancel("a")
    scheduler.cancel("a")
    scheduler.cancel("nobody")
    _, (output,) = run_step(scheduler)
    assert (output.request_id, output.reason, output.token_ids) == ("a", FinishReason.CANCELLED, ())
    assert (scheduler.has_work, scheduler.snapshot().num_free_slots) == (False, 4)


@pytest.mark.parametrize("result", [2, END, RowFault(message="x")])
def test_cancel_wins_over_what_its_forward_brings(result):
    """A row cancelled while it computes delivers nothing more, whatever the forward made of it."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(submission("a"), 0.0)
    step = scheduler.schedule(0.0)
    scheduler.cancel("a")
    (output,) = scheduler.commit(step, [result], 0.0)
    assert (output.reason, output.token_ids, scheduler.has_work) == (FinishReason.CANCELLED, (), False)


def test_a_row_waits_no_longer_than_it_said():
    """At its deadline a waiter ends with queue_timeout and is never computed; running rows have none."""
    scheduler = Scheduler(LIMITS)
    for name in range(4):
        scheduler.add(submission(name, max_tokens=30), 0.0)
    run_step(scheduler)
    scheduler.add(submission("patient"), 0.0)
    scheduler.add(submission("hasty", max_wait_ms=1000), 0.0)
    assert run_step(scheduler, 0.999)[0].ended == ()
    (late,) = run_step(scheduler, 1.0)[0].ended
    assert (late.request_id, late.error_code) == ("hasty", "queue_timeout")
    (late,) = run_step(scheduler, 5.0)[0].ended
    assert (late.request_id, late.error_code) == ("patient", "queue_timeout")
    assert scheduler.snapshot().num_running == 4


def test_known_outputs_are_computed_one_by_one_and_not_delivered():
    """After a crash the prompt is read in chunks, the old answer token by token, and the new tokens follow."""
    scheduler, seen, tokens = Scheduler(LIMITS), [], []
    scheduler.add(submission("a", 10, max_tokens=5, output_ids=(3, 4, 5)), 0.0)
    while scheduler.has_work:
        step, outputs = run_step(scheduler, token=7)
        seen += [(row.start, row.num_tokens, row.is_last) for row in step.rows]
        tokens += [token for each in outputs for token in each.token_ids]
    assert seen == [(0, 8, False), (8, 2, False), (10, 1, False), (11, 1, False), (12, 1, True), (13, 1, True)]
    assert tokens == [7, 7]


def test_the_mean_service_is_learnt():
    """How long a request holds its slot is a running mean over those that ended."""
    scheduler = Scheduler(LIMITS)
    for name, seconds in enumerate((10.0, 20.0)):
        scheduler.add(submission(name, max_tokens=2), 0.0)
        run_step(scheduler, 0.0)
        run_step(scheduler, seconds)
    assert scheduler.snapshot().mean_service_s == pytest.approx(12.0)
