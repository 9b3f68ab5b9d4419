# SPDX-License-Identifier: Apache-2.0
"""`sampan config`: the settings as this machine would use them, and the texts made from them.

Prints and changes nothing. What it prints as TOML can be read back.
"""

import argparse
import sys

from server.cli.options import add_config_arguments, config_of, home_of
from server.core.config import Config, ModelSize, describe, memory_estimate, memory_limit_bytes
from server.models.package import PackageError, find_package

NAME = "config"
HELP = "show the settings, where each comes from, and what they cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=("print", "example", "docs"),
        default="print",
        help="print: every setting, its source and meaning; example: a commented file; docs: the reference",
    )
    parser.add_argument("--memory", action="store_true", help="what the settings may cost, as a sum")
    parser.add_argument("--json", action="store_true", help="print for machines")
    add_config_arguments(parser)
    parser.usage = (
        f"{parser.prog} [print|example|docs] [--memory] [--json] [--config FILE] [--SECTION.NAME VALUE …]"
    )


def run(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    if args.what == "example":
        sys.stdout.write(describe.example())
        return 0
    if args.what == "docs":
        sys.stdout.write(describe.reference())
        return 0
    config = config_of(args)
    if args.memory:
        model = model_size(config)
        sys.stdout.write(describe.memory_table(memory_estimate(config, model), memory_limit_bytes()))
        if model is None and not config.engine.connect:
            print(f"(without the model: {config.engine.model} is not here yet)", file=sys.stderr)
        return 0
    sys.stdout.write(describe.as_json(config) if args.json else describe.listing(config))
    return 0


def model_size(config: Config) -> ModelSize | None:
    """What the memory sum needs of the configured model; None while it is not here."""
    try:
        package = find_package(home_of(config), config.engine.model, config.engine.quantization)
    except PackageError:
        return None
    shape = package.manifest.shape
    return ModelSize(
        weights_bytes=package.manifest.num_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
    )
