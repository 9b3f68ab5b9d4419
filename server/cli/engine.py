# SPDX-License-Identifier: Apache-2.0
"""`sampan engine`: one engine alone, for the gateways that connect to it.

The one verb whose process loads ONNX Runtime. A gateway starts its own by it with `--child`: each setting is
spelled out (`describe.flags_of(config, "engine", "log")`) and nothing else read, so that the two can't differ.
"""

import argparse
import sys
from pathlib import Path

from server.cli.options import CommandError, add_config_arguments, config_of, home_of
from server.cli.packages import fit_to_model, served_package
from server.core import log
from server.core.clock import new_id
from server.core.config import EngineConfig
from server.engine.admission import SchedulerLimits
from server.engine.compute.threads import plan_threads
from server.models.package import ModelPackage

NAME = "engine"
HELP = "run the engine alone, for servers that connect to it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--package", type=Path, metavar="DIR", help="a model package (default: by its name)")
    parser.add_argument(
        "--child", action="store_true", help="hear flags alone, and end with the process that started this"
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM.

    Raises:
        PackageError, CommandError: there is no model.
        zmq.ZMQError: the address can't be used.
    """
    config = config_of(args, is_closed=args.child)
    if not config.engine.listen:
        raise CommandError("say where to listen: --engine.listen ipc:///run/sampan/engine.sock")
    log.configure(config.log.level, config.log.format, sys.stderr)
    home = home_of(config)
    if args.package:
        package = ModelPackage.load(args.package)
    else:
        package = served_package(home, config.engine.model, config.engine.quantization)
    config = fit_to_model(config, package)
    threads = plan_threads(asked=config.engine.num_threads)
    # What computes is imported when there is something to compute with.
    from server.engine.process.worker import run_worker  # noqa: PLC0415

    return run_worker(
        package_path=package.path,
        listen=config.engine.listen,
        engine_id=new_id("engine"),
        limits=limits_of(config.engine),
        num_threads=threads.num_threads,
        can_spin=threads.can_spin,
        dies_with_parent=args.child,
    )


def limits_of(engine: EngineConfig) -> SchedulerLimits:
    """The scheduler's bounds as settings give them."""
    return SchedulerLimits(
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        queue_max=engine.queue_max,
        queue_tokens_max=engine.queue_tokens_max,
        queue_timeout_ms=round(engine.queue_timeout_s * 1000),
    )
