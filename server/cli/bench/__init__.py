# SPDX-License-Identifier: Apache-2.0
"""`sampan bench`: load a server with simulated users and say what they saw.

`clients` is one user, `load` many of them, `report` the figures.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of annotations only: a client library is too heavy for `sampan --help`
    from collections.abc import Callable

    from server.cli.bench.clients import Client

NAME = "bench"
HELP = "load a running server with simulated users and measure what they see"
EPILOG = """examples:
  sampan bench                                  1, 4 and 16 users against the server on port 8000
  sampan bench -c 16 --turns 4                  16 users with four turns each: later turns reuse the history
  sampan bench --door completions --url http://127.0.0.1:8080/v1 --label peer
                                                any OpenAI-compatible server, over HTTP
  sampan bench -c 32 --rate 2 -n 60             an open loop: two new conversations a second
  sampan bench --json out.json --svg out.svg    keep the figures, and a picture of them
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000/v1", help="base URL of the server (%(default)s)"
    )
    parser.add_argument("--door", choices=("realtime", "completions"), default="realtime", help="(%(default)s)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model to ask for (%(default)s)")
    parser.add_argument("--api-key", default="none", help="bearer token, where the server wants one")
    parser.add_argument("-c", "--clients", type=_counts, default="1,4,16", help="users at once (%(default)s)")
    parser.add_argument("-n", "--conversations", type=int, help="conversations a run (default: one a user)")
    parser.add_argument("--turns", type=int, default=1, help="turns in each conversation (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="tokens in an answer, at most (%(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--rate", type=float, help="open loop: new conversations per second")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one turn (%(default)s)")
    parser.add_argument("--label", default="sampan", help="name of this server in the report (%(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--svg", type=Path, help="draw tokens per second to this file")


def run(args: argparse.Namespace) -> int:
    """Run the loads one after another, print a table and write what was asked for."""
    # The table must not wait for a client library, and `sampan --help` must not pay for it.
    from server.cli.bench import load, report  # noqa: PLC0415

    summaries = []
    for clients in _counts(args.clients) if isinstance(args.clients, str) else args.clients:
        plan = load.LoadPlan(
            clients=clients,
            conversations=args.conversations or clients,
            turns=args.turns,
            rate=args.rate,
            seed=clients,
        )
        try:
            timings = asyncio.run(load.run_load(plan, _client_maker(args)))
        except ExceptionGroup as group:
            print(f"sampan bench: cannot reach {args.url}: {group.exceptions[0]}", file=sys.stderr)
            return 1
        summaries.append(report.summarise(args.label, clients, timings))
        print(f"{clients} users: {summaries[-1].output_tokens_per_s} output tokens/s", file=sys.stderr)
    print(report.as_text(summaries))
    if args.json:
        args.json.write_text(json.dumps(report.as_json(summaries), indent=2) + "\n")
    if args.svg:
        args.svg.write_text(report.as_svg("Output tokens per second, by users at once", summaries) + "\n")
    return 1 if any(summary.errors for summary in summaries) else 0


def _client_maker(args: argparse.Namespace) -> "Callable[[int], Client]":
    from server.cli.bench import clients  # noqa: PLC0415  # as in run

    settings = clients.TurnSettings(
        model=args.model,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        api_key=args.api_key,
        timeout_s=args.timeout,
    )
    kind = clients.RealtimeClient if args.door == "realtime" else clients.CompletionsClient
    return lambda number: kind(number, args.url, settings)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"want numbers with commas between them, got {text!r}") from error
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("at least one user")
    return counts
