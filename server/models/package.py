# SPDX-License-Identifier: Apache-2.0
"""A model package: the finished folder, its manifest, and where such folders live.

Layout: `<home>/models/<model_id>/<quantization>/` with manifest.json, model.onnx, model.onnx.data,
tokenizer.json, chat_template.jinja. A package exists when its manifest does: it is built in a sibling
`.<quantization>.partial-<pid>` and renamed whole, so a killed build leaves nothing that loads.

The one module of `models` that a serving process imports: it knows neither numpy nor ONNX.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Self

FORMAT = 1
MANIFEST = "manifest.json"
GRAPH = "model.onnx"
GRAPH_DATA = "model.onnx.data"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
QUANTIZATIONS = ("w8a8", "w8", "w4", "fp32")


class PackageError(Exception):
    """A package is missing or damaged; the message names the file and the command that mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """What the runner must know of the graph. `vocab_size` counts the rows of the output head."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_length: int
    topk: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in float32."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 in hex of one file of the package."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a package is. `num_tokens` is the largest tokenizer id + 1: rows of the head beyond it are padding.

    `fidelity` holds what `models.check` measured, by name. `fingerprint` changes with any change of the
    answers: weights, quantisation, graph.
    """

    model_id: str
    quantization: str
    family: str
    source: Mapping[str, str]
    license: str | None
    created: int
    shape: GraphShape
    num_tokens: int
    bos_token_id: int | None
    eos_token_id: int | None
    adds_bos: bool
    end_token_ids: tuple[int, ...]
    files: Mapping[str, FileEntry]
    fingerprint: str
    fidelity: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, manifest excluded."""
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> str:
        """The manifest file's text."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a manifest strictly.

        Raises:
            ValueError: not JSON, another format, or a field that is missing, unknown or of a wrong kind.
        """
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        if value.get("format") != FORMAT:
            raise ValueError(f"format {value.get('format')!r}, this version reads {FORMAT}")
        known = {entry.name for entry in fields(cls)}
        if known != set(value):
            raise ValueError(f"fields {sorted(known ^ set(value))} are missing or unknown")
        try:
            value["shape"] = GraphShape(**value["shape"])
            value["files"] = {name: FileEntry(**entry) for name, entry in value["files"].items()}
            value["end_token_ids"] = tuple(int(token) for token in value["end_token_ids"])
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from error
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPackage:
    """A package that was found and whose files have the promised sizes."""

    path: Path
    manifest: Manifest

    @property
    def graph_path(self) -> Path:
        """The ONNX graph; its weights lie beside it."""
        return self.path / GRAPH

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizers file."""
        return self.path / TOKENIZER

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template, if the model has one."""
        path = self.path / CHAT_TEMPLATE
        return path.read_text(encoding="utf-8") if path.exists() else None

    @classmethod
    def load(cls, path: Path, *, verify: str = "sizes") -> Self:
        """Open the package in `path`; `verify` "sha256" also reads every byte.

        Raises:
            PackageError: no manifest, or a file that is missing, short, changed or outside the folder.
        """
        try:
            manifest = Manifest.from_json((path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PackageError(f"{path} is no model package: it has no {MANIFEST}") from None
        except (OSError, ValueError) as error:
            raise PackageError(f"{path / MANIFEST} cannot be read ({error}); {_rebuild_hint(path)}") from error
        for name, entry in manifest.files.items():
            _verify_file(path, name, entry, is_deep=verify == "sha256")
        return cls(path=path, manifest=manifest)


def data_home(environ: Mapping[str, str]) -> Path:
    """The folder of packages and downloads: SAMPAN_HOME, XDG_DATA_HOME/sampan or ~/.local/share/sampan."""
    if environ.get("SAMPAN_HOME"):
        return Path(environ["SAMPAN_HOME"]).expanduser().absolute()
    base = environ.get("XDG_DATA_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local/share")
    return Path(base) / "sampan"


def package_path(home: Path, model_id: str, quantization: str) -> Path:
    """Where this package is or would be.

    Raises:
        PackageError: a name that would leave the folder of models.
    """
    for name in (model_id, quantization):
        if not name or name.startswith(".") or set(name) & set('/\\:*?"<>|\0'):
            raise PackageError(f"{name!r} is not a model name: use letters, digits, '-', '_' and '.'")
    return home / "models" / model_id / quantization


def find_package(home: Path, model_id: str, quantization: str, *, verify: str = "sizes") -> ModelPackage:
    """Open a package by name.

    Raises:
        PackageError: not there (the message names what is, and how to add it), or damaged.
    """
    path = package_path(home, model_id, quantization)
    if path.is_dir():
        return ModelPackage.load(path, verify=verify)
    there = ", ".join(f"{p.parent.name} {p.name}" for p in _package_folders(home)) or "none"
    raise PackageError(
        f"no model package {model_id} ({quantization}) in {home}; there: {there}. "
        f"Add it with: sampan model add {model_id} --quantization {quantization}"
    )


def list_packages(home: Path) -> list[ModelPackage | PackageError]:
    """Every package in `home`, by name; a damaged one as the error that opening it gives."""
    found: list[ModelPackage | PackageError] = []
    for path in _package_folders(home):
        try:
            found.append(ModelPackage.load(path))
        except PackageError as error:
            found.append(error)
    return found


def remove_package(home: Path, model_id: str, quantization: str) -> int:
    """Delete a package, whole or damaged, and return the bytes it held.

    Raises:
        PackageError: there is none.
    """
    path = package_path(home, model_id, quantization)
    if not path.is_dir():
        raise PackageError(f"no model package {model_id} ({quantization}) in {home}")
    num_bytes = sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
    doomed = path.with_name(f".{path.name}.partial-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
    return num_bytes


@contextmanager
def package_writer(home: Path, model_id: str, quantization: str) -> Iterator[Path]:
    """Yield a temporary folder that becomes the package if the block ends well, and vanishes if it does not.

    The block must leave a manifest there. An older package of the same name is replaced at the end only.
    """
    target = package_path(home, model_id, quantization)
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_partials(home)
    folder = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
        assert (folder / MANIFEST).exists(), "a package is published by its manifest"
        for path in folder.iterdir():
            _sync(path)
        _replace_folder(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if target.parent.is_dir() and not any(target.parent.iterdir()):
            target.parent.rmdir()
        raise


def sweep_partials(home: Path) -> list[Path]:
    """Remove what killed builds left behind: partial folders whose process is gone."""
    swept = []
    for path in home.glob("models/*/.*.partial-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file in `folder`, by name."""
    entries = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            entries[path.name] = FileEntry(size=path.stat().st_size, sha256=file_sha256(path))
    return entries


def fingerprint_of(files: Mapping[str, FileEntry]) -> str:
    """A short name for what decides the answers: every file's hash."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}:{files[name].sha256}\n".encode())
    return f"fp_{digest.hexdigest()[:12]}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unix_now() -> int:
    """Seconds since 1970, for a manifest's `created`."""
    return int(time.time())


def _package_folders(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("models/*/*") if path.is_dir() and not path.name.startswith("."))


def _verify_file(folder: Path, name: str, entry: FileEntry, *, is_deep: bool) -> None:
    if Path(name).name != name:
        raise PackageError(f"{folder / MANIFEST} names a file outside its folder: {name!r}")
    path = folder / name
    if not path.is_file():
        raise PackageError(f"{path} is missing; {_rebuild_hint(folder)}")
    size = path.stat().st_size
    if size != entry.size:
        raise PackageError(f"{path} has {size} bytes instead of {entry.size}; {_rebuild_hint(folder)}")
    if is_deep and file_sha256(path) != entry.sha256:
        raise PackageError(f"{path} was changed: its SHA-256 is not the manifest's; {_rebuild_hint(folder)}")


def _rebuild_hint(folder: Path) -> str:
    return f"build it again with: sampan model add {folder.parent.name} --quantization {folder.name} --force"


def _replace_folder(folder: Path, target: Path) -> None:
    old: Path | None = None
    if target.exists():
        old = target.with_name(f".{target.name}.old.partial-{os.getpid()}")
        target.rename(old)
    folder.rename(target)
    _sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
