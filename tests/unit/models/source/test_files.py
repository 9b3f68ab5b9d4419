# SPDX-License-Identifier: Apache-2.0
"""Checksums, free space and what a fault of the disk means."""

import errno
import hashlib
import subprocess

import pytest

from server.models.source import files
from server.models.source.files import (
    Checksum,
    SourceError,
    SpaceError,
    disk_error,
    git_blob_sha1,
    need_space,
    verify,
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"content")
    return path


def test_the_right_checksum_passes(path):
    """A file that is what it should be stays, by either hash; so does one of which nothing is known."""
    verify(path, Checksum(sha256=hashlib.sha256(b"content").hexdigest(), git_sha1="0"))
    verify(path, Checksum(git_sha1=git_blob_sha1(path)))
    verify(path, Checksum())
    assert path.exists()


@pytest.mark.parametrize("checksum", [Checksum(sha256="0" * 64), Checksum(git_sha1="0" * 40)])
def test_a_wrong_checksum_leaves_nothing(path, checksum):
    """A file that is not what it should be is deleted, so that nothing takes it for whole."""
    with pytest.raises(SourceError, match=r"f has the wrong checksum .* instead of 000000000000"):
        verify(path, checksum)
    assert not path.exists()


def test_a_blobs_name_is_gits_own(path):
    """The SHA-1 is the one that git computes."""
    done = subprocess.run(["git", "hash-object", path], capture_output=True, text=True, check=True)
    assert git_blob_sha1(path) == done.stdout.strip()


def test_a_full_disk_is_foreseen(tmp_path, monkeypatch):
    """What will not fit is refused before the first byte, with both numbers."""
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100 << 20}))
    need_space(tmp_path, 36 << 20)
    with pytest.raises(SpaceError, match="has 100 MiB free, 101 MiB are needed"):
        need_space(tmp_path, 37 << 20)


@pytest.mark.parametrize(
    ("number", "text"), [(errno.ENOSPC, "is full; free some space"), (errno.EROFS, "cannot write")]
)
def test_a_fault_of_the_disk_is_told_as_one(tmp_path, number, text):
    """A full disk has its own advice; any other fault says where it was."""
    error = disk_error(OSError(number, "fault"), tmp_path)
    assert text in str(error)
    assert str(tmp_path) in str(error)
