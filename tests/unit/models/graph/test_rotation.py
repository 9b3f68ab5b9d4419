# SPDX-License-Identifier: Apache-2.0
"""Rotations: orthogonal for every width, even in what they spread, and invisible in what the model computes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.models.graph.rotation import LEFT_MAX, RotatedWeights, Rotation, orthogonal
from server.models.readers.checkpoint import EMBEDDING, HEAD
from tests.checkpoints import GraphRows, reference_logprobs, tiny_checkpoint, tiny_package

TOKENS = [7, 130, 255, 1, 90, 90, 12, 3]


@given(st.integers(1, 200))
def test_a_matrix_is_orthogonal(width):
    """Its transpose undoes it, whatever the width."""
    matrix = orthogonal(width)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-5)


@given(st.integers(1, 400), st.sampled_from([None, 1, LEFT_MAX]))
def test_a_rotation_keeps_lengths_and_products(width, left_max):
    """Mixing both sides of a product changes nothing: what weights and rows are mixed for."""
    rotation = Rotation(width, left_max=left_max)
    rows = np.random.default_rng(width).standard_normal((2, 3, width)).astype(np.float32)
    mixed = rotation.mix(rows)
    np.testing.assert_allclose((mixed * mixed).sum(axis=-1), (rows * rows).sum(axis=-1), rtol=1e-4)
    np.testing.assert_allclose(mixed[0] @ mixed[1].T, rows[0] @ rows[1].T, atol=1e-3)


@pytest.mark.parametrize("width", [64, 576, 896, 1536, 2048, 4864, 8192])
def test_a_lone_outlier_is_spread_over_all(width):
    """One huge channel becomes a row whose largest value is near its mean: int8 loses little of it."""
    rotation = Rotation(width)
    for channel in (0, 1, width // 2, width - 1):
        row = np.zeros(width, np.float32)
        row[channel] = 1000
        mixed = np.abs(rotation.mix(row))
        assert mixed.max() < 2.1 * np.sqrt((mixed * mixed).mean())


def test_channels_with_one_sign_do_not_meet():
    """A row of ones stays spread: the signs break what would add up in the first value."""
    mixed = np.abs(Rotation(576).mix(np.ones(576, np.float32)))
    assert mixed.max() < 5


@pytest.mark.parametrize(("width", "tile"), [(1536, 1536), (8192, 2048), (4864, 1216), (5632, 1408), (97, 1)])
def test_a_rotation_in_the_graph_is_cut_into_tiles(width, tile):
    """Tiles are as large as the limit lets them be, and fill the width exactly."""
    rotation = Rotation(width, left_max=LEFT_MAX)
    assert len(rotation.left) * len(rotation.right) == tile
    assert width % tile == 0


def test_signs_are_the_same_at_every_build():
    """Two builds of a model are the same bytes."""
    np.testing.assert_array_equal(Rotation(576).signs, Rotation(576).signs)
    assert Rotation(576).signs[:12].tolist() == [-1, -1, 1, 1, -1, -1, 1, -1, -1, 1, -1, 1]


@pytest.mark.parametrize("settings", [{}, {"hidden_size": 100, "intermediate_size": 36, "rms_norm_eps": 1e-2}])
@pytest.mark.parametrize("has_head", [False, True])
def test_a_rotated_model_is_the_same_model(settings, has_head, tmp_path, monkeypatch):
    """Every weight rotated and nothing rounded, the graph gives the plain forward pass's odds."""
    settings = settings | {"tie_word_embeddings": not has_head}
    checkpoint = tiny_checkpoint(tmp_path, settings, has_head=has_head)
    monkeypatch.setattr("server.models.graph.products.Products.add", _unrounded)
    found = GraphRows(tiny_package(tmp_path, checkpoint, "w8a8")).feed({0: TOKENS})[0]
    np.testing.assert_allclose(found, reference_logprobs(checkpoint, TOKENS), atol=1e-4)


def test_every_weight_is_turned_and_every_norm_is_one(tmp_path):
    """No weight stays as it was, norms are ones, and a tied head is another matrix than the embedding."""
    checkpoint = tiny_checkpoint(tmp_path)
    rotated = RotatedWeights(
        checkpoint.config, lambda name: checkpoint.tensor(EMBEDDING if name == HEAD else name)
    )
    for name in checkpoint.names():
        values, plain = rotated.tensor(name), checkpoint.tensor(name)
        assert values.shape == plain.shape
        assert values.dtype == np.float32
        assert (values == 1).all() if values.ndim == 1 else np.abs(values - plain).max() > 0.01
    assert np.abs(rotated.tensor(HEAD) - rotated.tensor(EMBEDDING)).max() > 0.01


def _unrounded(self, name, x, weight, packed=None, *, is_even=False):
    del packed, is_even
    return self.writer.node("MatMul", [x, self.writer.tensor(f"{name}.w", weight.T)], [f"{name}.out"])
