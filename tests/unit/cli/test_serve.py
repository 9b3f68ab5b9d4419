# SPDX-License-Identifier: Apache-2.0
"""`sampan serve`: it refuses before it opens anything, and says what a person wants to know."""

from types import SimpleNamespace

import pytest

from server import cli
from server.cli import serve
from server.cli.options import CommandError
from server.core.config import Config, EngineConfig, MemoryPart, ServerConfig
from server.gateway import app

PACKAGE = SimpleNamespace(
    path="/p", manifest=SimpleNamespace(model_id="m", shape=SimpleNamespace(context_length=1024))
)
PARTS = (MemoryPart(name="slots", num_bytes=2**30, doc="max_num_seqs × …"),)


@pytest.fixture
def served(monkeypatch, tmp_path):
    """The Configs the gateway was started with."""
    configs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAMPAN_HOME", str(tmp_path))
    monkeypatch.setattr(app, "serve", lambda config: configs.append(config) or 0)
    monkeypatch.setattr(serve, "served_package", lambda *_: PACKAGE)
    monkeypatch.setattr(serve.log, "configure", lambda *_: None)
    monkeypatch.setattr(serve, "memory_limit_bytes", lambda: None)
    return configs


def test_it_serves_what_was_configured(served, tmp_path, capsys):
    """The gateway gets the settings, with the home of models found and the context fitted to the model."""
    assert cli.main(["serve", "--port", "9000"]) == 0
    (config,) = served
    assert (config.server.port, config.engine.home, config.engine.max_model_len) == (9000, str(tmp_path), 1024)
    assert "http://127.0.0.1:9000/" in capsys.readouterr().out


def test_wrong_settings_open_nothing(served, capsys):
    """A fault of the settings ends it before a model is fetched or a port opened."""
    assert cli.main(["serve", "--port", "99999"]) == cli.EXIT_USAGE
    assert served == []
    assert "server.port" in capsys.readouterr().err


def test_a_container_that_is_too_small_is_refused():
    """A sum beyond the container's limit is refused with the largest part; a machine's memory may swap."""
    with pytest.raises(CommandError, match=r"may need 1,024 MiB, this container has 512 MiB.*slots"):
        serve.refuse_too_much(PARTS, (2**29, "container"))
    serve.refuse_too_much(PARTS, (2**29, "machine"))
    serve.refuse_too_much(PARTS, (2**31, "container"))
    serve.refuse_too_much(PARTS, None)


@pytest.mark.parametrize(
    ("server", "url"),
    [
        (ServerConfig(), "http://127.0.0.1:8000"),
        (ServerConfig(host="0.0.0.0", port=80), "http://127.0.0.1:80"),
        (ServerConfig(host="::"), "http://[::1]:8000"),
        (ServerConfig(host="::1"), "http://[::1]:8000"),
        (ServerConfig(host="chat.example"), "http://chat.example:8000"),
        (ServerConfig(uds="/run/s.sock"), "unix:/run/s.sock"),
    ],
)
def test_where_to_find_it(server, url):
    """The address is one that a browser on this machine can open."""
    assert serve.base_url(Config(server=server)) == url


def test_the_banner_says_what_counts():
    """Model, threads and memory; who opens it to a network is told what that means, others are not."""
    near = serve.banner(Config(), PARTS)
    far = serve.banner(Config(server=ServerConfig(host="0.0.0.0")), PARTS)
    assert "smollm2-135m-instruct (w8a8)" in near
    assert "1,024 MiB at worst" in near
    assert "NOTE" not in near
    assert "NOTE" in far
    elsewhere = serve.banner(Config(engine=EngineConfig(connect="tcp://e:1")), PARTS)
    assert "the engine at tcp://e:1" in elsewhere
