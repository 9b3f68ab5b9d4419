# SPDX-License-Identifier: Apache-2.0
"""The two halves of our texts: the same kinds, nothing in common, long enough to mean something."""

import pytest

from server.models.texts import CALIBRATION, EVALUATION

HALVES = pytest.mark.parametrize("texts", [CALIBRATION, EVALUATION], ids=["calibration", "evaluation"])
RUN = 24  # letters in a row that two independent texts do not share


def runs(text):
    return {text[start : start + RUN] for start in range(len(text) - RUN + 1)}


def test_both_halves_hold_the_same_kinds():
    """What is calibrated is what is measured: prose in two languages, and a chat."""
    assert list(CALIBRATION) == list(EVALUATION) == ["english", "chinese", "chat"]


@pytest.mark.parametrize("name", CALIBRATION)
def test_nothing_is_measured_on_what_it_was_calibrated_on(name):
    """The halves share no run of words, so neither flatters the other."""
    assert not runs(CALIBRATION[name]) & runs(EVALUATION[name])


@HALVES
def test_each_text_is_long_enough_to_measure(texts):
    """A perplexity over fewer tokens is noise; a Chinese character is about a token, as four letters are."""
    assert all(len(text) >= (150 if name == "chinese" else 600) for name, text in texts.items())


@HALVES
def test_each_text_is_of_its_kind(texts):
    """The Chinese text is Chinese, the English one plain ASCII, and the chat has both speakers."""
    assert sum("一" <= letter <= "鿿" for letter in texts["chinese"]) > 0.8 * len(texts["chinese"])
    assert texts["english"].isascii()
    assert texts["chat"].startswith("User: ")
    assert "\nAssistant: " in texts["chat"]
