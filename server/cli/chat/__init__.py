# SPDX-License-Identifier: Apache-2.0
"""`sampan chat`: talk to a running server, from a terminal or through a pipe.

    talk      the socket: one question out, one streamed answer in
    history   what was said, on disk
    terminal  lines, slash commands, Ctrl-C

From a pipe the whole input is one question, the answer goes to standard output, and nothing is kept.
"""

import argparse
import os
import sys
from pathlib import Path

from server.models.package import data_home

NAME = "chat"
HELP = "talk to a running server from the terminal"
EPILOG = """examples:
  sampan chat                                   talk; /help shows what else a line can be
  sampan chat --resume                          go on where you left off
  sampan chat "Name three rivers."              one question, one answer
  git diff | sampan chat "Review this change."  the input goes below the question
  sampan chat --url https://chat.example        a server elsewhere
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("message", nargs="?", help="ask this alone and leave")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    parser.add_argument("--model", help="name of the model (default: the server's own)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--temperature", type=float, metavar="N", help="0 always takes the likeliest word")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of one answer, at most")
    parser.add_argument("--resume", action="store_true", help="go on with the last conversation")
    parser.add_argument("--history", type=Path, metavar="FILE", help="where conversations are kept")


def run(args: argparse.Namespace) -> int:
    """Connect and talk.

    Raises:
        TalkError: the server is not there, or refuses.
    """
    # A WebSocket client is too heavy for `sampan --help`.
    from server.cli.chat.history import History  # noqa: PLC0415
    from server.cli.chat.talk import Talk, TalkSettings  # noqa: PLC0415 - as above
    from server.cli.chat.terminal import Terminal, ask_once  # noqa: PLC0415 - as above

    settings = TalkSettings(
        url=args.url,
        model=args.model,
        instructions=args.system,
        temperature=args.temperature,
        seed=args.seed,
        max_tokens=args.max_tokens,
        api_key=os.environ.get("SAMPAN_API_KEY"),
    )
    is_piped = not sys.stdin.isatty()
    with Talk(settings) as talk:
        if args.message is not None or is_piped:
            return ask_once(talk, _question(args.message, is_piped=is_piped))
        path = args.history or data_home(os.environ) / "chat" / "history.jsonl"
        return Terminal(talk, History(path, is_resumed=args.resume)).run()


def _question(message: str | None, *, is_piped: bool) -> str:
    piped = sys.stdin.read().strip("\n") if is_piped else ""
    return "\n\n".join(part for part in (message, piped) if part)
