# SPDX-License-Identifier: Apache-2.0
"""A weight matrix → integers, scales and zero points, and how they are packed; nothing of any graph.

Invariant: scale × (integer − zero point) is the nearest there is to the weight, and a zero stays a zero.
"""

import numpy as np
import numpy.typing as npt

from server.models.readers.checkpoint import FloatArray

BLOCK = 32


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
