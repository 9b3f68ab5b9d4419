# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what is slow, random or far away. Each obeys the contract of the thing it stands for."""

import asyncio

import numpy as np

from server.core.ports import GenerationFinished, GeneratorStatus, TextDelta
from server.core.types import FinishReason, ModelCard, Usage
from server.engine.compute.sampler import TopLogprobs


class FakeRunner:
    """A model without arithmetic: a row's logits are drawn from a hash of every token in its slot.

    So a token computed in the wrong slot, order or place shows as another text, and so does one computed
    alone that was to be computed among others (real attention rounds differently then). `faults` maps a
    request's first prompt token to what its rows do: an Exception is raised for the whole forward, a float
    fills the row's log-probabilities.
    """

    def __init__(self, *, num_slots=16, max_len=64, num_tokens=97, topk=8, faults=None):
        self.num_slots, self.max_len, self.num_tokens, self.topk = num_slots, max_len, num_tokens, topk
        self.slots = [[] for _ in range(num_slots)]  # the tokens whose keys and values stand there
        self.faults = faults or {}
        self.forwards = []  # the rows of every forward, as they came

    def forward(self, rows):
        """Rows of the answer stand at their slot's distance from the first; idle slots between hold NaN."""
        self.forwards.append(list(rows))
        slots = [row.slot for row in rows]
        assert slots == sorted(set(slots)), "rows come in ascending slots"
        for row in rows:
            assert row.start <= len(self.slots[row.slot]), "a row skips over tokens nobody computed"
            is_single = len(row.token_ids) == 1
            self.slots[row.slot][row.start :] = [(token, is_single) for token in row.token_ids]
            assert 0 < len(self.slots[row.slot]) <= self.max_len
        logprobs = np.full((slots[-1] - slots[0] + 1, self.num_tokens), np.nan, np.float32)
        for slot in slots:
            logprobs[slot - slots[0]] = self._logprobs(tuple(self.slots[slot]))
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, : self.topk]
        return TopLogprobs(ids, np.take_along_axis(logprobs, ids, axis=1), logprobs)

    def copy_rows(self, src, dst, num_tokens):
        self.slots[dst] = self.slots[src][:num_tokens]

    def _logprobs(self, tokens):
        fault = self.faults.get(tokens[0][0])
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            return np.full(self.num_tokens, fault, np.float32)
        logits = np.random.default_rng(abs(hash(tokens))).standard_normal(self.num_tokens) * 2
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


class FakeGenerator:
    """A Generator that recites: every request gets the same steps, a string a piece, an Exception raised.

    `is_held` makes each step wait for a `release()`; `is_deaf` loses every cancel, as a real generator does
    before it knows a request. A token is a character; each item costs one more, and so does the mark that
    asks for an answer. `running` holds the ids being answered, `requests` all that were made, and
    `has_started` is set by the first of them.
    """

    def __init__(self, *steps, reason=FinishReason.STOP, context_length=512, is_held=False, is_deaf=False):
        self.steps, self.reason, self.is_held, self.is_deaf = steps, reason, is_held, is_deaf
        self.cards = (ModelCard(id="m", created=7, context_length=context_length, quantization="w8a8",
                                fingerprint="fp_1"),)  # fmt: skip
        self.requests, self.running, self.cancelled, self.num_counts = [], set(), set(), 0
        self._num_permits, self._has_news = 0, asyncio.Event()
        self.has_started = asyncio.Event()

    def release(self, num_steps=1):
        """Let held requests go on by this many steps together."""
        self._num_permits += num_steps
        self._has_news.set()

    async def generate(self, request):
        self.requests.append(request)
        self.running.add(request.id)
        self.has_started.set()
        num_pieces = 0
        try:
            for step in (*self.steps, None):
                if self.is_held:
                    await self._permit(request.id)
                if request.id in self.cancelled or step is None:
                    break
                if isinstance(step, BaseException):
                    raise step
                num_pieces += 1
                yield TextDelta(text=step)
            reason = FinishReason.CANCELLED if request.id in self.cancelled else self.reason
            num_tokens = self._count(request.items)
            yield GenerationFinished(
                reason=reason, usage=Usage(input_tokens=num_tokens, output_tokens=num_pieces)
            )
        finally:
            self.running.discard(request.id)

    def cancel(self, request_id):
        if not self.is_deaf and request_id in self.running:
            self.cancelled.add(request_id)
            self._has_news.set()

    async def num_tokens(self, model, items):
        self.num_counts += 1
        return self._count(items)

    def models(self):
        return self.cards

    def status(self):
        return GeneratorStatus(is_ready=True, num_running=len(self.running))

    def _count(self, items):
        return sum(len(item.text) + 1 for item in items) + 1

    async def _permit(self, request_id):
        while not self._num_permits and request_id not in self.cancelled:
            self._has_news.clear()
            await self._has_news.wait()
        self._num_permits = max(0, self._num_permits - (request_id not in self.cancelled))
