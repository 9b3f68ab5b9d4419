# SPDX-License-Identifier: Apache-2.0
"""The block formats of GGML tensors, as plain numpy: bytes → float32, bit for bit as their authors compute it.

Each decoder takes uint8 [blocks, bytes of one block] and returns float32 [blocks, values of one block].
Layouts are those of ggml's `block_q*` structures; half-precision scales are little-endian.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.models.readers.checkpoint import FloatArray, PackedWeight

Bytes = npt.NDArray[np.uint8]
LOW = np.uint8(15)

PACK = 32  # values in one block of the simple formats
SUPER = 256  # values in one block of the K formats


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One tensor type: its name, values and bytes a block, and its decoder."""

    name: str
    num_values: int
    num_bytes: int
    decode: Callable[[Bytes], FloatArray]


def _halves(data: Bytes) -> FloatArray:
    """The half floats in the last axis, [.., 2n] bytes → [.., n]."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _f32(data: Bytes) -> FloatArray:
    return np.ascontiguousarray(data).view("<f4").astype(np.float32)


def _bf16(data: Bytes) -> FloatArray:
    return (np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves of all bytes, then their high halves: [.., n] → [.., 2n]."""
    return np.concatenate([packed & LOW, packed >> np.uint8(4)], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """The 32 bits of a little-endian word, as 0 or 16: [.., 4] → [.., 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(data: Bytes) -> FloatArray:
    return _halves(data[:, :2]) * (_nibbles(data[:, 2:]).astype(np.float32) - 8)


def _q4_1(data: Bytes) -> FloatArray:
    return _halves(data[:, :2]) * _nibbles(data[:, 4:]).astype(np.float32) + _halves(data[:, 2:4])


def _q5_0(data: Bytes) -> FloatArray:
    values = _nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6])
    return _halves(data[:, :2]) * (values.astype(np.float32) - 16)


def _q5_1(data: Bytes) -> FloatArray:
    values = _nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8])
    return _halves(data[:, :2]) * values.astype(np.float32) + _halves(data[:, 2:4])


def _q8_0(data: Bytes) -> FloatArray:
    return _halves(data[:, :2]) * np.ascontiguousarray(data[:, 2:]).view(np.int8).astype(np.float32)


def _scales_k(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minimums from 12 bytes: [n, 12] → [n, 8], [n, 8]."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return scales, minimums


def _affine_k(data: Bytes, values: Bytes) -> FloatArray:
    """Apply w = d × scale × q − dmin × minimum to [n, 8, 32] values."""
    scales, minimums = _scales_k(data[:, 4:16])
    scale = (_halves(data[:, :2]) * scales.astype(np.float32))[:, :, None]
    minimum = (_halves(data[:, 2:4]) * minimums.astype(np.float32))[:, :, None]
    return (scale * values.astype(np.float32) - minimum).reshape(len(data), SUPER)


def _nibbles_k(packed: Bytes) -> Bytes:
    """128 bytes → [n, 8, 32]: each 32 bytes hold two sub-blocks, low halves first."""
    groups = packed.reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (groups & LOW).reshape(-1, 8, 32)


def _q4_k(data: Bytes) -> FloatArray:
    return _affine_k(data, _nibbles_k(data[:, 16:]))


def _q5_k(data: Bytes) -> FloatArray:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = (data[:, None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4)
    return _affine_k(data, _nibbles_k(data[:, 48:]) | fifth)


def _q6_k(data: Bytes) -> FloatArray:
    low = data[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    low = (low & LOW).reshape(-1, 2, 4, 32)
    high = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    values = (low | (high & 3) << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = np.ascontiguousarray(data[:, 192:208]).view(np.int8).astype(np.float32)
    scale = (_halves(data[:, 208:]) * scales)[:, :, None]
    return (scale * values).reshape(len(data), SUPER)


FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _halves),
    2: BlockFormat("Q4_0", PACK, 18, _q4_0),
    3: BlockFormat("Q4_1", PACK, 20, _q4_1),
    6: BlockFormat("Q5_0", PACK, 22, _q5_0),
    7: BlockFormat("Q5_1", PACK, 24, _q5_1),
    8: BlockFormat("Q8_0", PACK, 34, _q8_0),
    12: BlockFormat("Q4_K", SUPER, 144, _q4_k),
    13: BlockFormat("Q5_K", SUPER, 176, _q5_k),
    14: BlockFormat("Q6_K", SUPER, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
UNSUPPORTED = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def packed_weight(kind: int, data: Bytes, shape: tuple[int, int]) -> PackedWeight | None:
    """Keep the 4-bit grid of Q4_0 and Q4_1 blocks; None for every other type.

    Args:
        kind: the tensor's type id.
        data: uint8 [blocks, bytes of one block].
        shape: [out, in] of the weight.
    """
    if FORMATS[kind].name not in ("Q4_0", "Q4_1"):
        return None
    rows, columns = shape
    scales = _halves(data[:, :2]).reshape(rows, columns // PACK)
    if FORMATS[kind].name == "Q4_0":
        values, minimums = _nibbles(data[:, 2:]), scales * -8
    else:
        values, minimums = _nibbles(data[:, 4:]), _halves(data[:, 2:4]).reshape(rows, columns // PACK)
    return PackedWeight(bits=4, values=values.reshape(rows, columns), scales=scales, minimums=minimums)
