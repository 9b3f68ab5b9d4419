# SPDX-License-Identifier: Apache-2.0
"""The `sampan` command: one module a verb, each with NAME, HELP, `add_arguments` and `run`.

    serve    the server, with its engine          engine   an engine alone
    chat     talk to a running server             model    fetch, build and check models
    bench    measure a running server             config   show the settings
    options  settings on the command line         packages a model that is missing is fetched

A verb parses, delegates and prints. Only the verb that was named is imported, so `sampan --help` is instant.
Invariant: what a user can cause ends as one clear line and a status: 2 for a wrong command or wrong settings,
1 for what went wrong on the way, 130 for Ctrl-C. A traceback means that we are at fault.
"""

import argparse
import os
import sys
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType
from typing import NoReturn, Protocol, cast

import server

COMMANDS = MappingProxyType(
    {
        "serve": "start the server: WebSocket, HTTP and a page to chat on",
        "chat": "talk to a running server from the terminal",
        "model": "add, list, show, check and remove models",
        "config": "show the settings, where each comes from, and what they cost",
        "bench": "load a running server with simulated users and measure what they see",
        "engine": "run the engine alone, for servers that connect to it",
    }
)
"""Every verb with its line of help, so that neither needs the verb's module."""

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
CLEAR = frozenset(
    {
        "builtins.OSError",
        "server.cli.options.CommandError",
        "server.core.errors.ServerError",
        "server.models.package.PackageError",
        "server.models.readers.checkpoint.CheckpointError",
        "server.models.source.files.SourceError",
        "zmq.error.ZMQError",
    }
)
"""Errors whose own words are enough. By name: importing them all would make `--help` slow."""


class _Command(Protocol):
    """What each verb's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit status."""


class _Parser(argparse.ArgumentParser):
    """argparse, with the way to the help in the one line that it says."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command and leave."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; never raises what a user can cause."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        command, args = _parse(words)
        return command.run(args)
    except SystemExit as leaving:  # argparse has said its line
        return leaving.code if isinstance(leaving.code, int) else EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has left; closing stdout again at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAULT
    except Exception as error:
        if (status := _known(error)) is None:
            raise
        for line in str(error).splitlines() or [type(error).__name__]:
            print(f"sampan: {line}", file=sys.stderr)
        return status


def _parse(words: list[str]) -> tuple[_Command, argparse.Namespace]:
    """Build the parser of the verb that was named, and of no other."""
    parser = _Parser(
        prog="sampan",
        description=(server.__doc__ or "").splitlines()[0],
        epilog="`sampan COMMAND --help` says more about each.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sampan {server.__version__}")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    settings, rest = _settings_apart(words, parser)
    named = next((word for word in rest if not word.startswith("-")), None)
    command: _Command | None = None
    for name, line in COMMANDS.items():
        verb = verbs.add_parser(
            name, help=line, description=f"{line[0].upper()}{line[1:]}.", allow_abbrev=False
        )
        if name == named:
            command = cast("_Command", import_module(f"server.cli.{name}"))
            command.add_arguments(verb)
    args = parser.parse_args(rest)
    assert command is not None, "argparse let an unknown verb pass"
    if settings and not hasattr(args, "config"):
        parser.error(f"`sampan {named}` has no settings such as --{next(iter(settings))}")
    args.settings = settings
    return command, args


def _settings_apart(words: list[str], parser: _Parser) -> tuple[dict[str, str], list[str]]:
    """Take every `--section.name value` out of the words, known or not.

    An unknown one is a fault of the settings, told together with all others and with the near name;
    argparse would stop at it.
    """
    settings: dict[str, str] = {}
    rest: list[str] = []
    queue = deque(words)
    while queue:
        word = queue.popleft()
        name, has_value, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not has_value:
            if not queue:
                parser.error(f"{name} needs a value")
            value = queue.popleft()
        settings[name.removeprefix("--")] = value
    return settings, rest


def _known(error: Exception) -> int | None:
    """The exit status of an error that speaks for itself; None for one of ours."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if "server.core.config.load.ConfigError" in names:
        return EXIT_USAGE
    return EXIT_FAULT if names & CLEAR else None
