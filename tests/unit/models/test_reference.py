# SPDX-License-Identifier: Apache-2.0
"""The slow forward pass against a slower one, and what it shows of itself to those who calibrate."""

import numpy as np
import pytest

from server.models.reference import ReferenceModel, negative_log_likelihoods
from tests.checkpoints import log_softmax, reference_greedy, reference_logits, tiny_checkpoint

TOKENS = [int(token) for token in np.random.default_rng(11).integers(0, 256, 17)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


class Counted:
    """A checkpoint that counts how often each tensor is decoded."""

    def __init__(self, checkpoint):
        self.checkpoint, self.config, self.reads = checkpoint, checkpoint.config, []

    def names(self):
        return self.checkpoint.names()

    def tensor(self, name):
        self.reads.append(name)
        return self.checkpoint.tensor(name)


@pytest.mark.parametrize("size", [1, 4, 17])
def test_it_is_the_twin_written_out(checkpoint, size):
    """At once, in chunks or token by token: logits of a pass that writes every position out."""
    model = ReferenceModel(checkpoint)
    found = [model.forward(TOKENS[start : start + size]) for start in range(0, len(TOKENS), size)]
    np.testing.assert_allclose(np.concatenate(found), reference_logits(checkpoint, TOKENS), atol=1e-4)
    assert model.num_tokens == len(TOKENS)


def test_a_forgotten_sequence_leaves_nothing(checkpoint):
    """After `reset` a sequence is as in a fresh model, bit for bit."""
    model = ReferenceModel(checkpoint)
    first = model.forward(TOKENS)
    model.forward(TOKENS[:3])
    model.reset()
    assert model.num_tokens == 0
    np.testing.assert_array_equal(model.forward(TOKENS), first)


def test_greedy_text_is_the_twins_and_stops_at_an_end(checkpoint):
    """The most likely continuation, which ends before an end token and is never longer than asked."""
    expected = reference_greedy(checkpoint, TOKENS[:5], 8)
    model = ReferenceModel(checkpoint)
    model.forward(TOKENS)
    assert model.greedy(TOKENS[:5], 8) == expected
    assert model.greedy(TOKENS[:5], 0) == []
    end = expected[3]
    assert model.greedy(TOKENS[:5], 8, [end]) == expected[: expected.index(end)]


@pytest.mark.parametrize(("flag", "is_own"), [(True, False), (False, True), (None, True)])
def test_the_head_is_its_own_unless_it_is_tied(tmp_path, flag, is_own):
    """A tied model reads its embedding even when the file repeats a head."""
    checkpoint = tiny_checkpoint(tmp_path, {"tie_word_embeddings": flag}, has_head=True)
    right = "lm_head.weight" if is_own else "model.embed_tokens.weight"
    np.testing.assert_array_equal(ReferenceModel(checkpoint)._head(), checkpoint.tensor(right))


def test_kept_weights_are_decoded_once(checkpoint):
    """With `keeps_weights` no tensor is read twice; without it the same numbers come at no memory."""
    kept, plain = Counted(checkpoint), Counted(checkpoint)
    models = [ReferenceModel(kept, keeps_weights=True), ReferenceModel(plain)]
    for _ in range(2):
        first, second = (model.forward(TOKENS[:4]) for model in models)
        np.testing.assert_array_equal(first, second)
    assert len(kept.reads) == len(set(kept.reads))
    assert len(plain.reads) > 2 * len(set(plain.reads)) - 1


def test_surprise_is_of_the_token_that_came():
    """One value for each token after the first, natural logarithm, from logits or from their odds alike."""
    logits = np.random.default_rng(0).normal(0, 3, (4, 9)).astype(np.float32)
    ids = [8, 2, 0, 5]
    expected = [-log_softmax(logits)[place, ids[place + 1]] for place in range(3)]
    for scores in (logits, log_softmax(logits), logits + 1000):
        np.testing.assert_allclose(negative_log_likelihoods(scores, ids), expected, atol=1e-3)
    even = negative_log_likelihoods(np.zeros((3, 50), np.float32), [1, 2, 3])
    np.testing.assert_allclose(np.exp(even), 50, rtol=1e-5)
