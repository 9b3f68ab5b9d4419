# SPDX-License-Identifier: Apache-2.0
"""Block formats against the reference implementation, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from server.models.readers.ggml import FORMATS, UNSUPPORTED, packed_weight

# type → byte offsets of its half-precision scales
SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208]}  # fmt: skip
BY_NAME = {form.name: (kind, form) for kind, form in FORMATS.items()}


def random_blocks(name, num_blocks=64, seed=0):
    """Any bytes are a valid block but for its scales, which are made finite."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_blocks, BY_NAME[name][1].num_bytes), dtype=np.uint8)
    for offset in SCALES[name]:
        halves = random.standard_normal(num_blocks).astype("<f2")
        blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks


@pytest.mark.parametrize("name", sorted(SCALES))
def test_every_block_format_decodes_bit_for_bit(name):
    """Each quantised type gives exactly the reference's float32, whatever the bytes."""
    kind, form = BY_NAME[name]
    blocks = random_blocks(name)
    expected = dequantize(blocks, gguf.GGMLQuantizationType(kind))
    found = form.decode(blocks)
    assert found.shape == (len(blocks), form.num_values)
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), expected.reshape(found.shape).view(np.uint32))


@pytest.mark.parametrize(("name", "kind"), [("F32", "<f4"), ("F16", "<f2")])
def test_float_formats_are_exact(name, kind):
    """Float types lose nothing, signs of zero, denormals and infinities included."""
    values = np.array([0.0, -0.0, 1.5, -2.25, 6e-8, 65504.0, np.inf, -np.inf], kind)
    found = BY_NAME[name][1].decode(values.view(np.uint8).reshape(len(values), -1))
    assert np.array_equal(found.ravel().view(np.uint32), values.astype(np.float32).view(np.uint32))


def test_bfloat16_is_the_upper_half_of_float32():
    """A bfloat16 is a float32 without its lower 16 bits."""
    values = np.array([0.0, -0.0, 1.0, -3.140625, 1e38], np.float32)
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    found = BY_NAME["BF16"][1].decode(upper.view(np.uint8).reshape(-1, 2))
    assert np.array_equal(found.ravel().view(np.uint32), upper.astype(np.uint32) << 16)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_sizes_are_the_formats_own(name):
    """Values and bytes of a block are those of the format's definition, under its own number."""
    kind, form = BY_NAME[name]
    assert gguf.GGMLQuantizationType(kind).name == name
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (form.num_values, form.num_bytes)


def test_types_that_are_refused_have_their_own_names():
    """Every type of the format is either decoded or can be refused by its name."""
    for kind, name in UNSUPPORTED.items():
        assert gguf.GGMLQuantizationType(kind).name == name
    assert not set(UNSUPPORTED) & set(FORMATS)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_a_packed_weight_is_the_decoded_one(name):
    """The kept 4-bit grid means the same numbers as decoding: scale × value + minimum."""
    weight = np.random.default_rng(1).standard_normal((6, 96)).astype(np.float32)
    kind, form = BY_NAME[name]
    blocks = quantize(weight, gguf.GGMLQuantizationType(kind)).reshape(-1, form.num_bytes)
    packed = packed_weight(kind, blocks, (6, 96))
    assert packed.bits == 4
    assert packed.values.shape == (6, 96)
    assert packed.values.max() <= 15
    assert packed.scales.shape == packed.minimums.shape == (6, 3)
    spread = packed.scales.repeat(32, axis=1) * packed.values + packed.minimums.repeat(32, axis=1)
    assert np.allclose(spread, form.decode(blocks).reshape(6, 96), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q6_K"])
def test_other_types_have_no_4_bit_grid(name):
    """Only Q4_0 and Q4_1 keep theirs."""
    kind, form = BY_NAME[name]
    assert packed_weight(kind, np.zeros((4, form.num_bytes), np.uint8), (2, 2 * form.num_values)) is None
