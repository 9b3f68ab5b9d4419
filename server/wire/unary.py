# SPDX-License-Identifier: Apache-2.0
"""Small HTTP bodies: the models, one model, an error."""

from server.core.errors import ServerError
from server.core.types import ModelCard


def error_body(error: ServerError) -> bytes:
    """`{"error": {message, type, param, code}}`."""
    raise NotImplementedError


def models_body(cards: tuple[ModelCard, ...]) -> bytes:
    """The list of models, default first."""
    raise NotImplementedError


def model_body(cards: tuple[ModelCard, ...], model_id: str) -> bytes:
    """One model.

    Raises:
        ServerError: `model_not_found`.
    """
    raise NotImplementedError
