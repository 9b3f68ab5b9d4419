# SPDX-License-Identifier: Apache-2.0
"""The free list of slots."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.engine.kv.pool import SlotPool


class PoolMachine(RuleBasedStateMachine):
    """Any order of acquire, release and move."""

    def __init__(self):
        super().__init__()
        self.pool, self.taken = SlotPool(6), set()

    @precondition(lambda self: len(self.taken) < 6)
    @rule()
    def acquire(self):
        lowest = min(set(range(6)) - self.taken)
        assert self.pool.acquire() == lowest
        self.taken.add(lowest)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.pool.release(slot)
        self.taken.remove(slot)

    @rule()
    def move(self):
        span = sorted(self.taken)
        found = self.pool.move_of(span)
        holes = [slot for slot in range(6) if span and span[0] < slot < span[-1] and slot not in self.taken]
        assert found == ((span[-1], holes[0]) if holes else None)
        if found:
            self.pool.move(*found)
            self.taken ^= set(found)

    @invariant()
    def every_slot_is_free_or_taken(self):
        assert set(self.pool.free_slots()) == set(range(6)) - self.taken
        assert self.pool.num_free == 6 - len(self.taken)


TestPool = PoolMachine.TestCase


def test_an_empty_pool_gives_nothing():
    """More rows than slots cannot be."""
    pool = SlotPool(1)
    pool.acquire()
    with pytest.raises(IndexError):
        pool.acquire()


@pytest.mark.parametrize("slot", [0, 9])
def test_giving_back_what_was_not_taken_is_our_bug(slot):
    """Releasing twice, or a slot that is not there, stops at once."""
    with pytest.raises(AssertionError):
        SlotPool(3).release(slot)


def test_moving_onto_a_taken_slot_is_our_bug():
    """A move never lands on a row."""
    pool = SlotPool(3)
    pool.acquire()
    with pytest.raises(AssertionError):
        pool.move(1, 0)
