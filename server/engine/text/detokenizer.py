# SPDX-License-Identifier: Apache-2.0
"""Ids → text as they come: whole characters, no part of a stop string, nothing twice.

Invariant: the texts returned, joined, are what all ids decode to at once, cut before the first stop string.
Held back is only what must be: an unfinished character, and the longest end of the text that may still grow
into a stop string. Costs are per new character, not per text.
"""

import codecs
from collections.abc import Sequence

from server.engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one answer. `has_stopped` turns true at a stop string; later ids are then ignored."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._watches = [_Watch(stop) for stop in stops if stop]
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
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, new: str) -> str:
        if self._strips_space and new:
            new, self._strips_space = new.removeprefix(" "), False
        text = self._held + new
        num_held = 0
        if self._watches:
            end, num_held = self._look(new)
            if end is not None:
                self.has_stopped, self._held = True, ""
                return text[: len(text) - len(new) + end - num_held]
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _look(self, new: str) -> tuple[int | None, int]:
        """Where in `new` the first stop string ends, and its length; else None and how much to hold.

        Of stop strings that end together the longest counts.
        """
        for place, character in enumerate(new, 1):
            found = [watch.length for watch in self._watches if watch.take(character)]
            if found:
                return place, max(found)
        return None, max(watch.num_matched for watch in self._watches)


class _Watch:
    """One stop string, and how much of its beginning the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.num_matched = 0
        self._shorter = [0] * (self.length + 1)  # by matched length: the next shorter match that ends there
        matched = 0
        for place in range(1, self.length):
            while matched and stop[place] != stop[matched]:
                matched = self._shorter[matched]
            matched += stop[place] == stop[matched]
            self._shorter[place + 1] = matched

    def take(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        while self.num_matched and self._stop[self.num_matched] != character:
            self.num_matched = self._shorter[self.num_matched]
        self.num_matched += self._stop[self.num_matched] == character
        return self.num_matched == self.length
