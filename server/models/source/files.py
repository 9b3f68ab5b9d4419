# SPDX-License-Identifier: Apache-2.0
"""Checksums and free space, and the one error by which fetching fails."""

import errno
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.models.package import file_sha256

Report = Callable[[str, int, int], None]
"""report(stage, done, total) in bytes while a file comes; a total of 0 is not known."""

SPACE_MARGIN_BYTES = 64 << 20


class SourceError(Exception):
    """A source cannot be had; the message says what failed and what to do."""


class SpaceError(SourceError):
    """The disk is too small: no other source would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """What a file must hash to: a SHA-256, or the SHA-1 by which git names it, in hex; both None: unknown."""

    sha256: str | None = None
    git_sha1: str | None = None

    def fault_of(self, path: Path) -> str | None:
        """What the file hashes to instead, or None when it is right or nothing is known."""
        if self.sha256 is not None:
            found, expected = file_sha256(path), self.sha256
        elif self.git_sha1 is not None:
            found, expected = git_blob_sha1(path), self.git_sha1
        else:
            return None
        return None if found == expected else f"{found[:12]}… instead of {expected[:12]}…"


def verify(path: Path, checksum: Checksum) -> None:
    """Delete a file that is not what it should be.

    Raises:
        SourceError: it is not.
    """
    fault = checksum.fault_of(path)
    if fault:
        path.unlink()
        raise SourceError(f"{path.name} has the wrong checksum {fault}; it was deleted, start again")


def need_space(folder: Path, num_bytes: int) -> None:
    """Refuse before the first byte when the disk cannot hold what will come.

    Raises:
        SpaceError: too little space.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes + SPACE_MARGIN_BYTES > free:
        need = (num_bytes + SPACE_MARGIN_BYTES) >> 20
        raise SpaceError(f"the disk of {folder} has {free >> 20} MiB free, {need} MiB are needed")


def git_blob_sha1(path: Path) -> str:
    """The name that git gives a file's content, in hex."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def disk_error(error: OSError, home: Path) -> SourceError:
    """What a fault of the disk means to the user."""
    if error.errno == errno.ENOSPC:
        return SourceError(f"the disk of {home} is full; free some space and start again")
    return SourceError(f"cannot write to {home}: {error}")
