# SPDX-License-Identifier: Apache-2.0
"""What settings must be to one another, in one place. Pure.

Each line names the settings it joins, so a fault points at all of them. Relations to files outside (Nginx's
timeouts, systemd's) are checked by tests beside those files.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit

from server.core.config.tree import Config

HEADROOM = 16
"""Connections kept for probes and pages when every WebSocket is taken."""

SLOWEST_TOKENS_PER_S = 50
"""Prompt tokens a second on the slowest machine we mean to serve on: what a step may honestly last."""

OUTBOX_ITEMS = 4
"""An item is echoed twice and read back in whole, in JSON: this many times its text must fit the outbox."""

Relation = tuple[bool, tuple[str, ...], str]
"""Whether it holds, the settings it joins, and what must be."""


def broken_relations(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each contradiction as the settings it joins and a sentence."""
    for is_kept, paths, sentence in (*_client_relations(config), *_engine_relations(config)):
        if not is_kept:
            yield paths, sentence
    yield from _addresses(config)


def _client_relations(config: Config) -> Iterator[Relation]:
    server, session = config.server, config.session
    yield (
        server.connections_max >= server.sockets_max + HEADROOM,
        ("server.connections_max", "server.sockets_max"),
        f"must be at least sockets_max + {HEADROOM}, so that probes are answered when every socket is taken",
    )
    yield (
        session.item_bytes_max <= session.session_bytes_max,
        ("session.item_bytes_max", "session.session_bytes_max"),
        "must not exceed session_bytes_max: one message must fit its conversation",
    )
    yield (
        session.item_bytes_max <= server.frame_bytes_max,
        ("session.item_bytes_max", "server.frame_bytes_max"),
        "must not exceed server.frame_bytes_max: a longer message could never arrive",
    )
    yield (
        session.item_bytes_max <= server.body_bytes_max,
        ("session.item_bytes_max", "server.body_bytes_max"),
        "must not exceed server.body_bytes_max: a longer message could never arrive",
    )
    yield (
        session.item_bytes_max * OUTBOX_ITEMS <= server.outbox_bytes_max,
        ("server.outbox_bytes_max", "session.item_bytes_max"),
        f"must be at least {OUTBOX_ITEMS} × session.item_bytes_max, or an echo would close its socket",
    )
    yield (
        len(session.instructions.encode()) <= session.item_bytes_max,
        ("session.instructions", "session.item_bytes_max"),
        "must not be longer than session.item_bytes_max",
    )


def _engine_relations(config: Config) -> Iterator[Relation]:
    engine = config.engine
    yield (
        engine.max_num_batched_tokens >= engine.max_num_seqs + engine.prefill_chunk_tokens,
        ("engine.max_num_batched_tokens", "engine.max_num_seqs", "engine.prefill_chunk_tokens"),
        "must be at least max_num_seqs + prefill_chunk_tokens, or prompts would starve behind answers",
    )
    yield (
        engine.queue_tokens_max >= engine.max_model_len,
        ("engine.queue_tokens_max", "engine.max_model_len"),
        "must be at least max_model_len, or the longest prompt could never wait",
    )
    yield (
        engine.hang_timeout_s * SLOWEST_TOKENS_PER_S >= engine.max_num_batched_tokens,
        ("engine.hang_timeout_s", "engine.max_num_batched_tokens"),
        f"must be at least max_num_batched_tokens / {SLOWEST_TOKENS_PER_S}, or a step would look like a hang",
    )
    yield (
        config.sampling.max_tokens < engine.max_model_len,
        ("sampling.max_tokens", "engine.max_model_len"),
        "must be less than engine.max_model_len: at least one token is read",
    )


def _addresses(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    server, engine = config.server, config.engine
    if not server.host and not server.uds:
        yield ("server.host",), "must name an address"
    if server.uds and config.source_of("server.port") != "default":
        yield ("server.uds", "server.port"), "are both set: listen on one of them"
    if "*" in server.trusted_proxies and not server.uds:
        yield ("server.trusted_proxies",), 'must not be "*" on a port: anybody could claim any address'
    for origin in server.allowed_origins:
        if not _is_origin(origin):
            yield ("server.allowed_origins",), f"{origin!r} is no origin: write https://shop.example"
    for path in ("engine.connect", "engine.listen"):
        address = config.value_of(path)
        if address and not str(address).startswith(("ipc://", "tcp://")):
            yield (path,), "must begin with ipc:// or tcp://"
    if engine.connect and engine.connect == engine.listen:
        yield ("engine.connect", "engine.listen"), "are the same address: an engine can't use itself"


def _is_origin(text: str) -> bool:
    if text == "*":
        return True
    parts = urlsplit(text)
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and parts.path in ("", "/")
        and not parts.query
    )
