# SPDX-License-Identifier: Apache-2.0
"""The tree of settings: complete, within its own bounds, frozen."""

import dataclasses

import pytest

from server.core.config.relations import broken_relations
from server.core.config.tree import SECTIONS, SETTINGS, Config

UNITS = ("_s", "_max", "_bytes", "_tokens", "_len", "_seqs")
NUMBERS_WITHOUT_UNIT = {
    "server.port", "engine.num_threads",
    "sampling.temperature", "sampling.top_k", "sampling.top_p", "sampling.min_p",
}  # fmt: skip


def test_defaults_are_good():
    """The defaults lie within their bounds, are of their kind, and don't contradict each other."""
    for each in SETTINGS.values():
        assert type(each.default) is each.kind, each.path
        if each.low is not None and each.high is not None:
            assert each.low <= each.default <= each.high, each.path
        assert not each.choices or each.default in each.choices
    assert [] == list(broken_relations(Config()))


def test_every_setting_is_described():
    """Each setting says what it is for, in one line; each number has both bounds and its unit in its name."""
    for path, each in SETTINGS.items():
        assert each.doc, path
        assert "\n" not in each.doc, path
        if each.kind in (int, float):
            assert None not in (each.low, each.high), path
            assert path.endswith(UNITS) or path in NUMBERS_WITHOUT_UNIT, path


def test_each_section_is_in_the_config():
    """The sections are those of Config, in its order."""
    names = [field.name for field in dataclasses.fields(Config) if field.name != "sources"]
    assert names == list(SECTIONS)


def test_names_in_other_places():
    """A setting has one name in the file, in the environment and on the command line each."""
    each = SETTINGS["engine.max_num_seqs"]
    assert each.variable == "SAMPAN_ENGINE__MAX_NUM_SEQS"
    assert each.flag == "--engine.max-num-seqs"


def test_a_config_is_frozen_and_compared_by_value():
    """Nobody changes a Config, and where its values came from makes no other Config of it."""
    config = Config(sources={"server.port": "flag --port"})
    assert config == Config()
    assert config.source_of("server.port") == "flag --port"
    assert config.source_of("server.host") == "default"
    assert config.value_of("server.port") == 8000
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.server.port = 1
