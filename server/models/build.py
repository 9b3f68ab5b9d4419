# SPDX-License-Identifier: Apache-2.0
"""The recipe: checkpoint → calibrated, quantised graph → checked package, published whole or not at all.

Never holds more than one layer's weights in float32 beside what the reader maps.
"""

import errno
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from server.models.check import check_package
from server.models.graph.decoder import build_graph
from server.models.graph.writer import GraphWriter
from server.models.package import (
    CHAT_TEMPLATE,
    MANIFEST,
    TOKENIZER,
    GraphShape,
    Manifest,
    ModelPackage,
    PackageError,
    describe_files,
    fingerprint_of,
    package_path,
    package_writer,
    unix_now,
)
from server.models.quantize import channel_scales
from server.models.readers.checkpoint import Checkpoint, FloatArray, TextFiles
from server.models.reference import ReferenceModel
from server.models.texts import CALIBRATION

Report = Callable[[str, int, int], None]
"""report(stage, done, total) is called as work goes on."""


def build_package(
    checkpoint: Checkpoint,
    *,
    model_id: str,
    quantization: str,
    home: Path,
    source: Mapping[str, str],
    report: Report = lambda _stage, _done, _total: None,
    is_checked: bool = True,
) -> ModelPackage:
    """Build the package of a checkpoint and return it, opened from its final place.

    `is_checked` measures it against the reference first; a package beyond its limit is not published.

    Raises:
        CheckpointError: the checkpoint is incomplete or not supported.
        PackageError: the disk is full, or the package missed its fidelity limit.
    """
    try:
        with package_writer(home, model_id, quantization) as folder:
            text = checkpoint.text()
            shape = _write_graph(checkpoint, text, folder, quantization, report)
            _write_text(text, folder)
            names = {"model_id": model_id, "quantization": quantization}
            manifest = _manifest(checkpoint, text, shape, folder, names=names, source=source)
            (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
            if is_checked:
                report("check", 0, 1)
                fidelity = check_package(ModelPackage.load(folder), checkpoint).as_fidelity()
                checked = replace(manifest, fidelity=fidelity)
                (folder / MANIFEST).write_text(checked.to_json(), encoding="utf-8")
                report("check", 1, 1)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise PackageError(f"the disk of {home} is full: nothing was kept; free some space") from error
        raise
    return ModelPackage.load(package_path(home, model_id, quantization))


def _write_graph(
    checkpoint: Checkpoint, text: TextFiles, folder: Path, quantization: str, report: Report
) -> GraphShape:
    scales = _migration(checkpoint, text, report) if quantization == "w8a8" else {}
    writer = GraphWriter(folder)
    try:
        shape = build_graph(checkpoint, writer, quantization, scales, partial(report, "build"))
        writer.save({"sampan.quantization": quantization, "sampan.family": checkpoint.config.family})
    finally:
        writer.close()
    return shape


def _write_text(text: TextFiles, folder: Path) -> None:
    (folder / TOKENIZER).write_text(text.tokenizer_json, encoding="utf-8")
    if text.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(text.chat_template, encoding="utf-8")


def _manifest(
    checkpoint: Checkpoint,
    text: TextFiles,
    shape: GraphShape,
    folder: Path,
    *,
    names: Mapping[str, str],
    source: Mapping[str, str],
) -> Manifest:
    files = describe_files(folder)
    return Manifest(
        model_id=names["model_id"],
        quantization=names["quantization"],
        family=checkpoint.config.family,
        source=dict(source),
        license=checkpoint.license,
        created=unix_now(),
        shape=shape,
        num_tokens=min(text.num_tokens, shape.vocab_size),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        adds_bos=text.adds_bos,
        end_token_ids=text.end_token_ids,
        files=files,
        fingerprint=fingerprint_of(files),
    )


def _migration(checkpoint: Checkpoint, text: TextFiles, report: Report) -> dict[str, FloatArray]:
    """Channel scales of every product, from the largest inputs that the calibration texts cause."""
    largest: dict[str, FloatArray] = {}

    def observe(name: str, x: FloatArray) -> None:
        peak = np.abs(x).max(axis=0)
        largest[name] = np.maximum(largest[name], peak) if name in largest else peak

    tokenizer = Tokenizer.from_str(text.tokenizer_json)
    model = ReferenceModel(checkpoint)
    for done, content in enumerate(CALIBRATION.values()):
        report("calibrate", done, len(CALIBRATION))
        model.reset()
        ids = tokenizer.encode(content, add_special_tokens=False).ids[: checkpoint.config.context_length]
        model.forward(ids, observe)
    report("calibrate", len(CALIBRATION), len(CALIBRATION))
    scales: dict[str, FloatArray] = {}
    for layer in range(checkpoint.config.num_layers):
        scales |= _layer_scales(checkpoint, layer, largest)
    return scales


def _layer_scales(
    checkpoint: Checkpoint, layer: int, largest: Mapping[str, FloatArray]
) -> dict[str, FloatArray]:
    name, config = f"layers.{layer}", checkpoint.config

    def columns(*sources: str) -> FloatArray:
        tensors = [checkpoint.tensor(f"model.{name}.{source}.weight") for source in sources]
        peak: FloatArray = np.max([np.abs(tensor).max(axis=0) for tensor in tensors], axis=0)
        return peak

    def by_kv_head(values: FloatArray) -> FloatArray:
        """Largest over the query heads that share a value head: [heads × dim] → [kv heads × dim]."""
        shape = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        shared: FloatArray = values.reshape(shape).max(axis=1).reshape(-1)
        return shared

    value = channel_scales(by_kv_head(largest[f"{name}.o"]), by_kv_head(columns("self_attn.o_proj")))
    group = config.num_heads // config.num_kv_heads
    spread = value.reshape(config.num_kv_heads, 1, config.head_dim).repeat(group, axis=1).reshape(-1)
    return {
        f"{name}.qkv": channel_scales(
            largest[f"{name}.qkv"], columns("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        ),
        f"{name}.o": spread,
        f"{name}.v": value,
        f"{name}.gate_up": channel_scales(largest[f"{name}.gate_up"], columns("mlp.gate_proj", "mlp.up_proj")),
        f"{name}.down": channel_scales(largest[f"{name}.down"], columns("mlp.down_proj")),
    }
