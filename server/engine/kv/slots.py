# SPDX-License-Identifier: Apache-2.0
"""The memory of running rows: keys and values of each layer, contiguous per slot.

One anonymous mapping of the full size, made once: it never grows, and a page of it is resident only after a
token was written there. Huge pages are declined: a slot's first token would make megabytes resident for
each layer. Who may write where is the Scheduler's business; the runner reads and writes through addresses,
which stay valid as long as this object lives.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = 4  # float32
PARTS = ("key", "value")


class KvSlots:
    """Arrays float32 [slots, kv_heads, max_len, head_dim], two for each layer.

    Args:
        num_layers, num_kv_heads, head_dim: the model's shape.
        num_slots: rows that can run at once.
        max_len: tokens a slot holds.
    """

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, num_slots: int, max_len: int
    ) -> None:
        self.shape = (num_slots, num_kv_heads, max_len, head_dim)
        self.num_layers = num_layers
        self._slot_bytes = num_kv_heads * max_len * head_dim * ITEM_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self.num_bytes, flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._arrays: NDArray[np.float32] = np.frombuffer(self._memory, np.float32).reshape(
            num_layers, len(PARTS), *self.shape
        )
        self._start = self._arrays.ctypes.data

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole mapping: what is resident when every slot is full."""
        return self.num_layers * len(PARTS) * self.shape[0] * self._slot_bytes

    def array(self, layer: int, part: str) -> NDArray[np.float32]:
        """One layer's keys or values, a view [slots, kv_heads, max_len, head_dim]."""
        view: NDArray[np.float32] = self._arrays[layer, PARTS.index(part)]
        return view

    def address(self, layer: int, part: str, slot: int) -> int:
        """Where a slot's memory starts; the slots after it follow without a gap."""
        num_before = (layer * len(PARTS) + PARTS.index(part)) * self.shape[0] + slot
        return self._start + num_before * self._slot_bytes

    def copy_rows(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of one slot to another, in every layer."""
        self._arrays[:, :, dst, :, :num_tokens] = self._arrays[:, :, src, :, :num_tokens]
