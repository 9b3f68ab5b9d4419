# SPDX-License-Identifier: Apache-2.0
"""The engine's graph: a batch of slots, each with any number of new tokens, in; the next token's odds out.

Inputs
    input_ids              int64 [rows, tokens]   right-padded
    query_seqlens          int32 [rows]           new tokens of each row, 0 for an idle row
    seqlens_k              int32 [rows]           tokens of the row after this run, minus 1
    total_sequence_length  int32 []               the largest total
    positions              int64 [rows, picks]    which new tokens get odds
    past.{i}.key, .value   float [rows, kv_heads, max_len, head_dim]
Outputs
    topk_logprobs, topk_ids  [rows, picks, topk]  sorted, most likely first
    logprobs                 [rows, picks, vocab] natural logarithms, whole row
    present.{i}.key, .value                       to be bound to the past's own memory

Rows never see each other: every product quantises each row by itself and attention reads its own slot, so
a row's bits are the same alone or in any company.
"""

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from server.models.graph import rope
from server.models.graph.families import FAMILIES
from server.models.graph.products import Products
from server.models.graph.rotation import RotatedWeights
from server.models.graph.writer import CONTRIB, GraphWriter
from server.models.package import GraphShape
from server.models.readers.checkpoint import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    CheckpointError,
    FloatArray,
    PackedWeight,
)

ROTARY_WIDTH = 16  # the attention kernel rotates heads of a multiple of this
TOPK = 64  # top_k and top_p rarely reach further; a request that does fetches the whole row

Progress = Callable[[int, int], None]


def build_graph(checkpoint: Checkpoint, writer: GraphWriter, quantization: str, tick: Progress) -> GraphShape:
    """Lay the whole decoder into `writer` and return its shape; the caller saves.

    `tick(done, total)` is called after each layer and after the head.

    Raises:
        CheckpointError: a tensor is missing, of a wrong shape, all zero or not finite, or heads or rope scaling
            are of a kind that cannot run.
    """
    return _Decoder(checkpoint, writer, quantization).build(tick)


class _Decoder:
    def __init__(self, checkpoint: Checkpoint, writer: GraphWriter, quantization: str) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        if self.config.head_dim % ROTARY_WIDTH:
            raise CheckpointError(
                f"the model has heads of {self.config.head_dim} values; only multiples of {ROTARY_WIDTH} run"
            )
        self.writer = writer
        has_grid = checkpoint.packed("model.layers.0.mlp.down_proj.weight") is not None
        self.products = Products(writer, quantization, rounds_to_4_bits=not has_grid)
        self.rotated = RotatedWeights(self.config, self._load) if quantization == "w8a8" else None
        self.weight = self.rotated.tensor if self.rotated else self._load

    def build(self, tick: Progress) -> GraphShape:
        config, writer = self.config, self.writer
        self._inputs()
        cosine, sine = rope.tables(config)
        writer.tensor("rope.cos", cosine)
        writer.tensor("rope.sin", sine)
        embedding = writer.tensor("embed.weight", self.weight(EMBEDDING))
        residual = writer.node("Gather", [embedding, "input_ids"], ["embed.out"])
        normed = writer.node(
            "SimplifiedLayerNormalization",
            [residual, self._norm("model.layers.0.input_layernorm.weight")],
            ["layers.0.normed"],
            epsilon=config.norm_eps,
            axis=-1,
            stash_type=1,
        )
        for layer in range(config.num_layers):
            residual, normed = self._layer(layer, residual, normed)
            tick(layer + 1, config.num_layers + 1)
        vocab_size, topk = self._head(normed)
        tick(config.num_layers + 1, config.num_layers + 1)
        return GraphShape(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=vocab_size,
            context_length=config.context_length,
            topk=topk,
        )

    def _inputs(self) -> None:
        writer = self.writer
        writer.input("input_ids", TensorProto.INT64, ["rows", "tokens"])
        writer.input("query_seqlens", TensorProto.INT32, ["rows"])
        writer.input("seqlens_k", TensorProto.INT32, ["rows"])
        writer.input("total_sequence_length", TensorProto.INT32, [])
        writer.input("positions", TensorProto.INT64, ["rows", "picks"])

    def _layer(self, layer: int, residual: str, normed: str) -> tuple[str, str]:
        """One block: attention and gated MLP, each followed by its fused add-and-normalise."""
        writer, name = self.writer, f"layers.{layer}"
        attended = self._attention(layer, normed)
        output = self._product(f"{name}.o", attended, ["self_attn.o_proj"])
        residual, normed = self._add_norm(
            f"{name}.mid", residual, output, f"model.{name}.post_attention_layernorm.weight"
        )
        gate = self._product(f"{name}.gate", normed, ["mlp.gate_proj"], is_even=True)
        up = self._product(f"{name}.up", normed, ["mlp.up_proj"], is_even=True)
        active = writer.node("QuickGelu", [gate], [f"{name}.active"], domain=CONTRIB, alpha=1.0)
        gated = writer.node("Mul", [active, up], [f"{name}.gated"])
        if self.rotated:
            gated = self.products.mix(gated, self.rotated.gated)
        output = self._product(f"{name}.down", gated, ["mlp.down_proj"])
        is_last = layer + 1 == self.config.num_layers
        norm = "model.norm.weight" if is_last else f"model.layers.{layer + 1}.input_layernorm.weight"
        return self._add_norm(f"{name}.end", residual, output, norm)

    def _attention(self, layer: int, normed: str) -> str:
        """Grouped-query attention with rotation, over the slot's own length."""
        config, writer, name = self.config, self.writer, f"layers.{layer}"
        qkv = self._product(f"{name}.qkv", normed, [f"self_attn.{part}_proj" for part in "qkv"])
        shape: list[str | int] = ["rows", config.num_kv_heads, "max_len", config.head_dim]
        for kind in ("key", "value"):
            writer.input(f"past.{layer}.{kind}", TensorProto.FLOAT, shape)
            writer.output(f"present.{layer}.{kind}", TensorProto.FLOAT, shape)
        past = [f"past.{layer}.key", f"past.{layer}.value"]
        lengths = ["seqlens_k", "total_sequence_length"]
        return writer.node(
            "GroupQueryAttention",
            [qkv, "", "", *past, *lengths, "rope.cos", "rope.sin", *[""] * 7, "query_seqlens"],
            [f"{name}.attended", f"present.{layer}.key", f"present.{layer}.value"],
            domain=CONTRIB,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
        )

    def _head(self, normed: str) -> tuple[int, int]:
        """The picked positions' odds; returns the rows of the head and the width of the top-k."""
        writer = self.writer
        places = writer.node("Unsqueeze", ["positions", writer.tensor("last_axis", np.array([-1]))], ["places"])
        picked = writer.node("GatherND", [normed, places], ["picked"], batch_dims=1)
        weight = self.weight(HEAD)
        logits = self.products.add("head", picked, weight, self._packed(HEAD), is_even=True)
        odds = writer.node("LogSoftmax", [logits], ["logprobs"], axis=-1)
        topk = min(TOPK, len(weight))
        count = writer.tensor("topk", np.array([topk]))
        writer.node("TopK", [odds, count], ["topk_logprobs", "topk_ids"], axis=-1)
        writer.output("topk_logprobs", TensorProto.FLOAT, ["rows", "picks", topk])
        writer.output("topk_ids", TensorProto.INT64, ["rows", "picks", topk])
        writer.output("logprobs", TensorProto.FLOAT, ["rows", "picks", len(weight)])
        return len(weight), topk

    def _add_norm(self, name: str, residual: str, added: str, norm: str) -> tuple[str, str]:
        """Return the new residual stream and its normalised form, made by one node."""
        outputs = [f"{name}.normed", "", "", f"{name}.residual"]
        self.writer.node(
            "SkipSimplifiedLayerNormalization",
            [residual, added, self._norm(norm)],
            outputs,
            domain=CONTRIB,
            epsilon=self.config.norm_eps,
        )
        return outputs[3], outputs[0]

    def _norm(self, name: str) -> str:
        """A norm's weight; rotated they are all ones, and one tensor serves them all."""
        return self.writer.tensor("norm" if self.rotated else name, self.weight(name))

    def _product(self, name: str, x: str, roles: list[str], *, is_even: bool = False) -> str:
        """Multiply `x` by the transposed weights of `roles` in the layer of `name`, laid side by side."""
        sources = [f"model.{name.rpartition('.')[0]}.{role}.weight" for role in roles]
        weight = np.concatenate([self.weight(source) for source in sources])
        packed = _join([self._packed(source) for source in sources])
        return self.products.add(name, x, weight, packed, is_even=is_even)

    def _load(self, name: str) -> FloatArray:
        tensor = self.checkpoint.tensor(self._source(name))
        if not np.isfinite(tensor).all():
            raise CheckpointError(f"tensor {name} holds a value that is not finite; fetch the model again")
        return tensor

    def _packed(self, name: str) -> PackedWeight | None:
        return self.checkpoint.packed(self._source(name))

    def _source(self, name: str) -> str:
        """Where a tensor is: the output head of a tied model is its embedding."""
        if name != HEAD:
            return name
        tied, has_own = self.config.tie_word_embeddings, HEAD in self.checkpoint.names()
        if tied is None:
            tied = FAMILIES[self.config.family].ties_by_default and not has_own
        if not tied and not has_own:
            raise CheckpointError(f"the model is not tied but has no {HEAD}: the file is incomplete")
        return EMBEDDING if tied else HEAD


def _join(parts: list[PackedWeight | None]) -> PackedWeight | None:
    whole = [part for part in parts if part is not None]
    if len(whole) != len(parts):
        return None
    return PackedWeight(
        bits=whole[0].bits,
        values=np.concatenate([part.values for part in whole]),
        scales=np.concatenate([part.scales for part in whole]),
        minimums=np.concatenate([part.minimums for part in whole]),
    )
