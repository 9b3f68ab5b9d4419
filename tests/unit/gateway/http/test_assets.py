# SPDX-License-Identifier: Apache-2.0
"""The page's files come from memory, with tags, and a page of ours may load nothing from elsewhere."""

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from server.gateway.http import assets as module
from server.gateway.http.assets import asset_routes, page_headers, read_assets, static_folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "strings").mkdir()
    (tmp_path / "index.html").write_text("<!doctype html>é", encoding="utf-8")
    (tmp_path / "widget.js").write_text("export {}")
    (tmp_path / "strings" / "en.json").write_text("{}")
    (tmp_path / ".secret.js").write_text("no")
    (tmp_path / "notes.bak").write_text("no")
    (tmp_path.parent / "outside.js").write_text("no")
    return tmp_path


@pytest.fixture
def client(folder):
    app = Starlette(routes=asset_routes(read_assets(folder)))
    app.router.redirect_slashes = False
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/index.html", "text/html; charset=utf-8"),
        ("/widget.js", "text/javascript; charset=utf-8"),
        ("/static/widget.js", "text/javascript; charset=utf-8"),
        ("/strings/en.json", "application/json"),
    ],
)
def test_each_file_has_its_type(client, path, media_type):
    """Wrong types would be refused by browsers, as sniffing is off."""
    reply = client.get(path)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == media_type
    assert reply.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        "/.secret.js",
        "/notes.bak",
        "/../outside.js",
        "/%2e%2e/outside.js",
        "/static/..%2foutside.js",
        "/strings",
        "/strings/",
        "/static/",
        "/static//etc/passwd",
        "/widget.js/",
        "/WIDGET.js",
        "/widget.js%00",
    ],
)
def test_nothing_else_is_there(client, path):
    """Only what the table holds: no hidden file, no other folder, no listing."""
    assert client.get(path).status_code == 404


def test_a_known_tag_gets_304(client):
    """A file is sent once, and again when it has changed."""
    tag = client.get("/widget.js").headers["etag"]
    for known in (tag, f'"x", W/{tag}'):
        reply = client.get("/widget.js", headers={"if-none-match": known})
        assert (reply.status_code, reply.content) == (304, b"")
    assert client.get("/widget.js", headers={"if-none-match": '"old"'}).status_code == 200


def test_head_has_no_body(client):
    """HEAD is GET without its body."""
    reply = client.head("/")
    assert (reply.status_code, reply.content) == (200, b"")


def test_pages_have_a_policy_and_scripts_do_not(client):
    """Inline code and foreign hosts are off; sockets to this host are on."""
    policy = client.get("/", headers={"host": "chat.example:8443"}).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "connect-src 'self' ws://chat.example:8443 wss://chat.example:8443;" in policy
    assert "unsafe" not in policy
    assert "content-security-policy" not in client.get("/widget.js").headers


@pytest.mark.parametrize("host", ["", "a b", "a;script-src *", "é", "x" * 300])
def test_a_strange_host_adds_nothing_to_the_policy(host):
    """A Host header can't write into it."""
    assert "connect-src 'self';" in page_headers(host)["content-security-policy"]


def test_a_missing_folder_serves_nothing(tmp_path):
    """A server without its page still serves the doors."""
    assert asset_routes(read_assets(tmp_path / "none")) == []


@pytest.mark.parametrize("limit", ["FILE_BYTES_MAX", "NUM_FILES_MAX"])
def test_it_is_no_file_server(folder, monkeypatch, limit):
    """Memory is bounded: too large or too many is a fault of the folder, said at start."""
    monkeypatch.setattr(module, limit, 2)
    with pytest.raises(ValueError, match="static folder"):
        read_assets(folder)


def test_demo_page_is_the_index_when_there_is_no_other(folder):
    """`/` has a page in both layouts."""
    (folder / "index.html").rename(folder / "demo.html")
    assert "/" in [route.path for route in asset_routes(read_assets(folder))]


def test_the_folder_of_this_checkout():
    """In a checkout the files stand beside the package."""
    assert static_folder().name == "static"
