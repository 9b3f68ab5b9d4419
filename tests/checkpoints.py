# SPDX-License-Identifier: Apache-2.0
"""Tiny packages on the spot, a graph to drive by hand, and the slow twin that tells what is right.

    checkpoint = tiny_checkpoint(tmp_path, {"tie_word_embeddings": False}, has_head=True)
    package = tiny_package(tmp_path, checkpoint, "w8a8")
    rows = GraphRows(package, num_rows=3)
    rows.feed({0: [5, 6, 7], 2: [8]})                  row → log-probabilities after each new token
    reference_logits(checkpoint, [5, 6, 7])            what they come from, by plain numpy

The twin shares no code with the product: every position is written out, one head at a time.
"""

import numpy as np
import onnxruntime as ort

from server.models.build import build_package
from server.models.readers.safetensors import FolderCheckpoint
from tests.data.tiny_models import tiny_tensors, write_folder

SHAPE = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}  # attention asks for 16 at least


def tiny_weights(settings=None, seed=0, *, has_head=False):
    """Random tensors by name, of a shape that attention takes."""
    return tiny_tensors(SHAPE | (settings or {}), seed, has_head=has_head)


def tiny_checkpoint(folder, settings=None, *, seed=0, has_head=False, tensors=None, **options):
    """A random model in `folder`, opened; `tensors` replaces the weights, `options` go to `write_folder`."""
    settings = SHAPE | (settings or {})
    tensors = tiny_weights(settings, seed, has_head=has_head) if tensors is None else tensors
    return FolderCheckpoint(write_folder(folder / "checkpoint", tensors, settings, **options))


def tiny_package(home, checkpoint, quantization="fp32", *, model_id="tiny", is_checked=False, **options):
    """Its package in `home`. Unchecked unless told so: nothing here is trained, so nothing is likely."""
    names = {"model_id": model_id, "quantization": quantization}
    return build_package(
        checkpoint, **names, home=home, source={"uri": "test"}, is_checked=is_checked, **options
    )


class GraphRows:
    """A package's graph over `num_rows` rows, each with memory of its own."""

    def __init__(self, package, num_rows=1, max_len=128):
        self.shape = package.manifest.shape
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.x64quantprecision", "1")
        self.session = ort.InferenceSession(str(package.graph_path), options, ["CPUExecutionProvider"])
        size = (num_rows, self.shape.num_kv_heads, max_len, self.shape.head_dim)
        names = [f"{layer}.{part}" for layer in range(self.shape.num_layers) for part in ("key", "value")]
        self.memory = {name: np.zeros(size, np.float32) for name in names}
        self.lengths = [0] * num_rows

    def feed(self, new, output="logprobs"):
        """Append tokens to rows in one run: {row: ids} → {row: `output` after each of them}."""
        num_tokens = max(len(ids) for ids in new.values())
        counts = np.array([len(new.get(row, ())) for row in range(len(self.lengths))])
        ids = np.zeros((len(counts), num_tokens), np.int64)
        for row, values in new.items():
            ids[row, : len(values)] = values
        self.lengths = [int(total) for total in np.add(self.lengths, counts)]
        totals = np.maximum(self.lengths, 1)
        binding = self.session.io_binding()
        for name, value in {
            "input_ids": ids,
            "query_seqlens": counts.astype(np.int32),
            "seqlens_k": (totals - 1).astype(np.int32),
            "total_sequence_length": np.array(totals.max(), np.int32),
            "positions": np.tile(np.arange(num_tokens), (len(counts), 1)),
        }.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(value))
        for name, value in self.memory.items():
            place = ("cpu", 0, np.float32, value.shape, value.ctypes.data)
            binding.bind_input(f"past.{name}", *place)
            binding.bind_output(f"present.{name}", *place)
        binding.bind_output(output)
        self.session.run_with_iobinding(binding)
        found = binding.get_outputs()[-1].numpy()
        return {row: found[row, : len(values)].copy() for row, values in new.items()}

    def feed_chunks(self, ids, size, row=0):
        """Append `ids` to one row in chunks and return the log-probabilities after each token."""
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        return np.concatenate([self.feed({row: chunk})[row] for chunk in chunks])

    def greedy(self, prompt, num_tokens):
        """The most likely continuation of a prompt in row 0."""
        out = [int(self.feed({0: prompt})[0][-1].argmax())]
        while len(out) < num_tokens:
            out.append(int(self.feed({0: out[-1:]})[0][-1].argmax()))
        return out


def reference_logits(checkpoint, token_ids):
    """Logits after each token, [tokens, vocab], float32."""
    config, weight = checkpoint.config, checkpoint.tensor
    x = np.stack([weight("model.embed_tokens.weight")[token] for token in token_ids])
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        normed = _rms_norm(x, weight(f"{name}.input_layernorm.weight"), config.norm_eps)
        x = x + _attention(checkpoint, f"{name}.self_attn", normed)
        normed = _rms_norm(x, weight(f"{name}.post_attention_layernorm.weight"), config.norm_eps)
        gate = normed @ weight(f"{name}.mlp.gate_proj.weight").T
        up = normed @ weight(f"{name}.mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{name}.mlp.down_proj.weight").T
    has_own = "lm_head.weight" in checkpoint.names() and not config.tie_word_embeddings
    head = weight("lm_head.weight" if has_own else "model.embed_tokens.weight")
    return _rms_norm(x, weight("model.norm.weight"), config.norm_eps) @ head.T


def reference_logprobs(checkpoint, token_ids):
    """Natural logarithms of the odds after each token, [tokens, vocab]."""
    return log_softmax(reference_logits(checkpoint, token_ids))


def reference_greedy(checkpoint, prompt_ids, num_tokens):
    """The most likely continuation, everything computed anew for each token."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(reference_logits(checkpoint, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def log_softmax(logits):
    """Logits → log-probabilities along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _attention(checkpoint, name, x):
    config = checkpoint.config
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    queries, keys, values = (x @ checkpoint.tensor(f"{name}.{part}_proj.weight").T for part in "qkv")
    heads = []
    for head in range(config.num_heads):
        own, shared = slice(head * dim, (head + 1) * dim), slice(head // group * dim, (head // group + 1) * dim)
        query, key = _rotate(config, queries[:, own]), _rotate(config, keys[:, shared])
        scores = query @ key.T / np.sqrt(dim)
        scores[np.triu_indices(len(x), 1)] = -np.inf  # nothing reads what comes after it
        weights = np.exp(log_softmax(scores))
        heads.append(weights @ values[:, shared])
    return np.concatenate(heads, axis=1) @ checkpoint.tensor(f"{name}.o_proj.weight").T


def _rotate(config, x):
    """Turn value i and value i + dim/2 of each position by position × frequency i."""
    half = config.head_dim // 2
    turned = np.empty_like(x)
    for i in range(half):
        angle = np.arange(len(x)) * _frequency(config, i)
        turned[:, i] = x[:, i] * np.cos(angle) - x[:, i + half] * np.sin(angle)
        turned[:, i + half] = x[:, i + half] * np.cos(angle) + x[:, i] * np.sin(angle)
    return turned


def _frequency(config, i):
    plain = config.rope_theta ** (-2 * i / config.head_dim)
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "default":
        return plain
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    assert scaling["rope_type"] == "llama3"
    wavelength, original = 2 * np.pi / plain, scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < original / high:
        return plain
    if wavelength > original / low:
        return plain / scaling["factor"]
    share = (original / wavelength - low) / (high - low)
    return (1 - share) * plain / scaling["factor"] + share * plain
