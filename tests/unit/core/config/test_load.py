# SPDX-License-Identifier: Apache-2.0
"""Loading settings: the order of the sources, and every fault at once."""

import pytest

from server.core.config.load import ALIASES, ConfigError, load_config
from server.core.config.tree import SETTINGS


def faults_of(tmp_path, text="", environ=(), **flags):
    """The faults of these settings, as lines."""
    file = tmp_path / "sampan.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(environ=dict(environ), flags=flags, file=file)
    return str(caught.value).splitlines()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_later_sources_win(tmp_path):
    """Default < file < environment < flag, and the Config tells which."""
    file = tmp_path / "own.toml"
    file.write_text("[server]\nport = 1\nhost = '::'\nuds = ''\n[engine]\nqueue_max = 1\n")
    environ = {"SAMPAN_SERVER__PORT": "2", "SAMPAN_ENGINE__QUEUE_MAX": "2", "PATH": "/bin"}
    config = load_config(environ=environ, flags={"port": "3"}, file=file)
    assert (config.server.port, config.source_of("server.port")) == (3, "flag --port")
    assert config.engine.queue_max == 2
    assert config.source_of("engine.queue_max") == "env SAMPAN_ENGINE__QUEUE_MAX"
    assert (config.server.host, config.source_of("server.host")) == ("::", f"file {file}")
    assert (config.engine.max_num_seqs, config.source_of("engine.max_num_seqs")) == (16, "default")


def test_where_the_file_is(tmp_path):
    """The flag names the file, else the environment, else it is ./sampan.toml, if that exists."""
    for name, port in (("sampan.toml", 1), ("env.toml", 2), ("flag.toml", 3)):
        (tmp_path / name).write_text(f"[server]\nport = {port}\n")
    environ = {"SAMPAN_CONFIG": str(tmp_path / "env.toml")}
    assert load_config(environ={}).server.port == 1
    assert load_config(environ=environ).server.port == 2
    assert load_config(environ=environ, file=tmp_path / "flag.toml").server.port == 3
    (tmp_path / "sampan.toml").unlink()
    assert load_config(environ={}).server.port == 8000


def test_each_kind_is_read_from_text():
    """Text of the environment and of flags becomes the setting's kind."""
    flags = {"server.allowed-origins": "https://a.example, https://b.example", "ping-interval-s": "7"}
    flags = {"server.ping_interval_s": flags.pop("ping-interval-s"), **flags, "engine.queue-max": "1_000"}
    config = load_config(environ={"SAMPAN_SESSION__INSTRUCTIONS": "Be brief, 请。"}, flags=flags)
    assert config.server.allowed_origins == ("https://a.example", "https://b.example")
    assert config.server.ping_interval_s == 7.0
    assert config.engine.queue_max == 1000
    assert config.session.instructions == "Be brief, 请。"


def test_every_fault_at_once(tmp_path):
    """One error names everything that is wrong, where it was written, and the near name."""
    text = "stray = 1\n[server]\nhots = 'x'\nport = 'many'\n[engin]\nqueue_max = 1\n"
    environ = {"SAMPAN_ENGINE__QUANTIZATION": "w8a", "SAMPAN_LOG__LEVEL": "loud"}
    lines = faults_of(tmp_path, text, environ, port="-1", mdoel="x")
    assert len(lines) == 8
    for words in (
        ("stray", "file", "no such setting"),
        ("server.hots", "did you mean server.host?"),
        ("server.port", "file", "must be a whole number, got 'many'"),
        ("engin.queue_max", "did you mean engine.queue_max?"),
        ("engine.quantization", "env SAMPAN_ENGINE__QUANTIZATION", "did you mean 'w8a8'?"),
        ("log.level", "must be one of debug, info, warning, error"),
        ("server.port", "flag --port", "must be at least 0, got -1"),
        ("mdoel", "did you mean engine.model?"),
    ):
        assert any(all(word in line for word in words) for line in lines), words


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("server.port", "true"), ("server.port", "8000.0"), ("server.port", "'8000'"), ("server.host", "1"),
        ("server.ping_timeout_s", "nan"), ("server.ping_timeout_s", "inf"), ("server.ping_timeout_s", "true"),
        ("server.allowed_origins", "'*'"), ("server.allowed_origins", "[1]"), ("engine.model", '"a\\u0000b"'),
        ("server.frame_bytes_max", "-1"), ("sampling.top_p", "1.01"), ("engine.queue_timeout_s", "1e9"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(tmp_path, path, value):
    """A value of another kind or beyond its bounds is refused by name: nothing is rounded or guessed."""
    section, name = path.split(".")
    (line,) = faults_of(tmp_path, f"[{section}]\n{name} = {value}\n")
    assert line.startswith(f"{path} (file ")


@pytest.mark.parametrize("value", ["", "x", "1.5", "0x10", "٣x", "1e3"])
def test_text_that_is_no_number_is_refused(tmp_path, value):
    """A flag's text must be the number as people write it."""
    (line,) = faults_of(tmp_path, port=value)
    assert "must be a whole number" in line


def test_a_contradiction_names_all_sides(tmp_path):
    """Values that are right alone and wrong together are told together, with their sources."""
    (line,) = faults_of(tmp_path, "[engine]\nmax_model_len = 4096\nqueue_tokens_max = 100\n")
    assert line.startswith("engine.queue_tokens_max (file ")
    assert "engine.max_model_len = 4096 (file " in line


def test_a_refused_value_is_not_blamed_twice(tmp_path):
    """A contradiction with a value that was itself refused is not told: nobody knows what it should be."""
    (line,) = faults_of(tmp_path, "[engine]\nmax_num_batched_tokens = 0\nmax_num_seqs = 500\n")
    assert line.startswith("engine.max_num_batched_tokens (file ")


def test_an_unreadable_file_is_a_fault(tmp_path):
    """A file that was asked for and is not there, or is not TOML, is refused by its path."""
    with pytest.raises(ConfigError, match=r"none\.toml \(file\): can't be read: No such file"):
        load_config(environ={}, file=tmp_path / "none.toml")
    (line, *_) = faults_of(tmp_path, "[server\n")
    assert "sampan.toml (file): can't be read" in line


def test_variables_of_orchestrators_are_not_ours():
    """SAMPAN_PORT and its like, which Kubernetes sets for a service of that name, are left alone."""
    environ = {"SAMPAN_PORT": "tcp://10.0.0.1:8000", "SAMPAN_SERVICE_HOST": "10.0.0.1", "SAMPAN_HOME": "/x"}
    assert load_config(environ=environ).sources == {}


def test_aliases_name_settings():
    """Each short flag stands for a setting."""
    assert set(ALIASES.values()) <= set(SETTINGS)
