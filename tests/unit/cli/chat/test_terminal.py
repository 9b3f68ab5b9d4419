# SPDX-License-Identifier: Apache-2.0
"""Lines in, text out, with a talk that recites."""

import os
import signal

import pytest

from server.cli.chat import terminal
from server.cli.chat.history import History
from server.cli.chat.talk import Answer, TalkError
from server.cli.chat.terminal import Terminal, ask_once, stops_on_interrupt, visible


class FakeTalk:
    """Answers with its pieces; an exception among them is raised."""

    model = "m"

    def __init__(self, *pieces, status="completed"):
        self.pieces, self.status = pieces, status
        self.asked, self.recalled, self.instructions, self.num_resets = [], [], None, 0

    def ask(self, text, on_text, is_stopped):
        self.asked.append(text)
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            on_text(piece)
        return Answer(status=self.status, text="".join(self.pieces))

    def recall(self, said):
        self.recalled += said

    def instruct(self, text):
        self.instructions = text

    def reset(self):
        self.num_resets += 1


@pytest.fixture
def session(tmp_path):
    """Run a terminal over these lines; an exception among them is raised where it would be read."""

    def run(talk, *lines, is_resumed=False):
        waiting = iter(lines)

        def read(_prompt):
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        history = History(tmp_path / "history.jsonl", is_resumed=is_resumed)
        return Terminal(talk, history, read).run()

    return run


def test_a_line_is_a_message(session, capsys):
    """A line is asked, its answer shown as it comes; an empty line is nothing."""
    talk = FakeTalk("Hel", "lo")
    assert session(talk, "hi", "  ", "//slash", "/exit", "never") == 0
    assert talk.asked == ["hi", "/slash"]
    assert "Hello\n" in capsys.readouterr().out


def test_commands(session, capsys, tmp_path):
    """Each command does what its help says; an unknown one says where the help is."""
    talk = FakeTalk("yes")
    path = tmp_path / "out.md"
    session(talk, "q", f"/save {path}", "/save", "/system Be brief.", "/system", "/new", "/help", "/what")
    out = capsys.readouterr().out
    assert path.read_text() == "**user**\n\nq\n\n**assistant**\n\nyes\n\n"
    assert (talk.instructions, talk.num_resets) == ("Be brief.", 1)
    assert out.count("system: Be brief.") == 2
    assert "/save FILE\n" in out
    assert "/what? /help shows the commands" in out
    assert talk.asked == ["q"]


def test_resuming_brings_messages_back(session, capsys):
    """What was said before is told to the server before the first line."""
    session(FakeTalk("yes"), "q")
    talk = FakeTalk()
    session(talk, is_resumed=True)
    assert talk.recalled == [("user", "q"), ("assistant", "yes")]
    assert "2 messages brought back" in capsys.readouterr().out


def test_a_failed_answer_ends_nothing(session, capsys):
    """An answer that failed is told and not kept; the next line is read."""
    talk = FakeTalk("Hel", TalkError("the engine died"))
    session(talk, "one", "two")
    assert talk.asked == ["one", "two"]
    assert capsys.readouterr().err == "sampan: the engine died\n" * 2


def test_interrupts_at_the_prompt(session, capsys):
    """Ctrl-C once clears the line and warns, twice in a row leaves."""
    talk = FakeTalk("x")
    assert session(talk, KeyboardInterrupt(), "hi", KeyboardInterrupt(), KeyboardInterrupt(), "never") == 130
    assert talk.asked == ["hi"]
    assert capsys.readouterr().out.count("Ctrl-C again leaves") == 2


@pytest.mark.parametrize(("status", "mark"), [("cancelled", "(stopped)"), ("incomplete", "(cut short)")])
def test_an_unfinished_answer_is_marked(session, capsys, status, mark):
    """Who reads the answer sees that it is not whole."""
    session(FakeTalk("Hel", status=status), "hi")
    assert f"Hel {mark}\n" in capsys.readouterr().out


def test_an_interrupt_is_noted_inside_and_raised_outside():
    """Within the block Ctrl-C only sets a mark; afterwards it is as before."""
    with stops_on_interrupt() as is_stopped:
        assert not is_stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert is_stopped()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_model_cannot_command_a_terminal():
    """Escape sequences lose their power; text, breaks, tabs and emoji stay."""
    assert visible("a\x1b[2J\x9b31m\x07\rb\n\tc 你好 👩‍🚀") == "a[2J31mb\n\tc 你好 👩‍🚀"


def test_one_question_for_a_pipe(capsys):
    """A pipe gets the answer alone, byte for byte, and a status; no question is a fault."""
    assert ask_once(FakeTalk("a\x1b", "b"), "q") == 0
    assert capsys.readouterr().out == "a\x1bb\n"
    assert ask_once(FakeTalk("a", status="cancelled"), "q") == 130
    with pytest.raises(TalkError, match="nothing was asked"):
        ask_once(FakeTalk(), " \n")
    assert "/exit" in terminal.HELP
