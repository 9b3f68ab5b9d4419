# SPDX-License-Identifier: Apache-2.0
"""Which slots are free. Pure; owned by the Scheduler, which alone knows whose a taken slot is.

Invariant: each of `num_slots` slots is free or taken, never both. The lowest free slot is always given
first, and `move_of` names the one copy that makes a span of rows denser: a forward spans the slots from its
first row to its last, and a slot without work inside the span costs as much as a row.
"""

from bisect import bisect_left, insort


class SlotPool:
    """The free list of slots 0 … num_slots - 1."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # ascending

    @property
    def num_free(self) -> int:
        """How many slots can be acquired now."""
        return len(self._free)

    def acquire(self) -> int:
        """Take the lowest free slot.

        Raises:
            IndexError: none is free.
        """
        return self._free.pop(0)

    def release(self, slot: int) -> None:
        """Give a taken slot back."""
        assert 0 <= slot < self.num_slots, f"no slot {slot}"
        assert not self.is_free(slot), f"slot {slot} was not taken"
        insort(self._free, slot)

    def move(self, src: int, dst: int) -> None:
        """Take free slot `dst` in exchange for taken slot `src`."""
        assert self.is_free(dst), f"slot {dst} is taken"
        self._free.remove(dst)
        self.release(src)

    def is_free(self, slot: int) -> bool:
        """Whether nobody holds the slot."""
        at = bisect_left(self._free, slot)
        return at < len(self._free) and self._free[at] == slot

    def move_of(self, span: list[int]) -> tuple[int, int] | None:
        """Name a copy (src, dst) that shortens the span of these ascending taken slots, or None.

        It moves the highest slot into the lowest hole between the first and the last.
        """
        if len(span) < 2:  # noqa: PLR2004 - one row has no inside
            return None
        at = bisect_left(self._free, span[0])
        if at < len(self._free) and self._free[at] < span[-1]:
            return span[-1], self._free[at]
        return None

    def free_slots(self) -> tuple[int, ...]:
        """Every free slot, ascending."""
        return tuple(self._free)
