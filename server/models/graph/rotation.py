# SPDX-License-Identifier: Apache-2.0
"""The same function in a basis where int8 loses little: channels are mixed, so that none stands out.

A few channels of a language model are a hundred times larger than the rest, and one int8 step for a whole
row then rounds the rest away. An orthogonal matrix Q mixes them evenly, and Q·Qᵀ = 1 keeps the function
(QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). It needs no calibration text, and costs the graph nothing
where Q folds into the weights on both sides: the residual stream (norm weights fold into the products
behind them, a plain RMS norm does not see Q) and each value head. Only the gated MLP's product must be mixed
as the graph runs.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from server.models.readers.checkpoint import EMBEDDING, ArchConfig, FloatArray

Weights = Callable[[str], FloatArray]

RIGHT_MAX = 32
LEFT_MAX = 64  # of a rotation that runs in the graph: wider tiles cost more and mix hardly better
NORM = "model.norm.weight"


class Rotation:
    """An orthogonal matrix over `width` channels, as a sign for each and products of small matrices.

    The channels are laid out in tiles [left, right]; each tile X becomes Aᵀ·X·B. A power of two is mixed by a
    Hadamard matrix, an odd factor by a cosine transform: any width works, a prime one as a single column.
    `left_max` limits the tile's height, for a rotation that runs in the graph.
    """

    def __init__(self, width: int, *, left_max: int | None = None) -> None:
        right = math.gcd(width, RIGHT_MAX)
        rest = width // right
        left = max(size for size in range(1, min(left_max or rest, rest) + 1) if rest % size == 0)
        self.left, self.right = orthogonal(left), orthogonal(right)
        self.signs = _signs(width)

    def mix(self, x: FloatArray) -> FloatArray:
        """Rotate rows [..., width], signs included."""
        tiles = (x * self.signs).reshape(*x.shape[:-1], -1, len(self.left), len(self.right))
        mixed: FloatArray = (self.left.T @ tiles @ self.right).reshape(x.shape)
        return mixed


class RotatedWeights:
    """A checkpoint's weights by name, rotated: what `weights` gives, for a graph without norm weights.

    `weights(HEAD)` must give the output head also when it is tied; rotated it never is. The input of each down
    product must be mixed by `gated`, its signs apart: those are in the up products already.
    """

    def __init__(self, config: ArchConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._hidden = Rotation(config.hidden_size)
        self._head = Rotation(config.head_dim)
        self.gated = Rotation(config.intermediate_size, left_max=LEFT_MAX)

    def tensor(self, name: str) -> FloatArray:
        """One tensor in the rotated basis."""
        values = self._weights(name)
        if values.ndim == 1:
            return np.ones_like(values)  # a norm's weight: the products behind it have it now
        return self._rows(name, self._columns(name, values))

    def _columns(self, name: str, weight: FloatArray) -> FloatArray:
        """Fit a weight [out, in] to the rotated rows that it is multiplied with."""
        if "down_proj" in name:
            return self.gated.mix(weight)
        if "o_proj" in name:
            return self._by_head(weight)
        norm = _norm_before(name)
        return self._hidden.mix(weight if norm is None else weight * self._weights(norm))

    def _rows(self, name: str, weight: FloatArray) -> FloatArray:
        """Rotate what a weight [out, in] makes."""
        if "o_proj" in name or "down_proj" in name:
            return self._hidden.mix(weight.T).T
        if "v_proj" in name:
            return self._by_head(weight.T).T
        return weight * self.gated.signs[:, None] if "up_proj" in name else weight

    def _by_head(self, weight: FloatArray) -> FloatArray:
        """Rotate the columns of each head, [out, heads × dim]."""
        heads = weight.reshape(len(weight), -1, self._config.head_dim)
        return self._head.mix(heads).reshape(weight.shape)


def _norm_before(name: str) -> str | None:
    """The norm whose output a weight is multiplied with; the embedding has none, being the stream itself."""
    if name == EMBEDDING:
        return None
    layer, _, block = name.rpartition(".weight")[0].rpartition(".")[0].rpartition(".")
    norms = {"self_attn": f"{layer}.input_layernorm.weight", "mlp": f"{layer}.post_attention_layernorm.weight"}
    return norms.get(block, NORM)


def orthogonal(width: int) -> FloatArray:
    """An orthogonal matrix whose entries are all of about the same size, [width, width]."""
    odd = width
    while odd % 2 == 0:
        odd //= 2
    matrix = _cosines(odd)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / math.sqrt(2)
    return matrix.astype(np.float32)


def _cosines(width: int) -> npt.NDArray[np.float64]:
    places, waves = np.arange(width)[:, None], np.arange(width)[None, :]
    matrix: npt.NDArray[np.float64] = np.cos(math.pi * (2 * places + 1) * waves / (2 * width))
    return matrix * np.sqrt(np.where(waves == 0, 1, 2) / width)


def _signs(width: int) -> FloatArray:
    """±1 by chance, so that channels with a common sign do not add up in one place; the same at every build."""
    chance = np.frombuffer(hashlib.shake_128(b"signs").digest(width // 8 + 1), np.uint8)
    signs: FloatArray = np.unpackbits(chance)[:width].astype(np.float32) * 2 - 1
    return signs
