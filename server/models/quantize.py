# SPDX-License-Identifier: Apache-2.0
"""One weight matrix → the nodes and tensors of its product, in each quantisation.

    fp32   MatMul
    w8a8   int8 weights per output channel × uint8 activations per row (zero point 128): the row's largest
           magnitude sets its scale, so no row's bits depend on another's. Per-tensor activations are ruled
           out: they let one user's text change another's. The MLP's down product, whose inputs have the
           wildest outliers, has int8 blocks of 32 on both sides instead.
    w8     8-bit blocks of 32 (MatMulNBits) × float32 activations
    w4     4-bit blocks of 32 on the source's own grid where it has one; head and finer tensors as in w8

A matrix that quantises to nothing but zeros, or holds a value that is not finite, is refused.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import numpy_helper

from server.models.graph.writer import CONTRIB, GraphWriter
from server.models.readers.checkpoint import CheckpointError, FloatArray, PackedWeight

BLOCK = 32
ZERO_POINT = 128
ACCURACY_INT8 = 4  # MatMulNBits: activations as int8 with a scale for each block


class Products:
    """Adds products to one graph; inputs that several products share are quantised once.

    `rounds_to_4_bits` lets w4 round layer weights that come without a 4-bit grid; else they keep 8 bits.
    """

    def __init__(self, writer: GraphWriter, quantization: str, *, rounds_to_4_bits: bool) -> None:
        self.writer = writer
        self.quantization = quantization
        self.rounds_to_4_bits = rounds_to_4_bits
        self._quantized: dict[str, tuple[str, str]] = {}
        self._zero_points: dict[str, str] = {}

    def add(self, name: str, x: str, weight: FloatArray, packed: PackedWeight | None = None) -> str:
        """Add `x` [rows, tokens, in] × `weight`ᵀ [out, in] and return its output's name.

        Raises:
            CheckpointError: the weight is not finite or all zero.
        """
        if not np.isfinite(weight).all():
            raise CheckpointError(f"weight {name} holds a value that is not finite; fetch the model again")
        if not weight.any():
            raise CheckpointError(f"weight {name} is all zero; fetch the model again")
        if self.quantization == "fp32":
            return self.writer.node("MatMul", [x, self.writer.tensor(f"{name}.w", weight.T)], [f"{name}.out"])
        if self.quantization == "w8a8" and not name.endswith(".down"):
            return self._w8a8(name, x, weight)
        return self._blocks(name, x, weight, packed)

    def _w8a8(self, name: str, x: str, weight: FloatArray) -> str:
        writer = self.writer
        values, scales = per_channel_int8(weight)
        quantized, row_scale = self._rows(x, weight.shape[1])
        product = writer.node(
            "MatMulIntegerToFloat",
            [
                quantized,
                writer.tensor(f"{name}.w", values.T),
                writer.tensor("one", np.array(1, np.float32)),
                writer.tensor(f"{name}.scale", scales),
                writer.tensor("zero_point", np.array(ZERO_POINT, np.uint8)),
                # One each, though all are alike: where int8 × uint8 would saturate, ONNX Runtime rewrites
                # every product's own zero points, and a shared tensor would be rewritten twice.
                writer.tensor(f"{name}.zeros", np.zeros(len(scales), np.int8)),
            ],
            [f"{name}.unscaled"],
            domain=CONTRIB,
        )
        return writer.node("Mul", [product, row_scale], [f"{name}.out"])

    def _rows(self, x: str, width: int) -> tuple[str, str]:
        """Quantise each row of `x` by itself: (uint8 values, float scales [rows, tokens, 1]).

        A row of zeros gets scale 0: whatever its values become, the product is multiplied by that 0.
        """
        if x in self._quantized:
            return self._quantized[x]
        writer = self.writer
        magnitude = writer.node("Abs", [x], [f"{x}.abs"])
        axis = writer.tensor("last_axis", np.array([-1]))
        largest = writer.node("ReduceMax", [magnitude, axis], [f"{x}.max"], keepdims=1)
        step = writer.tensor("per_127", np.array(1 / 127, np.float32))
        scale = writer.node("Mul", [largest, step], [f"{x}.scale"])
        inputs = [x, scale, self._zero_point(scale, x)]
        values = writer.node("QuantizeLinear", inputs, [f"{x}.u8"], axis=-1, block_size=width)
        self._quantized[x] = (values, scale)
        return values, scale

    def _zero_point(self, scale: str, x: str) -> str:
        """128s in the shape of the scales: made once for all hidden rows and once for the picked ones."""
        kind = "picked" if x == "picked" else "hidden"
        if kind not in self._zero_points:
            shape = self.writer.node("Shape", [scale], [f"{kind}.shape"])
            value = np.array([ZERO_POINT], np.uint8)
            self._zero_points[kind] = self.writer.node(
                "ConstantOfShape",
                [shape],
                [f"{kind}.zero_point"],
                value=numpy_helper.from_array(value, "value"),
            )
        return self._zero_points[kind]

    def _blocks(self, name: str, x: str, weight: FloatArray, packed: PackedWeight | None) -> str:
        """Blocks of 32: the source's 4-bit grid as it is, else rounded to the bits that its place deserves."""
        rows, columns = weight.shape
        if self.quantization == "w4" and packed is not None:
            bits, values = 4, packed.values
            scales = np.where(packed.scales == 0, np.float32(1), packed.scales)
            zeros: npt.NDArray[Any] = (-packed.minimums / scales).astype(np.float32)
        else:
            # The head decides every token and a source that mixes grids kept this one finer on purpose.
            bits = 4 if self.quantization == "w4" and self.rounds_to_4_bits and name != "head" else 8
            values, scales, zeros = block_affine(weight, bits)
            zeros = pack_rows(zeros) if bits == 4 else zeros  # noqa: PLR2004  # two to a byte
        inputs = [
            x,
            self.writer.tensor(f"{name}.w", pack_nibbles(values) if bits == 4 else values),  # noqa: PLR2004
            self.writer.tensor(f"{name}.scale", scales),
            self.writer.tensor(f"{name}.zero", zeros),
        ]
        shape = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK}
        if self.quantization == "w8a8":
            shape["accuracy_level"] = ACCURACY_INT8
        return self.writer.node("MatMulNBits", inputs, [f"{name}.out"], domain=CONTRIB, **shape)


def per_channel_int8(weight: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Round [out, in] to −127..127 with one scale a row; a row of zeros gets scale 1."""
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(weight / scales[:, None]).astype(np.int8), scales.astype(np.float32)


def block_affine(
    weight: FloatArray, bits: int
) -> tuple[npt.NDArray[np.uint8], FloatArray, npt.NDArray[np.uint8]]:
    """Round blocks of 32 values of a row to 0..2^bits−1 with a scale and a zero point each.

    Columns are padded with zeros to whole blocks. Returns values [out, blocks, 32], scales and zero points
    [out, blocks].
    """
    top = 2**bits - 1
    padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % BLOCK)))
    blocks = padded.reshape(len(weight), -1, BLOCK)
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    scales = (high - low) / np.float32(top)
    scales[scales == 0] = 1
    zeros = np.clip(np.rint(-low / scales), 0, top)
    values = np.clip(np.rint(blocks / scales[:, :, None]) + zeros[:, :, None], 0, top)
    return values.astype(np.uint8), scales.astype(np.float32), zeros.astype(np.uint8)


def pack_nibbles(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two 4-bit values a byte, low half first: [out, .., in] → [out, blocks, 16]."""
    blocks = values.reshape(len(values), -1, BLOCK)
    return blocks[:, :, 0::2] | blocks[:, :, 1::2] << np.uint8(4)


def pack_rows(zeros: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Zero points, two a byte, each row padded to a whole byte: [out, blocks] → [out, ⌈blocks / 2⌉]."""
    padded = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
    return padded[:, 0::2] | padded[:, 1::2] << np.uint8(4)


ALPHAS = (0.0, 0.25, 0.5, 0.75)
SCALE_MAX = 100.0

Shared = Callable[[FloatArray], FloatArray]


def channel_scales(x: FloatArray, weight: FloatArray, share: Shared = lambda values: values) -> FloatArray:
    """How much of each input channel's spread moves into the weights, by trying: the least error wins.

    SmoothQuant (Xiao et al. 2022, arXiv 2211.10438) with two changes. A channel's spread is the root mean
    square of its values over their row's largest, as AWQ (Lin et al. 2023, arXiv 2306.00978) does in kind: the
    one huge value of a text's first token must not decide. And the strength α is searched for each product.

    Args:
        x: inputs of the product from real text, [tokens, channels]; the first token is not judged.
        weight: [out, channels].
        share: makes channels that must have one scale equal, on [channels].

    Returns:
        positive scales with a geometric mean of 1, [channels]: x / scales and weight × scales.
    """
    expected = x @ weight.T
    size = (expected * expected).sum(axis=1) + np.float32(1e-9)
    relative = x / np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-9))
    spread = share(np.sqrt((relative * relative).mean(axis=0)) + np.float32(1e-9))
    carried = share(np.sqrt((weight * weight).mean(axis=0)) + np.float32(1e-9))
    best, least = np.ones(x.shape[1], np.float32), np.inf
    for alpha in ALPHAS:
        scales = spread**alpha / carried ** (alpha / 2)
        scales = np.clip(scales / np.exp(np.log(scales).mean()), 1 / SCALE_MAX, SCALE_MAX).astype(np.float32)
        error = round_trip(x / scales) @ round_trip(weight * scales).T - expected
        loss = float(((error * error).sum(axis=1) / size)[1:].mean())
        if loss < least:
            best, least = scales, loss
    return best


def round_trip(values: FloatArray) -> FloatArray:
    """What rows of `values` are after int8: rounded to 127ths of their own largest magnitude."""
    steps = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    steps[steps == 0] = 1
    back: FloatArray = np.rint(values / steps) * steps
    return back
