# SPDX-License-Identifier: Apache-2.0
"""One connection's codec: commands in, named frames out."""

import itertools
import json

import pytest

from server.core.events import CancelResponse, Delta, SessionCreated, SessionSettings, TurnStarted
from server.wire.frames import DecodeFault
from server.wire.realtime.codec import RealtimeCodec


def codec():
    numbers = itertools.count()
    return RealtimeCodec(lambda prefix: f"{prefix}_{next(numbers)}")


def test_every_frame_has_an_event_id_of_its_own_in_order():
    """Drawn as the frames are spelled."""
    made = codec()
    settings = SessionSettings(model="m")
    started = TurnStarted(
        turn_id="r", item_id="i", previous_item_id=None, settings=settings, is_out_of_band=False
    )
    frames = made.encode(SessionCreated(session_id="s", settings=settings)) + made.encode(started)
    assert [f"event_{n}" for n in range(5)] == [json.loads(frame)["event_id"] for frame in frames]


def test_any_text_of_a_model_can_be_sent():
    """A lone surrogate becomes U+FFFD, never an exception."""
    made = codec()
    settings = SessionSettings(model="m")
    made.encode(
        TurnStarted(turn_id="r", item_id="i", previous_item_id=None, settings=settings, is_out_of_band=True)
    )
    (frame,) = made.encode(Delta(turn_id="r", index=0, text="a\ud800字"))
    assert "a\ufffd字" == json.loads(frame)["delta"]


def test_decode_gives_one_command_or_a_fault():
    """A fault leaves the codec as it was."""
    made = codec()
    with pytest.raises(DecodeFault):
        made.decode("{")
    assert [CancelResponse()] == made.decode('{"type":"response.cancel"}')
