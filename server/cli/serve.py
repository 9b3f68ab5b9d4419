# SPDX-License-Identifier: Apache-2.0
"""`sampan serve`: settings, model, a word of welcome, then the gateway, which starts its own engine.

Invariant: it refuses before it opens a port: wrong settings, a model that can't be had, more memory than the
container has. This process never loads numpy or ONNX Runtime.
"""

import argparse
import sys
from dataclasses import replace

from server import __version__
from server.cli.config import model_size
from server.cli.options import CommandError, add_config_arguments, config_of, home_of
from server.cli.packages import fit_to_model, served_package
from server.core import log
from server.core.config import Config, MemoryPart, describe, memory_estimate, memory_limit_bytes
from server.engine.compute.threads import plan_threads

NAME = "serve"
HELP = "start the server: WebSocket, HTTP and a page to chat on"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ConfigError, CommandError, PackageError: it can't start; nothing was opened.
    """
    config = config_of(args)
    log.configure(config.log.level, config.log.format, sys.stderr)
    home = home_of(config)
    package = served_package(home, config.engine.model, config.engine.quantization)
    config = fit_to_model(replace(config, engine=replace(config.engine, home=str(home))), package)
    parts = memory_estimate(config, model_size(config))
    refuse_too_much(parts, memory_limit_bytes())
    print(banner(config, parts), flush=True)
    # The gateway's libraries are loaded once it is sure that they are needed.
    from server.gateway.app import serve  # noqa: PLC0415

    return serve(config)


def refuse_too_much(parts: tuple[MemoryPart, ...], limit: tuple[int, str] | None) -> None:
    """Don't start in a container that the settings could outgrow: the kernel would kill us under load.

    A machine's own memory is no such bound: it may swap, and nobody set it with us in mind.

    Raises:
        CommandError: with the largest parts and the settings that lower them.
    """
    total = sum(part.num_bytes for part in parts)
    if limit is None or limit[1] != "container" or total <= limit[0]:
        return
    largest = sorted(parts, key=lambda part: -part.num_bytes)[:3]
    said = "; ".join(f"{part.name} {describe.mebibytes(part.num_bytes)} = {part.doc}" for part in largest)
    raise CommandError(
        f"the settings may need {describe.mebibytes(total)}, "
        f"this container has {describe.mebibytes(limit[0])}. "
        f"Lower what counts most: {said}. `sampan config --memory` shows the sum"
    )


def banner(config: Config, parts: tuple[MemoryPart, ...]) -> str:
    """What a person wants to know at the start, for a terminal."""
    server, engine = config.server, config.engine
    base = base_url(config)
    if engine.connect:
        computes = f"the engine at {engine.connect}"
    else:
        threads = plan_threads(asked=engine.num_threads)
        computes = f"threads: {threads.reason}; {engine.max_num_seqs} answers at once"
    worst = describe.mebibytes(sum(part.num_bytes for part in parts))
    lines = [
        f"Sampan {__version__}",
        f"  page      {base}/",
        f"  doors     {base}/v1/realtime (WebSocket) · {base}/v1/chat/completions · {base}/chat (wscat)",
        f"  model     {engine.model} ({engine.quantization}), {engine.max_model_len} tokens of context",
        f"  engine    {computes}",
        f"  memory    {worst} at worst; `sampan config --memory` shows the sum",
        "  Ctrl-C stops it: running answers end first.",
    ]
    if not server.uds and server.host not in LOOPBACK:
        lines.append(
            "  NOTE      whoever reaches this address may use it; put TLS and access control in front."
        )
    return "\n".join(lines)


def base_url(config: Config) -> str:
    """Where a client on this machine finds us."""
    server = config.server
    if server.uds:
        return f"unix:{server.uds}"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)  # noqa: S104 - to name, not to bind
    return (
        f"http://[{host}]:{server.port}" if ":" in host and "[" not in host else f"http://{host}:{server.port}"
    )
