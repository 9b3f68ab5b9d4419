# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the container, and the llama family in it.

The file is mapped, not read; every count and offset is checked against the file's size before it is used, so
that a hostile or truncated file is refused by name and never allocates more than it holds. Weights leave
here under their Hugging Face names, and the query/key rows that the llama export interleaves for rotary
pairs are put back into half-split order (https://github.com/ggml-org/llama.cpp, convert: `permute`).
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.models.readers.checkpoint import (
    ArchConfig,
    CheckpointError,
    FloatArray,
    PackedWeight,
    TextFiles,
    check_layout,
)
from server.models.readers.ggml import FORMATS, UNSUPPORTED, packed_weight
from server.models.readers.vocab import text_from_gguf

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ITEMS_MAX = 4_000_000  # entries of one array; the largest vocabularies of today have 262 144
DIMENSIONS_MAX = 4
DEPTH_MAX = 2  # arrays of arrays are legal, deeper ones are an attack

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IGNORED = {"rope_freqs.weight"}  # derived from the metadata
FAMILIES = {"llama": "llama"}


class _Cursor:
    """Reads little-endian values and never past the end."""

    def __init__(self, data: npt.NDArray[np.uint8], path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise CheckpointError(f"{self.path} is truncated: it ends inside its header; fetch it again")
        self.at += count
        return self.data[self.at - count : self.at].tobytes()

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= DEPTH_MAX:
            raise CheckpointError(f"{self.path} has a metadata value of unknown type {kind}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if count > ITEMS_MAX:
            raise CheckpointError(f"{self.path} claims an array of {count} entries, at most {ITEMS_MAX}")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))
        return [self.value(inner, depth + 1) for _ in range(count)]


class _Tensor:
    """Where a tensor lies: its type, its [out, in] shape and its bytes as blocks."""

    __slots__ = ("blocks", "kind", "shape")

    def __init__(self, kind: int, shape: tuple[int, ...], blocks: npt.NDArray[np.uint8]) -> None:
        self.kind = kind
        self.shape = shape
        self.blocks = blocks


class GgufCheckpoint:
    """A GGUF file as a Checkpoint.

    Raises:
        CheckpointError: not a GGUF file of version 2 or 3, big-endian, split, truncated, of an unknown
            architecture, or with a tensor type that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be opened: {error}") from error
        self.metadata, raw = _read(data, path)
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{path} is one part of a split file; merge the parts first (llama-gguf-split)"
            )
        self._config = _config(_Numbers(self.metadata, path), raw)
        self._tensors = {_canonical(name, path): tensor for name, tensor in raw.items() if name not in _IGNORED}
        check_layout(self._config, {name: entry.shape for name, entry in self._tensors.items()}, str(path))

    @property
    def config(self) -> ArchConfig:
        """The architecture, from the metadata."""
        return self._config

    @property
    def license(self) -> str | None:
        """`general.license`."""
        value = self.metadata.get("general.license")
        return value if isinstance(value, str) and value else None

    def names(self) -> frozenset[str]:
        """Every tensor's Hugging Face name."""
        return frozenset(self._tensors)

    def tensor(self, name: str) -> FloatArray:
        """One tensor as float32 [out, in], rotary rows in half-split order."""
        entry = self._entry(name)
        values = FORMATS[entry.kind].decode(entry.blocks).reshape(entry.shape)
        return np.ascontiguousarray(values[_row_order(name, self._config, len(values))])

    def packed(self, name: str) -> PackedWeight | None:
        """The 4-bit grid of a Q4_0 or Q4_1 weight, rows as in `tensor`."""
        entry = self._entry(name)
        if len(entry.shape) != 2:  # noqa: PLR2004  # a matrix
            return None
        packed = packed_weight(entry.kind, entry.blocks, (entry.shape[0], entry.shape[1]))
        if packed is None:
            return None
        order = _row_order(name, self._config, entry.shape[0])
        return PackedWeight(
            bits=packed.bits,
            values=packed.values[order],
            scales=packed.scales[order],
            minimums=packed.minimums[order],
        )

    def text(self) -> TextFiles:
        """Tokenizer and template, built from the metadata."""
        return text_from_gguf(self.metadata, str(self.path))

    def _entry(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._tensors[name]


def _read(data: npt.NDArray[np.uint8], path: Path) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    cursor = _Cursor(data, path)
    if cursor.take(4) != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file")
    version = cursor.scalar("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian" if swapped in VERSIONS else f"of version {version}"
        raise CheckpointError(f"{path} is {kind}; a little-endian GGUF file of version 2 or 3 is needed")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    heads = [_tensor_head(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path} has an impossible alignment of {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {head[0]: _place(data, path, start, head) for head in heads}
    if len(tensors) != len(heads):
        raise CheckpointError(f"{path} names a tensor twice")
    return metadata, tensors


def _tensor_head(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= DIMENSIONS_MAX:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
    if 0 in shape:
        raise CheckpointError(f"{cursor.path}: tensor {name} is empty: its shape is {list(shape)}")
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _place(
    data: npt.NDArray[np.uint8], path: Path, start: int, head: tuple[str, tuple[int, ...], int, int]
) -> _Tensor:
    name, shape, kind, offset = head
    if kind not in FORMATS:
        label = UNSUPPORTED.get(kind, f"number {kind}")
        usable = ", ".join(form.name for form in FORMATS.values())
        raise CheckpointError(f"{path}: tensor {name} is of type {label}, which is not supported; {usable} are")
    form = FORMATS[kind]
    num_values = 1
    for size in shape:
        num_values *= size
    if shape[-1] % form.num_values:
        raise CheckpointError(
            f"{path}: tensor {name} has rows of {shape[-1]}, no multiple of {form.num_values}"
        )
    num_bytes = num_values // form.num_values * form.num_bytes
    if start + offset + num_bytes > len(data):
        raise CheckpointError(f"{path} is truncated: tensor {name} lies beyond its end; fetch it again")
    view = data[start + offset : start + offset + num_bytes]
    return _Tensor(kind, shape, view.reshape(-1, form.num_bytes))


class _Numbers:
    """Metadata that must be numbers: whatever else a file holds there is refused by name."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        self.arch = metadata.get("general.architecture")
        if not isinstance(self.arch, str) or self.arch not in FAMILIES:
            raise CheckpointError(
                f"{path} is of architecture {self.arch!r}, which is not supported; "
                f"supported: {', '.join(sorted(FAMILIES))}"
            )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.path} has {self.arch}.{key} = {value!r}; one whole number is needed")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.path} has {self.arch}.{key} = {value!r}; one number is needed")
        return float(value)

    def _value(self, key: str, default: float | None) -> Any:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks the metadata {self.arch}.{key}")
        return value


def _config(numbers: _Numbers, tensors: Mapping[str, _Tensor]) -> ArchConfig:
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{numbers.path} has no tensor token_embd.weight")
    hidden, heads = numbers.integer("embedding_length"), numbers.integer("attention.head_count")
    head_dim = numbers.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if numbers.integer(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{numbers.path} has {key} other than its heads' {head_dim}, which is not supported"
            )
    return ArchConfig(
        family=FAMILIES[str(numbers.arch)],
        num_layers=numbers.integer("block_count"),
        hidden_size=hidden,
        intermediate_size=numbers.integer("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=numbers.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=numbers.real("attention.layer_norm_rms_epsilon"),
        rope_theta=numbers.real("rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(numbers, tensors, head_dim),
        context_length=numbers.integer("context_length"),
        vocab_size=tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in tensors,
    )


def _rope_scaling(numbers: _Numbers, tensors: Mapping[str, _Tensor], head_dim: int) -> Mapping[str, Any] | None:
    """Scaling by type, or by the per-frequency divisors that Llama 3.x files carry as a tensor."""
    if "rope_freqs.weight" in tensors:
        entry = tensors["rope_freqs.weight"]
        divisors = FORMATS[entry.kind].decode(entry.blocks).reshape(-1)
        if len(divisors) != head_dim // 2 or not (divisors > 0).all() or not np.isfinite(divisors).all():
            raise CheckpointError(f"{numbers.path} has a rope_freqs.weight that does not fit its heads")
        return {"rope_type": "divisors", "divisors": divisors.tolist()}
    kind = numbers.metadata.get(f"{numbers.arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": numbers.real("rope.scaling.factor", 1.0)}


def _canonical(name: str, path: Path) -> str:
    if name in _NAMES:
        return _NAMES[name]
    prefix, _, rest = name.partition(".")
    number, _, role = rest.partition(".")
    if prefix == "blk" and number.isdigit() and role in _LAYER_NAMES:
        return f"model.layers.{number}.{_LAYER_NAMES[role]}"
    raise CheckpointError(f"{path} has a tensor {name} that this architecture should not have")


def _row_order(name: str, config: ArchConfig, num_rows: int) -> npt.NDArray[np.intp] | slice:
    """Rows that undo the export's interleaving of rotary pairs; everything else stays."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return slice(None)
    half = config.head_dim // 2
    rows = np.arange(num_rows).reshape(-1, half, 2)
    return rows.swapaxes(1, 2).reshape(-1)
