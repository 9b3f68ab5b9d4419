# SPDX-License-Identifier: Apache-2.0
"""Time and names: where `now` comes from, and where ids come from.

Deciders get `now` as a number and never see a clock; shells hold one. Invariant: `now` never goes back, `wall`
may. An id is unguessable (128 random bits), so knowing one is knowing the thing it names.
"""

import itertools
import secrets
import time
from typing import Protocol

ID_BYTES = 16


class Clock(Protocol):
    """Two readings of time, in seconds."""

    def now(self) -> float:
        """Seconds of a clock that only goes forward; its zero means nothing."""

    def wall(self) -> float:
        """Seconds since 1970, as people and other machines count."""


class SystemClock:
    """The machine's own."""

    def now(self) -> float:
        """Seconds of the monotonic clock: the one an asyncio loop goes by."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()


class ManualClock:
    """Stands still until told otherwise."""

    def __init__(self, now: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def now(self) -> float:
        """Seconds as set."""
        return self._now

    def wall(self) -> float:
        """Seconds since 1970, as set."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: backwards.
        """
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
        self._wall += seconds


def new_id(prefix: str) -> str:
    """Draw an unguessable id: `new_id("resp")` → `"resp_…"`, 32 hex digits. Safe in any thread."""
    return f"{prefix}_{secrets.token_hex(ID_BYTES)}"


class CountingIds:
    """Ids that a test can foretell: `resp_1`, `resp_2`, each prefix with its own count."""

    def __init__(self) -> None:
        self._counts: dict[str, itertools.count[int]] = {}

    def new_id(self, prefix: str) -> str:
        """The next id of this prefix."""
        return f"{prefix}_{next(self._counts.setdefault(prefix, itertools.count(1)))}"
