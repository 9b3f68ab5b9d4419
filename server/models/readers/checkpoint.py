# SPDX-License-Identifier: Apache-2.0
"""The seam between a file format and the builder: what every reader offers, whatever it reads.

Tensor names are the Hugging Face ones ("model.layers.0.self_attn.q_proj.weight"), and rotary weights are in
its half-split order, so that nothing after a reader knows the source. A reader never executes anything that
it reads and never guesses: what it does not know it refuses by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


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
