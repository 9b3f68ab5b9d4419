# SPDX-License-Identifier: Apache-2.0
"""Texts made of the tree: all of it, and what is TOML can be read back."""

import json
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from server.core.config import Config, ServerConfig, describe, load_config
from server.core.config.memory import memory_estimate
from server.core.config.tree import SETTINGS


def flat(tree):
    return {f"{section}.{name}": value for section, rows in tree.items() for name, value in rows.items()}


def test_the_listing_is_the_config():
    """Read back, the listing gives the same values; each line has its source and meaning."""
    config = Config(server=ServerConfig(port=9), sources={"server.port": "flag --port"})
    text = describe.listing(config)
    assert set(flat(tomllib.loads(text))) == set(SETTINGS)
    assert tomllib.loads(text)["server"]["port"] == 9
    assert "# flag --port; TCP port" in text


def test_the_example_changes_nothing():
    """The example is TOML without a value, and with every comment mark removed it is the defaults."""
    text = describe.example()
    assert flat(tomllib.loads(text)) == {}
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line or line.startswith("[")]
    values = flat(tomllib.loads("\n".join(lines)))
    assert {path: tuple(v) if isinstance(v, list) else v for path, v in values.items()} == {
        path: each.default for path, each in SETTINGS.items()
    }


def test_the_reference_has_a_row_for_each_setting():
    """The reference leaves nothing out, and no row has another number of cells."""
    rows = [line for line in describe.reference().splitlines() if line.startswith("| `")]
    assert len(rows) == len(SETTINGS)
    assert all(line.replace("\\|", "").count("|") == 5 for line in rows)


def test_json_for_machines():
    """The same as JSON."""
    tree = json.loads(describe.as_json(Config()))
    assert tree["engine.queue_max"]["value"] == 256
    assert set(tree) == set(SETTINGS)


def test_flags_rebuild_sections():
    """Another process given the flags has the same sections, whatever the values hold."""
    config = Config(server=ServerConfig(port=9, allowed_origins=("https://a.example", "https://b.example")))
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in describe.flags_of(config, "server", "log"))
    again = load_config(environ={}, flags=flags)
    assert (again.server, again.log) == (config.server, config.log)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_is_written_as_toml(text):
    """A text survives being written as TOML and read."""
    assert tomllib.loads(f"x = {describe.toml_value(text)}")["x"] == text


def test_the_memory_table_adds_up():
    """Its last lines are the sum and the limit."""
    lines = describe.memory_table(memory_estimate(Config()), (2**31, "container")).splitlines()
    assert lines[-2].startswith("at worst")
    assert "2,048 MiB" in lines[-1]
