# SPDX-License-Identifier: Apache-2.0
"""The probes say whether we live and whether we take work, without waiting for either."""

import random

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from server.core.ports import GeneratorStatus
from server.gateway.drain import Drain
from server.gateway.http.admin import Admin

READY = GeneratorStatus(is_ready=True, num_running=16, num_waiting=40, num_waiting_tokens=900)
STARTING = GeneratorStatus(is_ready=False, reason="the engine is starting")


@pytest.fixture
def ask():
    drain = Drain(deadline_s=1, rng=random.Random(1))

    class Engine:
        now = READY

        def status(self):
            return self.now

    admin = Admin(generator=Engine, drain=drain, exposition=lambda: (b"up 1\n", "text/plain; version=1.0.0"))
    Engine.status = lambda: Engine.now
    routes = [Route(f"/{name}", getattr(admin, name)) for name in ("livez", "readyz", "metrics")]
    with TestClient(Starlette(routes=routes)) as client:
        client.engine, client.drain = Engine, drain
        yield client


def test_a_full_queue_is_ready(ask):
    """It answers 429, and that is service."""
    reply = ask.get("/readyz")
    assert reply.status_code == 200
    assert reply.json() == {
        "status": "ready",
        "reason": "",
        "running": 16,
        "waiting": 40,
        "waiting_tokens": 900,
    }
    assert reply.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("status", "is_draining", "reason"),
    [
        (STARTING, False, "the engine is starting"),
        (GeneratorStatus(is_ready=False), False, "the engine is not ready"),
        (READY, True, "draining"),
        (STARTING, True, "draining"),
    ],
)
def test_what_takes_no_work_is_not_ready_and_says_why(ask, status, is_draining, reason):
    """Both the engine and the drain can say no."""
    ask.engine.now = status
    ask.drain.is_draining = is_draining
    reply = ask.get("/readyz")
    assert (reply.status_code, reply.json()["reason"]) == (503, reason)
    assert reply.headers["retry-after"] == "1"


def test_alive_is_not_ready(ask):
    """A server without its engine, or on its way out, must not be killed for it."""
    ask.engine.now = STARTING
    ask.drain.is_draining = True
    assert ask.get("/livez").status_code == 200


def test_metrics_are_passed_on(ask):
    """Body and media type are the registry's own."""
    reply = ask.get("/metrics")
    assert (reply.text, reply.headers["content-type"]) == ("up 1\n", "text/plain; version=1.0.0; charset=utf-8")
