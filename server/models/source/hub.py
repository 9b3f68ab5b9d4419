# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub over HTTP: list a repository, fetch its files, go on where an attempt was cut."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from server.models.source.files import Report, SourceError, need_space, verify

HUB = "https://huggingface.co"
HUB_FILES = frozenset(
    {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
)
TIMEOUT_S = 30.0
ATTEMPTS = 5
BLOCK_BYTES = 1 << 20
PAUSE_S = 0.1


def fetch_repository(address: str, home: Path, environ: Mapping[str, str], report: Report) -> Path:
    """Fetch what a model needs of `ORG/REPO[@REVISION]` and return the folder.

    Raises:
        SourceError: the address is wrong, the hub fails or does not give it, or a checksum is wrong.
        OSError: the disk fails.
    """
    repository, _, revision = address.partition("@")
    if repository.count("/") != 1 or ".." in address:
        raise SourceError(f"hf:{address} is not an address; write hf:ORG/REPO or hf:ORG/REPO@REVISION")
    hub = Hub(environ.get("HF_ENDPOINT") or HUB, environ.get("HF_TOKEN"))
    revision = revision or "main"
    folder = home / "downloads" / repository.replace("/", "--") / revision.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    for entry in hub.files(repository, revision):
        name = str(entry["path"])
        is_weights = name.endswith((".safetensors", ".safetensors.index.json")) and "/" not in name
        if name in HUB_FILES or is_weights:
            hub.fetch(repository, revision, entry, folder / name, report)
    return folder


class Hub:
    """One hub's HTTP interface."""

    def __init__(self, endpoint: str, token: str | None) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.headers = {"User-Agent": "sampan"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def files(self, repository: str, revision: str) -> list[Mapping[str, Any]]:
        """Path, size and, for large files, SHA-256 of every file of a repository.

        Raises:
            SourceError: the hub cannot be reached, or does not have or give it.
        """
        url = f"{self.endpoint}/api/models/{repository}/tree/{quote(revision, safe='')}"
        with self._open(url, 0, repository) as answer:
            try:
                entries: list[Mapping[str, Any]] = json.loads(answer.read())
            except ValueError as error:
                raise SourceError(f"{self.endpoint} gave no list of the files of {repository}") from error
        return [entry for entry in entries if entry.get("type") == "file"]

    def fetch(
        self, repository: str, revision: str, entry: Mapping[str, Any], target: Path, report: Report
    ) -> None:
        """Fetch one file to `target`, going on where an earlier attempt was cut.

        Raises:
            SourceError: the hub fails after several attempts, or the checksum is wrong.
            OSError: the disk fails.
        """
        size = int(entry["size"])
        if target.is_file() and target.stat().st_size == size:
            return
        partial = target.with_name(f"{target.name}.partial")
        need_space(target.parent, size - (partial.stat().st_size if partial.exists() else 0))
        url = f"{self.endpoint}/{repository}/resolve/{quote(revision, safe='')}/{quote(str(entry['path']))}"
        for _ in range(ATTEMPTS):
            done = partial.stat().st_size if partial.exists() else 0
            if done >= size:
                break
            self._append(url, partial, done, size, report)
        if not partial.exists() or partial.stat().st_size != size:
            partial.unlink(missing_ok=True) if size else None
            raise SourceError(f"{url} ended before its {size} bytes, {ATTEMPTS} times; start again to go on")
        digest = (entry.get("lfs") or {}).get("oid")
        if digest:
            verify(partial, str(digest))
        partial.rename(target)

    def _append(self, url: str, partial: Path, done: int, size: int, report: Report) -> None:
        try:
            with self._open(url, done, url) as answer:
                mode = "ab" if answer.status == 206 else "wb"  # noqa: PLR2004  # 206: it goes on where we stopped
                with partial.open(mode) as out:
                    while block := answer.read(BLOCK_BYTES):
                        out.write(block)
                        report(f"fetch {partial.stem}", out.tell(), size)
        except (TimeoutError, ConnectionError, urllib.error.URLError):
            time.sleep(PAUSE_S)

    def _open(self, url: str, start: int, what: str) -> Any:
        headers = self.headers | ({"Range": f"bytes={start}-"} if start else {})
        request = urllib.request.Request(url, headers=headers)  # noqa: S310  # the hub that the user named
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310  # as above
        except urllib.error.HTTPError as error:
            hints = {
                401: "set HF_TOKEN",
                403: "accept its terms on the hub, then set HF_TOKEN",
                404: "check the name",
            }
            hint = hints.get(error.code, "try again later")
            raise SourceError(f"{self.endpoint} answered {error.code} for {what}: {hint}") from error
        except urllib.error.URLError as error:
            raise SourceError(
                f"{self.endpoint} cannot be reached: {error.reason}; HF_ENDPOINT names another"
            ) from error
