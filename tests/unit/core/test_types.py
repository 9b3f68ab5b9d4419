# SPDX-License-Identifier: Apache-2.0
"""The nouns: compared by content, never changed."""

import dataclasses

import pytest

from server.core.types import ContentPart, GenerationRequest, Item, Principal, Role, SamplingParams, Usage


def test_an_item_reads_as_one_text():
    """A model reads an item's parts joined, in order."""
    item = Item(id="a", role=Role.USER, parts=(ContentPart(text="你"), ContentPart(text="好")))
    assert item.text == "你好"


def test_values_are_compared_by_content_and_frozen():
    """Equal content is equal, usable as a key, and can't be changed."""
    one, other = (GenerationRequest(id="r", model="m", items=()) for _ in range(2))
    assert one == other
    assert len({one, other}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.model = "x"


def test_usage_adds_up():
    """The total is input and output; cached tokens are part of the input."""
    assert Usage(input_tokens=3, output_tokens=4, cached_tokens=2).total_tokens == 7


def test_defaults_bound_nothing_by_surprise():
    """Without a word from anybody: no filter of tokens, no stop, no bound, a seed drawn by the server."""
    params = SamplingParams()
    assert (params.top_k, params.top_p, params.min_p, params.stop) == (0, 1.0, 0.0, ())
    assert (params.seed, params.max_tokens) == (None, None)
    assert Principal().tenant == "default"
