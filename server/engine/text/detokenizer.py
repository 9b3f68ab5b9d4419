# SPDX-License-Identifier: Apache-2.0
"""Ids → text as they come: whole characters, no part of a stop string, nothing twice.

Invariant: the texts returned, joined, are what all ids decode to at once, cut before the first stop string.
Held back is only what must be: an unfinished character, and the longest end of the text that may still grow
into a stop string. Costs are per new byte, not per text.
"""

import codecs
from collections.abc import Sequence

from server.engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one answer. `has_stopped` turns true at a stop string; later ids are then ignored."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._strips_space = tokenizer.strips_first_space
        self.has_stopped = False

    def add(self, token_id: int) -> str:
        """Take the next id and return the text that is now certain."""
        if self.has_stopped:
            return ""
        return self._release(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """Return what is still held: the text ends here. An unfinished character becomes U+FFFD."""
        if self.has_stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        rest, self._held = ("" if self.has_stopped else self._held), ""
        return text + rest

    def _release(self, new: str) -> str:
        if self._strips_space and new:
            new, self._strips_space = new.removeprefix(" "), False
        text = self._held + new
        cut = self._first_stop(text)
        if cut is not None:
            self.has_stopped, self._held = True, ""
            return text[:cut]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string that is complete first begins; of several that end together, the longest."""
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        return min(ends)[1] if ends else None

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        longest = min(max((len(stop) - 1 for stop in self._stops), default=0), len(text))
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) and length < len(stop) for stop in self._stops):
                return length
        return 0
