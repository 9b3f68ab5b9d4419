# SPDX-License-Identifier: Apache-2.0
"""What any stream of Realtime frames must obey, as a checker every test can run over one.

    order = RealtimeOrder()
    for frame in frames: order.feed(frame)      # raises AssertionError at the first fault
    order.finish()                              # nothing is left open

Each frame is also validated against the type the official client has for it.
"""

from typing import get_args

from openai.types.realtime import RealtimeServerEvent

_MODELS = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(RealtimeServerEvent)[0])
}

_NEXT = {
    "response.created": "response.output_item.added",
    "response.output_item.added": "conversation.item.added",
    "conversation.item.added": "response.content_part.added",
    "response.content_part.added": "response.output_text.done",
    "response.output_text.done": "response.content_part.done",
    "response.content_part.done": "conversation.item.done",
    "conversation.item.done": "response.output_item.done",
    "response.output_item.done": "response.done",
    "response.done": None,
}
"""The order of one response; deltas stand before the text's done, and the conversation.* pair is left out
of band."""


def validate(frame):
    """Validate a frame strictly against the official client's type for it."""
    _MODELS[frame["type"]].model_validate(frame, strict=True)


class _Response:
    def __init__(self, response):
        assert response["status"] == "in_progress"
        assert response["output"] == []
        assert response["usage"] is None
        self.id = response["id"]
        self.in_conversation = response["conversation_id"] is not None
        self.expected = self._after("response.created")
        self.item_id = None
        self.text = ""

    def _after(self, kind):
        following = _NEXT[kind]
        if following and following.startswith("conversation.") and not self.in_conversation:
            return _NEXT[following]
        return following

    def step(self, frame):
        kind = frame["type"]
        if kind == "response.output_text.delta":
            assert self.expected == "response.output_text.done", f"{kind} while {self.expected} is due"
            assert frame["delta"] != "", "an empty delta"
            self.text += frame["delta"]
        else:
            assert kind == self.expected, f"{kind} while {self.expected} is due"
            self.expected = self._after(kind)
        item = frame.get("item") or (frame["response"]["output"][0] if kind == "response.done" else None)
        item_id = item["id"] if item else frame["item_id"]
        self.item_id = self.item_id or item_id
        assert item_id == self.item_id, "the item's id changed"
        assert (frame.get("output_index", 0), frame.get("content_index", 0)) == (0, 0)
        self._check_text(kind, frame, item)

    def _check_text(self, kind, frame, item):
        if kind.endswith("item.added"):
            assert (item["status"], item["content"]) == ("in_progress", [])
        elif item:
            assert item["content"] == [{"type": "output_text", "text": self.text}]
        elif kind == "response.output_text.done":
            assert frame["text"] == self.text
        elif kind.startswith("response.content_part"):
            assert frame["part"] == {"type": "text", "text": self.text}
        if kind == "response.done":
            status = frame["response"]["status"]
            assert status in {"completed", "cancelled", "failed", "incomplete"}
            assert item["status"] == ("completed" if status == "completed" else "incomplete")
            assert (frame["response"]["status_details"] is None) == (status == "completed")
            assert frame["response"]["usage"]["total_tokens"] >= 0


class RealtimeOrder:
    """Feeds on one connection's frames in order."""

    def __init__(self):
        self.num_frames = 0
        self.statuses = {}  # of finished responses, by id
        self._event_ids = set()
        self._open = {}
        self._pending_item = None  # a client's item whose done is due next

    def feed(self, frame):
        """Check one frame.

        Raises:
            AssertionError: it is out of order, or contradicts an earlier one.
        """
        validate(frame)
        kind = frame["type"]
        assert (self.num_frames == 0) == (kind == "session.created"), f"frame {self.num_frames} is {kind}"
        self.num_frames += 1
        assert frame["event_id"], "no event_id"
        assert frame["event_id"] not in self._event_ids, "an event_id stands twice"
        self._event_ids.add(frame["event_id"])
        if self._pending_item is not None:
            assert kind == "conversation.item.done", f"{kind} between an item's added and its done"
            assert frame["item"] == self._pending_item
            self._pending_item = None
        elif kind == "response.created":
            self._created(frame["response"])
        elif kind.startswith("response."):
            self._stepped(frame)
        elif kind.startswith("conversation.item.") and kind.endswith((".added", ".done")):
            self._item(frame)

    def finish(self):
        """Check that nothing is open.

        Raises:
            AssertionError: a response or an item has no end.
        """
        assert not self._open, f"responses without an end: {list(self._open)}"
        assert self._pending_item is None, "an item without its done"

    def _created(self, response):
        assert response["id"] not in self._open
        assert response["id"] not in self.statuses, "a response began twice"
        opened = _Response(response)
        if opened.in_conversation:
            assert not any(other.in_conversation for other in self._open.values()), "two write at once"
        self._open[opened.id] = opened

    def _stepped(self, frame):
        response_id = frame["response"]["id"] if "response" in frame else frame["response_id"]
        response = self._open[response_id]
        response.step(frame)
        if frame["type"] == "response.done":
            self.statuses[response_id] = frame["response"]["status"]
            del self._open[response_id]

    def _item(self, frame):
        for response in self._open.values():
            if response.item_id == frame["item"]["id"]:
                response.step(frame)
                return
        assert frame["type"] == "conversation.item.added", "an item's done without its added"
        assert frame["item"]["status"] == "completed"
        self._pending_item = frame["item"]
