# SPDX-License-Identifier: Apache-2.0
"""Settings on the command line: a flag for each, short ones for the usual, and the file.

Invariant: a flag is handed on as text; its kind, its bounds and its faults are `core.config`'s business, so a
wrong value reads the same whether it came from a flag, a file or the environment.
"""

import argparse
import os
from pathlib import Path

from server.core.config import Config, load_config
from server.core.config.load import ALIASES
from server.core.config.tree import SETTINGS
from server.models.package import data_home

METAVARS = {str: "TEXT", int: "N", float: "NUMBER", bool: "BOOL", tuple: "A,B"}


class CommandError(Exception):
    """What was asked can't be done; the message says why and what to do instead."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--config`, the short flags and `--section.name` for every setting."""
    parser.usage = f"{parser.prog} [--config FILE] [--host TEXT] [--port N] [--SECTION.NAME VALUE …]"
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file (default: ./sampan.toml, if any)"
    )
    for alias, path in ALIASES.items():
        setting = SETTINGS[path]
        parser.add_argument(
            f"--{alias}", dest=f"flag:{alias}", metavar=METAVARS[setting.kind], help=_help(setting.doc)
        )
    group = parser.add_argument_group("every setting", "each also in the file, or as SAMPAN_SECTION__NAME")
    for path, setting in SETTINGS.items():
        default = ",".join(setting.default) if isinstance(setting.default, tuple) else setting.default
        group.add_argument(
            setting.flag,
            dest=f"help:{path}",  # for the help alone: `cli` takes these words out before argparse sees them
            metavar=METAVARS[setting.kind],
            help=_help(f"{setting.doc} ({default})" if default != "" else setting.doc),
        )


def config_of(args: argparse.Namespace, *, is_closed: bool = False) -> Config:
    """The settings of this command line, environment and file; a closed one hears the command line alone.

    Raises:
        ConfigError: with every fault.
    """
    flags = {
        name.removeprefix("flag:"): value
        for name, value in vars(args).items()
        if name.startswith("flag:") and value is not None
    }
    if is_closed:
        return load_config(environ={"SAMPAN_CONFIG": os.devnull}, flags={**flags, **args.settings})
    return load_config(environ=os.environ, flags={**flags, **args.settings}, file=args.config)


def home_of(config: Config) -> Path:
    """The folder of models and downloads."""
    return Path(config.engine.home).expanduser().absolute() if config.engine.home else data_home(os.environ)


def _help(text: str) -> str:
    return text.replace("%", "%%")
