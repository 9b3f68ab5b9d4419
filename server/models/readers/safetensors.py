# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders with safetensors weights: one file or shards, float types only.

The format is a length, a JSON header and raw bytes (https://github.com/huggingface/safetensors#format);
files are mapped and every offset is checked. A folder with pickles only is refused: they run code.
"""

import json
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
from server.models.readers.vocab import read_json, text_from_folder

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
FAMILIES = {"llama": "llama"}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class FolderCheckpoint:
    """A Hugging Face folder as a Checkpoint.

    Raises:
        CheckpointError: no config or weights, pickles only, an unknown architecture or quantisation, or a
            damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = read_json(folder / "config.json")
        if not self.settings:
            raise CheckpointError(f"{folder} has no config.json; a Hugging Face model folder is needed")
        quantized = self.settings.get("quantization_config")
        if quantized:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            raise CheckpointError(
                f"{folder} holds {method} weights, which are not supported yet; use the original ones"
            )
        self._config = arch_config(self.settings, str(folder))
        self._places = {name: place for path in _weight_files(folder) for name, place in _header(path).items()}
        check_layout(self._config, {name: place[2] for name, place in self._places.items()}, str(folder))

    @property
    def config(self) -> ArchConfig:
        """The architecture, from config.json."""
        return self._config

    @property
    def license(self) -> str | None:
        """`license` at the head of README.md, where a hub's repository states it."""
        return _stated_license(self.folder / "README.md")

    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._places)

    def tensor(self, name: str) -> FloatArray:
        """One tensor as float32."""
        if name not in self._places:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        path, kind, shape, start, end = self._places[name]
        raw = np.memmap(path, np.uint8, mode="r")[start:end]
        return _as_float(raw, kind).reshape(shape)

    def packed(self, name: str) -> PackedWeight | None:
        """Float weights have no grid of their own."""
        del name
        return None

    def text(self) -> TextFiles:
        """Tokenizer, template and ids of the folder."""
        return text_from_folder(self.folder, self.settings)


_Place = tuple[Path, str, tuple[int, ...], int, int]


def arch_config(settings: Mapping[str, Any], where: str) -> ArchConfig:
    """Read a config.json of a known family.

    Raises:
        CheckpointError: the family is unknown or a number is missing.
    """
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"{where} is of architecture {kind!r}, which is not supported; supported: {known}"
        )
    for flag in ("attention_bias", "mlp_bias"):
        if settings.get(flag):
            raise CheckpointError(f"{where} sets {flag}, which this family does not support")
    if settings.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where} uses the activation {settings['hidden_act']!r}; only silu is supported")
    if settings.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError(f"{where} rotates only a part of each head, which is not supported")
    try:
        heads, hidden = int(settings["num_attention_heads"]), int(settings["hidden_size"])
        rope = settings.get("rope_parameters") or {}
        scaling = dict(settings.get("rope_scaling") or rope)
        return ArchConfig(
            family=FAMILIES[kind],
            num_layers=int(settings["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(settings["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(settings.get("num_key_value_heads") or heads),
            head_dim=int(settings.get("head_dim") or hidden // max(heads, 1)),
            norm_eps=float(settings["rms_norm_eps"]),
            rope_theta=float(settings.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(scaling),
            context_length=int(settings["max_position_embeddings"]),
            vocab_size=int(settings["vocab_size"]),
            tie_word_embeddings=_is_tied(settings.get("tie_word_embeddings")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{where}: config.json lacks or spoils {error}") from error


def _rope_scaling(scaling: dict[str, Any]) -> dict[str, Any] | None:
    kind = scaling.get("rope_type") or scaling.pop("type", None) or "default"
    return None if kind == "default" else {**scaling, "rope_type": kind}


def _is_tied(value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise ValueError("tie_word_embeddings, which must be true or false")


def _stated_license(path: Path) -> str | None:
    """The value of `license:` between the two `---` lines that open a README of a hub."""
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if lines[:1] != ["---"] or "---" not in lines[1:]:
        return None
    head = lines[1 : lines.index("---", 1)]
    stated = [line.partition(":")[2].strip() for line in head if line.startswith("license:")]
    return stated[0] if stated and stated[0] else None


def _weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, else model.safetensors, else every file there is."""
    weight_map = read_json(folder / "model.safetensors.index.json").get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / 'model.safetensors.index.json'} maps no tensors to files")
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    whole = ["model.safetensors"] if "model.safetensors" in found else found
    names = sorted(set(weight_map.values())) or whole
    if not names:
        if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
            raise CheckpointError(f"{folder} holds pickled weights only; they can run code. Use safetensors")
        raise CheckpointError(f"{folder} has no *.safetensors file")
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{folder}: the index names a file outside the folder: {name!r}")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; fetch the model again")
    return [folder / name for name in names]


def _header(path: Path) -> dict[str, _Place]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_BYTES_MAX):  # noqa: PLR2004  # the length field itself
            raise CheckpointError(f"{path} is truncated or no safetensors file; fetch it again")
        try:
            header = json.loads(file.read(length))
            return {
                name: _place(path, entry, 8 + length, size)
                for name, entry in header.items()
                if name[:2] != "__"
            }
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path} has a broken header: {error}") from error


def _place(path: Path, entry: Mapping[str, Any], base: int, size: int) -> _Place:
    kind, shape = entry["dtype"], tuple(int(edge) for edge in entry["shape"])
    start, end = (base + int(offset) for offset in entry["data_offsets"])
    if kind not in _ITEM_BYTES:
        raise CheckpointError(f"{path} holds a tensor of type {kind}; supported: {', '.join(_ITEM_BYTES)}")
    num_values = 1
    for edge in shape:
        num_values *= edge
    if end > size:
        raise CheckpointError(f"{path} is truncated: a tensor lies beyond its end; fetch it again")
    if not base <= start <= end or end - start != num_values * _ITEM_BYTES[kind]:
        raise ValueError("a tensor's offsets do not fit its shape")
    return path, kind, shape, start, end


def _as_float(raw: npt.NDArray[np.uint8], kind: str) -> FloatArray:
    data = np.ascontiguousarray(raw)
    if kind == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f2" if kind == "F16" else "<f4").astype(np.float32)
