# SPDX-License-Identifier: Apache-2.0
"""The seam's own checks: numbers that cannot be, tensors that are not there."""

from dataclasses import replace

import pytest

from server.models.readers.checkpoint import CONTEXT_MAX, ArchConfig, CheckpointError, check_layout
from tests.data.tiny_models import SETTINGS, tiny_tensors

CONFIG = ArchConfig(
    family="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    context_length=128,
    vocab_size=SETTINGS["vocab_size"],
)
SHAPES = {name: tensor.shape for name, tensor in tiny_tensors().items()}


def test_a_whole_checkpoint_passes():
    """Numbers and shapes that agree are accepted, with a head, without one, and with tensors beside them."""
    check_layout(CONFIG, SHAPES, "f")
    check_layout(CONFIG, SHAPES | {"lm_head.weight": (SETTINGS["vocab_size"], 64), "other": (1,)}, "f")


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_tensor_is_needed(name):
    """Whichever tensor is missing or of another shape, it is named."""
    rest = {key: shape for key, shape in SHAPES.items() if key != name}
    with pytest.raises(CheckpointError, match=f"f has no tensor {name}"):
        check_layout(CONFIG, rest, "f")
    with pytest.raises(CheckpointError, match=f"tensor {name} has the shape"):
        check_layout(CONFIG, rest | {name: (*SHAPES[name][:-1], 7)}, "f")


def test_an_own_head_must_fit():
    """A head of another vocabulary is refused."""
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has the shape \[3, 64\]"):
        check_layout(CONFIG, SHAPES | {"lm_head.weight": (3, 64)}, "f")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_layers": 0}, "impossible num_layers of 0"),
        ({"hidden_size": -64}, "impossible hidden_size of -64"),
        ({"num_kv_heads": 0}, "impossible num_kv_heads of 0"),
        ({"norm_eps": float("nan")}, "impossible norm_eps of nan"),
        ({"rope_theta": float("inf")}, "impossible rope_theta of inf"),
        ({"context_length": CONTEXT_MAX + 1}, "positions, at most"),
        ({"num_kv_heads": 3}, "8 heads, no multiple of its 3"),
        ({"head_dim": 7}, "heads of 7 values"),
        ({"num_layers": 10**18}, "no tensor model.layers.2."),
    ],
)
def test_impossible_numbers_are_refused(change, fault):
    """A number that no model has is refused by its name, however large the claim, without counting up to it."""
    with pytest.raises(CheckpointError, match=fault):
        check_layout(replace(CONFIG, **change), SHAPES, "f")
