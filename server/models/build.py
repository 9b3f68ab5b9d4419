# SPDX-License-Identifier: Apache-2.0
"""The recipe: checkpoint → quantised graph → checked package, published whole or not at all.

Never holds more than one layer's weights in float32 beside what the reader maps.
"""

import errno
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from server.models.readers.checkpoint import Checkpoint, TextFiles

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
            shape = _write_graph(checkpoint, folder, quantization, report)
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


def _write_graph(checkpoint: Checkpoint, folder: Path, quantization: str, report: Report) -> GraphShape:
    writer = GraphWriter(folder)
    try:
        shape = build_graph(checkpoint, writer, quantization, partial(report, "build"))
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
