# SPDX-License-Identifier: Apache-2.0
"""The items of one conversation, in order and within their limits. Pure.

Invariant: ids are unique, the bytes counted are those of the items' text in UTF-8, and a refused change changed
nothing. An answer's bytes are never refused (its length has a bound of its own): the next item is.
"""

from dataclasses import dataclass

from server.core.errors import ServerError, error_of
from server.core.types import Item, ItemStatus

ROOT = "root"
"""What `previous_item_id` says for the front of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may hold. Bytes are those of text in UTF-8; times are seconds.

    `num_side_turns_max` counts turns that run beside the conversation's own; `slow_s_max` is how long the
    outbox may stay over its bound before the socket is closed.
    """

    num_items_max: int = 1_000
    item_bytes_max: int = 65_536
    conversation_bytes_max: int = 1_048_576
    num_side_turns_max: int = 4
    slow_s_max: float = 5.0


class Conversation:
    """Ordered items. A list walked from the front is fast enough for `num_items_max` of them."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._items: list[Item] = []
        self._num_bytes = 0

    @property
    def items(self) -> tuple[Item, ...]:
        """All items, oldest first."""
        return tuple(self._items)

    @property
    def num_bytes(self) -> int:
        """Bytes of all items' text."""
        return self._num_bytes

    @property
    def last_id(self) -> str | None:
        """The id of the newest item."""
        return self._items[-1].id if self._items else None

    def whole_items(self) -> tuple[Item, ...]:
        """The items a model may read: all but an answer still being written."""
        return tuple(item for item in self._items if item.status is not ItemStatus.IN_PROGRESS)

    def newest(self, *, num_items_max: int, bytes_max: int) -> tuple[Item, ...]:
        """As many of the newest whole items as stay within both bounds, oldest first."""
        found: list[Item] = []
        for item in reversed(self.whole_items()[-num_items_max:]):
            bytes_max -= num_bytes(item)
            if bytes_max < 0:
                break
            found.append(item)
        return tuple(reversed(found))

    def check_room(self, num_items: int, item: Item | None = None) -> None:
        """Refuse `num_items` more, the bytes of `item` among them.

        Raises:
            ServerError: `payload_too_large` for one item, `conversation_full` for the sum.
        """
        limits, size = self._limits, num_bytes(item) if item else 0
        if size > limits.item_bytes_max:
            message = f"the item has {size} bytes of text; at most {limits.item_bytes_max} are allowed"
            raise error_of("payload_too_large", message, param="item")
        fix = "delete items or begin a new conversation"
        if len(self._items) + num_items > limits.num_items_max:
            message = f"a conversation has at most {limits.num_items_max} items: {fix}"
            raise error_of("conversation_full", message)
        if self._num_bytes + size > limits.conversation_bytes_max:
            message = f"a conversation has at most {limits.conversation_bytes_max} bytes of text: {fix}"
            raise error_of("conversation_full", message)

    def insert(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Place an item after another (None: at the end) and return the id that now stands before it.

        Raises:
            ServerError: `item_already_exists`, `item_not_found`, or as `check_room`.
        """
        if any(item.id == other.id for other in self._items):
            message = f"the conversation already has an item '{item.id}': choose another id or none"
            raise error_of("item_already_exists", message, param="item.id")
        self.check_room(1, item)
        if previous_item_id is None:
            index = len(self._items)
        elif previous_item_id == ROOT:
            index = 0
        else:
            index = self._index(previous_item_id, "previous_item_id") + 1
        self._items.insert(index, item)
        self._num_bytes += num_bytes(item)
        return self._items[index - 1].id if index else None

    def find(self, item_id: str) -> Item:
        """One item.

        Raises:
            ServerError: `item_not_found`.
        """
        return self._items[self._index(item_id, "item_id")]

    def remove(self, item_id: str) -> None:
        """Forget one item; an answer still being written has to be cancelled first.

        Raises:
            ServerError: `item_not_found`, or `invalid_value` for an answer being written.
        """
        index = self._index(item_id, "item_id")
        if self._items[index].status is ItemStatus.IN_PROGRESS:
            message = f"item '{item_id}' is being written: cancel its response first"
            raise error_of("invalid_value", message, param="item_id")
        self._num_bytes -= num_bytes(self._items.pop(index))

    def finish(self, item: Item) -> None:
        """Put a written answer in the place that was kept for it."""
        index = next(index for index, other in enumerate(self._items) if other.id == item.id)
        self._num_bytes += num_bytes(item) - num_bytes(self._items[index])
        self._items[index] = item

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
        self._num_bytes = 0

    def check_integrity(self) -> None:
        """Assert what the head of this file promises."""
        assert len({item.id for item in self._items}) == len(self._items), "an id stands twice"
        assert self._num_bytes == sum(map(num_bytes, self._items)), "bytes are miscounted"

    def _index(self, item_id: str, param: str) -> int:
        for index, item in enumerate(self._items):
            if item.id == item_id:
                return index
        raise self._not_found(item_id, param)

    def _not_found(self, item_id: str, param: str) -> ServerError:
        return error_of("item_not_found", f"the conversation has no item '{item_id}'", param=param)


def text_bytes(text: str) -> int:
    """Bytes of a text in UTF-8; half a surrogate pair, which a model may write, counts as three."""
    return len(text.encode("utf-8", "surrogatepass"))


def num_bytes(item: Item) -> int:
    """Bytes of an item's text in UTF-8."""
    return sum(text_bytes(part.text) for part in item.parts)
