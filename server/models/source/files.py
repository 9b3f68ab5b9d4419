# SPDX-License-Identifier: Apache-2.0
"""Checksums and free space, and the one error by which fetching fails."""

import errno
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

Report = Callable[[str, int, int], None]
"""report(stage, done, total) in bytes while a file comes."""

SPACE_MARGIN_BYTES = 64 << 20


class SourceError(Exception):
    """A source cannot be had; the message says what failed and what to do."""


def need_space(folder: Path, num_bytes: int) -> None:
    """Refuse before the first byte when the disk cannot hold what will come.

    Raises:
        SourceError: too little space.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes + SPACE_MARGIN_BYTES > free:
        need = (num_bytes + SPACE_MARGIN_BYTES) >> 20
        raise SourceError(f"the disk of {folder} has {free >> 20} MiB free, {need} MiB are needed")


def verify(path: Path, sha256: str) -> None:
    """Delete a file whose SHA-256 is another.

    Raises:
        SourceError: it is.
    """
    found = sha256_of(path)
    if found != sha256:
        path.unlink()
        raise SourceError(
            f"{path.name} has the wrong checksum {found[:12]}… instead of {sha256[:12]}…; start again"
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def disk_error(error: OSError, home: Path) -> SourceError:
    """What a fault of the disk means to the user."""
    if error.errno == errno.ENOSPC:
        return SourceError(f"the disk of {home} is full; free some space and start again")
    return SourceError(f"cannot write to {home}: {error}")
