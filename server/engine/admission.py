# SPDX-License-Identifier: Apache-2.0
"""Who waits for a slot, and who is next: fair between tenants, first come first served inside each.

Deficit round-robin: tenants stand in a ring; the one at the front earns `QUANTUM_TOKENS` a visit and sends
its oldest request as soon as it has earned that request's cost. A tenant that floods the queue waits behind
itself alone. Pure: `now` comes in, seconds of any clock that only goes forward.

Invariant: a sequence stands in the queue at most once, and `num_tokens` is the sum over those that do.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from server.core.errors import error_of
from server.engine.sequence import Sequence, Submission

QUANTUM_TOKENS = 128  # small against a usual cost, so that tenants take turns request by request
OUTPUT_TOKENS_CHARGED = 128  # an answer's length is unknown: charge a usual one, less if `max_tokens` says so

RETRY_MS_MIN = 100
RETRY_MS_MAX = 60_000
RETRY_MS_UNKNOWN = 1_000  # before anything was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Every bound of the scheduler.

    Args:
        max_num_seqs: rows that run at once, one slot each.
        max_model_len: tokens a slot holds, prompt and output together.
        max_num_batched_tokens: tokens computed in one step.
        prefill_chunk_tokens: tokens of a prompt computed in one forward.
        queue_max: requests that may wait for a slot.
        queue_tokens_max: prompt tokens that may wait, over all of them.
        queue_timeout_ms: how long a request waits when it does not say.

    Raises:
        ValueError: the bounds contradict each other.
    """

    max_num_seqs: int = 16
    max_model_len: int = 2048
    max_num_batched_tokens: int = 256
    prefill_chunk_tokens: int = 128
    queue_max: int = 256
    queue_tokens_max: int = 65_536
    queue_timeout_ms: int = 30_000

    def __post_init__(self) -> None:
        """Check the relations between the bounds."""
        faults = [
            (self.max_num_seqs < 1, "max_num_seqs must be at least 1"),
            (self.max_model_len < 2, "max_model_len must be at least 2: one token read, one written"),  # noqa: PLR2004 - said beside
            (self.prefill_chunk_tokens < 4, "prefill_chunk_tokens must be at least 4"),  # noqa: PLR2004 - so that no cut leaves a single token
            (
                self.max_num_batched_tokens < self.max_num_seqs + self.prefill_chunk_tokens,
                "max_num_batched_tokens must be at least max_num_seqs + prefill_chunk_tokens",
            ),
            (self.queue_max < 0, "queue_max must not be negative"),
            (
                self.queue_tokens_max < self.max_model_len,
                "queue_tokens_max must be at least max_model_len, or the longest prompt could never wait",
            ),
            (self.queue_timeout_ms < 0, "queue_timeout_ms must not be negative"),
        ]
        if found := [message for is_wrong, message in faults if is_wrong]:
            raise ValueError("; ".join(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured speeds; 0 means not measured yet."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


@dataclass(slots=True)
class _Lane:
    """One tenant's waiting requests and what it has earned."""

    tenant: str
    waiting: deque[Sequence]  # bounded by the queue's own count
    deficit: int = 0


class AdmissionQueue:
    """Waiting sequences of every tenant. Its owner checks the bounds before `push`."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._ring: deque[_Lane] = deque()  # exactly the lanes that hold somebody
        self._has_visited = False  # whether the lane at the front has had its visit
        self._earliest_deadline = inf
        self._num_waiting = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait, behind those of its tenant."""
        tenant = sequence.submission.tenant
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = _Lane(tenant, deque())
            self._ring.append(lane)
        lane.waiting.append(sequence)
        self._count(sequence, 1)
        self._earliest_deadline = min(self._earliest_deadline, sequence.deadline)

    def pop(self) -> Sequence:
        """Take out whose turn it is.

        Raises:
            IndexError: nobody waits.
        """
        lane = self._ring[0]
        if lane.deficit < _cost_of(lane.waiting[0]):
            lane = self._earn()
        sequence = lane.waiting.popleft()
        lane.deficit -= _cost_of(sequence)
        self._count(sequence, -1)
        if not lane.waiting:
            self._close(lane)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out one that gave up.

        Raises:
            KeyError, ValueError: it does not wait.
        """
        lane = self._lanes[sequence.submission.tenant]
        lane.waiting.remove(sequence)
        self._count(sequence, -1)
        if not lane.waiting:
            self._close(lane)

    def expire(self, now: float) -> list[Sequence]:
        """Take out everyone whose deadline has come."""
        if now < self._earliest_deadline:
            return []
        expired = [each for each in self if each.deadline <= now]
        for sequence in expired:
            self.remove(sequence)
        self._earliest_deadline = min((each.deadline for each in self), default=inf)
        return expired

    def refuse_overload(
        self,
        submission: Submission,
        limits: SchedulerLimits,
        *,
        num_free_slots: int,
        rates: Rates,
        mean_service_s: float,
    ) -> None:
        """Say no when one more would break the queue's bounds, and when it is worth asking again.

        Those for whom a slot is free already do not count as waiting.

        Raises:
            ServerError: `queue_full`.
        """
        if len(self) < num_free_slots:
            return
        num_tokens = len(submission.token_ids) + len(submission.output_ids)
        num_excess_tokens = max(0, self.num_tokens + num_tokens - limits.queue_tokens_max)
        num_excess = max(0, len(self) + 1 - num_free_slots - limits.queue_max)
        if not num_excess and not num_excess_tokens:
            return
        mean_tokens = max(1.0, self.num_tokens / max(1, len(self)))
        num_places = max(num_excess, ceil(num_excess_tokens / mean_tokens))
        # A place comes free when a running row ends: `max_num_seqs` of them, each after the mean service.
        seconds = num_places * mean_service_s / limits.max_num_seqs
        if not seconds and rates.prefill_tokens_per_s:
            seconds = self.num_tokens / rates.prefill_tokens_per_s
        message = f"{len(self)} requests wait for the model; try again later"
        raise error_of("queue_full", message, retry_after_ms=_retry_after_ms(seconds))

    def __iter__(self) -> Iterator[Sequence]:
        """Everyone who waits, tenant by tenant."""
        for lane in self._ring:
            yield from lane.waiting

    def check_integrity(self) -> None:
        """Assert the module's invariant."""
        everyone = list(self)
        assert len(everyone) == len(set(map(id, everyone))) == self._num_waiting, "the queue lost count"
        assert self.num_tokens == sum(each.num_pending_tokens for each in everyone), "the queue lost tokens"
        assert set(self._lanes) == {lane.tenant for lane in self._ring}, "a lane stands outside the ring"
        assert all(lane.waiting for lane in self._ring), "an empty lane stands in the ring"

    def _earn(self) -> _Lane:
        """Turn the ring until its front can pay, in one reckoning instead of visit by visit.

        A visited lane that cannot pay goes to the back; then every lane visited earns a quantum.
        """
        ring = self._ring
        if self._has_visited:
            ring.rotate(-1)
        self._has_visited = True
        visits = [max(1, ceil((_cost_of(lane.waiting[0]) - lane.deficit) / QUANTUM_TOKENS)) for lane in ring]
        rounds = min(visits)
        winner = visits.index(rounds)
        for at, lane in enumerate(ring):
            lane.deficit += QUANTUM_TOKENS * (rounds if at <= winner else rounds - 1)
        ring.rotate(-winner)
        return ring[0]

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._num_waiting += sign
        self.num_tokens += sign * sequence.num_pending_tokens

    def _close(self, lane: _Lane) -> None:
        """Forget a tenant nobody waits for; what it had earned is forfeit."""
        del self._lanes[lane.tenant]
        self._has_visited &= lane is not self._ring[0]
        self._ring.remove(lane)


def _cost_of(sequence: Sequence) -> int:
    """Tokens that admitting this sequence is charged for."""
    return sequence.num_pending_tokens + min(sequence.submission.params.max_tokens, OUTPUT_TOKENS_CHARGED)


def _retry_after_ms(seconds: float) -> int:
    """Bound an estimated wait; 0 seconds means that nothing is known."""
    if seconds <= 0:
        return RETRY_MS_UNKNOWN
    return min(max(ceil(seconds * 1000), RETRY_MS_MIN), RETRY_MS_MAX)
