# SPDX-License-Identifier: Apache-2.0
"""The model package that a process is about to serve: found, or fetched and built first.

Invariant: what builds runs in a process of its own, so that a gateway never carries the memory of numpy and
ONNX Runtime for an hour's worth of conversion it did once.
"""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from server.cli.options import CommandError
from server.core.config import Config
from server.models.package import ModelPackage, PackageError, find_package, package_path

STATUS_TERMINATED = 128 + signal.SIGTERM


def served_package(home: Path, model_id: str, quantization: str) -> ModelPackage:
    """Find the package; one that is not there at all is added as `sampan model add` would.

    Raises:
        PackageError: the package is damaged.
        CommandError: it could not be added; what adds it has said why.
    """
    try:
        return find_package(home, model_id, quantization)
    except PackageError:
        if package_path(home, model_id, quantization).exists():
            raise
    print(f"{model_id} ({quantization}) is not here yet: fetching and converting it, once.", file=sys.stderr)
    words = ["model", "add", model_id, "--quantization", quantization, "--home", str(home)]
    if _run([sys.executable, "-m", "server", *words]) != 0:
        raise CommandError(f"without the model {model_id} ({quantization}) there is nothing to serve")
    return find_package(home, model_id, quantization)


def _run(command: list[str]) -> int:
    """Run a command to its end; told to stop meanwhile, end it too instead of leaving it to itself."""

    def stop(_signal: int, _frame: object) -> NoReturn:
        raise SystemExit(STATUS_TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return subprocess.run(command, check=False).returncode  # noqa: S603 - our own words; killed when we raise
    finally:
        signal.signal(signal.SIGTERM, before)


def fit_to_model(config: Config, package: ModelPackage) -> Config:
    """The settings for this model: a default context longer than the model's becomes the model's.

    Raises:
        CommandError: somebody asked for a longer one.
    """
    context, asked = package.manifest.shape.context_length, config.engine.max_model_len
    if asked <= context:
        return config
    source = config.source_of("engine.max_model_len")
    if source != "default":
        name = package.manifest.model_id
        raise CommandError(
            f"engine.max_model_len ({source}): is {asked}, but {name} reads {context} tokens at most"
        )
    return replace(config, engine=replace(config.engine, max_model_len=context))
