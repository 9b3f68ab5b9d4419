# SPDX-License-Identifier: Apache-2.0
"""A model package: the finished folder, its manifest, and where such folders live.

Layout: `<home>/models/<model_id>/<quantization>/` with manifest.json, model.onnx, model.onnx.data,
tokenizer.json, chat_template.jinja. A package exists when its manifest does: it is built in a sibling
`.<quantization>.partial-<pid>` and renamed whole, so a killed build leaves nothing that loads. A lock on such
a sibling says that its process lives; without one it is rubbish, and the next build sweeps it.

The one module of `models` that a serving process imports: it knows neither numpy nor ONNX.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

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
        try:
            value = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(value, dict):
            raise ValueError("not an object")
        if value.get("format") != FORMAT:
            raise ValueError(f"format {value.get('format')!r}, this version reads {FORMAT}")
        _check_fields(cls, value)
        wrong = [name for name, is_right in _KINDS.items() if not is_right(value[name])]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} cannot be {', '.join(repr(value[name]) for name in wrong)}")
        _check_fields(GraphShape, value["shape"])
        for entry in value["files"].values():
            _check_fields(FileEntry, entry)
        value["shape"] = GraphShape(**value["shape"])
        value["files"] = {name: FileEntry(**entry) for name, entry in value["files"].items()}
        value["end_token_ids"] = tuple(value["end_token_ids"])
        return cls(**value)


def _check_fields(kind: type, value: Mapping[str, object]) -> None:
    known = {entry.name for entry in fields(kind)}
    if known != set(value):
        raise ValueError(f"fields {sorted(known ^ set(value))} are missing or unknown")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_mapping(value: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(is_right(entry) for entry in value.values())


def _is_file(value: object) -> bool:
    return isinstance(value, dict) and _is_count(value.get("size")) and _is_text(value.get("sha256"))


# a manifest's field → whether a JSON value can be it; the keys inside are checked after
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("model_id", "quantization", "family", "fingerprint"), _is_text),
    **dict.fromkeys(("created", "num_tokens"), _is_count),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), lambda value: value is None or _is_count(value)),
    "license": lambda value: value is None or _is_text(value),
    "adds_bos": lambda value: isinstance(value, bool),
    "source": lambda value: _is_mapping(value, lambda entry: isinstance(entry, str)),
    "shape": lambda value: _is_mapping(value, lambda entry: _is_count(entry) and entry > 0),
    "end_token_ids": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "files": lambda value: _is_mapping(value, _is_file) and {GRAPH, TOKENIZER} <= set(value),
    "fidelity": lambda value: _is_mapping(value, lambda entry: isinstance(entry, int | float)),
}


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
    doomed = path.with_name(f".{path.name}.doomed.partial-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    _remove_if_empty(path.parent)
    return num_bytes


@contextmanager
def package_writer(home: Path, model_id: str, quantization: str) -> Iterator[Path]:
    """Yield a temporary folder that becomes the package if the block ends well, and vanishes if it does not.

    The block must leave a manifest there. An older package of the same name is replaced at the end only.

    Raises:
        PackageError: another process builds the same package under this process's id.
    """
    target = package_path(home, model_id, quantization)
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_partials(home)
    try:
        with scratch_folder(target.parent, target.name) as folder:
            yield folder
            assert (folder / MANIFEST).exists(), "a package is published by its manifest"
            for path in (*folder.iterdir(), folder):
                _sync(path)
            _replace_folder(folder, target)
    finally:
        _remove_if_empty(target.parent)


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new locked folder `.{name}.partial-{pid}` in `parent`; what is left there at the end vanishes.

    Raises:
        PackageError: another process with this process's id (in another container) works there.
    """
    folder = parent / f".{name}.partial-{os.getpid()}"
    handle = _make_locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def sweep_partials(home: Path) -> list[Path]:
    """Remove what killed processes left behind: partial folders that nobody has locked.

    A package that was moved aside by a build which died before its new one stood there is put back.
    """
    swept = []
    for path in (*home.glob("models/*/.*.partial-*"), *home.glob("downloads/.*.partial-*")):
        handle = _lock(path)
        if handle is None:
            continue
        replaced = path.with_name(path.name[1:].partition(".old.partial-")[0])
        if ".old.partial-" in path.name and not replaced.exists():
            path.rename(replaced)
        else:
            shutil.rmtree(path, ignore_errors=True)
        os.close(handle)
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
    if Path(name).name != name or name in ("", ".."):
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
    old = target.with_name(f".{target.name}.old.partial-{os.getpid()}")
    handle = _lock(target)  # moves with the folder: no sweep takes it for rubbish between the two renames
    try:
        if handle is not None:
            target.rename(old)
        folder.rename(target)
        _sync(target.parent)
    except OSError:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        if handle is not None:
            os.close(handle)
    shutil.rmtree(old, ignore_errors=True)


def _make_locked(folder: Path) -> int:
    """Make a folder and lock it; begins again if a sweep took it in between."""
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            raise PackageError(
                f"{folder} is in use by another process; wait for it, then start again"
            ) from None
        handle = _lock(folder)
        if handle is None:
            continue
        if folder.exists():
            return handle
        os.close(handle)


def _lock(folder: Path) -> int | None:
    """An open handle that holds the folder's lock, or None if somebody else does or it is not there.

    On a disk that knows no locks everybody gets one: two builds at once are then for the user to avoid.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        return handle
    return handle


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
