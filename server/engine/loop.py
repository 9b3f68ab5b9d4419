# SPDX-License-Identifier: Apache-2.0
"""The engine's one step: schedule → forward → sample → commit. A thread or process only repeats it.

    submit, cancel ─▶ scheduler ─▶ runner ─▶ sampler ─▶ scheduler ─▶ StepOutputs

Invariant: every accepted request ends exactly once, and nothing a row does ends another. A forward that
raises is run again row by row, and the rows that raise alone end with `engine_error`; what a forward writes
it writes at fixed places, so running it again is harmless. It never waits and holds no lock: submit, cancel
and step are called by one thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from time import monotonic
from typing import Protocol

from server.core.errors import error_of
from server.engine.admission import Rates
from server.engine.compute.sampler import Sampler, SampleRow, TopLogprobs
from server.engine.scheduler import Scheduler
from server.engine.sequence import (
    ForwardRow,
    RowFault,
    RowResult,
    SlotMove,
    StepOutput,
    StepRow,
    Submission,
)

RATE_WEIGHT = 0.1  # of the newest sample in the measured speeds

FAILED = RowFault(message="the engine could not compute this request")
LOST = RowFault(message="the engine lost what this request had read")

_log = logging.getLogger(__name__)


class ForwardRunner(Protocol):
    """What the loop needs of a model: see `compute.runner.Runner`."""

    @property
    def num_tokens(self) -> int:
        """Ids from here on are padding."""

    def forward(self, rows: Sequence[ForwardRow]) -> TopLogprobs:
        """Compute the rows' tokens, given in ascending slots."""

    def copy_rows(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the keys and values of a slot's first tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSnapshot:
    """How the engine stands now; counts run from its start."""

    num_steps: int
    num_running: int
    num_prefilling: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_slots: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_failed_forwards: int
    num_fault_rows: int
    num_full_rows: int
    prefill_tokens_per_s: float
    decode_step_s: float
    mean_service_s: float


class EngineLoop:
    """Owner of the scheduler and the runner.

    Args:
        runner: the model.
        scheduler: empty; its bounds must be the runner's.
        clock: seconds of a clock that only goes forward.
    """

    def __init__(
        self, runner: ForwardRunner, scheduler: Scheduler, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = Sampler(runner.num_tokens)
        self._clock = clock
        self._rates = Rates()
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_failed_forwards = 0

    def submit(self, submission: Submission) -> None:
        """Accept a request; its outputs come from `step`.

        Raises:
            ServerError: `invalid_value`, `context_length_exceeded` or `queue_full`; nothing is kept of it.
        """
        self._refuse_invalid(submission)
        self._scheduler.add(submission, self._clock(), self._rates)

    def cancel(self, request_id: str) -> None:
        """End a request as CANCELLED in the next step; unknown ids are ignored."""
        self._scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or deliver anything."""
        return self._scheduler.has_work

    def step(self) -> list[StepOutput]:
        """Compute one step and return what came out of it, requests that ended first; [] when idle."""
        step = self._scheduler.schedule(self._clock())
        self._num_steps += 1
        lost = self._move(step.moves)
        results = [result for forward in step.forwards for result in self._run(forward)]
        if lost:
            results = [
                LOST if row.slot in lost else result for row, result in zip(step.rows, results, strict=True)
            ]
        outputs = [*step.ended, *self._scheduler.commit(step, results, self._clock())]
        self._num_output_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def snapshot(self) -> LoopSnapshot:
        """Return the numbers for heartbeats and metrics."""
        now = self._scheduler.snapshot()
        return LoopSnapshot(
            num_steps=self._num_steps,
            num_running=now.num_running,
            num_prefilling=now.num_prefilling,
            num_waiting=now.num_waiting,
            num_waiting_tokens=now.num_waiting_tokens,
            num_free_slots=now.num_free_slots,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_failed_forwards=self._num_failed_forwards,
            num_fault_rows=self._sampler.num_fault_rows,
            num_full_rows=self._sampler.num_full_rows,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step_s=self._rates.decode_step_s,
            mean_service_s=now.mean_service_s,
        )

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants; cheap enough for every step of a test."""
        self._scheduler.check_integrity()

    # ---- one step --------------------------------------------------------------------------------------

    def _move(self, moves: tuple[SlotMove, ...]) -> set[int]:
        """Perform the moves; return the slots whose content was lost on the way."""
        lost = set()
        for move in moves:
            try:
                self._runner.copy_rows(move.src, move.dst, move.num_tokens)
            except Exception:  # noqa: BLE001 - whatever it is, it is that row's end and nobody else's
                _log.exception("move_failed")
                lost.add(move.dst)
        return lost

    def _run(self, forward: tuple[StepRow, ...]) -> list[RowResult]:
        """Run a forward; when it raises, find the rows at fault by running each alone."""
        try:
            return self._compute(forward)
        except Exception:  # noqa: BLE001 - whatever it is, it must not end the others
            self._num_failed_forwards += 1
            _log.exception("forward_failed", extra={"num_rows": len(forward)})
        if len(forward) == 1:
            return [FAILED]
        return [result for row in forward for result in self._run((row,))]

    def _compute(self, forward: tuple[StepRow, ...]) -> list[RowResult]:
        started = self._clock()
        rows = [
            ForwardRow(
                slot=row.slot,
                start=row.start,
                token_ids=row.sequence.token_ids[row.start : row.start + row.num_tokens],
            )
            for row in forward
        ]
        top = self._runner.forward(rows)
        first = forward[0].slot
        choices = [
            SampleRow(
                at=row.slot - first, params=row.sequence.submission.params, index=row.sequence.output_index
            )
            for row in forward
            if row.is_last
        ]
        tokens = iter(self._sampler.sample(top, choices) if choices else [])
        self._measure(forward, self._clock() - started)
        return [next(tokens) if row.is_last else None for row in forward]

    def _measure(self, forward: tuple[StepRow, ...], seconds: float) -> None:
        """Learn the speeds: a forward of one token a row decodes, any other reads prompts."""
        num_tokens = sum(row.num_tokens for row in forward)
        rates = self._rates
        if num_tokens == len(forward):
            step_s = _blend(rates.decode_step_s, seconds)
            self._rates = Rates(prefill_tokens_per_s=rates.prefill_tokens_per_s, decode_step_s=step_s)
            return
        self._num_prompt_tokens += num_tokens
        speed = _blend(rates.prefill_tokens_per_s, num_tokens / max(seconds, 1e-6))
        self._rates = Rates(prefill_tokens_per_s=speed, decode_step_s=rates.decode_step_s)

    # ---- admission -------------------------------------------------------------------------------------

    def _refuse_invalid(self, submission: Submission) -> None:
        """Check every number here once more: one bad id in a forward would be everybody's fault."""
        params, limit = submission.params, self._runner.num_tokens
        faults = [
            (not submission.token_ids, "input", "the prompt is empty"),
            (not _are_ids(submission.token_ids, limit), "input", f"token ids must be from 0 to {limit - 1}"),
            (not _are_ids(submission.output_ids, limit), "input", f"token ids must be from 0 to {limit - 1}"),
            (params.max_tokens < 1, "max_tokens", "max_tokens must be at least 1"),
            (
                not (isfinite(params.temperature) and params.temperature >= 0),
                "temperature",
                "temperature must be a number from 0",
            ),
            (not 0 <= params.top_p <= 1, "top_p", "top_p must be from 0 to 1"),
            (not 0 <= params.min_p <= 1, "min_p", "min_p must be from 0 to 1"),
        ]
        for is_wrong, param, message in faults:
            if is_wrong:
                raise error_of("invalid_value", message, param=param)


def _are_ids(token_ids: tuple[int, ...], limit: int) -> bool:
    """Whether each is an id; a bool or a float that a sloppy sender let through is not."""
    if not token_ids:
        return True
    return set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < limit


def _blend(mean: float, sample: float) -> float:
    return mean + RATE_WEIGHT * (sample - mean) if mean else sample
