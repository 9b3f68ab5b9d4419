# SPDX-License-Identifier: Apache-2.0
"""What was said in the terminal, a line of JSON for each message, readable by its owner alone.

Invariant: a message is on disk when `add` returns; a line that was cut (the disk was full, the machine went
off) is skipped, never an error. One conversation is kept: the last.
"""

import json
import os
from pathlib import Path

MESSAGES_MAX = 400
"""Messages that a resumed conversation brings back; older ones stay in the file."""

ROLES = ("user", "assistant")


class History:
    """The messages of one conversation, as (role, text).

    Raises:
        OSError: the file can't be read.
    """

    def __init__(self, path: Path, *, is_resumed: bool) -> None:
        self.path = path
        self.said: list[tuple[str, str]] = []
        self._is_new = not is_resumed
        if is_resumed and path.exists():
            lines = path.read_text("utf-8").splitlines()
            self.said = [each for line in lines if (each := _parse(line))][-MESSAGES_MAX:]

    def clear(self) -> None:
        """Begin a new conversation; with its first message it takes the file of the old one."""
        self.said = []
        self._is_new = True

    def add(self, role: str, text: str) -> None:
        """Keep a message.

        Raises:
            OSError: the file can't be written.
        """
        self.said.append((role, text))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if self._is_new else os.O_APPEND)
        self._is_new = False
        with os.fdopen(os.open(self.path, flags, 0o600), "w", encoding="utf-8") as out:
            out.write(json.dumps({"role": role, "text": text}, ensure_ascii=False) + "\n")

    def save(self, path: Path) -> None:
        """Write the conversation to a file of one's own, as Markdown.

        Raises:
            OSError: the file exists already, or can't be written.
        """
        with path.open("x", encoding="utf-8") as out:
            for role, text in self.said:
                out.write(f"**{role}**\n\n{text}\n\n")


def _parse(line: str) -> tuple[str, str] | None:
    try:
        value = json.loads(line)
        if value["role"] in ROLES and isinstance(value["text"], str):
            return value["role"], value["text"]
    except (ValueError, KeyError, TypeError):
        pass
    return None
