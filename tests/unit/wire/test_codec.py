# SPDX-License-Identifier: Apache-2.0
"""A path chooses its protocol."""

import pytest

from server.core.events import SessionCreated, SessionSettings
from server.wire.codec import CODECS
from server.wire.frames import DecodeFault
from server.wire.plain import PlainCodec
from server.wire.realtime.codec import RealtimeCodec


def test_each_path_has_its_codec():
    """The socket routes exactly these."""
    assert {"/v1/realtime": RealtimeCodec, "/chat": PlainCodec} == CODECS


@pytest.mark.parametrize("path", CODECS)
def test_every_codec_greets_and_refuses_binary(path):
    """What a socket relies on, whatever the protocol: a greeting, and faults as DecodeFault only."""
    codec = CODECS[path](lambda prefix: f"{prefix}_1")
    assert codec.encode(SessionCreated(session_id="s_1", settings=SessionSettings(model="m")))
    with pytest.raises(DecodeFault):
        codec.decode(b"\xff\x00")
