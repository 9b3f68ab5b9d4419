# SPDX-License-Identifier: Apache-2.0
"""Small bodies, valid for the official client."""

import json

import pytest
from openai.types import Model

from server.core.errors import ServerError, error_of
from server.core.types import ModelCard
from server.wire.unary import error_body, find_card, model_body, models_body

CARDS = tuple(
    ModelCard(id=name, created=7, context_length=512, quantization="w8a8", fingerprint="fp_1") for name in "ab"
)


def test_models_are_listed_default_first():
    """Each as the client's Model."""
    listed = json.loads(models_body(CARDS))
    assert ("list", ["a", "b"]) == (listed["object"], [model["id"] for model in listed["data"]])
    for model in listed["data"]:
        Model.model_validate(model, strict=True)


def test_one_model():
    """The same shape alone."""
    assert json.loads(models_body(CARDS))["data"][1] == json.loads(model_body(CARDS, "b"))


@pytest.mark.parametrize(("cards", "code"), [(CARDS, "model_not_found"), ((), "engine_unavailable")])
def test_an_unknown_model_is_told_from_no_model_at_all(cards, code):
    """The first is the client's to mend, the second time's."""
    with pytest.raises(ServerError) as caught:
        model_body(cards, "z" * 99)
    assert code == caught.value.code


def test_the_first_card_answers_when_none_is_named():
    """As `models()` promises."""
    assert CARDS[0] is find_card(CARDS, None)


def test_an_error_has_its_four_fields():
    """Whatever is unknown is null."""
    error = error_of("invalid_value", "no", param="n")
    wanted = {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    assert {"error": wanted} == json.loads(error_body(error))
