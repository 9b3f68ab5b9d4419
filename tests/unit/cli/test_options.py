# SPDX-License-Identifier: Apache-2.0
"""Settings as flags: each has one, and their text goes to the one place that judges it."""

import argparse
from pathlib import Path

import pytest

from server.cli.options import add_config_arguments, config_of, home_of
from server.core.config import Config, EngineConfig
from server.core.config.tree import SETTINGS


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAMPAN_HOME", raising=False)


def parsed(*words, settings=()):
    parser = argparse.ArgumentParser(prog="x")
    add_config_arguments(parser)
    args = parser.parse_args(words)
    args.settings = dict(settings)
    return parser, args


def test_every_setting_is_in_the_help():
    """The help names each setting with its meaning and default."""
    text = " ".join(parsed()[0].format_help().split())
    for each in SETTINGS.values():
        assert each.flag in text
        assert " ".join(each.doc.split()[:3]) in text


def test_short_and_long_flags():
    """A short flag and a long one reach the same tree; the long one is heard last."""
    _, args = parsed("--port", "1", "--model", "m", settings={"engine.max-num-seqs": "3", "server.port": "2"})
    config = config_of(args)
    assert (config.server.port, config.engine.model, config.engine.max_num_seqs) == (2, "m", 3)
    assert config.source_of("engine.max_num_seqs") == "flag --engine.max-num-seqs"


def test_the_file_flag(tmp_path):
    """--config names the file."""
    (tmp_path / "own.toml").write_text("[server]\nport = 9\n")
    assert config_of(parsed("--config", "own.toml")[1]).server.port == 9


def test_a_closed_command_line_hears_nothing_else(monkeypatch, tmp_path):
    """An engine's settings are those its gateway spelled out, whatever file or environment it finds."""
    monkeypatch.setenv("SAMPAN_SESSION__ITEM_BYTES_MAX", "1000000")
    (tmp_path / "sampan.toml").write_text("[engine]\nqueue_max = 1\n")
    config = config_of(parsed(settings={"engine.max-num-seqs": "3"})[1], is_closed=True)
    assert (config.engine.max_num_seqs, config.engine.queue_max) == (3, 256)


def test_where_models_are(monkeypatch):
    """The setting names the home of models, else the environment, and `~` is the user's."""
    monkeypatch.setenv("SAMPAN_HOME", "/srv/models")
    assert home_of(Config()) == Path("/srv/models")
    assert home_of(Config(engine=EngineConfig(home="~/models"))) == Path.home() / "models"
