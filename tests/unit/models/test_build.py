# SPDX-License-Identifier: Apache-2.0
"""The recipe: what a build publishes, and that a failure leaves nothing."""

import errno
from pathlib import Path

import numpy as np
import pytest

from server.models import build
from server.models.check import CheckReport, TextReport
from server.models.package import (
    CHAT_TEMPLATE,
    GRAPH,
    GRAPH_DATA,
    QUANTIZATIONS,
    TOKENIZER,
    ModelPackage,
    PackageError,
    find_package,
)
from server.models.readers.checkpoint import CheckpointError
from tests.checkpoints import GraphRows, reference_logprobs, tiny_checkpoint, tiny_package
from tests.data.tiny_models import BOS, EOS, TEMPLATE, TOKENS, tiny_tokenizer

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 256, 12)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def entries(home):
    return sorted(path.relative_to(home).as_posix() for path in home.rglob("*"))


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def report_of(ratio):
    text = TextReport(name="chat", num_tokens=9, perplexity=2, reference_perplexity=2, agreement=1)
    return CheckReport(quantization="fp32", texts=(text,), ratio=ratio, limit=1.02)


# ---- what is published -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_package_opens_and_predicts(checkpoint, tmp_path, quantization):
    """Every quantisation is whole, byte for byte as its manifest says, and near its source."""
    package = tiny_package(tmp_path, checkpoint, quantization)
    assert find_package(tmp_path, "tiny", quantization, verify="sha256") == package
    assert package.manifest.files.keys() == {GRAPH, GRAPH_DATA, TOKENIZER, CHAT_TEMPLATE}
    found = GraphRows(package).feed({0: PROMPT})[0]
    error = np.abs(found - reference_logprobs(checkpoint, PROMPT)).mean()
    assert error < {"fp32": 1e-5, "w8a8": 0.05, "w8": 0.05, "w4": 0.4}[quantization]


def test_the_manifest_tells_what_the_source_says(checkpoint, tmp_path):
    """Names, shape, ids and origin reach the manifest; the text files are the source's own."""
    package = tiny_package(tmp_path, checkpoint, model_id="my-bot")
    manifest, config = package.manifest, checkpoint.config
    assert (manifest.model_id, manifest.quantization, manifest.family) == ("my-bot", "fp32", "llama")
    assert manifest.source == {"uri": "test"}
    assert manifest.fidelity == {}
    assert (manifest.bos_token_id, manifest.eos_token_id, manifest.end_token_ids) == (BOS, EOS, (EOS,))
    assert manifest.num_tokens == manifest.shape.vocab_size == len(TOKENS)
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "context_length"):
        assert getattr(manifest.shape, name) == getattr(config, name)
    assert package.chat_template == TEMPLATE
    assert package.tokenizer_path.read_text(encoding="utf-8") == tiny_tokenizer().to_str()


def test_ids_without_a_row_or_a_token_do_not_count(tmp_path):
    """The ids that can be made are those with a token and a row in the head, whichever are fewer."""
    for rows, expected in ((len(TOKENS) + 6, len(TOKENS)), (100, 100)):
        checkpoint = tiny_checkpoint(tmp_path / str(rows), {"vocab_size": rows})
        manifest = tiny_package(tmp_path / str(rows), checkpoint).manifest
        assert (manifest.num_tokens, manifest.shape.vocab_size) == (expected, rows)


def test_a_model_without_a_template_has_none(tmp_path):
    """No template in the source, none in the package; the build does without."""
    checkpoint = tiny_checkpoint(tmp_path, files={"tokenizer_config.json": None})
    assert tiny_package(tmp_path, checkpoint, "w8a8").chat_template is None


def test_the_same_source_gives_the_same_bytes(checkpoint, tmp_path):
    """A build has no chance and no clock in its files: its fingerprint names the numbers."""
    first, second = (tiny_package(tmp_path / name, checkpoint, "w8a8").manifest for name in ("a", "b"))
    assert first.files == second.files
    assert first.fingerprint == second.fingerprint


def test_a_newer_build_replaces_the_older(checkpoint, tmp_path):
    """One folder stands there before and after, and it is the new one."""
    before = tiny_package(tmp_path, checkpoint)
    after = tiny_package(tmp_path, tiny_checkpoint(tmp_path / "new", seed=1))
    assert before.path == after.path
    assert before.manifest.fingerprint != after.manifest.fingerprint
    assert find_package(tmp_path, "tiny", "fp32", verify="sha256") == after
    assert [path.name for path in after.path.parent.iterdir()] == ["fp32"]


def test_progress_tells_every_stage_to_its_end(checkpoint, tmp_path, monkeypatch):
    """Building and checking each count up to their total, and never back."""
    monkeypatch.setattr(build, "check_package", lambda *_: report_of(1.0))
    told = {}

    def report(stage, done, total):
        assert told.get(stage, (0, total)) <= (done, total)
        told[stage] = (done, total)

    tiny_package(tmp_path, checkpoint, "w8a8", report=report, is_checked=True)
    assert list(told)[-2:] == ["build", "check"]
    assert all(done == total for done, total in told.values())


def test_a_checked_package_keeps_its_figures(checkpoint, tmp_path, monkeypatch):
    """The check sees a whole package and its source before it is published; its figures are stored."""
    seen = []

    def check(package, source):
        assert not (tmp_path / "models" / "tiny" / "fp32").exists()
        seen.append((ModelPackage.load(package.path, verify="sha256"), source))
        return report_of(1.001)

    monkeypatch.setattr(build, "check_package", check)
    package = tiny_package(tmp_path, checkpoint, is_checked=True)
    assert seen[0][1] is checkpoint
    assert package.manifest.fidelity["perplexity_ratio"] == 1.001
    assert ModelPackage.load(package.path, verify="sha256").manifest == package.manifest


# ---- what a failure leaves -------------------------------------------------------------------------------


def failing(fault):
    def fail(*_args, **_kwargs):
        raise fault

    return fail


@pytest.mark.parametrize("step", ["build_graph", "_write_text", "describe_files", "check_package"])
@pytest.mark.parametrize(
    "case",
    [
        (OSError(errno.ENOSPC, "No space left on device"), PackageError, "is full: nothing was kept"),
        (PermissionError(errno.EACCES, "Permission denied"), PermissionError, "Permission denied"),
        (CheckpointError("m.gguf is truncated"), CheckpointError, "is truncated"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
    ids=["disk full", "not allowed", "bad source", "interrupted"],
)
def test_a_failed_build_leaves_nothing(checkpoint, tmp_path, monkeypatch, step, case):
    """Whatever fails at whichever step, no file stays; a full disk is told as one."""
    fault, kind, told = case
    monkeypatch.setattr(build, step, failing(fault))
    with pytest.raises(kind, match=told):
        tiny_package(tmp_path, checkpoint, is_checked=True)
    assert entries(tmp_path) == ["models"]


def test_a_failed_build_leaves_the_older_package(checkpoint, tmp_path, monkeypatch):
    """What served before serves on, whole."""
    before = tiny_package(tmp_path, checkpoint)
    monkeypatch.setattr(build, "describe_files", failing(CheckpointError("x")))
    with pytest.raises(CheckpointError):
        tiny_package(tmp_path, tiny_checkpoint(tmp_path / "new", seed=1))
    assert find_package(tmp_path, "tiny", "fp32", verify="sha256") == before
    assert [path.name for path in before.path.parent.iterdir()] == ["fp32"]


def test_a_package_beyond_its_limit_is_not_published(checkpoint, tmp_path, monkeypatch):
    """A build that would be worse than allowed ends in a refusal and no package."""
    monkeypatch.setitem(build.check_package.__globals__["LIMITS"], "fp32", 0.5)
    with pytest.raises(PackageError, match="choose another quantisation"):
        tiny_package(tmp_path, checkpoint, is_checked=True)
    assert entries(tmp_path) == ["models"]


def test_the_data_file_is_given_back_when_a_build_fails(checkpoint, tmp_path, monkeypatch):
    """A build that fails half-way holds no file of its folder open."""
    monkeypatch.setattr(build, "build_graph", failing(CheckpointError("x")))
    before = open_files()
    with pytest.raises(CheckpointError):
        tiny_package(tmp_path, checkpoint)
    assert open_files() == before


def test_what_a_killed_build_left_is_swept(checkpoint, tmp_path):
    """The next build removes the folder of a dead one."""
    dead = tmp_path / "models" / "tiny" / ".fp32.partial-999999"
    dead.mkdir(parents=True)
    (dead / GRAPH_DATA).write_bytes(b"half")
    package = tiny_package(tmp_path, checkpoint)
    assert [path.name for path in package.path.parent.iterdir()] == ["fp32"]


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% if %}", "{{ 1 // 0 }}", "{{ 'a' + 1 }}"]
)
def test_a_template_that_fails_is_not_the_builds_affair(tmp_path, template):
    """A broken template is packed as it is: it is told where it is used."""
    files = {"tokenizer_config.json": {"chat_template": template}}
    package = tiny_package(tmp_path, tiny_checkpoint(tmp_path, files=files), "w8a8")
    assert package.chat_template == template
