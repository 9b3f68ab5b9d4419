# SPDX-License-Identifier: Apache-2.0
"""Tokens in, log-probabilities out: one ONNX Runtime session over the slots' memory.

A forward spans the slots from its first row to its last. Keys and values are read and written in place
through IoBinding, small inputs and outputs live in arrays made once, so a step allocates next to nothing of
ours. A row's numbers are the same in any batch; a row of one token is computed otherwise than a row of
several (see the Scheduler). Nothing here knows requests, sampling or time.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from server.engine.compute.sampler import TopLogprobs
from server.engine.kv.slots import PARTS, KvSlots
from server.engine.sequence import ForwardRow
from server.models.package import ModelPackage

BINDINGS_MAX = 32  # spans of decode rows that are kept bound; a prompt's span is bound anew each time


class Runner:
    """One model, its session and its slots. One thread; `forward`'s result is lent until the next one.

    Args:
        package: the model.
        num_slots: rows that can run at once.
        max_len: tokens a slot holds; at most what the model was made for.
        num_threads: threads of the session, the caller's own included.
        can_spin: whether they wait busily between two operators: faster, unless the CPU is shared.

    Raises:
        ValueError: the model has no such context.
        onnxruntime.capi.onnxruntime_pybind11_state.Fail, NoSuchFile, …: the graph cannot be loaded.
    """

    def __init__(
        self,
        package: ModelPackage,
        *,
        num_slots: int,
        max_len: int,
        num_threads: int,
        can_spin: bool = True,
    ) -> None:
        shape = package.manifest.shape
        if max_len > shape.context_length:
            raise ValueError(f"max_len {max_len} exceeds the model's context of {shape.context_length} tokens")
        self.num_tokens = package.manifest.num_tokens
        self.num_slots, self.max_len = num_slots, max_len
        self.slots = KvSlots(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_slots=num_slots,
            max_len=max_len,
        )
        self._session = ort.InferenceSession(
            str(package.graph_path), _options(num_threads, can_spin=can_spin), ["CPUExecutionProvider"]
        )
        self._bindings: OrderedDict[tuple[int, int], ort.IOBinding] = OrderedDict()
        self._input_ids = np.zeros(num_slots * max_len, np.int64)  # [rows * tokens]
        self._query_seqlens = np.zeros(num_slots, np.int32)
        self._seqlens_k = np.zeros(num_slots, np.int32)
        self._total = np.zeros((), np.int32)
        self._positions = np.zeros((num_slots, 1), np.int64)
        self._topk_ids = np.zeros((num_slots, 1, shape.topk), np.int64)
        self._topk_logprobs = np.zeros((num_slots, 1, shape.topk), np.float32)
        self._logprobs = np.zeros((num_slots, 1, shape.vocab_size), np.float32)

    def forward(self, rows: Sequence[ForwardRow]) -> TopLogprobs:
        """Compute the rows' tokens, given in ascending slots, and keep their keys and values.

        Returns:
            for each row the log-probabilities of what follows its last token, at its slot's distance
            from the first row's.

        Raises:
            Exception: ONNX Runtime could not run; what the rows held before this forward is unharmed.
        """
        first, span = rows[0].slot, rows[-1].slot - rows[0].slot + 1
        num_tokens = max(len(row.token_ids) for row in rows)
        self._fill(rows, first, span, num_tokens)
        self._session.run_with_iobinding(self._binding_of(first, span, num_tokens))
        return TopLogprobs(
            ids=self._topk_ids[:span, 0], logprobs=self._topk_logprobs[:span, 0], full=self._logprobs[:span, 0]
        )

    def copy_rows(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the keys and values of a slot's first tokens to another slot."""
        self.slots.copy_rows(src, dst, num_tokens)

    def warm(self) -> None:
        """Run once, so that the first request does not pay for first touches. Writes into slot 0."""
        self.forward([ForwardRow(slot=0, start=0, token_ids=[0])])

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots and of our own arrays; the session's weights and workspace come on top."""
        own = (self._input_ids, self._topk_ids, self._topk_logprobs, self._logprobs)
        return self.slots.num_bytes + sum(array.nbytes for array in own)

    def _fill(self, rows: Sequence[ForwardRow], first: int, span: int, num_tokens: int) -> None:
        """Write the inputs of a span; a slot without a row stays idle: no token, nothing written."""
        input_ids = self._input_ids[: span * num_tokens].reshape(span, num_tokens)
        input_ids[:] = 0
        self._query_seqlens[:span] = 0
        self._seqlens_k[:span] = 0
        self._positions[:span] = 0
        total = 0
        for row in rows:
            at, num_new = row.slot - first, len(row.token_ids)
            end = row.start + num_new
            assert 0 < num_new <= end <= self.max_len, "a row stays inside its slot"
            input_ids[at, :num_new] = row.token_ids
            self._query_seqlens[at] = num_new
            self._seqlens_k[at] = end - 1
            self._positions[at] = num_new - 1
            total = max(total, end)
        self._total[()] = total

    def _binding_of(self, first: int, span: int, num_tokens: int) -> ort.IOBinding:
        if num_tokens > 1:
            return self._bind(first, span, num_tokens)
        key = (first, span)
        binding = self._bindings.get(key)
        if binding is None:
            if len(self._bindings) >= BINDINGS_MAX:
                self._bindings.popitem(last=False)
            binding = self._bindings[key] = self._bind(first, span, 1)
        self._bindings.move_to_end(key)
        return binding

    def _bind(self, first: int, span: int, num_tokens: int) -> ort.IOBinding:
        """Bind every input and output to memory of ours, for a span of slots."""
        binding = self._session.io_binding()

        def bind_input(name: str, array: NDArray[np.generic], *shape: int) -> None:
            binding.bind_input(name, "cpu", 0, array.dtype.type, list(shape), array.ctypes.data)

        def bind_output(name: str, array: NDArray[np.generic]) -> None:
            shape = [span, *array.shape[1:]]
            binding.bind_output(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)

        bind_input("input_ids", self._input_ids, span, num_tokens)
        bind_input("query_seqlens", self._query_seqlens, span)
        bind_input("seqlens_k", self._seqlens_k, span)
        bind_input("total_sequence_length", self._total)
        bind_input("positions", self._positions, span, 1)
        bind_output("topk_logprobs", self._topk_logprobs)
        bind_output("topk_ids", self._topk_ids)
        bind_output("logprobs", self._logprobs)
        shape = [span, *self.slots.shape[1:]]
        for layer in range(self.slots.num_layers):
            for part in PARTS:
                address = self.slots.address(layer, part, first)
                binding.bind_input(f"past.{layer}.{part}", "cpu", 0, np.float32, shape, address)
                binding.bind_output(f"present.{layer}.{part}", "cpu", 0, np.float32, shape, address)
        return binding


def _options(num_threads: int, *, can_spin: bool) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads  # explicit, so that no thread is pinned to a core
    options.inter_op_num_threads = 1
    # The arena stays on: shapes are bounded by slot and chunk, and over random ones the process kept its size
    # (1023 MB with it, 1020 without), while a step of one row was 5 % faster.
    options.enable_mem_pattern = False  # shapes differ from run to run: a pattern would be kept for each
    options.log_severity_level = 4  # a failed run raises: it need not be told on stderr as well
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if can_spin else "0")
    # Without VNNI the fast u8·s8 product saturates; this asks for the exact one, where it makes a difference.
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options
