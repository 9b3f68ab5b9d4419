# SPDX-License-Identifier: Apache-2.0
"""What the settings may cost at worst, as a sum of parts, and what this machine or container allows.

Pure but for `memory_limit_bytes`, which reads two files of the kernel. An estimate, not a promise: each part
says what it counts, so that who doubts the sum can check it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.core.config.tree import Config

GATEWAY_BYTES = 112 * 1024 * 1024
"""Interpreter, libraries and tokenizer of the gateway process, before anybody connects."""

ENGINE_BYTES = 96 * 1024 * 1024
"""Interpreter, numpy and ONNX Runtime of the engine process, before a model is loaded."""

SOCKET_BYTES = 64 * 1024
"""Objects of one open socket and its session, empty."""

FLOAT_BYTES = 4
WORKSPACE_TENSORS = 24
"""Activations alive at once in a forward, counted as rows of `hidden_size` floats for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the sum needs of a model."""

    weights_bytes: int
    kv_bytes_per_token: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One line of the sum: its bytes at worst, and how they come about."""

    name: str
    num_bytes: int
    doc: str


def memory_estimate(config: Config, model: ModelSize | None = None) -> tuple[MemoryPart, ...]:
    """The parts of the sum. Without a model, or with an engine elsewhere, the engine's parts are left out."""
    server, session = config.server, config.session
    parts = [
        MemoryPart(name="gateway", num_bytes=GATEWAY_BYTES, doc="the process itself"),
        MemoryPart(
            name="sockets",
            num_bytes=server.sockets_max * (SOCKET_BYTES + server.frame_bytes_max),
            doc="sockets_max × (64 KiB + frame_bytes_max)",
        ),
        MemoryPart(
            name="outboxes",
            num_bytes=server.sockets_max * server.outbox_bytes_max,
            doc="sockets_max × outbox_bytes_max, if every client stopped reading",
        ),
        MemoryPart(
            name="conversations",
            num_bytes=server.sockets_max * session.session_bytes_max,
            doc="sockets_max × session_bytes_max, if every conversation were full",
        ),
        MemoryPart(
            name="bodies",
            num_bytes=(server.connections_max - server.sockets_max) * server.body_bytes_max,
            doc="(connections_max - sockets_max) × body_bytes_max",
        ),
    ]
    if model is not None and not config.engine.connect:
        parts += _engine_parts(config, model)
    return tuple(parts)


def _engine_parts(config: Config, model: ModelSize) -> list[MemoryPart]:
    engine = config.engine
    num_tokens = max(engine.max_num_seqs, engine.prefill_chunk_tokens)
    per_token = WORKSPACE_TENSORS * model.hidden_size * FLOAT_BYTES
    return [
        MemoryPart(name="engine", num_bytes=ENGINE_BYTES, doc="the process itself"),
        MemoryPart(name="weights", num_bytes=model.weights_bytes, doc="the model's files"),
        MemoryPart(
            name="slots",
            num_bytes=engine.max_num_seqs * engine.max_model_len * model.kv_bytes_per_token,
            doc=f"max_num_seqs × max_model_len × {model.kv_bytes_per_token} B a token, touched as answers grow",
        ),
        MemoryPart(
            name="workspace",
            num_bytes=num_tokens * per_token + 2 * engine.max_num_seqs * model.vocab_size * FLOAT_BYTES,
            doc="activations of one forward, probabilities of each row",
        ),
    ]


def memory_limit_bytes(root: Path = Path("/")) -> tuple[int, str] | None:
    """The memory we may use and what sets it: "container" (a cgroup's limit) or "machine"; None if unknown.

    `root` stands before `sys/fs/cgroup` and `proc`.
    """
    machine = _machine_bytes(root)
    container = min(_container_bytes(root), default=None)
    if container is not None and (machine is None or container < machine):
        return container, "container"
    return None if machine is None else (machine, "machine")


def _container_bytes(root: Path) -> Iterator[int]:
    """Every limit that binds this process: its own group's and those of the groups above it, v2 and v1."""
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            text = _read(root.joinpath("sys/fs/cgroup", mount, *parts[:depth], name)).strip()
            if text.isdigit():
                yield int(text)


def _machine_bytes(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
