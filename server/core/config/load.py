# SPDX-License-Identifier: Apache-2.0
"""Defaults < TOML file < environment < command line → a Config, or every fault at once.

Owns the reading of settings and the words about what is wrong with them. Invariant: a Config is returned
only if every value fits its kind, its bounds and its relations; nothing is guessed, rounded or ignored.
"""

import difflib
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from server.core.config.relations import broken_relations
from server.core.config.tree import SECTIONS, SETTINGS, Config, Setting, Value

DEFAULT_FILE = "sampan.toml"
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "host": "server.host",
        "port": "server.port",
        "uds": "server.uds",
        "model": "engine.model",
        "quantization": "engine.quantization",
    }
)
"""Short flags of the command line and what they stand for."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong: the setting as it was written, where, and why."""

    name: str
    source: str
    message: str

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.name} ({self.source}): {self.message}"


class ConfigError(Exception):
    """The settings can't be used. `faults` holds every fault; the text has a line for each."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as somebody wrote it. Text of the environment and of flags is still to be parsed."""

    name: str
    path: str
    value: Any
    source: str
    is_text: bool


def load_config(
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    """Read the settings.

    Args:
        environ: the environment: `SAMPAN_CONFIG`, and `SAMPAN_SECTION__FIELD` for each setting.
        flags: what the command line says, by full name (`engine.max_num_seqs`) or alias (`port`).
        file: the TOML file; else `$SAMPAN_CONFIG`, else `./sampan.toml` if there is one.

    Raises:
        ConfigError: with every fault.
    """
    faults: list[Fault] = []
    given = [*_from_file(file, environ, faults), *_from_environ(environ), *_from_flags(flags or {})]
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    for each in given:
        setting = SETTINGS.get(each.path)
        if setting is None:
            faults.append(Fault(name=each.name, source=each.source, message=_unknown(each)))
            continue
        try:
            values[each.path] = _checked(setting, _parsed(setting, each))
            sources[each.path] = each.source
        except ValueError as error:
            faults.append(Fault(name=each.name, source=each.source, message=str(error)))
    config = _build(values, sources)
    # A value that was refused stands at its default here, so what it should have been to others is unknown.
    refused = {fault.name for fault in faults}
    for paths, sentence in broken_relations(config):
        if not refused.intersection(paths):
            faults.append(_relation_fault(config, paths, sentence))
    if faults:
        raise ConfigError(faults)
    return config


def _build(values: Mapping[str, Value], sources: Mapping[str, str]) -> Config:
    sections = {
        name: kind(**{path.partition(".")[2]: v for path, v in values.items() if path.startswith(f"{name}.")})
        for name, kind in SECTIONS.items()
    }
    return Config(**sections, sources=MappingProxyType(dict(sources)))


def _relation_fault(config: Config, paths: tuple[str, ...], sentence: str) -> Fault:
    written = ", ".join(f"{path} = {config.value_of(path)!r} ({config.source_of(path)})" for path in paths[1:])
    message = f"is {config.value_of(paths[0])!r}: {sentence}" + (f"; {written}" if written else "")
    return Fault(name=paths[0], source=config.source_of(paths[0]), message=message)


# ---- where values come from ------------------------------------------------------------------------------


def _from_file(file: Path | None, environ: Mapping[str, str], faults: list[Fault]) -> Iterator[_Given]:
    path = file or (Path(environ["SAMPAN_CONFIG"]) if environ.get("SAMPAN_CONFIG") else None)
    if path is None:
        path = Path(DEFAULT_FILE)
        if not path.exists():
            return
    source = f"file {path}"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        faults.append(Fault(name=str(path), source="file", message=f"can't be read: {reason}"))
        return
    for name, section in tree.items():
        if not isinstance(section, dict):
            yield _Given(name, name, section, source, is_text=False)
            continue
        for key, value in section.items():
            yield _Given(f"{name}.{key}", f"{name}.{key}", value, source, is_text=False)


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Given]:
    for name, value in sorted(environ.items()):
        # Only names with a section are ours: orchestrators set SAMPAN_PORT and the like for a service's name.
        if name.startswith("SAMPAN_") and "__" in name:
            path = name.removeprefix("SAMPAN_").replace("__", ".", 1).lower()
            yield _Given(path, path, value, f"env {name}", is_text=True)


def _from_flags(flags: Mapping[str, str]) -> Iterator[_Given]:
    for name, value in flags.items():
        path = ALIASES.get(name, name.replace("-", "_"))
        yield _Given(path, path, value, f"flag --{name.replace('_', '-')}", is_text=True)


# ---- one value -------------------------------------------------------------------------------------------


def _unknown(given: _Given) -> str:
    near = difflib.get_close_matches(given.path, SETTINGS, n=1, cutoff=0.5)
    if not near:  # the right name in a wrong section, or without one
        tail = given.path.rpartition(".")[2]
        tails = {path.rpartition(".")[2]: path for path in SETTINGS}
        near = [tails[match] for match in difflib.get_close_matches(tail, tails, n=1, cutoff=0.7)]
    return "no such setting" + (
        f"; did you mean {near[0]}?" if near else "; `sampan config print` lists them all"
    )


def _parsed(setting: Setting, given: _Given) -> Value:
    """The value in its setting's kind.

    Raises:
        ValueError: it is of another kind.
    """
    value: Any = _from_text(setting, given.value) if given.is_text else given.value
    if setting.kind is tuple and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    if setting.kind is float and type(value) is int:
        return float(value)
    if type(value) is not setting.kind:
        raise ValueError(f"must be {_KINDS[setting.kind]}, got {given.value!r}")
    return cast("Value", value)


def _from_text(setting: Setting, text: str) -> Value:
    try:
        if setting.kind in (int, float):
            number: int | float = setting.kind(text.strip().replace("_", ""))
            return number
    except ValueError:
        return text  # refused as a wrong kind
    if setting.kind is bool and text.strip().lower() in _TRUE + _FALSE:
        return text.strip().lower() in _TRUE
    if setting.kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _checked(setting: Setting, value: Value) -> Value:
    """The value, if it lies within its setting's own bounds.

    Raises:
        ValueError: it does not.
    """
    if setting.choices and value not in setting.choices:
        near = difflib.get_close_matches(str(value), setting.choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"must be one of {', '.join(setting.choices)}, got {value!r}{hint}")
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and "\0" in text:
            raise ValueError("must not hold a NUL character")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError("must be finite")
        if setting.low is not None and value < setting.low:
            raise ValueError(f"must be at least {setting.low:g}, got {value!r}")
        if setting.high is not None and value > setting.high:
            raise ValueError(f"must be at most {setting.high:g}, got {value!r}")
    return value
