# SPDX-License-Identifier: Apache-2.0
"""The texts that packages are measured on: of their kinds, and long enough to mean something."""

from server.models.texts import EVALUATION


def test_each_text_is_long_enough_to_measure():
    """A perplexity over fewer tokens is noise; a Chinese character is about a token, as four letters are."""
    assert list(EVALUATION) == ["english", "chinese", "chat"]
    assert all(len(text) >= (150 if name == "chinese" else 600) for name, text in EVALUATION.items())


def test_each_text_is_of_its_kind():
    """The Chinese text is Chinese, the English one plain ASCII, and the chat has both speakers."""
    chinese = EVALUATION["chinese"]
    assert sum("一" <= letter <= "鿿" for letter in chinese) > 0.8 * len(chinese)
    assert EVALUATION["english"].isascii()
    assert EVALUATION["chat"].startswith("User: ")
    assert "\nAssistant: " in EVALUATION["chat"]
