# SPDX-License-Identifier: Apache-2.0
"""Packages on disk: found whole or refused by name, published whole or not at all."""

import fcntl
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from server.models import package as module
from server.models.package import (
    GRAPH,
    MANIFEST,
    TOKENIZER,
    FileEntry,
    GraphShape,
    Manifest,
    ModelPackage,
    PackageError,
    data_home,
    describe_files,
    file_sha256,
    find_package,
    fingerprint_of,
    list_packages,
    package_path,
    package_writer,
    remove_package,
    scratch_folder,
    sweep_partials,
    unix_now,
)

SHAPE = GraphShape(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=97,
    context_length=64,
    topk=64,
)
MANIFEST_OF_TINY = Manifest(
    model_id="tiny",
    quantization="fp32",
    family="llama",
    source={"uri": "file"},
    license=None,
    created=1,
    shape=SHAPE,
    num_tokens=90,
    bos_token_id=None,
    eos_token_id=2,
    adds_bos=False,
    end_token_ids=(2, 5),
    files={GRAPH: FileEntry(size=1, sha256="0"), TOKENIZER: FileEntry(size=2, sha256="1")},
    fingerprint="fp_1",
    fidelity={"perplexity_ratio": 1.01},
)


def fill(folder, text="graph", **changes):
    """Leave a whole package in `folder`."""
    (folder / GRAPH).write_text(text)
    (folder / TOKENIZER).write_text("{}")
    files = describe_files(folder)
    manifest = replace(MANIFEST_OF_TINY, files=files, fingerprint=fingerprint_of(files), **changes)
    (folder / MANIFEST).write_text(manifest.to_json())


def publish(home, model_id="tiny", quantization="fp32", text="graph"):
    with package_writer(home, model_id, quantization) as folder:
        fill(folder, text, model_id=model_id, quantization=quantization)
    return package_path(home, model_id, quantization)


def entries(home):
    return sorted(path.relative_to(home).as_posix() for path in home.rglob("*"))


# ---- manifest --------------------------------------------------------------------------------------------


def test_a_manifest_survives_its_own_text():
    """What is written is what is read."""
    assert Manifest.from_json(MANIFEST_OF_TINY.to_json()) == MANIFEST_OF_TINY
    assert MANIFEST_OF_TINY.num_bytes == 3
    assert SHAPE.kv_bytes_per_token == 2 * 2 * 8 * 2 * 4


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"format": 2}', "{}"])
def test_text_that_is_no_manifest_is_refused(text):
    """No object, another format: a ValueError, whatever the text."""
    with pytest.raises(ValueError):
        Manifest.from_json(text)


@pytest.mark.parametrize("name", sorted(json.loads(MANIFEST_OF_TINY.to_json())))
def test_no_field_may_be_missing(name):
    """Every field must be there and is named when it is not."""
    value = json.loads(MANIFEST_OF_TINY.to_json())
    del value[name]
    with pytest.raises(ValueError, match=name):
        Manifest.from_json(json.dumps(value))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("model_id", [7, "", None]),
        ("quantization", [[]]),
        ("family", [None]),
        ("fingerprint", [""]),
        ("license", [7]),
        ("created", [-1, 1.5, True, "1", None]),
        ("num_tokens", ["90", None]),
        ("bos_token_id", [-1, "1", False]),
        ("eos_token_id", [[2]]),
        ("adds_bos", [0, None]),
        ("source", [None, "file", {"uri": 7}]),
        ("shape", [None, [], {"num_layers": 2}, asdict(SHAPE) | {"topk": 0}, asdict(SHAPE) | {"more": 1}]),
        ("end_token_ids", [None, 2, [2, "5"], [-1]]),
        ("files", [None, [], {}, {GRAPH: {"size": 1, "sha256": "0"}}]),
        ("fidelity", [None, {"ratio": "1"}]),
    ],
)
def test_no_field_may_be_of_another_kind(name, wrong):
    """A value of a wrong kind is refused at reading, not met as a surprise later."""
    for value in wrong:
        document = json.loads(MANIFEST_OF_TINY.to_json()) | {name: value}
        with pytest.raises(ValueError):
            Manifest.from_json(json.dumps(document))


def test_an_unknown_field_is_refused():
    """A newer manifest is not half understood: in it, in its shape and in its files."""
    value = json.loads(MANIFEST_OF_TINY.to_json())
    with pytest.raises(ValueError, match="more"):
        Manifest.from_json(json.dumps(value | {"more": 1}))
    value["files"][GRAPH]["more"] = 1
    with pytest.raises(ValueError, match="more"):
        Manifest.from_json(json.dumps(value))


# ---- loading ---------------------------------------------------------------------------------------------


def test_a_published_package_is_found(tmp_path):
    """A package opens by name, verified as deeply as asked, and gives its parts."""
    path = publish(tmp_path)
    for verify in ("sizes", "sha256"):
        found = find_package(tmp_path, "tiny", "fp32", verify=verify)
    assert found == ModelPackage.load(path)
    assert (found.graph_path, found.tokenizer_path) == (path / GRAPH, path / TOKENIZER)
    assert found.manifest.files.keys() == {GRAPH, TOKENIZER}
    assert found.chat_template is None
    (path / "chat_template.jinja").write_text("é")
    assert found.chat_template == "é"


def test_a_package_loads_from_anywhere(tmp_path, monkeypatch):
    """Neither the working directory nor a link nor a move of the folder matters."""
    path = publish(tmp_path / "home")
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    ModelPackage.load(Path("link"), verify="sha256")
    path.rename(tmp_path / "moved")
    ModelPackage.load(tmp_path / "moved", verify="sha256")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: (path / GRAPH).unlink(), "model.onnx is missing; build it again"),
        (lambda path: (path / GRAPH).write_text("grap"), "has 4 bytes instead of 5; build it again"),
        (lambda path: (path / GRAPH).write_text("graphs"), "has 6 bytes instead of 5"),
        (lambda path: (path / MANIFEST).write_text("{"), "manifest.json cannot be read"),
        (lambda path: (path / MANIFEST).write_bytes(b"\xff"), "manifest.json cannot be read"),
        (lambda path: (path / MANIFEST).unlink(), "no model package: it has no manifest.json"),
    ],
)
def test_damage_is_named_at_opening(tmp_path, damage, fault):
    """A file that is missing, short or long is named with the command that mends it."""
    damage(publish(tmp_path))
    with pytest.raises(PackageError, match=fault):
        find_package(tmp_path, "tiny", "fp32")


def test_changed_bytes_are_found_when_asked_for(tmp_path):
    """The same size with other bytes passes the quick look and fails the deep one."""
    (publish(tmp_path) / GRAPH).write_text("GRAPH")
    find_package(tmp_path, "tiny", "fp32")
    with pytest.raises(PackageError, match=r"model\.onnx was changed"):
        find_package(tmp_path, "tiny", "fp32", verify="sha256")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_a_manifest_reaches_no_file_outside_its_folder(tmp_path, name):
    """A name that leads out is refused, whether or not the file is there."""
    path = publish(tmp_path)
    value = json.loads((path / MANIFEST).read_text())
    value["files"][name] = {"size": 0, "sha256": "0"}
    (path / MANIFEST).write_text(json.dumps(value))
    with pytest.raises(PackageError, match="outside its folder"):
        ModelPackage.load(path)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a:b", "a\0b", "a*"])
def test_a_model_name_is_a_name_not_a_path(tmp_path, name):
    """No model id or quantisation leads out of the folder of models."""
    for pair in ((name, "w8a8"), ("tiny", name)):
        with pytest.raises(PackageError, match="is not a model name"):
            package_path(tmp_path, *pair)


def test_a_missing_package_says_what_is_there(tmp_path):
    """The message names the packages there are and the command that adds the one that is not."""
    with pytest.raises(PackageError, match="there: none"):
        find_package(tmp_path, "tiny", "w4")
    publish(tmp_path)
    with pytest.raises(PackageError, match=r"there: tiny fp32.*sampan model add tiny --quantization w4"):
        find_package(tmp_path, "tiny", "w4")


def test_the_list_names_whole_and_damaged_ones(tmp_path):
    """Every package is listed in order; a damaged one as its error; partial folders not at all."""
    assert list_packages(tmp_path) == []
    publish(tmp_path, "b")
    publish(tmp_path, "a", "w4")
    (publish(tmp_path, "a", "fp32") / GRAPH).unlink()
    (tmp_path / "models/a/.w8.partial-1").mkdir()
    damaged, second, third = list_packages(tmp_path)
    assert isinstance(damaged, PackageError)
    assert [(p.manifest.model_id, p.manifest.quantization) for p in (second, third)] == [
        ("a", "w4"),
        ("b", "fp32"),
    ]


# ---- writing ---------------------------------------------------------------------------------------------


def test_nothing_loads_before_the_end(tmp_path):
    """While a package is written it can't be found, and an older one stays as it is."""
    with package_writer(tmp_path, "tiny", "fp32") as folder:
        fill(folder)
        with pytest.raises(PackageError):
            find_package(tmp_path, "tiny", "fp32")
    with package_writer(tmp_path, "tiny", "fp32") as folder:
        fill(folder, "newer")
        assert find_package(tmp_path, "tiny", "fp32").graph_path.read_text() == "graph"
    assert find_package(tmp_path, "tiny", "fp32").graph_path.read_text() == "newer"
    assert sorted(path.name for path in (tmp_path / "models/tiny").iterdir()) == ["fp32"]


@pytest.mark.parametrize(
    "fault", [OSError(28, "No space left on device"), KeyboardInterrupt(), PackageError("x")]
)
def test_a_build_that_fails_leaves_nothing(tmp_path, fault):
    """Whatever ends a build, its files are gone and an older package is untouched."""

    def build():
        with package_writer(tmp_path, "tiny", "fp32") as folder:
            fill(folder, "newer")
            raise fault

    with pytest.raises(type(fault)):
        build()
    assert entries(tmp_path) == ["models"]
    publish(tmp_path)
    with pytest.raises(type(fault)):
        build()
    assert find_package(tmp_path, "tiny", "fp32", verify="sha256").graph_path.read_text() == "graph"
    assert sorted(path.name for path in (tmp_path / "models/tiny").iterdir()) == ["fp32"]


def test_a_package_without_a_manifest_is_our_fault(tmp_path):
    """A block that forgets the manifest publishes nothing."""
    with pytest.raises(AssertionError), package_writer(tmp_path, "tiny", "fp32") as folder:
        (folder / GRAPH).write_text("graph")
    assert entries(tmp_path) == ["models"]


def test_a_failed_exchange_puts_the_old_package_back(tmp_path, monkeypatch):
    """If the new folder can't take the place, the old one stands there again."""
    publish(tmp_path)
    real = Path.rename

    def rename(path, target):
        if ".partial-" in path.name and ".old." not in path.name:
            raise OSError(5, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        publish(tmp_path, text="newer")
    assert find_package(tmp_path, "tiny", "fp32").graph_path.read_text() == "graph"


def leave(home, name, *, is_whole=True):
    """What a killed process leaves: a hidden folder that nobody has locked."""
    folder = home / name
    folder.mkdir(parents=True)
    if is_whole:
        fill(folder)
    return folder


def test_leftovers_of_killed_processes_are_swept(tmp_path):
    """An unlocked partial folder is rubbish, of a build or of a download; anything else stays."""
    publish(tmp_path)
    dead = [leave(tmp_path, name) for name in ("models/tiny/.w4.partial-1", "downloads/.wheel.partial-7")]
    (tmp_path / "downloads/m.gguf.partial").write_text("to be gone on with")
    assert sweep_partials(tmp_path) == dead
    assert not any(path.exists() for path in dead)
    assert (tmp_path / "downloads/m.gguf.partial").exists()
    assert find_package(tmp_path, "tiny", "fp32")


def test_a_folder_at_work_is_not_swept(tmp_path):
    """A lock says that its process lives, whatever its id; the next build starts with a sweep."""
    (tmp_path / "downloads").mkdir()
    with scratch_folder(tmp_path / "downloads", "wheel") as at_work:
        leave(tmp_path, "models/tiny/.w4.partial-1")
        publish(tmp_path)
        assert at_work.exists()
    assert entries(tmp_path / "models/tiny")[:1] == ["fp32"]
    assert not at_work.exists()


def test_a_package_moved_aside_by_a_dead_build_comes_back(tmp_path):
    """Killed between its two renames, a build has hidden the old package: the sweep puts it back."""
    publish(tmp_path).rename(tmp_path / "models/tiny/.fp32.old.partial-1")
    sweep_partials(tmp_path)
    assert find_package(tmp_path, "tiny", "fp32", verify="sha256")
    leave(tmp_path, "models/tiny/.fp32.old.partial-1")
    sweep_partials(tmp_path)
    assert sorted(path.name for path in (tmp_path / "models/tiny").iterdir()) == ["fp32"]


def test_one_build_at_a_time_under_one_process_id(tmp_path):
    """Two containers may share a disk and a process id: the second build is told to wait."""
    with package_writer(tmp_path, "tiny", "fp32") as folder:
        fill(folder)
        with (
            pytest.raises(PackageError, match="in use by another process"),
            package_writer(tmp_path, "tiny", "fp32"),
        ):
            pass
    assert find_package(tmp_path, "tiny", "fp32")


def test_a_sweep_in_the_wrong_moment_is_outlived(tmp_path, monkeypatch):
    """A folder swept between its making and its lock is made again."""
    real, lost = module._lock, []

    def lock(folder):
        if not lost:
            lost.append(folder)
            folder.rmdir()
            return os.open(tmp_path, os.O_RDONLY)
        return real(folder)

    monkeypatch.setattr(module, "_lock", lock)
    with scratch_folder(tmp_path, "x") as folder:
        assert folder.exists()
        assert lost == [folder]


def test_a_disk_without_locks_still_builds(tmp_path, monkeypatch):
    """Where the disk knows no locks a build goes on without one."""

    def no_locks(_handle, _operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    publish(tmp_path)
    publish(tmp_path, text="newer")
    assert find_package(tmp_path, "tiny", "fp32").graph_path.read_text() == "newer"


def test_removing_gives_the_space_back(tmp_path):
    """A package goes whole, damaged or not, and its model's folder with the last one."""
    publish(tmp_path, "tiny", "w4")
    (publish(tmp_path) / MANIFEST).unlink()
    assert remove_package(tmp_path, "tiny", "fp32") == len("graph") + len("{}")
    assert remove_package(tmp_path, "tiny", "w4") > 100
    assert entries(tmp_path) == ["models"]
    with pytest.raises(PackageError, match="no model package tiny"):
        remove_package(tmp_path, "tiny", "w4")


# ---- small things ----------------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_any_file(tmp_path):
    """Same files, same name; another byte or another name, another one."""
    fill(tmp_path)
    files = describe_files(tmp_path)
    assert MANIFEST not in files
    assert files[GRAPH] == FileEntry(size=5, sha256=file_sha256(tmp_path / GRAPH))
    first = fingerprint_of(files)
    assert len(first) == len("fp_") + 12
    assert first == fingerprint_of(dict(reversed(files.items())))
    for change in ({GRAPH: FileEntry(size=5, sha256="0")}, {"more": files[GRAPH]}):
        assert fingerprint_of(files | change) != first


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SAMPAN_HOME": "/a", "XDG_DATA_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_DATA_HOME": "/b", "HOME": "/c"}, "/b/sampan"),
        ({"SAMPAN_HOME": "", "XDG_DATA_HOME": "", "HOME": "/c"}, "/c/.local/share/sampan"),
    ],
)
def test_the_data_home(environ, expected):
    """Our own variable wins, then the desktop's, then the usual place."""
    assert data_home(environ) == Path(expected)


def test_a_relative_home_is_made_absolute(tmp_path, monkeypatch):
    """A home given from here stays the same after a change of directory."""
    monkeypatch.chdir(tmp_path)
    assert data_home({"SAMPAN_HOME": "x"}) == tmp_path / "x"


def test_created_is_a_unix_time():
    """Whole seconds since 1970."""
    assert unix_now() > 1_700_000_000
