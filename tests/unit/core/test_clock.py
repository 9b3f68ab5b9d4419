# SPDX-License-Identifier: Apache-2.0
"""Clocks and ids."""

import pytest

from server.core.clock import CountingIds, ManualClock, SystemClock, new_id


def test_the_system_clock_goes_forward():
    """`now` never goes back; `wall` is a time of this century."""
    clock = SystemClock()
    assert clock.now() <= clock.now()
    assert clock.wall() > 1_600_000_000


def test_the_manual_clock_stands_still():
    """Time passes when told to, on both readings, and never backwards."""
    clock = ManualClock(now=5.0, wall=100.0)
    clock.advance(2.5)
    assert (clock.now(), clock.wall()) == (7.5, 102.5)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_ids_are_unguessable_and_unique():
    """An id is its prefix and 128 random bits."""
    ids = {new_id("resp") for _ in range(1000)}
    assert len(ids) == 1000
    prefix, _, bits = ids.pop().partition("_")
    assert (prefix, len(bits)) == ("resp", 32)


def test_counting_ids_can_be_foretold():
    """Each prefix has its own count."""
    ids = CountingIds()
    assert [ids.new_id("a"), ids.new_id("b"), ids.new_id("a")] == ["a_1", "b_1", "a_2"]
