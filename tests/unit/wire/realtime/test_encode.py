# SPDX-License-Identifier: Apache-2.0
"""Events become Realtime frames in the exact order, each valid for the official client."""

import pytest

from server.core.errors import error_of
from server.core.events import (
    ConversationReset,
    Delta,
    Failed,
    ItemAdded,
    ItemDeleted,
    ItemRetrieved,
    SessionCreated,
    SessionDescribed,
    SessionSettings,
    SessionUpdated,
    TurnFinished,
    TurnStarted,
)
from server.core.types import ContentPart, FinishReason, Item, Role, SamplingParams, Truncation, Usage
from server.wire.realtime.encode import EventFrames
from tests.data.realtime_order import RealtimeOrder, validate

SETTINGS = SessionSettings(model="m", instructions="be brief")
CREATED = SessionCreated(session_id="sess_1", settings=SETTINGS)


def started(turn_id="resp_1", item_id="item_1", **changes):
    given = {"previous_item_id": "item_0", "settings": SETTINGS, "is_out_of_band": False, **changes}
    return TurnStarted(turn_id=turn_id, item_id=item_id, **given)


def finished(turn_id="resp_1", reason=FinishReason.STOP, text="ab", **changes):
    usage = Usage(input_tokens=5, output_tokens=2, cached_tokens=3)
    return TurnFinished(turn_id=turn_id, reason=reason, text=text, usage=usage, **changes)


def turn(**changes):
    deltas = [Delta(turn_id="resp_1", index=0, text="a"), Delta(turn_id="resp_1", index=1, text="b")]
    return [started(**changes), *deltas, finished()]


def frames_of(*events):
    """All frames of a connection, checked for order and types."""
    encoder, order = EventFrames(), RealtimeOrder()
    frames = [frame for event in (CREATED, *events) for frame in encoder.frames(event)]
    for number, frame in enumerate(frames):
        order.feed({"event_id": f"event_{number}", **frame})
    order.finish()
    return frames[1:]


def test_a_text_turn_has_the_documented_order():
    """The whole response, as the official service sends it."""
    assert [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ] == [frame["type"] for frame in frames_of(*turn())]


def test_out_of_band_leaves_the_conversation_out():
    """No conversation.item.* pair and no conversation id."""
    frames = frames_of(*turn(is_out_of_band=True))
    assert not [frame for frame in frames if frame["type"].startswith("conversation.")]
    assert frames[0]["response"]["conversation_id"] is None


def test_turns_interleave_without_mixing():
    """Frames of two responses are told apart by their ids."""
    frames = frames_of(
        started(),
        started("resp_2", "item_2", is_out_of_band=True),
        Delta(turn_id="resp_2", index=0, text="x"),
        Delta(turn_id="resp_1", index=0, text="a"),
        finished("resp_2", text="x"),
        finished(text="a"),
    )
    assert ["resp_2", "resp_1"] == [f["response"]["id"] for f in frames if f["type"] == "response.done"]


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        (FinishReason.STOP, "completed", None),
        (FinishReason.LENGTH, "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}),
        (FinishReason.FILTERED, "incomplete", {"type": "incomplete", "reason": "content_filter"}),
        (FinishReason.CANCELLED, "cancelled", {"type": "cancelled", "reason": "client_cancelled"}),
    ],
)
def test_each_reason_has_its_status(reason, status, details):
    """And the item of an unfinished answer is incomplete, with the text so far."""
    done = frames_of(started(), Delta(turn_id="resp_1", index=0, text="ab"), finished(reason=reason))[-1]
    assert (status, details) == (done["response"]["status"], done["response"]["status_details"])


def test_a_failed_turn_closes_its_parts_and_tells_why():
    """The error stands in response.done; no text of ours leaks a cause."""
    error = error_of("engine_error", "the model failed while answering")
    done = frames_of(started(), finished(reason=FinishReason.ERROR, text="", error=error))[-1]
    wanted = {"type": "server_error", "code": "engine_error", "message": error.message}
    assert {"type": "failed", "error": wanted} == done["response"]["status_details"]


def test_a_wait_is_told_where_we_know_one():
    """A client may then retry in time instead of by guess; where there is none, no field is there."""
    busy = error_of("queue_full", "12 requests wait", retry_after_ms=7_000)
    (frame,) = frames_of(Failed(error=busy, event_id=None))
    assert frame["error"]["retry_after_ms"] == 7_000
    done = frames_of(started(), finished(reason=FinishReason.ERROR, text="", error=busy))[-1]
    assert done["response"]["status_details"]["error"]["retry_after_ms"] == 7_000


def test_an_ended_turn_is_forgotten():
    """A connection that lives for days holds its open turns only."""
    encoder = EventFrames()
    for event in (CREATED, *turn()):
        encoder.frames(event)
    with pytest.raises(KeyError):
        encoder.frames(Delta(turn_id="resp_1", index=2, text="c"))


def test_usage_and_truncation_are_told():
    """Cached tokens stand where the client's type has them; dropped items as a field of their own."""
    response = frames_of(started(), finished(text="", num_dropped_items=4))[-1]["response"]
    usage = response["usage"]
    assert (7, 5, 2) == (usage["total_tokens"], usage["input_tokens"], usage["output_tokens"])
    assert 3 == usage["input_token_details"]["cached_tokens"]
    assert 4 == response["truncated"]
    assert "truncated" not in frames_of(*turn())[-1]["response"]


def test_a_response_repeats_its_request():
    """Metadata, the effective bound and the conversation, in created and done alike."""
    settings = SessionSettings(model="m", sampling=SamplingParams(max_tokens=9))
    frames = frames_of(*turn(settings=settings, metadata=(("k", "v"),)))
    for response in (frames[0]["response"], frames[-1]["response"]):
        assert ({"k": "v"}, 9) == (response["metadata"], response["max_output_tokens"])
        assert ("conv_1", ["text"]) == (response["conversation_id"], response["output_modalities"])


def test_a_session_shows_its_effective_settings():
    """Text only, whatever was asked for, and the vendor fields under their plain names."""
    sampling = SamplingParams(temperature=0.5, top_k=3, seed=7, stop=("x",))
    settings = SessionSettings(model="m", sampling=sampling, truncation=Truncation.DISABLED)
    (frame,) = frames_of(SessionUpdated(session_id="sess_1", settings=settings))
    session = frame["session"]
    assert ("session.updated", "realtime", ["text"]) == (
        frame["type"], session["type"], session["output_modalities"]
    )  # fmt: skip
    assert ("inf", "disabled", []) == (session["max_output_tokens"], session["truncation"], session["tools"])
    assert (0.5, 3, 7, ["x"]) == tuple(session[name] for name in ("temperature", "top_k", "seed", "stop"))


@pytest.mark.parametrize(
    ("role", "kind"),
    [(Role.SYSTEM, "input_text"), (Role.USER, "input_text"), (Role.ASSISTANT, "output_text")],
)
def test_client_items_are_added_and_done_at_once(role, kind):
    """Both frames carry the whole item and its place."""
    item = Item(id="i1", role=role, parts=(ContentPart(text="x"), ContentPart(text="y")))
    added, done = frames_of(ItemAdded(item=item, previous_item_id=None))
    assert added["item"] == done["item"]
    assert [{"type": kind, "text": "x"}, {"type": kind, "text": "y"}] == added["item"]["content"]
    assert added["previous_item_id"] is done["previous_item_id"] is None


def test_items_are_retrieved_and_deleted():
    """One frame each."""
    item = Item(id="i1", role=Role.USER, parts=(ContentPart(text="x"),))
    retrieved, deleted = frames_of(ItemRetrieved(item=item), ItemDeleted(item_id="i1"))
    assert ("i1", "i1") == (retrieved["item"]["id"], deleted["item_id"])


def test_an_error_carries_the_clients_event_id():
    """So that a client knows which of its events failed."""
    error = error_of("invalid_value", "'session.temperature' must be…", param="session.temperature")
    (frame,) = frames_of(Failed(error=error, event_id="mine"))
    wanted = ("invalid_request_error", "invalid_value", "session.temperature", "mine")
    assert wanted == tuple(frame["error"][name] for name in ("type", "code", "param", "event_id"))


def test_events_of_other_protocols_are_silent():
    """No client of this protocol asked."""
    described = SessionDescribed(session_id="sess_1", settings=SETTINGS, items=())
    assert [] == frames_of(ConversationReset(), described)


def faulty(change):
    """The frames of a good turn with one fault planted."""
    encoder = EventFrames()
    frames = [frame for event in (CREATED, *turn()) for frame in encoder.frames(event)]
    return change([{"event_id": f"event_{number}", **frame} for number, frame in enumerate(frames)])


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f[1:],
        lambda f: f[:-1],
        lambda f: [*f[:2], f[3], f[2], *f[4:]],
        lambda f: [*f[:5], *f[6:]],
        lambda f: [*f, f[-1]],
        lambda f: [*f[:6], {**f[5], "event_id": "other", "item_id": "other"}, *f[6:]],
        lambda f: [*f[:7], {**f[7], "text": "other"}, *f[8:]],
        lambda f: [*f[:2], {**f[1], "event_id": "again"}, *f[2:]],
        lambda f: [*f[:1], {**f[1], "event_id": f[0]["event_id"]}, *f[2:]],
    ],
)
def test_the_order_checker_bites(change):
    """A frame missing, doubled, moved, changed or unnamed is found."""
    order = RealtimeOrder()

    def check():
        for frame in faulty(change):
            order.feed(frame)
        order.finish()

    with pytest.raises((AssertionError, KeyError)):
        check()


def test_the_validator_bites():
    """A frame of a wrong type is found."""
    with pytest.raises(ValueError, match="delta"):
        validate({"type": "response.output_text.delta", "event_id": "e", "response_id": "r", "item_id": "i",
                  "output_index": 0, "content_index": 0, "delta": 5})  # fmt: skip
