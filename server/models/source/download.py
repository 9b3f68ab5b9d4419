# SPDX-License-Identifier: Apache-2.0
"""HTTP: one JSON document, or one file that is gone on with where an attempt was cut.

A file grows as `NAME.partial` and gets its name when its size and checksum are right. A secret goes to the
host it was meant for and to no other, wherever that host redirects.
"""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from server.models.source.files import Checksum, Report, SourceError, verify

TIMEOUT_S = 30.0
ATTEMPTS = 5  # without a new byte
PAUSE_S = 0.5  # doubled from attempt to attempt
PAUSE_S_MAX = 60.0
BLOCK_BYTES = 1 << 20
DOCUMENT_BYTES_MAX = 16 << 20

_HINTS = {
    401: "it is private or does not exist: check the name, or set HF_TOKEN",
    403: "accept its terms on the hub, then set HF_TOKEN",
    404: "check the name and the revision",
}
_PARTIAL, _BAD_RANGE, _TOO_MANY = 206, 416, 429


class _Passing(Exception):
    """A fault that another attempt may outlive; the text is the reason."""

    def __init__(self, reason: object, pause_s: float = 0.0) -> None:
        super().__init__(str(reason))
        self.pause_s = pause_s


_PASSING = (_Passing, urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file at an address: its size in bytes, and its checksum."""

    url: str
    size: int
    checksum: Checksum


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects without carrying the secret to another host, and never from https to http."""

    def redirect_request(  # noqa: PLR0917  # the library's signature
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = (urllib.parse.urlsplit(url) for url in (req.full_url, newurl))
        if old.scheme == "https" and new.scheme != "https":
            raise SourceError(f"{old.netloc} redirects to an unencrypted address; it was not followed")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            request.remove_header("Authorization")
        return request


class Client:
    """Asks one host, with its token."""

    def __init__(self, endpoint: str, token: str | None) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._headers = {"User-Agent": "sampan", "Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._opener = urllib.request.build_opener(_Redirects)

    def read_json(self, url: str) -> Mapping[str, Any]:
        """One JSON object.

        Raises:
            SourceError: the host cannot be reached, refuses, or answers something else.
        """
        for failures in range(1, ATTEMPTS + 1):
            try:
                with self._open(url, 0) as answer:
                    body = answer.read(DOCUMENT_BYTES_MAX)
                    if answer.length:
                        raise _Passing(f"{answer.length} bytes of the answer are missing")
                break
            except _PASSING as error:
                self._pause_or_give_up(url, error, failures)
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{url} does not answer in JSON; does HF_ENDPOINT name a hub?") from error
        if not isinstance(value, dict):
            raise SourceError(f"{url} does not answer with an object; does HF_ENDPOINT name a hub?")
        return value

    def fetch(self, remote: RemoteFile, target: Path, report: Report) -> None:
        """Fetch a file to `target`; nothing is done when it is there.

        Raises:
            SourceError: the host fails again and again, refuses, or sends other bytes than it promised.
            OSError: the disk fails.
        """
        if target.is_file() and target.stat().st_size == remote.size:
            return
        partial = target.with_name(f"{target.name}.partial")
        partial.touch()
        failures, furthest = 0, partial.stat().st_size
        while (done := partial.stat().st_size) < remote.size:
            try:
                self._append(remote, partial, done, report)
                reason: Exception = _Passing("the connection was closed too early")
            except _PASSING as error:
                reason = error
            reached = partial.stat().st_size
            failures = 0 if reached > furthest else failures + 1
            furthest = max(reached, furthest)
            if failures:
                self._pause_or_give_up(remote.url, reason, failures)
        if done > remote.size:
            partial.unlink()
            raise SourceError(f"{remote.url} sends more than its {remote.size} bytes; it was deleted")
        verify(partial, remote.checksum)
        partial.rename(target)

    def _append(self, remote: RemoteFile, partial: Path, done: int, report: Report) -> None:
        with self._open(remote.url, done) as answer:
            goes_on = done > 0 and answer.status == _PARTIAL
            if goes_on and not answer.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                raise _Passing("the answer starts at another byte than was asked for")
            with partial.open("ab" if goes_on else "wb") as out:
                while block := answer.read(BLOCK_BYTES):
                    out.write(block)
                    report(f"fetch {partial.stem}", out.tell(), remote.size)
                    if out.tell() > remote.size:
                        return

    def _open(self, url: str, start: int) -> http.client.HTTPResponse:
        headers = self._headers | ({"Range": f"bytes={start}-"} if start else {})
        request = urllib.request.Request(url, headers=headers)  # noqa: S310  # the host that the user named
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error, url) from error
        return answer

    def _refusal(self, error: urllib.error.HTTPError, url: str) -> Exception:
        if error.code >= 500 or error.code in (_TOO_MANY, _BAD_RANGE):  # noqa: PLR2004  # the server's faults
            wait = error.headers.get("Retry-After", "")
            return _Passing(f"answer {error.code}", min(float(wait), PAUSE_S_MAX) if wait.isdecimal() else 0.0)
        hint = _HINTS.get(error.code, "try again later")
        return SourceError(f"{url} cannot be had, answer {error.code}: {hint}")

    def _pause_or_give_up(self, url: str, error: Exception, failures: int) -> None:
        reason = getattr(error, "reason", error)
        if failures >= ATTEMPTS:
            raise SourceError(
                f"{url} cannot be had, {ATTEMPTS} times: {reason}; start again to go on where it stopped. "
                "HF_ENDPOINT names another hub"
            ) from error
        time.sleep(max(PAUSE_S * 2 ** (failures - 1), getattr(error, "pause_s", 0.0)))
