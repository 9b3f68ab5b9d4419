# SPDX-License-Identifier: Apache-2.0
"""Settings: one frozen tree, read once, from four places of rising weight.

    tree       every setting: default, unit, bounds, what it is for
    load       defaults < TOML file < environment < command line; all faults at once
    relations  what settings must be to one another
    memory     what they may cost, as a sum
    describe   the tree as a listing, an example file and a table for the docs

Invariant: a Config that exists passed every check. Nobody changes one, and nothing is read again later.
"""

from server.core.config import describe
from server.core.config.load import ConfigError, Fault, load_config
from server.core.config.memory import MemoryPart, ModelSize, memory_estimate, memory_limit_bytes
from server.core.config.tree import (
    Config,
    EngineConfig,
    LogConfig,
    SamplingConfig,
    ServerConfig,
    SessionConfig,
)

__all__ = [
    "Config",
    "ConfigError",
    "EngineConfig",
    "Fault",
    "LogConfig",
    "MemoryPart",
    "ModelSize",
    "SamplingConfig",
    "ServerConfig",
    "SessionConfig",
    "describe",
    "load_config",
    "memory_estimate",
    "memory_limit_bytes",
]
