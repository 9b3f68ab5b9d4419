# SPDX-License-Identifier: Apache-2.0
"""Who computes what in the next step. Pure: `now` comes in, a `Step` goes out, results come back.

    add → WAITING ──schedule: a slot is free──▶ RUNNING ──commit: end token, length, fault──▶ FINISHED
             │ deadline or cancel                  │ cancel
             └────────────▶ FINISHED ◀─────────────┘

Rules: decode rows go first, one token each; what is left of the step's token budget goes to prompts, in
chunks whose borders depend on the prompt alone. While anybody decodes, a step reads at most one chunk's
worth, so no stream waits longer than that. Among prompts the fewest chunks left goes first, and every step
a prompt stands back counts as one chunk less, so none waits for ever. Every request ends exactly once.
It never computes, waits, or reads a clock.

A chunk of exactly one token, and a row's output tokens, are computed one at a time, beside the decode rows:
attention over a single query rounds differently from attention over several, so a token must be computed
the same way whether its row runs for the first time or again after a crash.
"""

from dataclasses import dataclass
from math import ceil

from server.core.errors import error_of
from server.core.types import FinishReason
from server.engine.admission import AdmissionQueue, Rates, SchedulerLimits
from server.engine.kv.pool import SlotPool
from server.engine.sequence import (
    RowFault,
    RowResult,
    Sequence,
    SequenceStatus,
    SlotMove,
    Step,
    StepOutput,
    StepRow,
    Submission,
)

__all__ = ["Scheduler", "SchedulerLimits", "SchedulerSnapshot"]

FORWARD_TOKENS_MIN = 16  # a forward's fixed cost is worth about as many tokens: charge a chunk at least these
PADDING_MAX = 1.25  # rows of unlike length share a forward while padding adds at most a quarter
SERVICE_WEIGHT = 0.2  # of the newest sample in the mean time that a request holds its slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSnapshot:
    """How the scheduler stands now."""

    num_running: int
    num_prefilling: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_slots: int
    mean_service_s: float


class Scheduler:
    """Owner of every sequence from `add` to its end. One thread; no method waits."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._sequences: dict[str, Sequence] = {}  # everyone who has not ended
        self._queue = AdmissionQueue()
        self._pool = SlotPool(limits.max_num_seqs)
        self._running: list[Sequence | None] = [None] * limits.max_num_seqs  # by slot
        self._cancelled: list[Sequence] = []  # not ended yet
        self._ended: list[StepOutput] = []  # ended, to be delivered by the next step
        self._num_added = 0
        self._mean_service_s = 0.0

    # ---- in and out ------------------------------------------------------------------------------------

    def add(self, submission: Submission, now: float, rates: Rates | None = None) -> None:
        """Accept a request, or refuse it and change nothing.

        Raises:
            ServerError: `context_length_exceeded` when the prompt cannot fit a slot, `queue_full` with a
                retry time, `invalid_value` when the id is in use.
        """
        self._refuse_unfit(submission)
        self._queue.refuse_overload(
            submission,
            self.limits,
            num_free_slots=self._pool.num_free,
            rates=rates or Rates(),
            mean_service_s=self._mean_service_s,
        )
        wait_ms = submission.max_wait_ms
        wait_s = (self.limits.queue_timeout_ms if wait_ms is None else wait_ms) / 1000
        num_prompt = len(submission.token_ids)
        sequence = Sequence(
            submission=submission,
            order=self._num_added,
            added_at=now,
            deadline=now + wait_s,
            num_tokens_max=min(num_prompt + submission.params.max_tokens, self.limits.max_model_len),
            token_ids=[*submission.token_ids, *submission.output_ids],
        )
        self._num_added += 1
        self._sequences[sequence.request_id] = sequence
        if len(sequence.token_ids) >= sequence.num_tokens_max:  # it died just before it could say so
            self._end(sequence, self._ended, FinishReason.LENGTH)
        else:
            self._queue.push(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request as CANCELLED in the next step, whatever it is doing; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.is_cancelled:
            return
        sequence.is_cancelled = True
        if sequence.status is SequenceStatus.WAITING:
            self._queue.remove(sequence)
            self._end(sequence, self._ended, FinishReason.CANCELLED)
        else:
            self._cancelled.append(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a step would do or deliver anything."""
        return bool(self._sequences or self._ended)

    # ---- one step --------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """Plan the next step: free what was given up, admit, divide the budget.

        The plan stands until `commit`, which must follow with a result for each row.
        """
        self._end_cancelled(self._ended, now)
        for sequence in self._queue.expire(now):
            self._end_late(sequence, now)
        while self._queue and self._pool.num_free:
            self._admit(self._queue.pop(), now)
        ended, self._ended = tuple(self._ended), []
        single, prompts = self._divide()
        moves = () if self._queue else self._compact(single)
        chunks = self._choose_chunks(prompts, len(single))
        forwards = self._group(chunks)
        if single:
            forwards = (tuple(_row_of(each, 1) for each in single), *forwards)
        return Step(forwards=forwards, moves=moves, ended=ended)

    def commit(self, step: Step, results: list[RowResult], now: float) -> list[StepOutput]:
        """Take in what a step computed and say what comes out of it.

        Args:
            step: what `schedule` returned last.
            results: for each of `step.rows` a token, a fault, or None where the row was not the last.
            now: the clock's second.
        """
        outputs: list[StepOutput] = []
        for row, result in zip(step.rows, results, strict=True):
            self._commit_row(row, result, outputs, now)
        self._end_cancelled(outputs, now)
        return outputs

    def snapshot(self) -> SchedulerSnapshot:
        """Return the numbers for heartbeats and metrics."""
        _, prompts = self._divide()
        return SchedulerSnapshot(
            num_running=self.limits.max_num_seqs - self._pool.num_free,
            num_prefilling=len(prompts),
            num_waiting=len(self._queue),
            num_waiting_tokens=self._queue.num_tokens,
            num_free_slots=self._pool.num_free,
            mean_service_s=self._mean_service_s,
        )

    def check_integrity(self) -> None:
        """Assert that each live sequence stands in exactly one place and each taken slot has one owner."""
        self._queue.check_integrity()
        running = [each for each in self._running if each is not None]
        for sequence in self._queue:
            assert sequence.status is SequenceStatus.WAITING, "a row waits and does not"
            assert sequence.slot is None, "a waiting row holds a slot"
        for slot, sequence_at in enumerate(self._running):
            assert self._pool.is_free(slot) == (sequence_at is None), f"slot {slot} leaks"
            assert sequence_at is None or sequence_at.slot == slot, f"slot {slot} is shared"
        for sequence in running:
            assert sequence.status is SequenceStatus.RUNNING, "a slot is held by a row that does not run"
            assert 0 <= sequence.num_computed_tokens < len(sequence.token_ids), "a row has nothing pending"
            assert len(sequence.token_ids) < sequence.num_tokens_max, "a row has outgrown its slot"
        everyone = {each.request_id for each in (*running, *self._queue)}
        assert everyone == set(self._sequences), "a row is lost"
        assert len(everyone) == len(running) + len(self._queue), "a row stands in two places"

    # ---- admission -------------------------------------------------------------------------------------

    def _refuse_unfit(self, submission: Submission) -> None:
        num_tokens, limit = len(submission.token_ids), self.limits.max_model_len
        if submission.request_id in self._sequences:
            raise error_of("invalid_value", "this request id is in use", param="request_id")
        if num_tokens + 1 > limit:
            message = f"the prompt has {num_tokens} tokens; the context holds {limit}, the answer included"
            raise error_of("context_length_exceeded", message)

    def _admit(self, sequence: Sequence, now: float) -> None:
        sequence.slot = self._pool.acquire()
        self._running[sequence.slot] = sequence
        sequence.status = SequenceStatus.RUNNING
        sequence.started_at = now

    # ---- planning --------------------------------------------------------------------------------------

    def _divide(self) -> tuple[list[Sequence], list[Sequence]]:
        """Split running rows, in slot order, into those that compute one token and those that read a prompt."""
        single: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._running:
            if sequence is None:
                continue
            is_single = len(sequence.submission.token_ids) - sequence.num_computed_tokens <= 1
            (single if is_single else prompts).append(sequence)
        return single, prompts

    def _chunk_of(self, sequence: Sequence) -> int:
        """Tokens of the next chunk: up to the next border, never one alone and never leaving one alone."""
        chunk = self.limits.prefill_chunk_tokens
        num_left = len(sequence.submission.token_ids) - sequence.num_computed_tokens
        size = min(chunk - sequence.num_computed_tokens % chunk, num_left)
        if size == 1:  # the border is one token ahead
            size = min(chunk, num_left)
        if num_left - size == 1:
            size = size - 1 if size > 2 else num_left  # noqa: PLR2004 - two is the least a chunk may hold
        return size

    def _choose_chunks(self, prompts: list[Sequence], num_single: int) -> list[StepRow]:
        """Choose the prompts that read a chunk in this step, in the order of their rank."""
        limits = self.limits
        has_streams = num_single > 0
        budget = limits.max_num_batched_tokens - num_single
        if has_streams:
            budget = min(budget, limits.prefill_chunk_tokens)
        chunk = limits.prefill_chunk_tokens

        def rank(sequence: Sequence) -> tuple[int, int]:
            num_left = len(sequence.submission.token_ids) - sequence.num_computed_tokens
            return ceil(num_left / chunk) - sequence.num_skipped_steps, sequence.order

        chosen: list[StepRow] = []
        for sequence in sorted(prompts, key=rank):
            size = self._chunk_of(sequence)
            charge = max(size, min(FORWARD_TOKENS_MIN, chunk)) if has_streams else size
            if charge > budget:
                sequence.num_skipped_steps += 1
                continue
            budget -= charge
            chosen.append(_row_of(sequence, size))
        return chosen

    def _group(self, chunks: list[StepRow]) -> tuple[tuple[StepRow, ...], ...]:
        """Let chunks of neighbouring slots and like length share a forward, within one chunk's worth."""
        groups: list[list[StepRow]] = []
        for row in sorted(chunks, key=lambda each: each.slot):
            if groups and self._may_share(groups[-1], row):
                groups[-1].append(row)
            else:
                groups.append([row])
        return tuple(tuple(group) for group in groups)

    def _may_share(self, group: list[StepRow], row: StepRow) -> bool:
        sizes = [each.num_tokens for each in (*group, row)]
        area = max(sizes) * len(sizes)
        is_neighbour = row.slot == group[-1].slot + 1
        return is_neighbour and area <= self.limits.prefill_chunk_tokens and area <= PADDING_MAX * sum(sizes)

    def _compact(self, single: list[Sequence]) -> tuple[SlotMove, ...]:
        """Move the last decode row into the first hole among them; nobody waits to fill it."""
        move = self._pool.move_of([_slot_of(each) for each in single])
        if move is None:
            return ()
        src, dst = move
        sequence = single[-1]
        self._pool.move(src, dst)
        self._running[src], self._running[dst] = None, sequence
        sequence.slot = dst
        single.sort(key=_slot_of)
        return (SlotMove(src=src, dst=dst, num_tokens=sequence.num_computed_tokens),)

    # ---- ends ------------------------------------------------------------------------------------------

    def _commit_row(self, row: StepRow, result: RowResult, outputs: list[StepOutput], now: float) -> None:
        sequence = row.sequence
        if sequence.is_cancelled:  # it ends as such, right after
            return
        if isinstance(result, RowFault):
            self._release(sequence, now)
            self._fail(sequence, outputs, "engine_error", result.message)
            return
        assert (result is not None) == row.is_last, "a token comes exactly from the last row of what is pending"
        sequence.num_computed_tokens = row.start + row.num_tokens
        if result is not None:
            self._take_token(sequence, result, outputs, now)

    def _take_token(self, sequence: Sequence, token_id: int, outputs: list[StepOutput], now: float) -> None:
        if token_id in sequence.submission.params.end_token_ids:
            self._release(sequence, now)
            self._end(sequence, outputs, FinishReason.STOP)
            return
        sequence.token_ids.append(token_id)
        if len(sequence.token_ids) < sequence.num_tokens_max:
            cached = sequence.num_cached_tokens
            outputs.append(
                StepOutput(request_id=sequence.request_id, token_ids=(token_id,), num_cached_tokens=cached)
            )
            return
        self._release(sequence, now)
        self._end(sequence, outputs, FinishReason.LENGTH, (token_id,))

    def _end_cancelled(self, outputs: list[StepOutput], now: float) -> None:
        for sequence in self._cancelled:
            self._release(sequence, now)
            self._end(sequence, outputs, FinishReason.CANCELLED)
        self._cancelled.clear()

    def _end_late(self, sequence: Sequence, now: float) -> None:
        waited_ms = round((now - sequence.added_at) * 1000)
        message = f"no slot came free within {waited_ms} ms; try again later"
        self._fail(sequence, self._ended, "queue_timeout", message)

    def _release(self, sequence: Sequence, now: float) -> None:
        """Free the row's slot, and learn how long a request holds one."""
        slot = _slot_of(sequence)
        self._pool.release(slot)
        self._running[slot] = None
        sequence.slot = None
        service_s = max(now - sequence.started_at, 0.0)
        mean_s = self._mean_service_s or service_s
        self._mean_service_s = mean_s + SERVICE_WEIGHT * (service_s - mean_s)

    def _fail(self, sequence: Sequence, outputs: list[StepOutput], code: str, message: str) -> None:
        self._forget(sequence)
        outputs.append(
            StepOutput(
                request_id=sequence.request_id,
                reason=FinishReason.ERROR,
                error_code=code,
                error_message=message,
                num_cached_tokens=sequence.num_cached_tokens,
            )
        )

    def _end(
        self,
        sequence: Sequence,
        outputs: list[StepOutput],
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
    ) -> None:
        self._forget(sequence)
        outputs.append(
            StepOutput(
                request_id=sequence.request_id,
                token_ids=token_ids,
                reason=reason,
                num_cached_tokens=sequence.num_cached_tokens,
            )
        )

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        sequence.status = SequenceStatus.FINISHED


def _slot_of(sequence: Sequence) -> int:
    assert sequence.slot is not None, "a running row holds a slot"
    return sequence.slot


def _row_of(sequence: Sequence, num_tokens: int) -> StepRow:
    return StepRow(
        sequence=sequence,
        slot=_slot_of(sequence),
        start=sequence.num_computed_tokens,
        num_tokens=num_tokens,
        is_last=num_tokens == sequence.num_pending_tokens,
    )
