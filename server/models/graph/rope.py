# SPDX-License-Identifier: Apache-2.0
"""Rotary angles: the frequencies of each scaling kind and the tables that attention reads.

Formulas: RoPE (Su et al. 2021, arXiv 2104.09864); linear (Chen et al. 2023, arXiv 2306.15595); llama3 as in
Hugging Face transformers `_compute_llama3_parameters`. An unknown kind is refused: a wrong angle reads well
on short chats and breaks long ones.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from server.models.readers.checkpoint import ArchConfig, CheckpointError, FloatArray

KINDS = ("default", "linear", "llama3", "divisors")


def frequencies(config: ArchConfig) -> npt.NDArray[np.float64]:
    """Radians per position of each rotary pair, [head_dim / 2].

    Raises:
        CheckpointError: a scaling kind that is not known, or a number of it that is missing or impossible.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain: npt.NDArray[np.float64] = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind not in KINDS:
        raise CheckpointError(f"rope scaling {kind!r} is not supported; supported: {', '.join(KINDS)}")
    try:
        with np.errstate(all="ignore"):  # what comes of a bad number is judged below
            scaled = plain / _divisors(kind, plain, scaling)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"rope scaling {kind!r} lacks or spoils {error}") from error
    if not (np.isfinite(scaled) & (scaled > 0)).all():
        raise CheckpointError(f"rope scaling {kind!r} of {dict(scaling)} makes frequencies that are none")
    return scaled


def tables(config: ArchConfig) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines of every position, each [context_length, head_dim / 2]."""
    angles = np.outer(np.arange(config.context_length), frequencies(config))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _divisors(kind: str, plain: npt.NDArray[np.float64], scaling: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """By how much each pair is slowed."""
    if kind == "linear":
        return np.full_like(plain, scaling["factor"])
    if kind == "divisors":
        return np.asarray(scaling["divisors"], np.float64)
    return plain / _llama3(plain, scaling) if kind == "llama3" else np.ones_like(plain)


def _llama3(plain: npt.NDArray[np.float64], scaling: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Slow pairs are slowed by `factor`, fast ones stay, those between are blended by wavelength."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * plain / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain / factor * (1 - blend) + plain * blend
