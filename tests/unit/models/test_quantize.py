# SPDX-License-Identifier: Apache-2.0
"""Rounding and packing: how far from the weight, and that nothing is lost on the way to bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from server.models.quantize import BLOCK, block_affine, pack_nibbles, pack_rows, per_channel_int8

SEEDS = st.integers(0, 2**32 - 1)


def matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@given(SEEDS, st.floats(1e-6, 1e6))
def test_int8_is_within_half_a_step(seed, size):
    """Each value is at most half a step off, a row's largest becomes ±127, and the sign is kept."""
    weight = matrix(5, 40, seed) * np.float32(size)
    values, scales = per_channel_int8(weight)
    assert np.abs(values.astype(np.int32)).max(axis=1).tolist() == [127] * 5
    assert (np.abs(values * scales[:, None] - weight) <= scales[:, None] * 0.5001).all()


def test_a_row_of_zero_weights_stays_zero():
    """A channel that the model does not use gets scale 1 and zeros."""
    values, scales = per_channel_int8(np.zeros((2, 8), np.float32))
    assert not values.any()
    assert scales.tolist() == [1, 1]


@given(SEEDS, st.sampled_from([4, 8]), st.integers(1, 70), st.floats(-3, 3))
def test_blocks_are_within_a_step(seed, bits, columns, shift):
    """Values fit their bits, each is at most a step off, and zero is exact, wherever the block's range lies."""
    weight = matrix(3, columns, seed) + np.float32(shift)
    values, scales, zeros = block_affine(weight, bits)
    assert values.shape == (3, -(-columns // BLOCK), BLOCK)
    assert max(values.max(), zeros.max()) < 2**bits
    back = (values.astype(np.float32) - zeros[:, :, None]) * scales[:, :, None]
    error = np.abs(back.reshape(3, -1)[:, :columns] - weight)
    assert (error <= scales.repeat(BLOCK, axis=1)[:, :columns] * 1.0001).all()
    assert not back.reshape(3, -1)[:, columns:].any()


@given(SEEDS, st.integers(1, 5))
def test_packed_nibbles_unpack(seed, blocks):
    """Two values a byte, the low half first; none is lost."""
    values = np.random.default_rng(seed).integers(0, 16, (3, blocks * BLOCK), np.uint8)
    packed = pack_nibbles(values)
    assert packed.shape == (3, blocks, BLOCK // 2)
    back = np.stack([packed & 15, packed >> 4], axis=-1).reshape(3, -1)
    np.testing.assert_array_equal(back, values)


@given(SEEDS, st.integers(1, 6))
def test_packed_zero_points_unpack(seed, blocks):
    """Two zero points a byte, each row beginning its own byte."""
    zeros = np.random.default_rng(seed).integers(0, 16, (3, blocks), np.uint8)
    packed = pack_rows(zeros)
    assert packed.shape == (3, -(-blocks // 2))
    back = np.stack([packed & 15, packed >> 4], axis=-1).reshape(3, -1)
    np.testing.assert_array_equal(back[:, :blocks], zeros)
