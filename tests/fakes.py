# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what is slow, random or far away. Each obeys the contract of the thing it stands for."""

import numpy as np

from server.engine.compute.sampler import TopLogprobs


class FakeRunner:
    """A model without arithmetic: a row's logits are drawn from a hash of every token in its slot.

    So a token computed in the wrong slot, order or place shows as another text. `faults` maps a request's
    first prompt token to what its rows do: an Exception is raised for the whole forward, a float fills the
    row's log-probabilities.
    """

    def __init__(self, *, num_slots=16, max_len=64, num_tokens=97, topk=8, faults=None):
        self.num_slots, self.max_len, self.num_tokens, self.topk = num_slots, max_len, num_tokens, topk
        self.slots = [[] for _ in range(num_slots)]  # the tokens whose keys and values stand there
        self.faults = faults or {}
        self.forwards = []  # the rows of every forward, as they came

    def forward(self, rows):
        self.forwards.append(list(rows))
        slots = [row.slot for row in rows]
        assert slots == sorted(set(slots)), "rows come in ascending slots"
        for row in rows:
            assert row.start <= len(self.slots[row.slot]), "a row skips over tokens nobody computed"
            self.slots[row.slot][row.start :] = row.token_ids
            assert 0 < len(self.slots[row.slot]) <= self.max_len
        logprobs = np.stack([self._logprobs(tuple(self.slots[slot])) for slot in slots])
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, : self.topk]
        return TopLogprobs(ids, np.take_along_axis(logprobs, ids, axis=1), logprobs)

    def copy_rows(self, src, dst, num_tokens):
        self.slots[dst] = self.slots[src][:num_tokens]

    def _logprobs(self, tokens):
        fault = self.faults.get(tokens[0])
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            return np.full(self.num_tokens, fault, np.float32)
        logits = np.random.default_rng(abs(hash(tokens))).standard_normal(self.num_tokens) * 2
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)
