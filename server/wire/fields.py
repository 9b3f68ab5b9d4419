# SPDX-License-Identifier: Apache-2.0
"""The only place that reads a client's field: typed, in range, or an error that names it and the fix.

Invariant: a null is as absent everywhere; every fault carries the field's whole path in the door's own spelling
(`session.temperature`, `messages[2].content`). It must never coerce: "5" is no number and true is no integer.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from server.core.errors import ServerError, error_of

_Choice = TypeVar("_Choice")

INTEGER_EXACT_MAX = 2**53
"""A double beyond this stands for several integers, so it names none."""

STOPS_MAX = 4
STOP_CHARS_MAX = 256
TEMPERATURE_MAX = 2.0
TOP_K_MAX = 1_000_000
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
ID_CHARS_MAX = 128

_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (str, "a string"),
    (int, "a number"),
    (float, "a number"),
    (list, "an array"),
    (dict, "an object"),
)


class Fields:
    """One JSON object, read field by field. A getter returns None for what is absent or null."""

    __slots__ = ("_path", "_values")

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def path(self, name: str) -> str:
        """The whole path of a field, as the client wrote it."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """The raw value of a field whose type depends on another."""
        return self._values.get(name)

    def names(self) -> Iterator[str]:
        """All fields that are there and not null, in the client's order."""
        return (name for name, value in self._values.items() if value is not None)

    def fault(self, name: str, message: str, code: str = "invalid_value") -> ServerError:
        """An error about a field; the message goes on from its name: "must be …"."""
        path = self.path(name)
        return error_of(code, f"'{path}' {message}", param=path)

    def require(self, name: str) -> None:
        """Refuse an object without a field.

        Raises:
            ServerError: `missing_required_parameter`.
        """
        if not self.has(name):
            raise self.fault(name, "is required", "missing_required_parameter")

    def string(self, name: str, *, chars_max: int | None = None, chars_min: int = 0) -> str | None:
        """A string, its length in characters within bounds."""
        value = self._of_type(name, str, "a string")
        if value is None:
            return None
        if len(value) < chars_min:
            raise self.fault(name, f"must have at least {chars_min} characters")
        if chars_max is not None and len(value) > chars_max:
            raise self.fault(name, f"has {len(value)} characters; at most {chars_max} are allowed")
        return str(value)

    def boolean(self, name: str) -> bool | None:
        """True or false."""
        value = self._of_type(name, bool, "true or false")
        return None if value is None else bool(value)

    def number(self, name: str, *, low: float, high: float) -> float | None:
        """A finite number from `low` to `high`."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(name, f"must be a number from {low:g} to {high:g}, not {_kind(value)}")
        if not low <= value <= high:
            raise self.fault(name, f"must be a number from {low:g} to {high:g}, not {value:g}")
        return float(value)

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`; 1.0 is one, 1.5 and a double too big to be exact are none."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(name, f"must be an integer, not {_kind(value)}")
        if isinstance(value, float) and (not value.is_integer() or abs(value) > INTEGER_EXACT_MAX):
            raise self.fault(name, f"must be an integer, not {value:g}")
        if not low <= value <= high:
            raise self.fault(name, f"must be an integer from {low} to {high}, not {int(value)}")
        return int(value)

    def array(self, name: str, *, count_max: int) -> list[Any] | None:
        """An array of at most `count_max` elements."""
        value = self._of_type(name, list, "an array")
        if value is None:
            return None
        if len(value) > count_max:
            raise self.fault(name, f"has {len(value)} elements; at most {count_max} are allowed")
        return list(value)

    def objects(self, name: str, *, count_max: int) -> "list[Fields] | None":
        """An array of objects, each readable with its own path."""
        value = self.array(name, count_max=count_max)
        return None if value is None else [self._element(name, index, v) for index, v in enumerate(value)]

    def object(self, name: str) -> "Fields | None":
        """An object, readable with its own path."""
        value = self._of_type(name, dict, "an object")
        return None if value is None else Fields(value, self.path(name))

    def choice(self, name: str, choices: Mapping[str, _Choice]) -> _Choice | None:
        """One of a few words, as what it stands for."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in choices:
            raise self.fault(name, f"must be one of {_quoted(choices)}, not {_shown(value)}")
        return choices[value]

    def strings(self, name: str, *, count_max: int, chars_max: int) -> tuple[str, ...] | None:
        """A string, or an array of strings; none of them empty."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return (self.string(name, chars_min=1, chars_max=chars_max) or "",)
        values = self.array(name, count_max=count_max) or []
        elements = Fields({f"{name}[{index}]": element for index, element in enumerate(values)}, self._path)
        for key in elements._values:
            elements.require(key)
            elements.string(key, chars_min=1, chars_max=chars_max)
        return tuple(values)

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        """Up to 16 pairs of short strings, in the client's order."""
        pairs = self.object(name)
        if pairs is None:
            return ()
        if len(names := list(pairs.names())) > METADATA_PAIRS_MAX:
            raise self.fault(name, f"has {len(names)} pairs; at most {METADATA_PAIRS_MAX} are allowed")
        if any(len(key) > METADATA_KEY_CHARS_MAX for key in names):
            raise self.fault(name, f"has a key of more than {METADATA_KEY_CHARS_MAX} characters")
        return tuple((key, pairs.string(key, chars_max=METADATA_VALUE_CHARS_MAX) or "") for key in names)

    def sampling(self) -> dict[str, Any]:
        """The sampling fields that are there, by their `SamplingParams` names and in their ranges.

        `top_k` -1 and 0 are off, larger than any vocabulary is clamped; `top_p` 0 keeps the likeliest token.
        The spelling of `max_tokens` differs between doors, so it is read there.
        """
        top_k = self.integer("top_k", low=-1, high=SEED_MAX)
        found = {
            "temperature": self.number("temperature", low=0, high=TEMPERATURE_MAX),
            "top_p": self.number("top_p", low=0, high=1),
            "top_k": None if top_k is None else min(max(top_k, 0), TOP_K_MAX),
            "min_p": self.number("min_p", low=0, high=1),
            "seed": self.integer("seed", low=SEED_MIN, high=SEED_MAX),
            "stop": self.strings("stop", count_max=STOPS_MAX, chars_max=STOP_CHARS_MAX),
        }
        return {name: value for name, value in found.items() if value is not None}

    def refuse(self, name: str, harmless: Collection[Any], why: str) -> None:
        """Refuse a field this server cannot honour, unless its value asks for nothing.

        Raises:
            ServerError: `unsupported_parameter`, whose message goes on from the field's name with `why`.
        """
        if self.has(name) and self._values[name] not in harmless:
            raise self.fault(name, why, "unsupported_parameter")

    def _of_type(self, name: str, kind: type, words: str) -> Any:
        value = self._values.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.fault(name, f"must be {words}, not {_kind(value)}")
        return value

    def _element(self, name: str, index: int, value: Any) -> "Fields":
        if not isinstance(value, dict):
            raise self.fault(f"{name}[{index}]", f"must be an object, not {_kind(value)}")
        return Fields(value, self.path(f"{name}[{index}]"))


def _kind(value: Any) -> str:
    return next((words for kind, words in _KINDS if isinstance(value, kind)), "null")


def _shown(value: Any) -> str:
    """A wrong value as a client can recognise it, never long."""
    return f"'{value[:40]}'" if isinstance(value, str) else _kind(value)


def _quoted(words: Collection[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)
