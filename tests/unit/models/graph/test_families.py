# SPDX-License-Identifier: Apache-2.0
"""Families: only what is proved is named."""

import numpy as np
import pytest

from server.models.graph.families import FAMILIES
from server.models.readers.safetensors import FAMILIES as READABLE
from tests.checkpoints import GraphRows, reference_logprobs, tiny_checkpoint, tiny_package

TOKENS = [11, 3, 200, 57, 9, 130, 64]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_computes_what_its_twin_does(family, tmp_path):
    """Each family's graph gives the odds of the plain forward pass."""
    checkpoint = tiny_checkpoint(tmp_path, {"model_type": family})
    found = GraphRows(tiny_package(tmp_path, checkpoint)).feed({0: TOKENS})[0]
    np.testing.assert_allclose(found, reference_logprobs(checkpoint, TOKENS), atol=1e-4)


def test_a_reader_names_no_family_that_cannot_be_built():
    """What a reader accepts, the builder knows."""
    assert set(READABLE.values()) <= set(FAMILIES)


def test_a_row_bears_its_own_name():
    """A row is found under the name that it states."""
    assert all(family.name == name for name, family in FAMILIES.items())
