# SPDX-License-Identifier: Apache-2.0
"""The page and the widget's files, read once and served from memory.

Owns the table path → file. Invariant: a path is served only if it is a key of that table, which was filled
from our own folder, so no path of a client's ever reaches a disk. It must never serve a type it does not
know, nor let a page of ours load anything from elsewhere.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
INDEXES = ("index.html", "demo.html")
FILE_BYTES_MAX = 1_048_576
NUM_FILES_MAX = 256

_HOST = re.compile(r"[A-Za-z0-9._\[\]:-]{1,255}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file in memory. The tag is of its bytes, so it changes exactly when they do."""

    body: bytes
    media_type: str
    etag: str


def static_folder() -> Path:
    """Where the files are: inside an installed package, beside it in a checkout."""
    packaged = Path(str(files("server.gateway.http"))) / "static"
    return packaged if packaged.is_dir() else Path(str(files("server"))).parent / "static"


def read_assets(folder: Path) -> dict[str, Asset]:
    """Read every servable file below a folder, by its path there with `/` between; hidden ones are left out.

    Raises:
        ValueError: more or larger files than a page needs: this is not a file server.
    """
    assets: dict[str, Asset] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = path.relative_to(folder).as_posix()
        if path.suffix not in TYPES or not path.is_file() or any(part[0] == "." for part in name.split("/")):
            continue
        body = path.read_bytes()
        if len(body) > FILE_BYTES_MAX or len(assets) >= NUM_FILES_MAX:
            raise ValueError(f"{path}: the static folder holds at most {NUM_FILES_MAX} files of 1 MiB")
        tag = hashlib.blake2b(body, digest_size=12).hexdigest()
        assets[name] = Asset(body=body, media_type=TYPES[path.suffix], etag=f'"{tag}"')
    return assets


def asset_routes(assets: Mapping[str, Asset]) -> list[Route]:
    """`/` is the page; every file is at its own name, and below `/static/` for proxies that serve those."""
    index = next((assets[name] for name in INDEXES if name in assets), None)
    pages = {"/": index} if index is not None else {}
    paths = {f"{prefix}{name}": asset for prefix in ("/", "/static/") for name, asset in assets.items()}
    return [Route(path, AssetDoor(asset), methods=["GET"]) for path, asset in (pages | paths).items()]


class AssetDoor:
    """Serves one file."""

    def __init__(self, asset: Asset) -> None:
        self._asset = asset

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the file, or 304 when the client has it."""
        headers = {"etag": self._asset.etag, "cache-control": "no-cache"}
        if self._asset.media_type.startswith("text/html"):
            headers |= page_headers(Headers(scope=scope).get("host", ""))
        known = Headers(scope=scope).get("if-none-match", "")
        if self._asset.etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}:
            await Response(status_code=304, headers=headers)(scope, receive, send)
            return
        response = Response(self._asset.body, headers=headers, media_type=self._asset.media_type)
        await response(scope, receive, send)


def page_headers(host: str) -> dict[str, str]:
    """What a page of ours may load and do: its own files, and sockets to this very host.

    The sockets are spelled out, as older browsers do not take `'self'` for a WebSocket.
    """
    sockets = f" ws://{host} wss://{host}" if _HOST.fullmatch(host) else ""
    policy = (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        f"connect-src 'self'{sockets}",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No script of ours makes markup out of text, so none may: the browser itself stands guard.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "content-security-policy": "; ".join(policy),
        "cross-origin-opener-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
    }
