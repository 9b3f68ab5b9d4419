# SPDX-License-Identifier: Apache-2.0
"""Metrics: their names, and that nobody else's are among them."""

from prometheus_client.parser import text_string_to_metric_families

from server.core.metrics import Metrics
from server.core.ports import GeneratorStatus

LABELS = {"code", "door", "le", "outcome"}


def samples_of(metrics):
    body, media_type = metrics.exposition()
    assert media_type.startswith("text/plain")
    families = text_string_to_metric_families(body.decode())
    return [sample for family in families for sample in family.samples]


def test_names_and_labels():
    """Every name is ours and is exposed before anything happened; labels come from a closed set."""
    metrics = Metrics()
    metrics.requests.labels("realtime", "stop").inc()
    metrics.first_token_s.labels("realtime").observe(0.3)
    found = samples_of(metrics)
    assert all(sample.name.startswith("sampan_") for sample in found)
    assert {label for sample in found for label in sample.labels} <= LABELS
    assert not [sample.name for sample in found if sample.name.endswith("_created")]
    names = {sample.name for sample in found}
    for name in ("sockets_open", "queue_length", "process_resident_memory_bytes", "process_open_fds"):
        assert f"sampan_{name}" in names


def test_engine_gauges_are_read_at_the_scrape():
    """The engine's gauges show how it stands when somebody asks, not when it was last told."""
    now = [GeneratorStatus(is_ready=False)]
    metrics = Metrics()
    metrics.watch(lambda: now[0])
    now[0] = GeneratorStatus(is_ready=True, num_running=2, num_waiting=3, num_waiting_tokens=400)
    values = {sample.name: sample.value for sample in samples_of(metrics)}
    assert values["sampan_engine_ready"] == 1
    assert values["sampan_running_rows"] == 2
    assert values["sampan_queue_length"] == 3
    assert values["sampan_queued_prefill_tokens"] == 400


def test_registries_are_apart():
    """Two Metrics in one process do not share a value: tests and servers can have their own."""
    one, other = Metrics(), Metrics()
    one.sockets_open.inc()
    assert other.registry.get_sample_value("sampan_sockets_open") == 0
