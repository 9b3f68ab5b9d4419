# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub on loopback that fails on request.

with HubServer() as hub:
    hub.add("org/repo", {"config.json": b"{}"})
    hub.faults["config.json"] = [cut(1), status(503)]     # one fault an attempt, then it behaves
    ...                                                   # ask hub.url
    hub.requests                                          # (path, headers) of every request
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cut(num_bytes):
    """Promise the whole file and close after `num_bytes` of what was asked for."""
    return {"cut": num_bytes}


def status(code, **headers):
    """Answer with a status and these headers."""
    return {"status": code, "headers": {name.replace("_", "-"): value for name, value in headers.items()}}


def whole():
    """Ignore the range and send the whole file."""
    return {"is_whole": True}


def shifted():
    """Answer a range with another one."""
    return {"is_shifted": True}


class HubServer:
    """Repositories by name, each at one commit; `entries` changes what the listing says of a file."""

    def __init__(self):
        self.repositories, self.faults, self.entries, self.requests = {}, {}, {}, []
        self.listing = None  # bytes in place of every listing
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, repository, files):
        self.repositories.setdefault(repository, {}).update(files)

    def paths(self):
        """What was asked for, by the last part of each path."""
        return [path.rpartition("/")[2] for path, _ in self.requests]

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def describe(self, repository):
        """The listing of a repository, as a hub gives it."""
        siblings = []
        for name, data in self.repositories[repository].items():
            entry = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if name.endswith((".safetensors", ".gguf")):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
            siblings.append(entry | self.entries.get(name, {}))
        return json.dumps({"sha": COMMIT, "siblings": siblings}).encode()

    def answer(self, path):
        """The content behind a path, or None."""
        if path.startswith("/api/models/"):
            if self.listing is not None:
                return self.listing
            repository, _, _ = path.removeprefix("/api/models/").partition("/revision/")
            return self.describe(repository) if repository in self.repositories else None
        repository, _, rest = path[1:].partition(f"/resolve/{COMMIT}/")
        return self.repositories.get(repository, {}).get(rest)

    def _handler(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.path, dict(self.headers)))
                waiting = hub.faults.get(path.rpartition("/")[2])
                fault = waiting.pop(0) if waiting else {}
                data = hub.answer(path)
                if data is None or "status" in fault:
                    self._refuse(fault)
                else:
                    self._send(data, fault)

            def _refuse(self, fault):
                self.send_response(fault.get("status", 404))
                for name, value in fault.get("headers", {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _send(self, data, fault):
                start = int(self.headers.get("Range", "bytes=0-")[6:-1])
                if fault.get("is_whole"):
                    start = 0
                self.send_response(206 if start else 200)
                if start:
                    first = start - 1 if fault.get("is_shifted") else start
                    self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(data) - start))
                self.end_headers()
                self.wfile.write(data[start : start + fault["cut"]] if "cut" in fault else data[start:])

            def log_message(self, *_):
                pass

        return Handler


def git_sha1(data):
    """The name that git gives this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
