# SPDX-License-Identifier: Apache-2.0
"""The composition: every door is where it should be, and a process that can't start says so in one line."""

import logging
import random
import resource
from contextlib import asynccontextmanager

import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse

from server.core.config import Config, SamplingConfig, ServerConfig, SessionConfig
from server.core.errors import error_of
from server.gateway import app as module
from server.gateway.app import build_app, serve
from server.gateway.drain import Drain
from server.gateway.listener import GatewayServer, bind
from tests.fakes import FakeGenerator

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def client_of(*steps, config=Config(), **more):  # noqa: B008 - frozen
    drain = Drain(deadline_s=1, rng=random.Random(1))
    client = TestClient(build_app(config, FakeGenerator(*steps), drain=drain, **more))
    client.drain = drain
    return client


def test_every_door_is_there():
    """By path, for people, machines and SDKs."""
    with client_of("Par", "is") as client:
        for path in ("/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/m"):
            assert client.get(path).status_code == 200
        answer = client.post("/v1/chat/completions", json=ASK).json()
        assert answer["choices"][0]["message"]["content"] == "Paris"
        with client.websocket_connect("/v1/realtime?model=m") as socket:
            assert socket.receive_json()["type"] == "session.created"
        with client.websocket_connect("/chat") as socket:
            assert "is listening" in socket.receive_text()


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/realtime/", "/v1/chat/completions", "/nothing"])
def test_an_unrouted_socket_is_404(path):
    """In our form, and not the 403 that reads as a missing right."""
    with client_of() as client, pytest.raises(WebSocketDenialResponse) as caught:
        client.websocket_connect(path).__enter__()
    assert caught.value.status_code == 404
    assert caught.value.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/v1/realtime", "/chat"])
def test_a_plain_request_to_a_socket_door_is_426(path):
    """It names the protocol that is spoken here."""
    with client_of() as client:
        reply = client.get(path)
    assert (reply.status_code, reply.headers["upgrade"]) == (426, "websocket")
    assert reply.json()["error"]["code"] == "upgrade_required"


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/livez/", 404), ("/v1/models/none", 404)])
def test_unknown_paths_are_in_our_form(path, status):
    """And nothing is redirected."""
    with client_of() as client:
        reply = client.get(path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_settings_reach_the_doors():
    """How to sample, what to say first, and how much a body may hold."""
    config = Config(
        sampling=SamplingConfig(temperature=0.3, top_k=5, top_p=0.5, min_p=0.1, max_tokens=9),
        session=SessionConfig(instructions="be brief"),
        server=ServerConfig(body_bytes_max=1024),
    )
    generator = FakeGenerator("a")
    app = build_app(config, generator, drain=Drain(deadline_s=1, rng=random.Random(1)))
    with TestClient(app) as client:
        assert client.post("/v1/chat/completions", json={**ASK, "pad": "x" * 2000}).status_code == 413
        client.post("/v1/chat/completions", json=ASK)
        with client.websocket_connect("/chat") as socket:
            socket.receive_text(), socket.receive_text()
            socket.send_text("hi")
            socket.receive_text()
    over_http, over_socket = generator.requests
    for request in (over_http, over_socket):
        assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (
            0.3,
            5,
            9,
        )
    assert [item.text for item in over_http.items] == ["hi"]
    assert [item.text for item in over_socket.items] == ["be brief", "hi"]


def test_no_bound_is_no_bound():
    """0 tokens in the settings means what fits."""
    assert module._sampling(Config()).max_tokens is None


def test_metrics_tell_of_errors_and_restarts():
    """Each error by its code; an engine that was started again is counted once."""
    restarts = [0]
    with client_of(error_of("queue_full", "full"), restarts=lambda: restarts[0]) as client:
        client.post("/v1/chat/completions", json=ASK)
        assert "sampan_engine_restarts_total 0.0" in client.get("/metrics").text
        restarts[0] = 2
        client.get("/metrics")
        text = client.get("/metrics").text
    assert "sampan_engine_restarts_total 2.0" in text
    assert 'sampan_build_info{model="smollm2-135m-instruct",quantization="w8a8"' in text
    assert 'sampan_errors_total{code="queue_full"} 1.0' in text
    assert 'sampan_requests_total{door="completions",outcome="queue_full"} 1.0' in text


def test_what_is_opened_is_closed():
    """Before the first request, and after the last."""
    order = []

    @asynccontextmanager
    async def resources():
        order.append("open")
        yield
        order.append("close")

    with client_of(resources=resources()) as client:
        assert client.get("/livez").status_code == 200
        assert order == ["open"]
    assert order == ["open", "close"]


def test_a_wrong_origin_is_named_at_the_start():
    """Not when the first browser is refused."""
    with pytest.raises(ValueError, match=r"'shop\.example' is not an origin"):
        client_of(config=Config(server=ServerConfig(allowed_origins=("shop.example",))))


# ---- the process -----------------------------------------------------------------------------------------


class FakeEngine(FakeGenerator):
    """An engine that only starts and stops."""

    def __init__(self):
        super().__init__("a")
        self.life = []

    async def start(self):
        self.life.append("start")

    async def close(self):
        self.life.append("close")


@pytest.fixture
def engine(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(module, "_engine", lambda config, address: engine)
    monkeypatch.setattr(module, "_restarts_of", lambda _: lambda: 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield engine
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    log = logging.getLogger("uvicorn.error")
    log.filters.clear()
    log.setLevel(logging.NOTSET)


def test_a_busy_port_is_one_line_and_a_status(engine, caplog):
    """Before an engine is started."""
    with bind(ServerConfig(port=0)) as listener:
        config = Config(server=ServerConfig(port=listener.getsockname()[1]))
        assert serve(config) == 1
    (line,) = caplog.records
    assert line.msg == "cannot_listen"
    assert "another program" in line.reason
    assert not engine.life


def test_a_run_opens_stops_and_closes(engine, monkeypatch, tmp_path):
    """A stop that was asked for is status 0, the engine is closed and the socket file gone."""
    path = tmp_path / "s"

    async def at_once(self):
        assert path.is_socket()
        self.handle_exit(15, None)

    monkeypatch.setattr(GatewayServer, "main_loop", at_once)
    assert serve(Config(server=ServerConfig(uds=str(path), drain_timeout_s=0))) == 0
    assert engine.life == ["start", "close"]
    assert not path.exists()


def test_a_start_that_fails_is_a_status(engine, monkeypatch):
    """What could not be opened is not served."""

    async def broken():
        raise RuntimeError("no engine")

    monkeypatch.setattr(engine, "start", broken)
    assert serve(Config(server=ServerConfig(port=0))) == 1


def test_files_are_allowed_as_connections_are(engine, caplog, monkeypatch):
    """The soft limit is raised; a hard one that is too low is said."""
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    module._prepare_process(Config(server=ServerConfig(connections_max=500, sockets_max=100)))
    module._prepare_process(Config(server=ServerConfig(connections_max=5000)))
    assert set_to == [(500 + module.SPARE_FILES, 1000), (1000, 1000)]
    assert [record.msg for record in caplog.records] == ["too_few_files"]


def test_the_engine_is_started_with_our_settings(monkeypatch):
    """Every setting of its sections is spelled out, and nothing is read a second time."""
    made = {}
    monkeypatch.setattr(module, "find_package", lambda *key: key)
    monkeypatch.setattr(module, "Supervisor", lambda command, **more: made.update(command=command, **more))
    monkeypatch.setattr(module, "Engine", lambda package, address, **more: made.update(address=address, **more))
    module._engine(Config(), "ipc:///x/engine")
    assert made["address"] == "ipc:///x/engine"
    assert made["command"][2:5] == ("server", "engine", "--config")
    assert "--engine.listen=ipc:///x/engine" in made["command"]
    assert "--child" in made["command"]
    assert not [flag for flag in made["command"] if flag.startswith("--server")]
