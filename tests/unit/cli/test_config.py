# SPDX-License-Identifier: Apache-2.0
"""`sampan config`: what it prints is what a server would use."""

import json
import tomllib

import pytest

from server import cli
from server.cli.config import model_size
from server.core.config import Config, EngineConfig, describe


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAMPAN_HOME", str(tmp_path))


def printed(capsys, *words):
    assert cli.main(["config", *words]) == 0
    return capsys.readouterr()


def test_print_is_the_default(capsys, monkeypatch):
    """It shows value and source of everything, and can be read back."""
    monkeypatch.setenv("SAMPAN_ENGINE__QUEUE_MAX", "5")
    text = printed(capsys).out
    assert tomllib.loads(text)["engine"]["queue_max"] == 5
    assert "# env SAMPAN_ENGINE__QUEUE_MAX;" in text
    assert json.loads(printed(capsys, "--json").out)["engine.queue_max"]["value"] == 5


def test_generated_texts(capsys, monkeypatch):
    """The example and the reference do not depend on this machine's settings."""
    monkeypatch.setenv("SAMPAN_ENGINE__QUEUE_MAX", "not a number")
    assert printed(capsys, "example").out == describe.example()
    assert printed(capsys, "docs").out == describe.reference()


def test_memory_without_a_model(capsys):
    """While the model is not here, the sum says that it leaves it out."""
    out, err = printed(capsys, "--memory")
    assert "at worst" in out
    assert "smollm2-135m-instruct is not here yet" in err
    assert model_size(Config()) is None


def test_an_engine_elsewhere_costs_nothing_here(capsys):
    """With an engine elsewhere there is no model to miss."""
    assert printed(capsys, "--memory", "--engine.connect", "ipc:///run/e").err == ""
    assert model_size(Config(engine=EngineConfig(connect="ipc:///run/e"))) is None
