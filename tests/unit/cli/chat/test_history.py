# SPDX-License-Identifier: Apache-2.0
"""The conversation on disk."""

import pytest

from server.cli.chat.history import MESSAGES_MAX, History


def test_what_was_said_is_resumed(tmp_path):
    """Each message is on disk at once, in any script, and comes back in order."""
    path = tmp_path / "chat" / "history.jsonl"
    history = History(path, is_resumed=False)
    history.add("user", "你好\nline two")
    history.add("assistant", "Hello.")
    assert History(path, is_resumed=True).said == [("user", "你好\nline two"), ("assistant", "Hello.")]


def test_only_the_owner_can_read_it(tmp_path):
    """What people say to a model is nobody else's."""
    path = tmp_path / "history.jsonl"
    History(path, is_resumed=False).add("user", "private")
    assert path.stat().st_mode & 0o077 == 0


def test_a_new_conversation_takes_the_file_with_its_first_message(tmp_path):
    """Starting and leaving without a word keeps the last conversation; a first message replaces it."""
    path = tmp_path / "history.jsonl"
    History(path, is_resumed=False).add("user", "old")
    fresh = History(path, is_resumed=False)
    assert History(path, is_resumed=True).said == [("user", "old")]
    fresh.add("user", "new")
    resumed = History(path, is_resumed=True)
    assert resumed.said == [("user", "new")]
    resumed.add("assistant", "more")
    assert len(History(path, is_resumed=True).said) == 2
    resumed.clear()
    resumed.add("user", "newest")
    assert History(path, is_resumed=True).said == [("user", "newest")]


def test_a_damaged_line_is_skipped(tmp_path):
    """A line that was cut, or is not a message, loses itself alone."""
    path = tmp_path / "history.jsonl"
    lines = ['{"role": "user", "text": "a"}', '{"role": "us', "[]", '{"role": "x", "text": ""}', '{"text": ""}']
    path.write_text("\n".join(lines))
    assert History(path, is_resumed=True).said == [("user", "a")]
    assert History(tmp_path / "none", is_resumed=True).said == []


def test_a_long_history_is_bounded(tmp_path):
    """The newest messages come back, so many as a server takes."""
    path = tmp_path / "history.jsonl"
    path.write_text("".join(f'{{"role": "user", "text": "{n}"}}\n' for n in range(MESSAGES_MAX + 5)))
    said = History(path, is_resumed=True).said
    assert (len(said), said[0]) == (MESSAGES_MAX, ("user", "5"))


def test_saving_overwrites_nothing(tmp_path):
    """The conversation is saved as Markdown, never over a file that is there."""
    history = History(tmp_path / "history.jsonl", is_resumed=False)
    history.add("user", "Hi")
    history.save(tmp_path / "out.md")
    assert (tmp_path / "out.md").read_text() == "**user**\n\nHi\n\n"
    with pytest.raises(FileExistsError):
        history.save(tmp_path / "out.md")
