# SPDX-License-Identifier: Apache-2.0
"""The seam between a file format and the builder: what every reader offers, whatever it reads.

Tensor names are the Hugging Face ones ("model.layers.0.self_attn.q_proj.weight"), and rotary weights are in
its half-split order, so that nothing after a reader knows the source. A reader never executes anything that
it reads and never guesses: what it does not know it refuses by name.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

CONTEXT_MAX = 1 << 24  # positions; a larger claim is a slip or an attack: rotary tables grow with it
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message names the file, the fault and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchConfig:
    """The numbers of an architecture. `family` is a key of `graph.families.FAMILIES`.

    `rope_scaling` is the Hugging Face mapping with its type under "rope_type". `tie_word_embeddings` None
    means that the source does not say.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    context_length: int
    vocab_size: int
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight as its source packed it, 32 values of a row to a block: w = scale × q + minimum.

    `values` uint8 [out, in] in 0..15 (4 bits); `scales` and `minimums` float32 [out, in / 32].
    """

    bits: int
    values: npt.NDArray[np.uint8]
    scales: FloatArray
    minimums: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Everything about text: contents for tokenizer.json, the chat template, and which ids mean what.

    `end_token_ids` is the union of all that the source names as an end of turn or text; `eos_token_id` is the
    one that its template calls `eos_token`. `adds_bos` tells that the tokenizer itself, not the template,
    puts `bos_token_id` in front.
    """

    tokenizer_json: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: tuple[int, ...]
    num_tokens: int
    adds_bos: bool = False


class Checkpoint(Protocol):
    """Weights and text of one model."""

    @property
    def config(self) -> ArchConfig:
        """The architecture."""

    @property
    def license(self) -> str | None:
        """SPDX-like name, when the source states one."""

    def names(self) -> frozenset[str]:
        """Every tensor's Hugging Face name."""

    def tensor(self, name: str) -> FloatArray:
        """One tensor as float32, [out, in] for a weight.

        Raises:
            CheckpointError: no such tensor, or its bytes are missing.
        """

    def packed(self, name: str) -> PackedWeight | None:
        """The source's own 4-bit grid of a weight, when it has one."""

    def text(self) -> TextFiles:
        """Tokenizer, template and ids.

        Raises:
            CheckpointError: the tokenizer is missing or of an unknown kind.
        """


def check_layout(config: ArchConfig, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Hold the numbers of `config` against each other and against every tensor's shape.

    Readers call this once, at opening, so that nothing later meets a missing layer, a zero or a wrong size.

    Raises:
        CheckpointError: a number is impossible, or a tensor is missing or of another shape.
    """
    _check_numbers(config, where)
    for name, shape in _expected_shapes(config, has_head=HEAD in shapes):
        if name not in shapes:
            raise CheckpointError(f"{where} has no tensor {name}: it is incomplete, fetch it again")
        if shapes[name] != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has the shape {list(shapes[name])}, its settings ask for {list(shape)}"
            )


def _check_numbers(config: ArchConfig, where: str) -> None:
    counts = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    for name in (*counts, "context_length", "vocab_size", "norm_eps", "rope_theta"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{where} has an impossible {name} of {value}")
    if config.context_length > CONTEXT_MAX:
        raise CheckpointError(f"{where} claims {config.context_length} positions, at most {CONTEXT_MAX}")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where} has {config.num_heads} heads, no multiple of its {config.num_kv_heads} key/value heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{where} has heads of {config.head_dim} values; rotation needs an even number")


def _expected_shapes(config: ArchConfig, *, has_head: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Lazily, as `num_layers` is only a claim until the tensors prove it."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield EMBEDDING, (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if has_head:
        yield HEAD, (config.vocab_size, hidden)
    layer_shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    for layer in range(config.num_layers):
        for role, shape in layer_shapes.items():
            yield f"model.layers.{layer}.{role}.weight", shape
