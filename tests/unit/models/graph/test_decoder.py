# SPDX-License-Identifier: Apache-2.0
"""The graph against the plain forward pass, in any chunks and any company, and tied heads in every spelling."""

import numpy as np
import onnx
import pytest

from server.models.graph.decoder import TOPK, build_graph
from server.models.graph.writer import GraphWriter
from server.models.package import GRAPH, GRAPH_DATA
from server.models.readers.checkpoint import CheckpointError
from tests.checkpoints import (
    GraphRows,
    log_softmax,
    reference_greedy,
    reference_logprobs,
    tiny_checkpoint,
    tiny_package,
    tiny_weights,
)

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 23)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def package(checkpoint, tmp_path_factory):
    return tiny_package(tmp_path_factory.mktemp("home"), checkpoint)


@pytest.fixture(scope="module")
def w8a8(checkpoint, tmp_path_factory):
    return tiny_package(tmp_path_factory.mktemp("home"), checkpoint, "w8a8")


@pytest.fixture(scope="module")
def expected(checkpoint):
    return reference_logprobs(checkpoint, TOKENS)


def check(checkpoint, home, tokens=TOKENS):
    """The fp32 graph's odds are the plain forward pass's."""
    found = GraphRows(tiny_package(home, checkpoint)).feed({0: tokens})[0]
    np.testing.assert_allclose(found, reference_logprobs(checkpoint, tokens), atol=1e-4)


@pytest.mark.parametrize("size", [1, 5, 7, 22, 23])
def test_chunks_do_not_matter(package, expected, size):
    """Token by token, in chunks with a rest, or whole: the odds are the reference's."""
    np.testing.assert_allclose(GraphRows(package).feed_chunks(TOKENS, size), expected, atol=1e-4)


def test_company_does_not_matter(package, checkpoint, expected):
    """Rows of other lengths, idle rows, and rows that join later leave a row as it was."""
    rows = GraphRows(package, num_rows=5)
    rows.feed({1: TOKENS[:9], 4: TOKENS[5:7]})
    rows.feed({4: TOKENS[7:8]})
    found = rows.feed({0: TOKENS[::-1], 1: TOKENS[9:12], 3: TOKENS[:1]})
    np.testing.assert_allclose(found[1], expected[9:12], atol=1e-4)
    np.testing.assert_allclose(found[0], reference_logprobs(checkpoint, TOKENS[::-1]), atol=1e-4)
    np.testing.assert_allclose(found[3], expected[:1], atol=1e-4)
    np.testing.assert_allclose(rows.feed({1: TOKENS[12:]})[1], expected[12:], atol=1e-4)


@pytest.mark.parametrize("size", [2, 5, 7, 21])
def test_w8a8_has_the_same_bits_in_any_chunks_and_company(w8a8, size):
    """Cut anywhere into two tokens or more, beside longer and louder rows: bit for bit the row alone."""
    alone = GraphRows(w8a8).feed({0: TOKENS})[0]
    rows = GraphRows(w8a8, num_rows=4)
    rows.feed({3: TOKENS * 3})
    first = rows.feed({0: TOKENS[9:12], 1: TOKENS[:size], 3: TOKENS[:17]})[1]
    second = rows.feed({1: TOKENS[size:], 3: TOKENS[:2]})[1]
    np.testing.assert_array_equal(np.concatenate([first, second]), alone)


def test_w8a8_decodes_the_same_bits_in_any_company(w8a8):
    """One token at a time, alone or beside others at other places of their texts: the same bits."""
    alone, rows = GraphRows(w8a8), GraphRows(w8a8, num_rows=3)
    alone.feed({0: TOKENS[:9]})
    rows.feed({1: TOKENS[:9]})
    rows.feed({0: TOKENS, 2: TOKENS[:3]})
    for step in range(9, 14):
        token = TOKENS[step : step + 1]
        found = rows.feed({0: token, 1: token} if step % 2 else {1: token, 2: TOKENS[:1]})[1]
        np.testing.assert_array_equal(found, alone.feed({0: token})[0])


def test_greedy_text_is_the_references(package, checkpoint):
    """Twelve tokens one by one, each the reference's most likely."""
    assert GraphRows(package).greedy(TOKENS[:6], 12) == reference_greedy(checkpoint, TOKENS[:6], 12)


def test_the_best_are_those_of_the_whole_row(package):
    """Top ids and their odds are the whole row's, the best first; as many as the manifest says."""
    whole, best, odds = (
        GraphRows(package).feed({0: TOKENS}, output)[0] for output in ("logprobs", "topk_ids", "topk_logprobs")
    )
    assert best.shape[1] == package.manifest.shape.topk == TOPK
    np.testing.assert_array_equal(best, np.argsort(-whole, axis=1, kind="stable")[:, :TOPK])
    np.testing.assert_array_equal(odds, np.take_along_axis(whole, best, axis=1))
    np.testing.assert_allclose(np.exp(whole).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32},
        {"num_hidden_layers": 1, "hidden_size": 100, "intermediate_size": 36, "rms_norm_eps": 1e-2},
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "rope_theta": None},
    ],
    ids=["own heads", "one head for all", "odd sizes", "llama3 angles", "linear angles", "theta inside"],
)
def test_every_setting_reaches_the_graph(settings, tmp_path):
    """Heads, sizes, epsilon and angles are the checkpoint's; positions go far past the original context."""
    check(tiny_checkpoint(tmp_path, settings), tmp_path, TOKENS * 4)


def test_the_context_is_the_tables_length(tmp_path):
    """The last position of the context is right, and there is no row of angles after it."""
    checkpoint = tiny_checkpoint(tmp_path, {"max_position_embeddings": 40})
    check(checkpoint, tmp_path, (TOKENS * 2)[:40])
    shape = tiny_package(tmp_path, checkpoint).manifest.shape
    assert shape.context_length == 40
    assert tensors_of(tmp_path)["rope.cos"] == tensors_of(tmp_path)["rope.sin"] == [40, 8]


def test_a_small_vocabulary_narrows_the_best(tmp_path):
    """With fewer tokens than the usual width every token is among the best."""
    checkpoint = tiny_checkpoint(tmp_path, {"vocab_size": 50})
    package = tiny_package(tmp_path, checkpoint)
    assert package.manifest.shape.topk == package.manifest.shape.vocab_size == package.manifest.num_tokens == 50
    best = GraphRows(package).feed({0: [1, 2]}, "topk_ids")[0]
    assert sorted(best[0].tolist()) == list(range(50))


def test_heads_that_the_kernel_cannot_turn_are_refused(tmp_path):
    """Rotation works on multiples of 16 values; another width is told at the build, not at the first run."""
    checkpoint = tiny_checkpoint(tmp_path, {"head_dim": 24})
    with pytest.raises(CheckpointError, match="heads of 24 values"):
        tiny_package(tmp_path, checkpoint)


def tied_cases():
    """Name, flag, whether a head is in the file, whether it is the embedding, whose head is right."""
    yield "tied", True, None, "embedding"
    yield "tied, the same head in the file", True, "same", "embedding"
    yield "tied, another head in the file", True, "other", "embedding"
    yield "untied", False, "other", "own"
    yield "nothing said, a head in the file", None, "other", "own"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("case", list(tied_cases()), ids=lambda case: case[0])
@pytest.mark.parametrize("quantization", ["fp32", "w8a8", "w8", "w4"])
def test_the_head_is_the_right_one(case, quantization, shards, tmp_path):
    """A tied model decides by its embedding, an untied one by its own head, in every quantisation."""
    _, flag, head, right = case
    settings = {"tie_word_embeddings": flag, "num_hidden_layers": 1}
    tensors = tiny_weights(settings, has_head=head is not None)
    if head == "same":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    checkpoint = tiny_checkpoint(tmp_path, settings, tensors=tensors, num_shards=shards)
    rows = GraphRows(tiny_package(tmp_path, checkpoint, quantization))
    found = rows.feed({0: TOKENS})[0]
    plain = {"own": HEAD, "embedding": EMBEDDING}
    errors = {}
    for name in plain if head == "other" else [right]:
        twin = {**tensors, HEAD: tensors[plain[name]]}
        untied = tiny_checkpoint(tmp_path / name, settings | {"tie_word_embeddings": False}, tensors=twin)
        errors[name] = np.abs(found - reference_logprobs(untied, TOKENS)).mean()
    assert errors[right] < {"fp32": 1e-5, "w4": 0.4}.get(quantization, 0.05)
    assert min(errors, key=errors.get) == right


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("role", ["embed_tokens", "norm", "layers.1.mlp.up_proj", "layers.0.input_layernorm"])
@pytest.mark.parametrize("quantization", ["fp32", "w8a8", "w4"])
def test_a_value_that_is_not_finite_is_refused(quantization, role, value, tmp_path):
    """One value that is no number anywhere in the file: refused by the tensor's name."""
    tensors = tiny_weights()
    tensors[f"model.{role}.weight"].flat[5] = value
    with pytest.raises(CheckpointError, match=f"tensor model.{role}.weight .*not finite"):
        tiny_package(tmp_path, tiny_checkpoint(tmp_path, tensors=tensors), quantization)


@pytest.mark.parametrize("flag", [False, None])
def test_a_missing_head_is_refused(flag, tmp_path):
    """Untied, or not said in a family that does not tie: a file without a head is incomplete."""
    checkpoint = tiny_checkpoint(tmp_path, {"tie_word_embeddings": flag})
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight"):
        tiny_package(tmp_path, checkpoint)


@pytest.mark.parametrize("head", [None, "same"])
def test_a_tied_table_is_not_stored_as_another_tensor(head, tmp_path):
    """Whether or not the file repeats a tied head, the graph is the same, byte for byte."""
    tensors = tiny_weights(has_head=False)
    plain = tiny_package(tmp_path / "a", tiny_checkpoint(tmp_path / "a", tensors=tensors))
    if head:
        tensors[HEAD] = tensors[EMBEDDING].copy()
    other = tiny_package(tmp_path / "b", tiny_checkpoint(tmp_path / "b", tensors=tensors))
    assert {GRAPH, GRAPH_DATA} <= set(plain.manifest.files)
    assert plain.manifest.files == other.manifest.files


def test_progress_ends_at_its_total(checkpoint, tmp_path):
    """One tick a layer and one for the head, in order."""
    ticks = []
    writer = GraphWriter(tmp_path)
    build_graph(checkpoint, writer, "fp32", lambda done, total: ticks.append((done, total)))
    writer.close()
    assert ticks == [(1, 3), (2, 3), (3, 3)]


def test_log_softmax_of_the_twin_is_one():
    """The twin's own odds sum to 1, so that comparing with them means something."""
    assert np.exp(log_softmax(np.array([[1.0, 2.0, 3.0]]))).sum() == pytest.approx(1)


def tensors_of(home):
    model = onnx.load(home / "models" / "tiny" / "fp32" / GRAPH, load_external_data=False)
    return {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
