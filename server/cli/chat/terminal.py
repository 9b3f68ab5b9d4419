# SPDX-License-Identifier: Apache-2.0
"""Lines in, text out: the loop of `sampan chat`.

A line is a message unless it begins with `/`; `//` sends one slash. Ctrl-C stops an answer, twice at the
prompt leaves; Ctrl-D leaves. Invariant: what the server sends can't command the terminal: every control
character but line breaks and tabs is dropped before it is shown.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from server.cli.chat.history import History
from server.cli.chat.talk import Talk, TalkError

HELP = """  /new            begin a new conversation
  /system TEXT    tell the model what it is; without TEXT: show it
  /save FILE      write the conversation to a file
  /exit           leave (so does Ctrl-D)
  //text          a message that begins with a slash
Ctrl-C stops an answer."""


class Terminal:
    """One person at a terminal."""

    def __init__(self, talk: Talk, history: History, read: Callable[[str], str] = input) -> None:
        self._talk = talk
        self._history = history
        self._read = read
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/new": self._begin_anew,
            "/system": self._instruct,
            "/save": self._save,
        }

    def run(self) -> int:
        """Talk until the person leaves; returns the exit status.

        Raises:
            TalkError: the earlier conversation can't be brought back.
        """
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415 - imported, it gives `input` its editing and its memory
        print(f"{self._talk.model} — /help for help")
        if self._history.said:
            self._talk.recall(self._history.said)
            print(f"({len(self._history.said)} messages brought back)")
        is_warned = False
        while True:
            try:
                line = self._read("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                if is_warned:
                    return 130
                print("(Ctrl-C again leaves)")
                is_warned = True
                continue
            is_warned = False
            if line == "/exit":
                return 0
            self._obey(line)

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        try:
            if line.startswith("/") and not line.startswith("//"):
                command = self._commands.get(word)
                print(f"{word}? /help shows the commands") if command is None else command(rest.strip())
            elif line:
                self._ask(line.removeprefix("/") if line.startswith("//") else line)
        except (TalkError, OSError) as error:
            print(f"sampan: {error}", file=sys.stderr)

    def _ask(self, text: str) -> None:
        with stops_on_interrupt() as is_stopped:
            answer = self._talk.ask(text, show, is_stopped)
        print({"cancelled": " (stopped)", "incomplete": " (cut short)"}.get(answer.status, ""))
        self._history.add("user", text)
        if answer.text:
            self._history.add("assistant", answer.text)

    def _begin_anew(self, _: str) -> None:
        self._talk.reset()
        self._history.clear()
        print("(a new conversation)")

    def _instruct(self, text: str) -> None:
        if text:
            self._talk.instruct(text)
        print(f"system: {visible(self._talk.instructions or '(nothing)')}")

    def _save(self, name: str) -> None:
        if not name:
            print("/save FILE")
            return
        self._history.save(Path(name).expanduser())
        print(f"(saved to {name})")


def ask_once(talk: Talk, question: str) -> int:
    """Ask one question, answer on standard output; returns the exit status.

    Raises:
        TalkError: the question was refused, or there was none.
    """
    if not question.strip():
        raise TalkError("nothing was asked")
    with stops_on_interrupt() as is_stopped:
        answer = talk.ask(question, show if sys.stdout.isatty() else _write, is_stopped)
    print()
    return 130 if answer.status == "cancelled" else 0


@contextmanager
def stops_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C does not raise; the yielded function tells whether it was pressed."""
    pressed: list[bool] = []

    def note(_signal: int, _frame: FrameType | None) -> None:
        pressed.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def show(text: str) -> None:
    """Write a piece of an answer for a person, at once."""
    _write(visible(text))


def visible(text: str) -> str:
    """The text without what would command a terminal."""
    return "".join(char for char in text if char in "\n\t" or not _commands_terminal(char))


def _commands_terminal(char: str) -> bool:
    code = ord(char)
    return code < 0x20 or 0x7F <= code < 0xA0  # noqa: PLR2004 - the C0 and C1 control characters


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
