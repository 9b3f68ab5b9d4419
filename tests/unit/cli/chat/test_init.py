# SPDX-License-Identifier: Apache-2.0
"""`sampan chat`: what is asked once, and what opens a terminal."""

import io
from types import SimpleNamespace

import pytest

from server import cli
from server.cli.chat import talk, terminal


@pytest.fixture
def world(monkeypatch, tmp_path):
    """What was dialled, asked and opened; `world.pipe(text)` puts text into standard input."""
    state = SimpleNamespace(settings=None, asked=[], histories=[])

    class Talk:
        def __init__(self, settings):
            state.settings = settings

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def pipe(text):
        stdin = io.StringIO(text or "")
        stdin.isatty = lambda: text is None
        monkeypatch.setattr("sys.stdin", stdin)

    state.pipe = pipe
    monkeypatch.setenv("SAMPAN_HOME", str(tmp_path))
    monkeypatch.setenv("SAMPAN_API_KEY", "key")
    monkeypatch.setattr(talk, "Talk", Talk)
    monkeypatch.setattr(terminal, "ask_once", lambda _, question: state.asked.append(question) or 5)
    opened = state.histories.append
    monkeypatch.setattr(terminal, "Terminal", lambda _, kept: SimpleNamespace(run=lambda: opened(kept) or 6))
    return state


@pytest.mark.parametrize(
    ("words", "piped", "question"),
    [
        (["hi"], None, "hi"),
        ([], "one\ntwo\n", "one\ntwo"),
        (["Review:"], "a\nb\n", "Review:\n\na\nb"),
        (["hi"], "", "hi"),
        ([], "", ""),
    ],
)
def test_one_question(world, words, piped, question):
    """A message, a pipe or both make one question, whole; lines of a pipe are never commands."""
    world.pipe(piped)
    assert cli.main(["chat", *words]) == 5
    assert world.asked == [question]
    assert world.histories == []


def test_a_terminal(world, tmp_path):
    """A person at a terminal gets the loop, with the history where models are."""
    world.pipe(None)
    assert cli.main(["chat", "--url", "http://h:1", "--temperature", "0", "--seed", "7"]) == 6
    assert world.histories[0].path == tmp_path / "chat" / "history.jsonl"
    assert (world.settings.url, world.settings.temperature, world.settings.seed) == ("http://h:1", 0.0, 7)
    assert world.settings.api_key == "key"
