# SPDX-License-Identifier: Apache-2.0
"""Rotary angles: published ratios, tables of the whole context, and no guess about an unknown kind."""

from dataclasses import replace

import numpy as np
import pytest

from server.models.graph.rope import frequencies, tables
from server.models.readers.checkpoint import ArchConfig, CheckpointError

PLAIN = ArchConfig(
    family="llama",
    num_layers=1,
    hidden_size=64,
    intermediate_size=96,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    context_length=131_072,
    vocab_size=100,
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def scaled(scaling):
    return frequencies(replace(PLAIN, rope_scaling=scaling))


def test_plain_frequencies():
    """Pair i turns by theta^(−2i/dim) a position: the first once a radian, the last almost not."""
    found = frequencies(PLAIN)
    assert found.shape == (32,)
    assert found[0] == 1
    assert found[31] == pytest.approx(500_000 ** (-62 / 64), rel=1e-12)


def test_llama3_slows_only_the_slow_pairs():
    """The ratios of Llama 3.2: 1 up to pair 14, three blended ones, then 1/32."""
    ratios = scaled(LLAMA3) / frequencies(PLAIN)
    np.testing.assert_allclose(ratios[:15], 1)
    np.testing.assert_allclose(ratios[15:18], [0.605573, 0.303743, 0.103448], atol=5e-7)
    np.testing.assert_allclose(ratios[18:], 1 / 32)


def test_linear_slows_every_pair():
    """Linear scaling divides each frequency by its factor."""
    np.testing.assert_allclose(scaled({"rope_type": "linear", "factor": 4}) * 4, frequencies(PLAIN))


def test_divisors_slow_each_pair_by_its_own():
    """A source that lists a divisor for each pair (GGUF's rope_freqs) is taken at its word."""
    divisors = np.linspace(1, 8, 32)
    np.testing.assert_allclose(
        scaled({"rope_type": "divisors", "divisors": divisors}) * divisors, frequencies(PLAIN)
    )


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "su", "mrope", ""])
def test_an_unknown_kind_is_refused_by_name(kind):
    """A wrong angle reads well on short chats and breaks long ones, so nothing is guessed."""
    with pytest.raises(CheckpointError, match=f"rope scaling '{kind}' is not supported"):
        scaled({"rope_type": kind, "factor": 4.0})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": "much"},
        {"rope_type": "linear", "factor": None},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": -2.0},
        {"rope_type": "linear", "factor": float("nan")},
        {name: value for name, value in LLAMA3.items() if name != "low_freq_factor"},
        LLAMA3 | {"factor": 0.0},
        LLAMA3 | {"original_max_position_embeddings": "8k"},
        {"rope_type": "divisors", "divisors": np.ones(31)},
        {"rope_type": "divisors", "divisors": np.zeros(32)},
    ],
)
def test_a_broken_scaling_is_refused(scaling):
    """A number that is missing, no number, or makes angles that are none is the checkpoint's fault."""
    with pytest.raises(CheckpointError, match="rope scaling"):
        scaled(scaling)


def test_tables_cover_the_context():
    """A row a position: none turned at 0, one step at 1, the scaled angle at the last."""
    config = replace(PLAIN, context_length=300, rope_scaling={"rope_type": "linear", "factor": 3.0})
    cosine, sine = tables(config)
    assert cosine.shape == sine.shape == (300, 32)
    assert cosine.dtype == sine.dtype == np.float32
    np.testing.assert_array_equal(cosine[0], np.ones(32, np.float32))
    np.testing.assert_allclose(sine[1], np.sin(frequencies(config)), rtol=1e-6)
    np.testing.assert_allclose(cosine[299], np.cos(299 * frequencies(config)), atol=1e-6)
