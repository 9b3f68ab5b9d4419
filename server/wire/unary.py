# SPDX-License-Identifier: Apache-2.0
"""Small HTTP bodies in OpenAI's spelling: the models, one model, an error.

Invariant: every error of every HTTP door is spelled by `error_object`. It must never show a cause that is
not in the error's own message.
"""

from typing import Any

from server.core.errors import ServerError, error_of
from server.core.types import ModelCard
from server.wire.frames import dump


def error_object(error: ServerError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, as a body or a frame of a stream."""
    return {
        "error": {
            "message": error.message,
            "type": error.row.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_body(error: ServerError) -> bytes:
    """The body of an answer with status `error.row.http_status`."""
    return dump(error_object(error))


def find_card(cards: tuple[ModelCard, ...], model_id: str | None) -> ModelCard:
    """The card of a named model; the first when none is named.

    Raises:
        ServerError: `model_not_found`, or `engine_unavailable` when nothing is served at all.
    """
    if not cards:
        raise error_of("engine_unavailable", "no model is ready yet: try again soon", retry_after_ms=1_000)
    for card in cards:
        if model_id is None or card.id == model_id:
            return card
    names = ", ".join(f"'{card.id}'" for card in cards)
    message = f"no model is called '{(model_id or '')[:64]}'; here are: {names}"
    raise error_of("model_not_found", message, param="model")


def models_body(cards: tuple[ModelCard, ...]) -> bytes:
    """The list of models, default first."""
    return dump({"object": "list", "data": [_model(card) for card in cards]})


def model_body(cards: tuple[ModelCard, ...], model_id: str) -> bytes:
    """One model.

    Raises:
        ServerError: `model_not_found`.
    """
    return dump(_model(find_card(cards, model_id)))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "sampan",
        "context_length": card.context_length,
        "quantization": card.quantization,
        "fingerprint": card.fingerprint,
    }
