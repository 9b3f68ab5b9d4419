# SPDX-License-Identifier: Apache-2.0
"""The tree of settings as text: a listing with sources, an example file, a table for the docs. Pure.

All of it is generated from `tree`, so none of it can be out of date; a test compares the copies in the docs.
"""

import json
from collections.abc import Iterator
from typing import Any

from server.core.config.memory import MemoryPart
from server.core.config.tree import SECTIONS, SETTINGS, Config, Setting, Value

BOUND_SHOWN_MAX = 1_000_000
"""An upper bound beyond this guards against slips of the pen; it tells a reader nothing."""

REFERENCE_HEAD = """\
# Settings

Made by `sampan config docs`; a test compares the two.

A setting has its default, or is given in a TOML file (`--config FILE`, `$SAMPAN_CONFIG` or `./sampan.toml`),
in the environment (`SAMPAN_ENGINE__QUEUE_MAX=64`) or on the command line (`--engine.queue-max 64`); the later
one in this row wins. A wrong one stops the start, and every fault is told at once. `sampan config` prints each
value with its source, `sampan config example` a file to begin with, `sampan config --memory` what they cost.
"""

_KINDS = {str: "text", int: "int", float: "number", bool: "bool", tuple: "list"}


def toml_value(value: Value) -> str:
    """A value as TOML writes it."""
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(each) for each in value) + "]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def listing(config: Config) -> str:
    """Every setting, its value and where that came from, a line each, in the form of a TOML file."""
    lines: list[str] = []
    for section, settings in _by_section():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        rows = [(f"{each.name} = {toml_value(config.value_of(each.path))}", each) for each in settings]
        width = max(len(text) for text, _ in rows)
        lines += [f"{text:<{width}}  # {config.source_of(each.path)}; {each.doc}" for text, each in rows]
    return "\n".join(lines) + "\n"


def flags_of(config: Config, *sections: str) -> tuple[str, ...]:
    """Command-line flags that give another process these sections, whatever it finds elsewhere."""
    paths = [path for path, each in SETTINGS.items() if each.section in sections]
    return tuple(f"{SETTINGS[path].flag}={_flag_value(config.value_of(path))}" for path in paths)


def as_json(config: Config) -> str:
    """The same for machines."""
    tree: dict[str, dict[str, Any]] = {
        path: {"value": config.value_of(path), "source": config.source_of(path), "doc": each.doc}
        for path, each in SETTINGS.items()
    }
    return json.dumps(tree, ensure_ascii=False, indent=2) + "\n"


def example() -> str:
    """A commented TOML file that changes nothing until a line is uncommented."""
    lines = ["# Settings of Sampan, each at its default. Uncomment what you change."]
    for section, settings in _by_section():
        lines += ["", f"# {_doc_of(section)}", f"[{section}]"]
        for each in settings:
            bounds = f" ({_bounds(each)})" if _bounds(each) else ""
            lines += [f"# {each.doc}{bounds}", f"# {each.name} = {toml_value(each.default)}"]
    return "\n".join(lines) + "\n"


def reference() -> str:
    """Every setting as a page of Markdown, a table for each section."""
    lines = [REFERENCE_HEAD.rstrip()]
    for section, settings in _by_section():
        lines += ["", f"## `[{section}]`", "", _doc_of(section)]
        lines += ["", "| Setting | Default | Kind | Meaning |", "|---|---|---|---|"]
        for each in settings:
            kind = ", ".join(filter(None, (_KINDS[each.kind], _bounds(each))))
            doc = each.doc.replace("|", "\\|")
            lines.append(f"| `{each.name}` | `{toml_value(each.default)}` | {kind} | {doc} |")
    return "\n".join(lines) + "\n"


def memory_table(parts: tuple[MemoryPart, ...], limit: tuple[int, str] | None) -> str:
    """The sum of memory, a line for each part, and how it stands to what there is."""
    rows = [(each.name, each.num_bytes, each.doc) for each in parts]
    rows.append(("at worst", sum(each.num_bytes for each in parts), "every bound reached at once"))
    if limit is not None:
        rows.append((limit[1], limit[0], "the memory there is"))
    return "".join(f"{name:<14}{mebibytes(size):>12}  {doc}\n" for name, size, doc in rows)


def mebibytes(num_bytes: int) -> str:
    """Bytes as people read them."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def _flag_value(value: Value) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _by_section() -> Iterator[tuple[str, list[Setting]]]:
    for section in SECTIONS:
        yield section, [each for each in SETTINGS.values() if each.section == section]


def _doc_of(section: str) -> str:
    return (SECTIONS[section].__doc__ or "").strip()


def _bounds(setting: Setting) -> str:
    if setting.choices:
        return " · ".join(setting.choices)
    if setting.low is not None and setting.high is not None:
        return (
            f"{setting.low:g}–{setting.high:g}" if setting.high < BOUND_SHOWN_MAX else f"from {setting.low:g}"
        )
    return ""
