# SPDX-License-Identifier: Apache-2.0
"""The loop over a fake model: one end for every request, and no row's fate or text depends on another's."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.core.errors import ServerError
from server.core.types import FinishReason
from server.engine.compute.sampler import uniform
from server.engine.loop import EngineLoop
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.sequence import Submission, TokenParams
from tests.fakes import FakeRunner

PARAMS = TokenParams(
    temperature=0.8, top_k=0, top_p=0.95, min_p=0.0, seed=1, max_tokens=12, end_token_ids=(0, 1)
)
LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_model_len=48,
    max_num_batched_tokens=24,
    prefill_chunk_tokens=8,
    queue_tokens_max=600,
)


def loop_of(*, faults=None, limits=LIMITS, clock=lambda: 0.0):
    runner = FakeRunner(num_slots=limits.max_num_seqs, max_len=limits.max_model_len, faults=faults)
    return EngineLoop(runner, Scheduler(limits), clock=clock), runner


def submission(name, *, prompt=None, **changes):
    """A request whose prompt and seed follow from its number."""
    prompt = prompt or tuple(range(2 + name, 2 + name + 3 + name * 5 % 30))
    params = replace(PARAMS, seed=name, **changes)
    return Submission(request_id=str(name), token_ids=prompt, params=params)


def finish(loop, outputs=None):
    """Step until idle; return each request's tokens and its one end."""
    outputs = {} if outputs is None else outputs
    for _ in range(2000):
        if not loop.has_work:
            return outputs
        collect(loop, outputs)
    raise AssertionError("the loop does not end")


def collect(loop, outputs):
    for each in loop.step():
        tokens, end = outputs.get(each.request_id, ((), None))
        assert end is None, "an output after the end"
        outputs[each.request_id] = (tokens + each.token_ids, each.reason)
    loop.check_integrity()


@cache
def alone(request):
    """What the request gets when nobody else is there."""
    loop, _ = loop_of()
    loop.submit(request)
    return finish(loop)[request.request_id]


@settings(max_examples=40, deadline=None)
@given(arrivals=st.lists(st.integers(0, 6), min_size=1, max_size=14), chunk=st.sampled_from([4, 8, 16]))
def test_text_is_the_same_alone_and_among_others(arrivals, chunk):
    """Joining and leaving at any step, in any slot, with any chunk, changes nobody's tokens."""
    loop, _ = loop_of(limits=replace(LIMITS, prefill_chunk_tokens=chunk))
    outputs = {}
    for name, num_steps in enumerate(arrivals):
        loop.submit(submission(name))
        for _ in range(num_steps):
            collect(loop, outputs)
    finish(loop, outputs)
    assert outputs == {str(name): alone(submission(name)) for name in range(len(arrivals))}


def test_each_token_has_its_own_randomness():
    """With the same odds at every place, the tokens are those that (seed, index) name."""
    loop, runner = loop_of()
    runner._logprobs = lambda _tokens: np.full(97, -np.log(97), np.float32)
    request = submission(3, temperature=1.0, top_p=1.0, end_token_ids=())
    loop.submit(request)
    tokens, _ = finish(loop)["3"]
    assert tokens == tuple(int(uniform(3, index) * 97) for index in range(12))


@pytest.mark.parametrize("num_known", [0, 1, 5, 11, 12])
def test_a_request_goes_on_where_a_dead_engine_stopped(num_known):
    """Tokens of an earlier run are computed as they were, not delivered again, and the same text follows."""
    request = submission(3)
    tokens, reason = alone(replace(request, params=replace(request.params, end_token_ids=())))
    rest, end = alone(
        replace(request, params=replace(request.params, end_token_ids=()), output_ids=tokens[:num_known])
    )
    assert (tokens[num_known:], reason) == (rest, end)


@pytest.mark.parametrize("fault", [RuntimeError("bad row"), float("nan"), float("-inf")])
def test_a_faulty_row_ends_alone(fault):
    """A row that raises or is not a number ends with engine_error; its neighbours' text is untouched."""
    loop, _ = loop_of(faults={2 + 1: fault})
    for name in range(4):
        loop.submit(submission(name))
    outputs = finish(loop)
    assert outputs.pop("1") == ((), FinishReason.ERROR)
    assert outputs == {str(name): alone(submission(name)) for name in (0, 2, 3)}


def test_a_fault_names_a_code_and_holds_no_text():
    """The error says what failed, in our words."""
    loop, _ = loop_of(faults={3: RuntimeError("secret")})
    loop.submit(submission(1))
    (output,) = [each for _ in range(3) for each in loop.step()]
    assert (output.error_code, output.reason) == ("engine_error", FinishReason.ERROR)
    assert "secret" not in output.error_message
    assert loop.snapshot().num_failed_forwards == 1


def test_a_failed_move_ends_its_own_row():
    """When a slot's copy fails, only the row that was to move is lost."""
    loop, runner = loop_of()
    for name in range(3):
        loop.submit(submission(name, prompt=(5 + name, 6, 7), end_token_ids=()))
    outputs = {}
    collect(loop, outputs)
    runner.copy_rows = None  # calling it raises
    loop.cancel("0")
    loop.cancel("1")
    finish(loop, outputs)
    assert [outputs[name][1] for name in "012"] == [FinishReason.CANCELLED] * 2 + [FinishReason.LENGTH]
    loop, runner = loop_of()
    for name in range(3):
        loop.submit(submission(name, prompt=(5 + name, 6, 7), end_token_ids=()))
    collect(loop, outputs := {})
    runner.copy_rows = None
    loop.cancel("1")
    finish(loop, outputs)
    assert [outputs[name][1] for name in "02"] == [FinishReason.LENGTH, FinishReason.ERROR]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"token_ids": ()}, "input"),
        ({"token_ids": (97,)}, "input"),
        ({"token_ids": (-1,)}, "input"),
        ({"token_ids": (True,)}, "input"),
        ({"output_ids": (10**30,)}, "input"),
        ({"params": replace(PARAMS, max_tokens=0)}, "max_tokens"),
        ({"params": replace(PARAMS, temperature=float("nan"))}, "temperature"),
        ({"params": replace(PARAMS, temperature=float("inf"))}, "temperature"),
        ({"params": replace(PARAMS, temperature=-1.0)}, "temperature"),
        ({"params": replace(PARAMS, top_p=1.1)}, "top_p"),
        ({"params": replace(PARAMS, min_p=float("nan"))}, "min_p"),
    ],
)
def test_a_bad_number_is_refused_at_the_door(changes, param):
    """No number of a request can reach a forward unchecked."""
    loop, _ = loop_of()
    with pytest.raises(ServerError) as caught:
        loop.submit(replace(submission(1), **changes))
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)
    assert not loop.has_work


def test_idle_steps_are_empty():
    """Nothing to do is nothing done."""
    loop, runner = loop_of()
    assert (loop.step(), loop.has_work, runner.forwards) == ([], False, [])


def test_speeds_are_measured_by_the_clock():
    """Prompt tokens and decode steps each have their own measured speed."""
    ticks = iter(range(10_000))
    loop, _ = loop_of(clock=lambda: float(next(ticks)))
    loop.submit(submission(2, end_token_ids=()))
    finish(loop)
    snapshot = loop.snapshot()
    assert (snapshot.prefill_tokens_per_s, snapshot.decode_step_s) == (pytest.approx(8, abs=4), 1.0)
    assert (snapshot.num_prompt_tokens, snapshot.num_output_tokens) == (13, 12)
    assert snapshot.mean_service_s > 10


class TimedRunner(FakeRunner):
    """A fake whose forwards take time on a clock of its own, like a small model on two cores."""

    now = 0.0

    def forward(self, rows):
        self.now += 0.010 + 0.0014 * sum(len(row.token_ids) for row in rows)
        return super().forward(rows)


def test_a_long_prompt_neither_freezes_streams_nor_starves():
    """Four streams wait three usual gaps and a chunk at worst, a newcomer twice its solo time and the queue."""
    limits = SchedulerLimits(
        max_num_seqs=6, max_model_len=1000, max_num_batched_tokens=256, prefill_chunk_tokens=128
    )
    runner = TimedRunner(num_slots=6, max_len=1000)
    loop = EngineLoop(runner, Scheduler(limits), clock=lambda: runner.now)
    for name in range(4):
        loop.submit(submission(name, prompt=(5, 6 + name), max_tokens=60, end_token_ids=()))
    arrivals = {5: "long", 8: "second"}
    submitted, seen = {}, {}
    for num_step in range(70):
        if name := arrivals.get(num_step):
            prompt = tuple(n % 90 + 2 for n in range(900 if name == "long" else 300))
            submitted[name] = runner.now
            loop.submit(replace(submission(1, prompt=prompt, max_tokens=3), request_id=name))
        for each in loop.step():
            seen.setdefault(each.request_id, []).append(runner.now)
    gaps = [after - before for n in "0123" for before, after in zip(seen[n], seen[n][1:], strict=False)]
    usual_s, chunk_s = 0.010 + 4 * 0.0014, 0.010 + 128 * 0.0014
    assert max(gaps) <= 3 * usual_s + chunk_s
    solo_s = {"long": 8 * chunk_s, "second": 3 * chunk_s}
    for name, other in (("long", "second"), ("second", "long")):
        assert seen[name][0] - submitted[name] <= 2 * solo_s[name] + solo_s[other]


def test_a_flood_is_cut_at_the_queue_and_nobody_late_is_computed():
    """Of five hundred at once, slots and queue take theirs; those who wait too long never reach the model."""
    limits = replace(LIMITS, queue_max=8, queue_timeout_ms=3000)
    runner = TimedRunner(num_slots=4, max_len=48)
    loop, refused = EngineLoop(runner, Scheduler(limits), clock=lambda: runner.now), []
    for name in range(500):
        try:
            loop.submit(replace(submission(1, end_token_ids=(), max_tokens=200), request_id=str(name)))
        except ServerError as error:
            refused.append((error.code, error.retry_after_ms))
    outputs = {}
    collect(loop, outputs)
    runner.now += 4.0
    finish(loop, outputs)
    assert refused == [("queue_full", 1000)] * (500 - 4 - 8)  # nothing was measured yet
    assert sum(end is FinishReason.ERROR for _, end in outputs.values()) == 8
    assert sum(row.start == 0 for forward in runner.forwards for row in forward) == 4


def test_two_hundred_who_leave_give_everything_back():
    """Whatever the phase in which they leave, the slots are free again and a newcomer starts."""
    loop, _ = loop_of()
    for name in range(200):
        loop.submit(replace(submission(name % 9, end_token_ids=()), request_id=str(name)))
        for _ in range(name % 5):
            loop.step()
        loop.cancel(str(name))
    finish(loop)
    assert (loop.snapshot().num_free_slots, loop.snapshot().num_waiting) == (4, 0)
    loop.submit(submission(2))
    assert finish(loop)["2"] == alone(submission(2))
