# SPDX-License-Identifier: Apache-2.0
"""`sampan engine`: settings become the worker's arguments."""

import logging
from types import SimpleNamespace

import pytest

from server import cli
from server.cli import engine
from server.core.config import Config
from server.engine.admission import SchedulerLimits
from server.engine.process import worker

PACKAGE = SimpleNamespace(
    path="/p", manifest=SimpleNamespace(model_id="m", shape=SimpleNamespace(context_length=8192))
)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The arguments the worker was started with."""
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "run_worker", lambda **given: calls.append(given) or 0)
    monkeypatch.setattr(engine, "served_package", lambda *_: PACKAGE)
    monkeypatch.setattr(engine.log, "configure", lambda *_: None)
    return calls


def test_the_worker_gets_the_settings(started):
    """Every bound of the scheduler comes from the settings; each start has an id of its own."""
    words = ["engine", "--engine.listen", "ipc:///e", "--engine.num-threads", "3", "--engine.max-num-seqs=4"]
    assert cli.main(words) == 0
    assert cli.main([*words, "--child"]) == 0
    one, other = started
    assert one["limits"].max_num_seqs == 4
    assert (one["num_threads"], one["listen"], one["package_path"]) == (3, "ipc:///e", "/p")
    assert (one["dies_with_parent"], other["dies_with_parent"]) == (False, True)
    assert one["engine_id"] != other["engine_id"]


def test_it_must_be_told_where_to_listen(started, capsys):
    """An address is no default's business: who runs an engine alone names it."""
    assert cli.main(["engine"]) == 1
    assert "--engine.listen ipc:///" in capsys.readouterr().err
    assert started == []


def test_limits_are_all_set():
    """No bound of the scheduler is left at a default of its own."""
    limits = engine.limits_of(Config().engine)
    assert limits == SchedulerLimits(
        max_num_seqs=16, max_model_len=2048, max_num_batched_tokens=256, prefill_chunk_tokens=128,
        queue_max=256, queue_tokens_max=65_536, queue_timeout_ms=60_000,
    )  # fmt: skip
    assert logging.getLogger("server.cli.engine").level == logging.NOTSET
