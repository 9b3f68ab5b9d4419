# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub: what a repository holds at one commit, and the few files of it that a model needs.

A branch moves, so a revision is turned into its commit first; what is fetched lies under that commit and
never mixes with another's. Pickled weights are never fetched.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from server.models.source.download import Client, RemoteFile
from server.models.source.files import Checksum, Report, SourceError, need_space

HUB = "https://huggingface.co"
TEXT_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "README.md",
)
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_ADDRESS = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w./ +-]+\.gguf))?(?:@([\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """`ORG/REPO`, at a revision, and the one GGUF file of it that is meant, if any."""

    repository: str
    revision: str
    file: str | None

    @classmethod
    def of(cls, text: str) -> "Address":
        """Read `ORG/REPO[/FILE.gguf][@REVISION]`.

        Raises:
            SourceError: it is something else.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or ".." in text:
            raise SourceError(
                f"hf:{text} is no address; write hf:ORG/REPO, hf:ORG/REPO@REVISION or hf:ORG/REPO/FILE.gguf"
            )
        return cls(repository=match[1], revision=match[3] or "main", file=match[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What came: a folder, or the GGUF file that was named; `uri` says it with its commit."""

    path: Path
    uri: str


def fetch_repository(
    address: Address,
    home: Path,
    environ: Mapping[str, str],
    report: Report,
    accept: Callable[[Path], None] = lambda _folder: None,
) -> Fetched:
    """Fetch what a model needs of a repository.

    `accept` sees the folder when all but the weights is there, and may raise: gigabytes are not fetched for
    a model that cannot be used.

    Raises:
        SourceError: the hub fails or does not give it, it holds nothing of use, or a checksum is wrong.
        OSError: the disk fails.
    """
    client = Client(environ.get("HF_ENDPOINT") or HUB, environ.get("HF_TOKEN"))
    commit, files = _listing(client, address)
    folder = home / "downloads" / address.repository.replace("/", "--") / commit
    folder.mkdir(parents=True, exist_ok=True)
    uri = f"hf:{address.repository}{f'/{address.file}' if address.file else ''}@{commit}"
    if address.file is not None:
        if address.file not in files:
            raise SourceError(
                f"hf:{address.repository} has no file {address.file}; {_gguf_hint(address, files)}"
            )
        weights, texts = [address.file], []
    else:
        weights, texts = _weights(address, files), [name for name in (*TEXT_FILES, INDEX) if name in files]
    need_space(folder, sum(_missing(folder / Path(name).name, files[name].size) for name in (*texts, *weights)))
    for name in texts:
        client.fetch(files[name], folder / name, report)
    if texts:
        accept(folder)
    for name in weights:
        client.fetch(files[name], folder / Path(name).name, report)
    return Fetched(path=folder / Path(address.file).name if address.file else folder, uri=uri)


def _listing(client: Client, address: Address) -> tuple[str, dict[str, RemoteFile]]:
    """The commit that a revision means now, and every file of it by name."""
    where = f"{client.endpoint}/api/models/{address.repository}/revision/{quote(address.revision, safe='')}"
    answer = client.read_json(f"{where}?blobs=true")
    try:
        commit, entries = _commit(answer["sha"]), answer["siblings"]
        base = f"{client.endpoint}/{address.repository}/resolve/{commit}"
        files = {
            str(entry["rfilename"]): RemoteFile(
                url=f"{base}/{quote(entry['rfilename'])}",
                size=int(entry["size"]),
                checksum=Checksum(sha256=(entry.get("lfs") or {}).get("sha256"), git_sha1=entry.get("blobId")),
            )
            for entry in entries
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"{client.endpoint} gives no list of files with sizes; is it a hub?") from error
    return commit, files


def _commit(value: str) -> str:
    if not _COMMIT.fullmatch(value):
        raise ValueError(value)
    return value


def _weights(address: Address, files: Mapping[str, RemoteFile]) -> list[str]:
    """The weights in their one whole file, or else in the shards that an index names."""
    if "model.safetensors" in files:
        return ["model.safetensors"]
    shards = sorted(name for name in files if _SHARD.fullmatch(name))
    if shards and INDEX in files:
        return shards
    where = f"hf:{address.repository}"
    if any(name.endswith(".gguf") for name in files):
        raise SourceError(f"{where} holds GGUF files: {_gguf_hint(address, files)}")
    if any(name.endswith(_PICKLES) for name in files):
        raise SourceError(f"{where} holds pickled weights only; they can run code. Use one with safetensors")
    raise SourceError(f"{where} holds no safetensors weights")


def _gguf_hint(address: Address, files: Mapping[str, RemoteFile]) -> str:
    names = sorted(name for name in files if name.endswith(".gguf"))
    if not names:
        return "it has no GGUF file"
    return "name one of " + ", ".join(f"hf:{address.repository}/{name}" for name in names)


def _missing(path: Path, size: int) -> int:
    """Bytes of a file that are still to come."""
    for there in (path, path.with_name(f"{path.name}.partial")):
        if there.is_file():
            return max(size - there.stat().st_size, 0)
    return size
