# SPDX-License-Identifier: Apache-2.0
"""The sum of memory and the limit it is held against."""

import pytest

from server.core.config import Config, EngineConfig
from server.core.config.memory import ModelSize, memory_estimate, memory_limit_bytes

MODEL = ModelSize(weights_bytes=100, kv_bytes_per_token=10, hidden_size=4, vocab_size=8)


def parts_of(config, model=None):
    return {part.name: part.num_bytes for part in memory_estimate(config, model)}


def test_the_sum_counts_every_bound():
    """Slots cost their tokens, sockets their buffers; the engine counts only with a model of our own."""
    parts = parts_of(Config(), MODEL)
    assert parts["slots"] == 16 * 2048 * 10
    assert parts["weights"] == 100
    assert parts["outboxes"] == 1000 * 262_144
    assert {"gateway", "sockets", "outboxes", "conversations", "bodies"} == set(parts_of(Config()))
    elsewhere = Config(engine=EngineConfig(connect="ipc:///run/e.sock"))
    assert set(parts_of(elsewhere, MODEL)) == set(parts_of(Config()))


def test_every_part_says_what_it_counts():
    """Who doubts the sum can check it."""
    assert all(part.doc and part.num_bytes > 0 for part in memory_estimate(Config(), MODEL))


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemFree: 1 kB\nMemTotal:       1000 kB\n"}
V2, V1 = "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"
OWN = "proc/self/cgroup"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        (MEMINFO, (1_024_000, "machine")),
        ({**MEMINFO, V2: "max\n"}, (1_024_000, "machine")),
        ({**MEMINFO, V2: "512000\n"}, (512_000, "container")),
        ({**MEMINFO, OWN: "4:memory:/\n", V1: "512000\n"}, (512_000, "container")),
        ({**MEMINFO, OWN: "4:memory:/\n", V1: "9223372036854771712\n"}, (1_024_000, "machine")),
        ({**MEMINFO, OWN: "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "4096"}, (4_096, "container")),
        ({**MEMINFO, OWN: "3:cpu:/a\n", V2: "4096"}, (1_024_000, "machine")),
        ({V2: "512000\n"}, (512_000, "container")),
    ],
)
def test_the_tightest_limit_counts(tmp_path, files, limit):
    """A container's limit counts if it is one: groups above ours bind us too, "max" and 2^63 are none."""
    assert memory_limit_bytes(machine(tmp_path, files)) == limit
