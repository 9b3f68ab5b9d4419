# SPDX-License-Identifier: Apache-2.0
"""One weight matrix → the nodes and tensors of its product, in each quantisation.

    fp32   MatMul
    w8a8   int8 weights per output channel × uint8 activations per row (zero point 128): the row's largest
           magnitude sets its scale, so no row's bits depend on another's. Per-tensor activations are ruled
           out: they let one user's text change another's.
    w8     8-bit blocks of 32 (MatMulNBits) × float32 activations
    w4     4-bit blocks of 32 on the source's own grid where it has one; head and finer tensors as in w8

A matrix of nothing but zeros is refused.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import numpy_helper

from server.models.graph.rotation import Rotation
from server.models.graph.writer import CONTRIB, GraphWriter
from server.models.quantize import BLOCK, block_affine, pack_nibbles, pack_rows, per_channel_int8
from server.models.readers.checkpoint import CheckpointError, FloatArray, PackedWeight

ZERO_POINT = 128
NIBBLE, BYTE = 4, 8  # bits
EVEN_MAX = 4.0  # what a value of an even row may reach; of 1 000 normal ones the largest is 3.2 on average


class Products:
    """Adds products to one graph; inputs that several products share are quantised once.

    `rounds_to_4_bits` lets w4 round layer weights that come without a 4-bit grid; else they keep 8 bits.
    """

    def __init__(self, writer: GraphWriter, quantization: str, *, rounds_to_4_bits: bool) -> None:
        self.writer = writer
        self.quantization = quantization
        self.rounds_to_4_bits = rounds_to_4_bits
        self._quantized: dict[str, tuple[str, str]] = {}
        self._row_zeros: str | None = None

    def add(
        self,
        name: str,
        x: str,
        weight: FloatArray,
        packed: PackedWeight | None = None,
        *,
        is_even: bool = False,
    ) -> str:
        """Add `x` [rows, tokens, in] × `weight`ᵀ [out, in] and return its output's name.

        `is_even` promises that each row of `x` has a root mean square of 1 and, where it is quantised, no
        outliers: then one scale for all rows of all texts spares five nodes. It costs queries and keys more
        than it gives: they have scales of their own.

        Raises:
            CheckpointError: the weight is all zero.
        """
        if not weight.any():
            raise CheckpointError(f"weight {name} is all zero; fetch the model again")
        if self.quantization == "fp32":
            return self.writer.node("MatMul", [x, self.writer.tensor(f"{name}.w", weight.T)], [f"{name}.out"])
        if self.quantization != "w8a8":
            return self._blocks(name, x, weight, packed)
        if is_even:
            step = self.writer.tensor("even_step", np.array(EVEN_MAX / 127, np.float32))
            return self._int8(name, self._even(x, step), step, weight)
        quantized, row_scale = self._rows(x, weight.shape[1])
        one = self.writer.tensor("one", np.array(1, np.float32))
        product = self._int8(f"{name}.unscaled", quantized, one, weight)
        return self.writer.node("Mul", [product, row_scale], [f"{name}.out"])

    def mix(self, x: str, rotation: Rotation) -> str:
        """Rotate the rows of `x` [rows, tokens, channels] in the graph, signs apart."""
        writer, height, width = self.writer, len(rotation.left), len(rotation.right)
        tiled = writer.tensor("tiled_shape", np.array([0, 0, -1, height, width]))
        flat = writer.tensor("flat_shape", np.array([0, 0, -1]))
        tiles = writer.node("Reshape", [x, tiled], [f"{x}.tiles"])
        mixed = writer.node("MatMul", [tiles, writer.tensor("mix.right", rotation.right)], [f"{x}.rows"])
        mixed = writer.node("MatMul", [writer.tensor("mix.left", rotation.left.T), mixed], [f"{x}.columns"])
        return writer.node("Reshape", [mixed, flat], [f"{x}.mixed"])

    def _int8(self, name: str, x: str, step: str, weight: FloatArray) -> str:
        """uint8 `x` × int8 weights → float32."""
        values, scales = per_channel_int8(weight)
        writer = self.writer
        inputs = [
            x,
            writer.tensor(f"{name}.w", values.T),
            step,
            writer.tensor(f"{name}.scale", scales),
            writer.tensor("zero_point", np.array(ZERO_POINT, np.uint8)),
            # One each, though all are alike: where int8 × uint8 would saturate, ONNX Runtime rewrites
            # every product's own zero points, and a shared tensor would be rewritten twice.
            writer.tensor(f"{name}.zeros", np.zeros(len(scales), np.int8)),
        ]
        return writer.node("MatMulIntegerToFloat", inputs, [f"{name}.out"], domain=CONTRIB)

    def _even(self, x: str, step: str) -> str:
        """Quantise rows that need no scale of their own."""
        if x not in self._quantized:
            zero = self.writer.tensor("zero_point", np.array(ZERO_POINT, np.uint8))
            self._quantized[x] = (self.writer.node("QuantizeLinear", [x, step, zero], [f"{x}.u8"]), step)
        return self._quantized[x][0]

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
        inputs = [x, scale, self._zero_points(scale)]
        values = writer.node("QuantizeLinear", inputs, [f"{x}.u8"], axis=-1, block_size=width)
        self._quantized[x] = (values, scale)
        return values, scale

    def _zero_points(self, scale: str) -> str:
        """128 for each row, in the shape of its scale: made once for all products of a run."""
        if self._row_zeros is None:
            shape = self.writer.node("Shape", [scale], ["rows.shape"])
            value = numpy_helper.from_array(np.array([ZERO_POINT], np.uint8), "value")
            self._row_zeros = self.writer.node("ConstantOfShape", [shape], ["rows.zero_points"], value=value)
        return self._row_zeros

    def _blocks(self, name: str, x: str, weight: FloatArray, packed: PackedWeight | None) -> str:
        """Blocks of 32, on the source's 4-bit grid or rounded to the bits that the weight's place deserves."""
        rows, columns = weight.shape
        if self.quantization == "w4" and packed is not None:
            bits, values = NIBBLE, packed.values
            scales = np.where(packed.scales == 0, np.float32(1), packed.scales)
            zeros: npt.NDArray[Any] = (-packed.minimums / scales).astype(np.float32)
        else:
            # The head decides every token and a source that mixes grids kept this one finer on purpose.
            is_coarse = self.quantization == "w4" and self.rounds_to_4_bits and name != "head"
            bits = NIBBLE if is_coarse else BYTE
            values, scales, zeros = block_affine(weight, bits)
            zeros = pack_rows(zeros) if is_coarse else zeros
        inputs = [
            x,
            self.writer.tensor(f"{name}.w", pack_nibbles(values) if bits == NIBBLE else values),
            self.writer.tensor(f"{name}.scale", scales),
            self.writer.tensor(f"{name}.zero", zeros),
        ]
        shape = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK}
        return self.writer.node("MatMulNBits", inputs, [f"{name}.out"], domain=CONTRIB, **shape)
