# SPDX-License-Identifier: Apache-2.0
"""Timings become figures, and nothing else is counted."""

import json
from xml.etree import ElementTree as ET

import pytest

from server.cli.bench.clients import TurnTiming
from server.cli.bench.report import as_json, as_svg, as_text, percentile, summarise


def timing(turn=0, start=0.0, arrivals=(0.5, 0.6, 0.8), end=1.0, error=None):
    return TurnTiming(
        client=0,
        turn=turn,
        started_at=start,
        arrivals=tuple(start + moment for moment in arrivals),
        ended_at=start + end,
        input_tokens=10,
        output_tokens=3,
        cached_tokens=2,
        text="abc",
        error=error,
    )


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [((), 50, 0.0), ((7.0,), 99, 7.0), ((1.0, 3.0), 50, 2.0), ((4.0, 1.0, 3.0, 2.0), 100, 4.0)],
)
def test_percentile_interpolates(values, percent, expected):
    """A percentile lies between its neighbours, in any order of the values."""
    assert expected == percentile(values, percent)


def test_rate_spans_first_send_to_last_end():
    """Tokens per second are all good tokens over the whole span of the run."""
    summary = summarise("x", 2, [timing(start=0.0), timing(start=1.0)])
    assert (6, 2.0, 3.0) == (summary.output_tokens, summary.seconds, summary.output_tokens_per_s)


def test_failed_turns_count_as_errors_only():
    """A failed turn adds its error's name, no token and no time."""
    summary = summarise("x", 2, [timing(), timing(error="queue_full")])
    assert ({"queue_full": 1}, 1, 3) == (summary.errors, summary.turns, summary.output_tokens)


def test_later_turns_are_told_apart():
    """The first token of a later turn, which may reuse the history, has figures of its own."""
    summary = summarise("x", 1, [timing(), timing(turn=1, start=1.0, arrivals=(0.1,))])
    assert (500.0, 100.0) == (summary.first_token_ms[0], summary.later_first_token_ms[0])


def test_a_run_without_a_good_turn_is_all_zeros():
    """Nothing measured is shown as zero, not as a crash."""
    summary = summarise("x", 1, [timing(error="TimeoutError")])
    assert 0.0 == summary.output_tokens_per_s == summary.gap_ms_max


def test_text_json_and_picture_tell_the_same_run():
    """Each form of the report names the run's rate; the picture is well-formed and escapes its words."""
    summaries = [summarise("<peer>", 4, [timing()])]
    assert "3.0" in as_text(summaries)
    assert 3.0 == json.loads(json.dumps(as_json(summaries)))[0]["output_tokens_per_s"]
    words = [element.text for element in ET.fromstring(as_svg("a < b", summaries)).iter() if element.text]
    assert {"a < b", "<peer>", "3", "4"} <= {word.strip() for word in words}
