# SPDX-License-Identifier: Apache-2.0
"""The slots' memory: addresses, copies, and what it costs while nobody uses it."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from server.engine.kv.slots import PARTS, KvSlots


def slots_of(**changes):
    sizes = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 4, "num_slots": 5, "max_len": 16}
    return KvSlots(**{**sizes, **changes})


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layer", [0, 1])
def test_an_address_is_where_the_array_says(layer, part):
    """What the runtime writes at an address, the array shows, and slots follow without a gap."""
    slots = slots_of()
    array = slots.array(layer, part)
    assert array.shape == (5, 3, 16, 4)
    for slot in range(5):
        ctypes.c_float.from_address(slots.address(layer, part, slot)).value = 1.5 + slot
    assert array[:, 0, 0, 0].tolist() == [1.5, 2.5, 3.5, 4.5, 5.5]


def test_copied_tokens_are_the_same_and_no_more():
    """A copy takes the first tokens in every layer, for keys and values, and leaves the rest."""
    slots = slots_of()
    for layer in range(2):
        for part in PARTS:
            slots.array(layer, part)[:] = np.random.default_rng(layer).random((5, 3, 16, 4))
    before = {part: slots.array(1, part).copy() for part in PARTS}
    slots.copy_rows(4, 1, 7)
    for part in PARTS:
        after = slots.array(1, part)
        np.testing.assert_array_equal(after[1, :, :7], before[part][4, :, :7])
        np.testing.assert_array_equal(after[1, :, 7:], before[part][1, :, 7:])
        np.testing.assert_array_equal(after[[0, 2, 3, 4]], before[part][[0, 2, 3, 4]])


def test_only_written_tokens_are_resident():
    """A gigabyte of slots costs what its tokens take, in small pages: a short chat is a few megabytes."""
    before = resident_bytes()
    slots = slots_of(num_layers=32, num_kv_heads=4, head_dim=64, num_slots=8, max_len=2048)
    assert slots.num_bytes == 2**30
    assert resident_bytes() - before < 2_000_000
    for layer in range(32):
        for part in PARTS:
            slots.array(layer, part)[5, :, :100] = 1.0
    assert resident_bytes() - before < 12_000_000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
