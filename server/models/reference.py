# SPDX-License-Identifier: Apache-2.0
"""The slow, obvious forward pass in plain numpy float32: what every faster graph is compared with.

One sequence, no padding, keys and values kept in lists of arrays. It shares no code with `graph` beyond the
rope frequencies, so that a fault there shows here.
"""

from collections.abc import Sequence

import numpy as np

from server.models.graph.rope import frequencies
from server.models.readers.checkpoint import Checkpoint, FloatArray


class ReferenceModel:
    """A checkpoint as a function from token ids to logits.

    With `keeps_weights` every tensor is decoded once and kept: faster for many short calls, at the price of
    the whole model in float32.
    """

    def __init__(self, checkpoint: Checkpoint, *, keeps_weights: bool = False) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.frequencies = frequencies(checkpoint.config)
        self._kept: dict[str, FloatArray] | None = {} if keeps_weights else None
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._keys: list[FloatArray] = [np.zeros((0, 0, 0), np.float32)] * self.config.num_layers
        self._values = list(self._keys)
        self.num_tokens = 0

    def forward(self, ids: Sequence[int]) -> FloatArray:
        """Append `ids` to the sequence and return their logits [tokens, vocab]."""
        x = self._weight("model.embed_tokens")[list(ids)]
        for layer in range(self.config.num_layers):
            name = f"model.layers.{layer}"
            normed = self._norm(x, f"{name}.input_layernorm")
            attended = self._attention(layer, normed)
            x = x + attended @ self._weight(f"{name}.self_attn.o_proj").T
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate = normed @ self._weight(f"{name}.mlp.gate_proj").T
            up = normed @ self._weight(f"{name}.mlp.up_proj").T
            gated = gate / (1 + np.exp(-gate)) * up
            x = x + gated @ self._weight(f"{name}.mlp.down_proj").T
        self.num_tokens += len(ids)
        logits: FloatArray = self._norm(x, "model.norm") @ self._head().T
        return logits

    def greedy(self, prompt: Sequence[int], num_tokens: int, end_ids: Sequence[int] = ()) -> list[int]:
        """The most likely continuation, token by token, at most `num_tokens` and without an end token."""
        self.reset()
        logits = self.forward(prompt)
        out: list[int] = []
        while len(out) < num_tokens:
            token = int(logits[-1].argmax())
            if token in end_ids:
                break
            out.append(token)
            logits = self.forward([token])
        return out

    def _attention(self, layer: int, x: FloatArray) -> FloatArray:
        config, name = self.config, f"model.layers.{layer}.self_attn"
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        count = len(x)
        query = self._rotate((x @ self._weight(f"{name}.q_proj").T).reshape(count, heads, dim))
        key = self._rotate((x @ self._weight(f"{name}.k_proj").T).reshape(count, kv_heads, dim))
        value = (x @ self._weight(f"{name}.v_proj").T).reshape(count, kv_heads, dim)
        if self.num_tokens:
            key = np.concatenate([self._keys[layer], key])
            value = np.concatenate([self._values[layer], value])
        self._keys[layer], self._values[layer] = key, value
        group = heads // kv_heads
        keys, values = key.repeat(group, axis=1), value.repeat(group, axis=1)  # [past + tokens, heads, dim]
        scores = query.swapaxes(0, 1) @ keys.transpose(1, 2, 0) / np.sqrt(np.float32(dim))
        places = np.arange(len(key))[None, :] > (self.num_tokens + np.arange(count))[:, None]
        scores = np.where(places[None], np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended: FloatArray = weights @ values.swapaxes(0, 1)  # [heads, tokens, dim]
        return attended.swapaxes(0, 1).reshape(count, heads * dim)

    def _rotate(self, x: FloatArray) -> FloatArray:
        """Rotate pairs (i, i + dim / 2) of [tokens, heads, dim] by position."""
        angles = np.outer(self.num_tokens + np.arange(len(x)), self.frequencies)[:, None, :]
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def _norm(self, x: FloatArray, name: str) -> FloatArray:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.config.norm_eps))
        normed: FloatArray = x / scale * self._weight(name)
        return normed

    def _head(self) -> FloatArray:
        """The output head's weight [vocab, hidden]: its own, or the embedding when they are tied."""
        is_untied = self.config.tie_word_embeddings is not True and "lm_head.weight" in self.checkpoint.names()
        return self._weight("lm_head" if is_untied else "model.embed_tokens")

    def _weight(self, name: str) -> FloatArray:
        if self._kept is None:
            return self.checkpoint.tensor(f"{name}.weight")
        if name not in self._kept:
            self._kept[name] = self.checkpoint.tensor(f"{name}.weight")
        return self._kept[name]


def negative_log_likelihoods(logits: FloatArray, ids: Sequence[int]) -> FloatArray:
    """How surprising each token of `ids` after the first is, in nats, [tokens − 1]."""
    scores = logits[:-1] - logits[:-1].max(axis=-1, keepdims=True)
    totals = np.log(np.exp(scores).sum(axis=-1))
    surprise: FloatArray = totals - scores[np.arange(len(scores)), list(ids[1:])]
    return surprise
