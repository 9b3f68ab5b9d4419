# SPDX-License-Identifier: Apache-2.0
"""The queue: bounded, honest about when to come back, and fair between tenants."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import ServerError
from server.engine.admission import QUANTUM_TOKENS, AdmissionQueue, Rates, SchedulerLimits
from server.engine.sequence import Sequence, Submission, TokenParams

LIMITS = SchedulerLimits(queue_max=4, queue_tokens_max=2048, max_num_seqs=2)
NO_RATES = Rates()
PARAMS = TokenParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, max_tokens=50, end_token_ids=())


def sequence(name, *, tenant="", num_tokens=100, deadline=9.0):
    request = Submission(request_id=str(name), token_ids=(1,) * num_tokens, params=PARAMS, tenant=tenant)
    return Sequence(
        submission=request,
        order=0,
        added_at=0.0,
        deadline=deadline,
        num_tokens_max=9999,
        token_ids=[*request.token_ids],
    )


def queue_of(*sequences):
    queue = AdmissionQueue()
    for each in sequences:
        queue.push(each)
    queue.check_integrity()
    return queue


def ask(queue, one_more, rates=NO_RATES, service_s=0.0, num_free_slots=0):
    """Ask whether one more may wait."""
    queue.refuse_overload(
        one_more.submission, LIMITS, num_free_slots=num_free_slots, rates=rates, mean_service_s=service_s
    )


def drain(queue):
    """Pop everyone; return tenants in order."""
    order = []
    while len(queue):
        order.append(queue.pop().submission.tenant)
        queue.check_integrity()
    return order


def test_first_come_first_served_within_a_tenant():
    """Whatever their length, requests of one tenant keep their order."""
    queue = queue_of(*(sequence(name, num_tokens=size) for name, size in enumerate([900, 1, 300])))
    assert [queue.pop().request_id for _ in range(3)] == ["0", "1", "2"]


def test_a_flood_does_not_double_anothers_wait():
    """Ten requests behind a hundred of somebody else are all served among the first twenty-one."""
    flood = [sequence(f"a{n}", tenant="a") for n in range(100)]
    order = drain(queue_of(*flood, *(sequence(f"b{n}", tenant="b") for n in range(10))))
    assert [at for at, tenant in enumerate(order) if tenant == "b"][-1] <= 20


def test_tokens_are_shared_and_not_requests():
    """A tenant of long prompts gets as many tokens as one of short prompts, so fewer requests."""
    long = [sequence(f"a{n}", tenant="a", num_tokens=950) for n in range(20)]
    short = [sequence(f"b{n}", tenant="b", num_tokens=50) for n in range(200)]
    order = drain(queue_of(*long, *short))
    for n in range(220):  # ten short ones for each long
        assert order[:n].count("a") == pytest.approx(n / 11, abs=1.01)


@given(
    sizes=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 2000)), min_size=1, max_size=40),
    gone=st.sets(st.integers(0, 39)),
)
def test_everyone_leaves_once_and_nobody_waits_for_ever(sizes, gone):
    """Popped or gone, each leaves exactly once; while a tenant waits no other gets much more than it."""
    everyone = [sequence(n, tenant=tenant, num_tokens=size) for n, (tenant, size) in enumerate(sizes)]
    queue = queue_of(*everyone)
    left = []
    for n in sorted(gone & set(range(len(everyone)))):
        queue.remove(everyone[n])
        left.append(everyone[n])
    served = dict.fromkeys("abcd", 0)
    waiting = {each.submission.tenant for each in queue}
    while len(queue):
        each = queue.pop()
        left.append(each)
        served[each.submission.tenant] += len(each.token_ids) + 50
        waiting &= {other.submission.tenant for other in queue}
        spread = [served[tenant] for tenant in waiting]
        assert not spread or max(spread) - min(spread) <= 2 * (2050 + 128)
        queue.check_integrity()
    assert sorted(map(id, left)) == sorted(map(id, everyone))


def visit_by_visit(everyone):
    """Deficit round-robin as its authors tell it: a quantum a visit, send while it pays, go on."""
    lanes = {}
    for each in everyone:
        lanes.setdefault(each.submission.tenant, [0, []])[1].append(each)
    ring, order = list(lanes.values()), []
    while ring:
        lane = ring.pop(0)
        lane[0] += QUANTUM_TOKENS
        while lane[1] and lane[0] >= len(lane[1][0].token_ids) + 50:
            lane[0] -= len(lane[1][0].token_ids) + 50
            order.append(lane[1].pop(0).request_id)
        ring += [lane] if lane[1] else []
    return order


@given(sizes=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 900)), min_size=1, max_size=30))
def test_one_reckoning_equals_every_visit(sizes):
    """Turning the ring at once gives the order that visiting lane by lane gives."""
    everyone = [sequence(n, tenant=tenant, num_tokens=size) for n, (tenant, size) in enumerate(sizes)]
    queue = queue_of(*everyone)
    assert [queue.pop().request_id for _ in everyone] == visit_by_visit(everyone)


def test_only_the_late_expire():
    """At a deadline those who reached it leave, whichever tenant's they are."""
    queue = queue_of(
        sequence("x", deadline=1.0), sequence("y", tenant="b", deadline=3.0), sequence("z", deadline=2.0)
    )
    assert queue.expire(0.9) == []
    assert [each.request_id for each in queue.expire(2.0)] == ["x", "z"]
    assert [each.request_id for each in queue.expire(3.0)] == ["y"]
    queue.check_integrity()


@pytest.mark.parametrize(
    ("service_s", "rates", "expected_ms"),
    [
        (0.0, Rates(), 1000),
        (0.0, Rates(prefill_tokens_per_s=200.0), 2000),
        (3.0, Rates(prefill_tokens_per_s=200.0), 1500),
        (0.001, Rates(), 100),
        (9999.0, Rates(), 60_000),
    ],
)
def test_a_full_queue_says_when_to_come_back(service_s, rates, expected_ms):
    """The retry time is when a place should come free by what was measured, within bounds."""
    queue = queue_of(*(sequence(n) for n in range(4)))
    with pytest.raises(ServerError) as caught:
        ask(queue, sequence("x"), rates, service_s)
    assert (caught.value.code, caught.value.retry_after_ms) == ("queue_full", expected_ms)


def test_a_free_slot_is_not_a_place_in_the_queue():
    """In a burst between two steps, those whom a slot awaits do not use up the queue."""
    queue = queue_of(*(sequence(n) for n in range(5)))
    ask(queue, sequence("x"), num_free_slots=6)
    ask(queue, sequence("x"), num_free_slots=2)
    with pytest.raises(ServerError, match="wait"):
        ask(queue, sequence("x"), num_free_slots=1)


def test_waiting_tokens_are_bounded_too():
    """A few long prompts fill the queue as well as many short ones; more places must then come free."""
    queue = queue_of(sequence("a", num_tokens=1000), sequence("b", num_tokens=1000))
    ask(queue, sequence("x", num_tokens=48), service_s=1.0)
    with pytest.raises(ServerError) as caught:
        ask(queue, sequence("x", num_tokens=1049), service_s=1.0)
    assert caught.value.retry_after_ms == 1000  # two of them must leave, through two slots


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 0},
        {"max_model_len": 1},
        {"prefill_chunk_tokens": 3},
        {"max_num_batched_tokens": 129},
        {"queue_max": -1},
        {"queue_tokens_max": 2047},
        {"queue_timeout_ms": -1},
    ],
)
def test_bounds_that_contradict_are_refused(changes):
    """Each relation between the bounds is checked where they are made."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(LIMITS, **changes)
