# SPDX-License-Identifier: Apache-2.0
"""A package against its source: the figures are right, the limit holds, a graph that is none is refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from server.models import check
from server.models.check import LIMITS, CheckReport, TextReport, check_package, measure_package
from server.models.package import GRAPH, QUANTIZATIONS, ModelPackage, PackageError
from server.models.texts import EVALUATION
from tests.checkpoints import (
    reference_logprobs,
    tiny_checkpoint,
    tiny_package,
    tiny_weights,
)
from tests.data.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def package(checkpoint, tmp_path_factory):
    return tiny_package(tmp_path_factory.mktemp("home"), checkpoint)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model, of the same shape."""
    return tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=5)


def twin_perplexity(checkpoint, text):
    ids = tiny_tokenizer().encode(text, add_special_tokens=False).ids[: checkpoint.config.context_length]
    odds = reference_logprobs(checkpoint, ids)
    return np.exp(-np.mean([odds[place, token] for place, token in enumerate(ids[1:])])), len(ids)


def with_figures(package, **figures):
    return ModelPackage(path=package.path, manifest=replace(package.manifest, fidelity=figures))


def test_a_limit_for_every_quantisation():
    """No quantisation goes unjudged, and the exact one is judged hardest."""
    assert LIMITS.keys() == set(QUANTIZATIONS)
    assert 1 < LIMITS["fp32"] == min(LIMITS.values())


def test_an_exact_package_measures_as_its_source(package, checkpoint):
    """Every text, cut at the context, in chunks: the twin's perplexity, the same tokens, a ratio of 1."""
    report = measure_package(package, checkpoint)
    assert [text.name for text in report.texts] == list(EVALUATION)
    for text in report.texts:
        expected, num_tokens = twin_perplexity(checkpoint, EVALUATION[text.name])
        assert text.num_tokens == num_tokens == checkpoint.config.context_length > check.CHUNK
        assert text.perplexity == pytest.approx(expected, rel=1e-4)
        assert text.reference_perplexity == pytest.approx(expected, rel=1e-4)
        assert text.agreement == 1
    assert report.ratio == pytest.approx(1, abs=1e-4)
    assert report.is_good


def test_another_model_agrees_less(package, other):
    """Measured against a source that is not its own, agreement falls to chance and the ratio leaves 1."""
    report = measure_package(package, other)
    assert all(text.agreement < 0.2 for text in report.texts)
    assert abs(report.ratio - 1) > 1e-3


def test_a_package_alone_is_compared_with_the_figures_of_its_build(package, checkpoint):
    """Without a source the stored figures serve; they give the same ratio, to their rounding."""
    report = measure_package(package, checkpoint)
    alone = measure_package(with_figures(package, **report.as_fidelity()), None)
    assert alone.ratio == pytest.approx(report.ratio, rel=1e-4)
    assert all(text.reference_perplexity is text.agreement is None for text in alone.texts)


def test_a_package_without_figures_is_not_judged(package, checkpoint):
    """No source and no figures, or figures of other texts: no ratio, and nothing to refuse."""
    figures = measure_package(package, checkpoint).as_fidelity()
    del figures["reference_perplexity_chat"]
    for stored in ({}, figures):
        report = check_package(with_figures(package, **stored), None)
        assert report.ratio is None
        assert report.is_good


def test_a_package_beyond_its_limit_is_refused(package, checkpoint, monkeypatch):
    """The refusal names the package, both figures and the way out; at the limit itself it passes."""
    ratio = measure_package(package, checkpoint).ratio
    monkeypatch.setitem(LIMITS, "fp32", ratio)
    assert check_package(package, checkpoint).limit == ratio
    monkeypatch.setitem(LIMITS, "fp32", ratio * 0.999)
    with pytest.raises(PackageError, match=r"fp32 package of tiny has .* the limit is .*another quantisation"):
        check_package(package, checkpoint)


def test_figures_have_names_and_few_digits():
    """What a manifest keeps: perplexities and agreement by text, the ratio, nothing that was not measured."""
    text = TextReport(name="a", num_tokens=9, perplexity=3.123456, reference_perplexity=3.0, agreement=0.987654)
    alone = replace(text, name="b", reference_perplexity=None, agreement=None)
    report = CheckReport(quantization="w4", texts=(text, alone), ratio=1.0123456, limit=1.03)
    assert report.as_fidelity() == {
        "perplexity_a": 3.1235,
        "reference_perplexity_a": 3.0,
        "agreement_a": 0.9877,
        "perplexity_b": 3.1235,
        "perplexity_ratio": 1.01235,
    }
    assert "perplexity_ratio" not in replace(report, ratio=None).as_fidelity()


def test_a_graph_that_does_not_load_is_refused(checkpoint, tmp_path):
    """Bytes that are no graph: a refusal that names the file."""
    package = tiny_package(tmp_path, checkpoint)
    package.graph_path.write_bytes(b"no graph")
    with pytest.raises(PackageError, match=rf"{GRAPH} does not load"):
        measure_package(package, None)


def test_odds_that_are_no_numbers_are_refused(tmp_path):
    """Finite weights can still overflow; then nothing is judged good."""
    tensors = tiny_weights()
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    package = tiny_package(tmp_path, tiny_checkpoint(tmp_path, tensors=tensors))
    with pytest.raises(PackageError, match="not numbers"):
        measure_package(package, None)


def test_chunks_cover_the_text_once(package):
    """Every token is run once and in order, however the length falls on the chunks."""
    graph = check._Graph(package)
    ids = [token % 200 for token in itertools.islice(itertools.count(3, 7), check.CHUNK + 1)]
    for count in (1, check.CHUNK, check.CHUNK + 1):
        assert graph.logprobs(ids[:count]).shape == (count, package.manifest.shape.vocab_size)
    np.testing.assert_allclose(graph.logprobs(ids)[:9], graph.logprobs(ids[:9]), atol=1e-5)
