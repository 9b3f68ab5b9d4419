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
from jinja2.sandbox import ImmutableSandboxedEnvironment
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
from server.models.quantize import Shared, channel_scales
from server.models.readers.checkpoint import Checkpoint, FloatArray, TextFiles
from server.models.reference import ReferenceModel
from server.models.texts import CALIBRATION

SAMPLE_STRIDE = 2  # every second token is enough to choose scales, and halves the memory
HEAD_STRIDE = 8  # as is every eighth row of the head

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
    """Channel scales of the products, found on the inputs that the calibration texts cause."""
    samples: dict[str, list[FloatArray]] = {}

    def observe(name: str, x: FloatArray) -> None:
        if not name.endswith(".down"):
            samples.setdefault(name, []).append(x[::SAMPLE_STRIDE].copy())

    model = ReferenceModel(checkpoint)
    num_layers = checkpoint.config.num_layers
    total = num_layers + len(CALIBRATION)
    for done, ids in enumerate(_calibration_ids(text)):
        report("calibrate", done, total)
        model.reset()
        model.forward(ids[: checkpoint.config.context_length], observe)
    scales: dict[str, FloatArray] = {}
    for layer in range(num_layers):
        report("calibrate", len(CALIBRATION) + layer, total)
        scales |= _layer_scales(checkpoint, layer, samples)
    scales["head"] = channel_scales(np.concatenate(samples["head"]), model.head()[::HEAD_STRIDE])
    report("calibrate", total, total)
    return scales


def _calibration_ids(text: TextFiles) -> list[list[int]]:
    """The calibration texts as the model will meet them: each half asked, half answered, in its template."""
    tokenizer = Tokenizer.from_str(text.tokenizer_json)
    prompts = []
    for content in CALIBRATION.values():
        cut = len(content) // 2
        asked, answered = content[:cut], content[cut:]
        if text.chat_template is not None:
            try:
                template = ImmutableSandboxedEnvironment(trim_blocks=True).from_string(text.chat_template)
                asked = template.render(
                    messages=[{"role": "user", "content": asked}], add_generation_prompt=True
                )
            except Exception:  # noqa: BLE001, S110  # a template raises whatever it likes
                pass  # one that wants more than this is tried where it is used; plain text does here
        prompts.append(tokenizer.encode(asked + answered, add_special_tokens=False).ids)
    return prompts


def _layer_scales(
    checkpoint: Checkpoint, layer: int, samples: Mapping[str, list[FloatArray]]
) -> dict[str, FloatArray]:
    name, config = f"layers.{layer}", checkpoint.config

    def scales(product: str, *sources: str, share: Shared = lambda values: values) -> FloatArray:
        weights = [checkpoint.tensor(f"model.{name}.{source}.weight") for source in sources]
        return channel_scales(np.concatenate(samples[f"{name}.{product}"]), np.concatenate(weights), share)

    def by_kv_head(values: FloatArray) -> FloatArray:
        """Equal over the query heads that share a value head, whose row takes the scale: root mean square."""
        heads = values.reshape(config.num_kv_heads, -1, config.head_dim)
        joint = np.sqrt((heads * heads).mean(axis=1, keepdims=True))
        shared: FloatArray = np.broadcast_to(joint, heads.shape).reshape(-1)
        return shared

    output = scales("o", "self_attn.o_proj", share=by_kv_head)
    return {
        f"{name}.qkv": scales("qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        f"{name}.o": output,
        f"{name}.v": output.reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1),
        f"{name}.gate_up": scales("gate_up", "mlp.gate_proj", "mlp.up_proj"),
    }
