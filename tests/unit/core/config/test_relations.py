# SPDX-License-Identifier: Apache-2.0
"""Relations between settings: each can be broken, and is then told."""

from dataclasses import replace

import pytest

from server.core.config.relations import broken_relations
from server.core.config.tree import SETTINGS, Config


def with_values(values, sources=None):
    """The default Config with some values changed."""
    config = Config(sources=sources or {})
    for path, value in values.items():
        section, name = path.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ({"server.connections_max": 1000}, "server.connections_max"),
        ({"session.session_bytes_max": 10_000}, "session.item_bytes_max"),
        ({"server.frame_bytes_max": 10_000}, "session.item_bytes_max"),
        ({"server.body_bytes_max": 10_000}, "session.item_bytes_max"),
        ({"server.outbox_bytes_max": 60_000}, "server.outbox_bytes_max"),
        ({"session.instructions": "话" * 6_000}, "session.instructions"),
        ({"engine.max_num_seqs": 200}, "engine.max_num_batched_tokens"),
        ({"engine.queue_tokens_max": 2_000}, "engine.queue_tokens_max"),
        ({"engine.hang_timeout_s": 5.0}, "engine.hang_timeout_s"),
        ({"sampling.max_tokens": 2_048}, "sampling.max_tokens"),
        ({"server.host": ""}, "server.host"),
        ({"server.trusted_proxies": ("*",)}, "server.trusted_proxies"),
        ({"server.allowed_origins": ("shop.example",)}, "server.allowed_origins"),
        ({"server.allowed_origins": ("https://shop.example/page",)}, "server.allowed_origins"),
        ({"engine.connect": "/run/engine.sock"}, "engine.connect"),
        ({"engine.listen": "8001"}, "engine.listen"),
        ({"engine.connect": "ipc:///e", "engine.listen": "ipc:///e"}, "engine.connect"),
    ],
)
def test_each_relation_bites(values, first):
    """A broken relation names its settings, the one to look at first, and no other relation breaks."""
    ((paths, sentence),) = broken_relations(with_values(values))
    assert paths[0] == first
    assert set(paths) <= set(SETTINGS)
    assert sentence


def test_one_place_to_listen():
    """A socket file and a port that somebody set are a contradiction; the port's default is none."""
    assert [] == list(broken_relations(with_values({"server.uds": "/run/s.sock"})))
    ((paths, _),) = broken_relations(with_values({"server.uds": "/run/s.sock"}, {"server.port": "flag --port"}))
    assert paths == ("server.uds", "server.port")


@pytest.mark.parametrize("origin", ["*", "https://shop.example", "http://localhost:3000", "https://[::1]:8443"])
def test_origins_pass(origin):
    """What a browser sends as an origin is one, and so is the explicit any."""
    assert [] == list(broken_relations(with_values({"server.allowed_origins": (origin,)})))
