# SPDX-License-Identifier: Apache-2.0
"""From log-probabilities to the next token of each row. Arrays in, ids out; no I/O, no clock, no randomness.

A row's token is a function of its own log-probabilities, its own parameters and (seed, output index): the
neighbours and their number never enter. Kept are, in this order: temperature → top_k → top_p → min_p; then
the first token at which the cumulated weight exceeds `u` times the whole, where the graph's best `topk` ids
come first, the best at the front, and all others follow by id.

What lies beyond the best ids weighs at most `bound`; when the choice is the same for a tail of 0 and of
`bound`, it is exact and the other ids need not be read. Else, seldom, every id of the row is weighed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from server.engine.sequence import RowFault, TokenParams

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FAULT_MESSAGE = "the model's output for this request is not a number"

ROUNDING = 1e-5  # how far float32 log-probabilities may miss a sum of 1
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
TEMPERATURE_MIN = 1e-30  # below it a float32 difference over it is infinite anyway
BLOCK = 256  # ids cumulated at once


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """What one forward says of its rows; borrowed, valid until the runner's next forward.

    The arrays' rows are the slots from the forward's first row on; an idle slot between holds nothing of
    use. `ids` and `logprobs` are sorted, the best first and the lower id first among equals; `full` holds
    the same log-probabilities of every id. Normalised over the whole output head, padding included.
    """

    ids: NDArray[np.int64]  # [rows, topk]
    logprobs: NDArray[np.float32]  # [rows, topk]
    full: NDArray[np.float32]  # [rows, vocab]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row to choose for: `at` is its place in the TopLogprobs, `index` that of the output token."""

    at: int
    params: TokenParams
    index: int


class Sampler:
    """Chooses tokens for one model.

    Args:
        num_tokens: ids from here on are padding of the output head and are never chosen.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_full_rows = 0  # rows whose tail had to be weighed, for metrics
        self.num_fault_rows = 0

    def sample(self, top: TopLogprobs, rows: Sequence[SampleRow]) -> list[int | RowFault]:
        """Choose one token for each of `rows`; a row without a usable number gets a RowFault."""
        at = [row.at for row in rows]
        ids, logprobs = top.ids[at], top.logprobs[at].astype(np.float64)  # [rows, topk]
        is_broken = ~(np.isfinite(logprobs[:, 0]) & ~np.isnan(logprobs).any(axis=1))
        floor, mass = logprobs[:, -1].copy(), np.ones(len(rows))
        if top.full.shape[1] > self.num_tokens:
            mass -= np.exp(top.full[at, self.num_tokens :], dtype=np.float64).sum(axis=1)
            ids, logprobs = _put_last(ids, logprobs, ids >= self.num_tokens)
        choice, is_sure = self._choose_sorted(logprobs, floor, mass, rows)
        is_sure &= np.isfinite(logprobs[:, 0])  # else every id at hand was padding
        results: list[int | RowFault] = []
        for i, row in enumerate(rows):
            if is_broken[i]:
                results.append(self._fault())
            elif is_sure[i]:
                results.append(int(ids[i, choice[i]]))
            else:
                self.num_full_rows += 1
                token = choose_among_all(top.full[row.at, : self.num_tokens], ids[i], row)
                results.append(self._fault() if token is None else token)
        return results

    def _fault(self) -> RowFault:
        self.num_fault_rows += 1
        return RowFault(message=FAULT_MESSAGE)

    def _choose_sorted(
        self, logprobs: Floats, floor: Floats, mass: Floats, rows: Sequence[SampleRow]
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """Choose a column for each row, and say where the sorted ids alone settle it."""
        if all(row.params.temperature == 0 for row in rows):
            return np.zeros(len(rows), np.int64), np.ones(len(rows), np.bool_)
        columns = _Columns(rows)
        with np.errstate(all="ignore"):  # -inf and NaN end as unsure or broken rows
            weights = _weigh(logprobs, columns.temperature)
            least = np.exp((floor - logprobs[:, 0]) / columns.temperature)
            bound = self._bound_tail(logprobs, floor, mass, columns)
            return _choose(weights, least, bound, columns)

    def _bound_tail(self, logprobs: Floats, floor: Floats, mass: Floats, columns: "_Columns") -> Floats:
        """Bound the weight of all ids beyond the sorted ones.

        With n ids in the tail, m their probability, p the least probability among the sorted and w its
        weight, each tail id weighs at most w: together n·w. Below temperature 1 weights fall faster than
        probabilities, so at most w·m/p; above it, at most as if m were spread evenly over the n.
        """
        best, temperature = logprobs[:, 0], columns.temperature
        num_kept = np.where(columns.top_k > 0, np.minimum(columns.top_k, self.num_tokens), self.num_tokens)
        num_tail = np.maximum(num_kept - np.isfinite(logprobs).sum(axis=1), 0)
        tail_mass = np.maximum(mass - np.exp(logprobs).sum(axis=1), 0.0) + ROUNDING
        least = np.exp((floor - best) / temperature)
        by_count = num_tail * least
        cold = least * tail_mass / np.exp(floor)
        hot = num_tail * np.exp((np.log(tail_mass / np.maximum(num_tail, 1)) - best) / temperature)
        by_mass = np.where(temperature <= 1.0, cold, hot)
        bound: Floats = np.fmin(by_count, by_mass)
        return bound  # by_mass is NaN where p is 0, and there by_count is 0


class _Columns:
    """The rows' parameters as arrays; argmax rows stand in with temperature 1, top_k 1."""

    def __init__(self, rows: Sequence[SampleRow]) -> None:
        params = [row.params for row in rows]
        is_greedy = np.array([each.temperature == 0 for each in params])
        self.temperature = np.array([each.temperature or 1.0 for each in params])
        self.top_k = np.where(is_greedy, 1, np.array([min(each.top_k, 1 << 40) for each in params]))
        self.top_p = np.array([each.top_p for each in params])
        self.min_p = np.array([each.min_p for each in params])
        self.u = np.array([uniform(row.params.seed, row.index) for row in rows])


def uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1) that belongs to output token `index` of a request with this seed."""
    return (_mix(_mix(seed & _MASK) + index) >> 11) / (1 << 53)


def choose_among_all(logprobs: NDArray[np.float32], best_ids: Ints, row: SampleRow) -> int | None:
    """Choose from the log-probabilities of every id [num_tokens]; None when none of them is possible.

    `best_ids` are the sorted ids; padding among them is passed over.
    """
    params = row.params
    best = logprobs.max()
    if not np.isfinite(best):
        return None
    if params.temperature == 0:
        return int(logprobs.argmax())
    with np.errstate(all="ignore"):
        weights = np.exp((logprobs - best) / np.float32(max(params.temperature, TEMPERATURE_MIN)))
    head = best_ids[best_ids < len(logprobs)]
    kept = _cut(weights, head, params)
    cumulated = np.cumsum(kept[head], dtype=np.float64)
    kept[head] = 0
    blocks = np.add.reduceat(kept, np.arange(0, len(kept), BLOCK), dtype=np.float64)
    blocks = np.cumsum(blocks) + (cumulated[-1] if len(head) else 0.0)
    goal = uniform(params.seed, row.index) * blocks[-1]
    if len(head) and goal < cumulated[-1]:
        return int(head[np.searchsorted(cumulated, goal, side="right")])
    at = min(int(np.searchsorted(blocks, goal, side="right")), len(blocks) - 1)
    block = kept[at * BLOCK : (at + 1) * BLOCK]
    within = np.cumsum(block, dtype=np.float64)
    passed = goal - (blocks[at] - within[-1])
    column = min(int(np.searchsorted(within, passed, side="right")), int(np.flatnonzero(block)[-1]))
    return at * BLOCK + column


def _cut(weights: NDArray[np.float32], head: Ints, params: TokenParams) -> NDArray[np.float32]:
    """Set to 0 what top_k, top_p and min_p drop, ties to the lower id. `weights` peak at 1 and are ours."""
    if params.top_k > 0 or params.top_p < 1:
        _cut_ranks(weights, head, params)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0
    return weights


def _cut_ranks(weights: NDArray[np.float32], head: Ints, params: TokenParams) -> None:
    ranked, whole = weights[head], weights.sum(dtype=np.float64)
    has_all = len(head) > 0 and params.top_k <= 0 and ranked.sum(dtype=np.float64) >= params.top_p * whole
    if not has_all:
        ranked = np.sort(weights)[::-1][: params.top_k or None]
        whole = ranked.sum(dtype=np.float64)
    cumulated = np.cumsum(ranked, dtype=np.float64)
    num_kept = len(ranked)
    if params.top_p < 1:
        num_kept = max(int((cumulated - ranked < params.top_p * whole).sum()), 1)
    last = ranked[num_kept - 1]
    is_above = weights > last
    ties = np.flatnonzero(weights == last)[: num_kept - int(is_above.sum())]
    is_above[ties] = True
    weights[~is_above] = 0


def _choose(
    weights: Floats, floor: Floats, tail_max: Floats, columns: _Columns
) -> tuple[Ints, NDArray[np.bool_]]:
    """Choose a column for each row, and say whether it holds for every weight the tail may have.

    `weights` [rows, topk] descend from 1; no id of the tail weighs more than `floor`, all of them no more
    than `tail_max`. What is kept, and so its whole, grows with the tail: when the least and the greatest
    possible whole lead to one column, every one between does.
    """
    width = weights.shape[1]
    num_sorted = (weights > 0).sum(axis=1)  # masked columns weigh nothing
    is_cut = (columns.top_k > 0) & (columns.top_k <= num_sorted)  # the tail is out
    weights = np.where(np.arange(width) < np.where(is_cut, columns.top_k, width)[:, None], weights, 0.0)
    tail_max = np.where(is_cut, 0.0, tail_max)
    cumulated = np.cumsum(weights, axis=1)
    total = cumulated[:, -1]
    is_nucleus = columns.top_p < 1.0
    num_min_p = ((weights >= columns.min_p[:, None]) & (weights > 0)).sum(axis=1)
    is_closed = (tail_max == 0) | (floor < columns.min_p)

    # Twice at once, for the least and the greatest tail: [2, rows]; `width` stands for a place in the tail.
    whole = np.stack([total, total + tail_max])
    goal = columns.top_p * whole
    num_top_p = np.where(is_nucleus, (cumulated - weights < goal[..., None]).sum(axis=-1), width)
    num_kept = np.maximum(np.minimum(num_top_p, num_min_p), 1)
    is_inside = is_closed | (is_nucleus & (total >= goal))
    whole = np.where(is_inside, cumulated[np.arange(len(total)), num_kept - 1], whole)
    passed = (cumulated <= (columns.u * whole)[..., None]).sum(axis=-1)
    least, greatest = np.minimum(passed, np.where(is_inside, num_kept - 1, width))
    return least, (least == greatest) & (greatest < width)


def _weigh(logprobs: Floats, temperature: Floats) -> Floats:
    """Weigh columns against the first; subtracting before dividing keeps the tiniest temperature finite."""
    return np.exp((logprobs - logprobs[:, :1]) / temperature[:, None])


def _put_last(ids: Ints, logprobs: Floats, is_out: NDArray[np.bool_]) -> tuple[Ints, Floats]:
    """Move masked columns behind the others, which keep their order, and make them impossible."""
    if not is_out.any():
        return ids, logprobs
    order = np.argsort(is_out, axis=1, kind="stable")
    masked = np.where(is_out, -np.inf, logprobs)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(masked, order, axis=1)


def _mix(value: int) -> int:
    """The step of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits whose every bit is mixed."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)
