# SPDX-License-Identifier: Apache-2.0
"""Repositories of a hub: one commit, the few files that are needed, and nothing that can run."""

import json

import pytest

from server.models.source import download, hub
from server.models.source.files import SourceError
from server.models.source.hub import Address, fetch_repository
from tests.data.hub_server import COMMIT, HubServer, cut, status

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "README.md": b"---\nlicense: mit\n---\n",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "run.py": b"code",
    ".gitattributes": b"",
    "onnx/model.onnx": b"graph",
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(download.time, "sleep", lambda _: None)


@pytest.fixture
def server():
    with HubServer() as server:
        server.add("org/repo", FILES)
        yield server


def fetch(server, home, text="org/repo", **options):
    environ = {"HF_ENDPOINT": server.url, "HF_TOKEN": "s3cret"}
    return fetch_repository(Address.of(text), home, environ, lambda *_: None, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", ("org/repo", "main", None)),
        ("Org-1/Re.po_2@v1.0", ("Org-1/Re.po_2", "v1.0", None)),
        ("org/repo@refs/pr/3", ("org/repo", "refs/pr/3", None)),
        ("org/repo/m-Q4_K_M.gguf", ("org/repo", "main", "m-Q4_K_M.gguf")),
        ("org/repo/sub/m.gguf@abc", ("org/repo", "abc", "sub/m.gguf")),
    ],
)
def test_an_address_in_each_form(text, expected):
    """Repository, revision and file are told apart."""
    address = Address.of(text)
    assert (address.repository, address.revision, address.file) == expected


@pytest.mark.parametrize(
    "text",
    ["", "repo", "org/", "/repo", "org/repo@", "org/../x", "org/repo/model.bin", "a/b?x=1", "a/b@x y", "a/b\n"],
)
def test_anything_else_is_no_address(text):
    """What is no address never becomes a part of a URL or of a path."""
    with pytest.raises(SourceError, match="write hf:ORG/REPO"):
        Address.of(text)


def test_only_what_a_model_needs_is_fetched(server, tmp_path):
    """Settings, text and safetensors come, at the commit; pickles, code and other formats never do."""
    fetched = fetch(server, tmp_path)
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "model.safetensors"}
    assert {path.name for path in fetched.path.iterdir()} == names
    assert all((fetched.path / name).read_bytes() == FILES[name] for name in names)
    assert fetched.path == tmp_path / "downloads" / "org--repo" / COMMIT
    assert fetched.uri == f"hf:org/repo@{COMMIT}"
    assert set(server.paths()) == names | {"main?blobs=true"}


def test_a_second_fetch_asks_for_the_commit_only(server, tmp_path):
    """What is there is not fetched again; the token goes with every request."""
    fetch(server, tmp_path)
    num_requests = len(server.requests)
    fetch(server, tmp_path)
    assert server.paths()[num_requests:] == ["main?blobs=true"]
    assert {headers["Authorization"] for _, headers in server.requests} == {"Bearer s3cret"}


def test_a_cut_fetch_is_gone_on_with(server, tmp_path):
    """An attempt that ends for good leaves what it had, and the next one needs only the rest."""
    server.faults["model.safetensors"] = [cut(3), status(403)]
    with pytest.raises(SourceError, match="accept its terms"):
        fetch(server, tmp_path)
    assert (fetch(server, tmp_path).path / "model.safetensors").read_bytes() == b"weights"
    assert server.requests[-1][1]["Range"] == "bytes=3-"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_changed_bytes_are_recognised(server, tmp_path, name):
    """Large files are known by their SHA-256, small ones by git's name of them."""
    wrong = {"lfs": {"sha256": "0" * 64}} if name.endswith("tensors") else {"blobId": "0" * 40}
    server.entries[name] = wrong
    with pytest.raises(SourceError, match=f"{name}.partial has the wrong checksum"):
        fetch(server, tmp_path)
    assert not list(tmp_path.rglob(f"{name}*"))


def test_shards_come_with_their_index(server, tmp_path):
    """Without one whole file the shards are fetched, and other safetensors files are not."""
    del server.repositories["org/repo"]["model.safetensors"]
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()
    shards = {f"model-0000{n}-of-00002.safetensors": b"%d" % n for n in (1, 2)}
    server.add("org/repo", {hub.INDEX: index, "consolidated.safetensors": b"x", **shards})
    names = {path.name for path in fetch(server, tmp_path).path.iterdir()}
    assert names >= {hub.INDEX, *shards}
    assert "consolidated.safetensors" not in names


def test_one_gguf_file_can_be_named(server, tmp_path):
    """Of a repository of GGUF files only the named one comes."""
    server.add("org/ggufs", {"q4/m.gguf": b"four", "m-q8.gguf": b"eight"})
    fetched = fetch(server, tmp_path, "org/ggufs/q4/m.gguf")
    assert fetched.path.read_bytes() == b"four"
    assert fetched.uri == f"hf:org/ggufs/q4/m.gguf@{COMMIT}"
    assert [path.name for path in fetched.path.parent.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("files", "text", "fault"),
    [
        ({"m.gguf": b"", "n.gguf": b""}, "org/x", "name one of hf:org/x/m.gguf, hf:org/x/n.gguf"),
        ({"m.gguf": b""}, "org/x/other.gguf", "has no file other.gguf; name one of hf:org/x/m.gguf"),
        ({"a.txt": b""}, "org/x/other.gguf", "it has no GGUF file"),
        ({"pytorch_model.bin": b""}, "org/x", "pickled weights only; they can run code"),
        ({"model-00001-of-00002.safetensors": b""}, "org/x", "no safetensors weights"),
        ({"config.json": b""}, "org/x", "no safetensors weights"),
    ],
)
def test_a_repository_without_what_we_need_is_refused(server, tmp_path, files, text, fault):
    """What it holds instead is said, and nothing of it is fetched."""
    server.add("org/x", files)
    with pytest.raises(SourceError, match=fault):
        fetch(server, tmp_path, text)
    assert len(server.requests) == 1


def test_a_model_that_cannot_be_used_costs_no_weights(server, tmp_path):
    """The check sees settings and tokenizer before the weights are asked for."""

    def refuse(folder):
        assert (folder / "config.json").exists()
        assert (folder / "tokenizer.json").exists()
        raise SourceError("of no use")

    with pytest.raises(SourceError, match="of no use"):
        fetch(server, tmp_path, accept=refuse)
    assert "model.safetensors" not in server.paths()


def test_a_full_disk_is_foreseen(server, tmp_path):
    """The sum of what is still to come is held against the disk before the first file."""
    server.entries["model.safetensors"] = {"size": 1 << 60}
    with pytest.raises(SourceError, match="MiB are needed"):
        fetch(server, tmp_path)
    assert len(server.requests) == 1


def test_an_unknown_repository_is_said_so(server, tmp_path):
    """A hub's answer is passed on with what to do."""
    with pytest.raises(SourceError, match="answer 404: check the name"):
        fetch(server, tmp_path, "org/none")


@pytest.mark.parametrize(
    "listing",
    [
        {},
        {"sha": COMMIT},
        {"sha": "../..", "siblings": []},
        {"sha": 7, "siblings": []},
        {"sha": COMMIT, "siblings": [{"rfilename": "config.json"}]},
        {"sha": COMMIT, "siblings": [7]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a", "size": 1, "lfs": 7}]},
    ],
)
def test_a_listing_that_is_none_is_refused(server, tmp_path, listing):
    """Without a commit, names and sizes nothing is fetched; a commit never becomes a path."""
    server.listing = json.dumps(listing).encode()
    with pytest.raises(SourceError, match="no list of files"):
        fetch(server, tmp_path)
