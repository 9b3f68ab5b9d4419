# SPDX-License-Identifier: Apache-2.0
"""`sampan model`: what is asked for is done, said in a line, and told by the exit status."""

import argparse
import io
import json
import subprocess
import sys

import pytest

from server.cli import model
from server.models import build, check
from server.models.check import CheckReport, TextReport
from server.models.package import GRAPH, PackageError, find_package, package_path
from server.models.source import resolve
from tests.data.tiny_models import tiny_tensors, write_gguf

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # of 16 values, as attention needs them


def tiny_file(folder, seed=0):
    """A GGUF file that can be built."""
    return str(write_gguf(folder / "tiny.gguf", tiny_tensors(HEADS, seed), HEADS))


@pytest.fixture
def sampan(tmp_path, capsys):
    """Run `sampan model …` with a home of its own; returns (status, stdout, stderr)."""

    def run(*words):
        parser = argparse.ArgumentParser()
        model.add_arguments(parser)
        status = model.run(parser.parse_args([*words, "--home", str(tmp_path / "home")]))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    run.home = tmp_path / "home"
    return run


@pytest.fixture
def gguf_file(tmp_path):
    return tiny_file(tmp_path)


@pytest.fixture
def builds(monkeypatch):
    """Every build's options; the build itself is the real one, unmeasured."""
    made, real = [], build.build_package

    def build_package(checkpoint, **options):
        made.append(options)
        return real(checkpoint, **options | {"is_checked": False})

    monkeypatch.setattr(build, "build_package", build_package)
    return made


def test_a_model_is_added(sampan, gguf_file, builds):
    """A source becomes a package under its own name; progress goes to standard error, the result to out."""
    status, out, err = sampan("add", gguf_file, "-q", "fp32")
    assert status == 0
    assert out.splitlines()[0].startswith("added tiny (fp32), ")
    assert "sampan serve --model tiny --quantization fp32" in out
    assert "build 1/" in err
    assert find_package(sampan.home, "tiny", "fp32", verify="sha256")
    assert builds[0]["is_checked"] is True


def test_a_model_can_have_another_name_and_go_unmeasured(sampan, gguf_file, builds):
    """`--as` names the package, `--no-check` leaves the measuring out."""
    status, out, _ = sampan("add", gguf_file, "-q", "fp32", "--as", "my-bot", "--no-check")
    assert (status, out.split(":")[1].splitlines()[0]) == (0, " not checked")
    assert find_package(sampan.home, "my-bot", "fp32")
    assert builds[0]["is_checked"] is False


def test_what_is_there_is_not_built_again(sampan, gguf_file, builds):
    """The same source again is no work; `--force` and damage are."""
    add = ("add", gguf_file, "-q", "fp32")
    sampan(*add)
    status, out, _ = sampan(*add)
    assert (status, len(builds)) == (0, 1)
    assert "tiny (fp32) is there already; --force builds it again" in out
    sampan(*add, "--force")
    assert len(builds) == 2
    (package_path(sampan.home, "tiny", "fp32") / GRAPH).unlink()
    status, _, err = sampan(*add)
    assert (status, len(builds)) == (0, 3)
    assert "model.onnx is missing" in err


def test_a_name_is_not_taken_from_another_source(sampan, gguf_file, tmp_path, builds):
    """Another model of the same name is refused with both ways out, and replaces only by force."""
    sampan("add", gguf_file, "-q", "fp32")
    (tmp_path / "other").mkdir()
    other = tiny_file(tmp_path / "other", seed=1)
    status, _, err = sampan("add", other, "-q", "fp32")
    assert (status, len(builds)) == (1, 1)
    assert "from another source (tiny.gguf)" in err
    assert "--as" in err
    assert sampan("add", other, "-q", "fp32", "--force")[0] == 0


def test_a_known_model_that_is_there_asks_nobody(sampan, gguf_file, builds, monkeypatch):
    """A catalogue's name that has its package needs neither network nor source."""
    sampan("add", gguf_file, "-q", "fp32", "--as", "smollm2-135m-instruct")
    monkeypatch.setattr(resolve, "open_source", None)
    status, out, _ = sampan("add", "smollm2-135m-instruct", "-q", "fp32")
    assert (status, "is there already" in out, len(builds)) == (0, True, 1)


def test_a_wrong_name_is_told_before_anything_is_fetched(sampan, monkeypatch):
    """A name that is a path is refused first."""
    monkeypatch.setattr(resolve, "open_source", None)
    status, _, err = sampan("add", "smollm2-135m-instruct", "--as", "../x")
    assert status == 1
    assert "'../x' is not a model name" in err


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"PK\x03\x04", "is not a GGUF file"), (None, "is no file, no folder and no known name")],
)
def test_a_source_that_cannot_be_used_is_one_line(sampan, tmp_path, content, fault):
    """Every expected fault is one line on standard error and status 1."""
    path = tmp_path / "m.gguf"
    if content:
        path.write_bytes(content)
    status, out, err = sampan("add", str(path))
    assert (status, out) == (1, "")
    assert err.startswith("sampan model: ")
    assert fault in err
    assert err.count("\n") == 1


def test_the_list_tells_what_is_here_and_what_can_be(sampan, gguf_file, builds):
    """Packages with their figures, damaged ones with their fault, then the names that can be added."""
    sampan("add", gguf_file, "-q", "fp32", "--as", "smollm2-135m-instruct")
    sampan("add", gguf_file, "-q", "w8", "--as", "b[red]c")
    (package_path(sampan.home, "b[red]c", "w8") / GRAPH).unlink()
    status, out, _ = sampan("list")
    here, _, rest = out.partition("can be added by name")
    assert status == 0
    assert "smollm2-135m-instruct" in here
    assert "not checked" in here
    assert "damaged:" in here
    assert "b[red]c" in here
    assert "smollm2-135m-instruct" not in rest
    assert "smollm2-360m-instruct" in rest


def test_show_prints_the_manifest(sampan, gguf_file, builds):
    """What a package says of itself is printed whole, as JSON."""
    sampan("add", gguf_file, "-q", "fp32")
    status, out, _ = sampan("show", "tiny", "-q", "fp32")
    assert (status, json.loads(out)["source"]["uri"]) == (0, "tiny.gguf")
    status, out, err = sampan("show", "none")
    assert (status, out) == (1, "")
    assert "no model package none (w8a8)" in err


def measured(monkeypatch, ratio, agreement=None, limit=1.02):
    """Let every measurement give this result; returns the references that were asked for."""
    references = []

    def measure(package, reference):
        references.append(reference)
        text = TextReport(
            name="english", num_tokens=9, perplexity=3.5, reference_perplexity=3.25, agreement=agreement
        )
        return CheckReport(quantization="fp32", texts=(text,), ratio=ratio, limit=limit)

    monkeypatch.setattr(check, "measure_package", measure)
    return references


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(1.01, (0, "source 1.0100, limit 1.02")), (1.03, (1, "1.0300")), (None, (0, "no figures"))],
)
@pytest.mark.usefixtures("builds")
def test_check_judges_by_the_limit(sampan, gguf_file, monkeypatch, ratio, expected):
    """A package within its limit passes, one beyond it fails, one that can't be compared says so."""
    sampan("add", gguf_file, "-q", "fp32")
    assert measured(monkeypatch, ratio) == []
    status, out, err = sampan("check", "tiny", "-q", "fp32")
    assert (status, expected[1] in out) == (expected[0], True)
    assert ("beyond its limit" in err) is (status == 1)
    assert "files are whole" in out
    assert "perplexity 3.500, fp32 source 3.250" in out


def test_check_compares_with_a_source(sampan, gguf_file, builds, monkeypatch):
    """With `--source` the reference is the source itself, and agreement is told."""
    sampan("add", gguf_file, "-q", "fp32")
    references = measured(monkeypatch, 1.0, agreement=0.987)
    _, out, _ = sampan("check", "tiny", "-q", "fp32", "--source", gguf_file)
    assert "same token 98.7%" in out
    assert references[0].names() == tiny_tensors(HEADS).keys()
    status, _, err = sampan("check", "tiny", "-q", "fp32", "--source", "none-such")
    assert (status, "no known name" in err) == (1, True)


def test_check_finds_changed_bytes(sampan, gguf_file, builds):
    """Every byte is read before anything is measured."""
    sampan("add", gguf_file, "-q", "fp32")
    path = package_path(sampan.home, "tiny", "fp32") / GRAPH
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    status, _, err = sampan("check", "tiny", "-q", "fp32")
    assert (status, "model.onnx was changed" in err) == (1, True)


def test_nothing_is_deleted_without_a_yes(sampan, gguf_file, builds, monkeypatch):
    """A question is asked; anything but yes, and nobody there to ask, deletes nothing."""
    sampan("add", gguf_file, "-q", "fp32")
    for answer in ("", "n\n", "maybe\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        status, out, _ = sampan("rm", "tiny", "-q", "fp32")
        assert (status, "nothing was deleted" in out) == (1, True)
        assert find_package(sampan.home, "tiny", "fp32")
    monkeypatch.setattr("sys.stdin", io.StringIO("Y\n"))
    assert sampan("rm", "tiny", "-q", "fp32")[0] == 0
    with pytest.raises(PackageError):
        find_package(sampan.home, "tiny", "fp32")


def test_yes_deletes_without_asking(sampan, gguf_file, builds):
    """`--yes` deletes at once; a second time there is nothing to delete."""
    sampan("add", gguf_file, "-q", "fp32")
    status, out, _ = sampan("rm", "tiny", "-q", "fp32", "--yes")
    assert (status, out.startswith("deleted tiny (fp32), ")) == (0, True)
    assert sampan("rm", "tiny", "-q", "fp32", "--yes")[0] == 1


# ---- progress --------------------------------------------------------------------------------------------


def test_progress_is_lines_where_there_is_no_terminal(capsys):
    """A stage is told when it starts and at every quarter, never at every block."""
    with model._progress() as report:
        for done in range(101):
            report("fetch", done << 20, 100 << 20)
        report("build", 1, 2)
        report("fetch x", 3 << 20, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        *(f"fetch {done}/100 MiB" for done in (0, 25, 50, 75, 100)),
        "build 1/2",
        "fetch x 3 MiB",
    ]


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    """A terminal gets a bar for each stage, with the amount beside it."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with model._progress() as report:
        report("fetch", 30 << 20, 100 << 20)
        report("fetch", 100 << 20, 100 << 20)
        report("build", 1, 2)
    err = capsys.readouterr().err
    assert "100/100 MiB" in err
    assert "1/2" in err
    assert "━" in err


def test_the_lighter_verbs_carry_no_arrays(tmp_path):
    """`list` and `show` load neither numpy nor ONNX: they answer at once."""
    code = (
        "import argparse, sys; from server.cli import model\n"
        "p = argparse.ArgumentParser(); model.add_arguments(p)\n"
        "for words in (['list'], ['show', 'x'], ['rm', 'x', '--yes']):\n"
        f"    model.run(p.parse_args([*words, '--home', {str(tmp_path)!r}]))\n"
        "print({'numpy', 'onnx', 'onnxruntime', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
