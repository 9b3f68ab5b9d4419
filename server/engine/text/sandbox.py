# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's chat template as a program that can neither reach out, nor run long, nor grow large.

jinja2's immutable sandbox keeps a template from attributes and files. It does not count, so this module does:
whatever can repeat (a loop's turn, a call, a filter) or grow (a joined, multiplied or built value) passes a
meter first, and a value's size is known before it is made. Templates have no other way to repeat, so each
rendering ends within its budget. It must never be trusted with another environment's filters: what stands
in FILTERS was looked at one by one.
"""

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from sys import getsizeof
from time import thread_time
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SOURCE_CHARS_MAX = 100_000  # five times the longest in use
OUTPUT_CHARS_MAX = 2_000_000  # what half a million tokens spell
VALUE_CHARS_MAX = 2_000_000
BUILT_BYTES_MAX = 134_217_728  # of all values of one rendering together, so of what it can hold at once
CPU_S_MAX = 1.0
TICKS_PER_LOOK = 16  # reading the thread's clock costs as much as a small operation
ELEMENT_BYTES = 64  # of a list: the place and a short text that stands there
NODE_CHARS = 16  # of a value in a list: a number, quotes and commas
NUMBER_MAX = 10_000  # of a factor, an exponent, a repetition
WIDTH_MAX = 100
MESSAGE_CHARS_MAX = 200

TEXT_FILTERS = frozenset(  # they make a text of whatever they are given
    ("capitalize", "e", "escape", "format", "indent", "lower", "replace", "safe", "string", "title", "tojson",
     "trim", "truncate", "upper", "wordcount")
)  # fmt: skip
FILTERS = (TEXT_FILTERS - {"tojson"}) | {
    "abs", "count", "d", "default", "dictsort", "first", "float", "int", "items", "join", "last", "length",
    "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique",
}  # fmt: skip
METHODS = frozenset(
    ("capitalize", "count", "endswith", "find", "format", "get", "index", "isalnum", "isalpha", "isdecimal",
     "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "items", "join", "keys", "lower",
     "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
     "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "values")
)  # fmt: skip
_WIDE_FORMAT = re.compile(r"\d{3}|\*|\{[^}]*\{")  # a width that fills, or one that comes from an argument


class TemplateFault(Exception):
    """The template is wrong, refused its input or broke its limits; the message is ours or the template's."""


class TemplateProgram:
    """One compiled template. Threads may render at once.

    Raises:
        TemplateFault: it does not parse, or uses what no chat template needs.
    """

    def __init__(self, source: str) -> None:
        if len(source) > SOURCE_CHARS_MAX:
            raise TemplateFault(f"it is longer than {SOURCE_CHARS_MAX} characters")
        self._sandbox = _Sandbox()
        try:
            tree = _Metered().visit(self._sandbox.parse(source))
            tree.set_environment(self._sandbox)
            code = self._sandbox.compile(tree)
            self._template = jinja2.Template.from_code(self._sandbox, code, self._sandbox.globals)
        except Exception as error:  # somebody's program: whatever is wrong with it is its own fault
            raise _fault_of(error) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """What the template writes.

        Raises:
            TemplateFault: it failed, refused or went beyond its budget.
        """
        meter = self._sandbox.local.meter = _Meter()
        try:
            return "".join(meter.written(self._template.generate(**variables)))
        except Exception as error:  # as above
            raise _fault_of(error) from error
        finally:
            del self._sandbox.local.meter


class _Meter:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._num_ticks = 0
        self._bytes_left = BUILT_BYTES_MAX
        self._ends_at = thread_time() + CPU_S_MAX

    def tick(self) -> None:
        """Count one step."""
        self._num_ticks += 1
        if self._num_ticks % TICKS_PER_LOOK == 0 and thread_time() > self._ends_at:
            raise TemplateFault("it runs too long")

    def written(self, pieces: Iterable[str]) -> Iterator[str]:
        """Hand on what the template writes."""
        num_chars = 0
        for piece in pieces:
            self.tick()
            num_chars += len(piece)
            if num_chars > OUTPUT_CHARS_MAX:
                raise TemplateFault("it writes too long a prompt")
            yield piece

    def keep(self, value: Any) -> Any:
        """Count a value that was built; returns it."""
        self.tick()
        if isinstance(value, str):
            self._bytes_left -= getsizeof(value)
        elif isinstance(value, list | tuple | dict):
            self._bytes_left -= ELEMENT_BYTES * len(value)
        if self._bytes_left < 0:
            raise TemplateFault("it builds too much text")
        return value


class _Turns(list[Any]):
    """What a loop walks over: each turn is counted."""

    def __init__(self, values: Iterable[Any], meter: _Meter) -> None:
        super().__init__(values)
        self._meter = meter

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self._meter.tick()
            yield value


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, as transformers sets it up, with a meter in every operation that repeats or grows."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_weighed,
        )
        self.local = threading.local()  # .meter of the rendering that this thread is in
        self.concat = self._concat  # type: ignore[method-assign]  # the class holds a plain function
        self.globals = {name: self.globals[name] for name in ("range", "namespace", "dict")}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self.filters = {name: self._metered(name, self.filters[name]) for name in FILTERS}
        self.filters |= {
            "tojson": self._metered("tojson", _to_json),
            "metered": self._in_template(lambda value: value),
            "watched": self._in_template(lambda values: _Turns(values, self._meter)),
            "joined": self._in_template(lambda *values: "".join(map(str, _weighed(values)))),
        }

    @property
    def _meter(self) -> _Meter:
        meter: _Meter = self.local.meter
        return meter

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what can grow; refuse what would grow too large."""
        if operator == "+":
            _refuse_long(_length(left) + _length(right))
        elif operator == "%" and isinstance(left, str):
            _refuse_wide(left, (right,))
        elif operator != "%" and not all(_length(each) <= NUMBER_MAX for each in (left, right)):
            raise TemplateFault("it computes too large a value")
        return self._meter.keep(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Get an item; a slice is a new value."""
        value = super().getitem(obj, argument)
        return self._meter.keep(value) if isinstance(argument, slice) else value

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function of ours, or a method that keeps values small."""
        method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps `str.format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | int | float | bytes | list | tuple | dict):
            args = _checked_method(owner, method.__name__, args, kwargs)
        self._meter.tick()
        return self._meter.keep(super().call(context, obj, *args, **kwargs))

    def _concat(self, pieces: Iterable[str]) -> str:
        listed = list(pieces)
        _refuse_long(sum(map(len, listed)))
        text: str = self._meter.keep("".join(listed))
        return text

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose arguments are looked at first and whose result is counted."""
        num_hidden = int(hasattr(function, "jinja_pass_arg"))  # jinja2 hands some filters their surroundings

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            seen = _checked_filter(name, args[num_hidden:], kwargs)
            return self._meter.keep(function(*args[:num_hidden], *seen, **kwargs))

        return run

    def _in_template(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter for `_Metered` to set; asking for the context keeps jinja2 from running it beforehand."""

        @jinja2.pass_context
        def run(_: Context, *args: Any) -> Any:
            return self._meter.keep(function(*args))

        return run


class _Metered(NodeTransformer):
    """Puts the meter where jinja2 has no hook: loops, joined text, written-out lists."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's name
        """Count a loop's turns."""
        self.generic_visit(node)
        node.iter = _filtered(cast("nodes.Expr", node.iter), "watched")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - jinja2's name
        """Measure before joining."""
        self.generic_visit(node)
        return _filtered(node.nodes[0], "joined", node.nodes[1:])

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802 - jinja2's name
        """Count a list."""
        self.generic_visit(node)
        return _filtered(node, "metered")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802 - jinja2's name
        """Count a mapping."""
        self.generic_visit(node)
        return _filtered(node, "metered")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802 - jinja2's name
        """Count a tuple, unless it is names to assign to."""
        self.generic_visit(node)
        return _filtered(node, "metered") if node.ctx == "load" else node


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; here they are just words."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's own content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Expr, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, args or [], [], None, None, lineno=node.lineno)


# ---- how large a value would be --------------------------------------------------------------------------


def _checked_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a method that is known to be harmless with them."""
    if name not in METHODS:
        raise TemplateFault(f"it calls {type(owner).__name__}.{name}, which no chat template needs")
    if name == "format":
        _refuse_wide(owner, (args, kwargs))
    elif name == "join" and args:
        args = (_joinable(args[0], owner), *args[1:])
    elif name == "replace":
        _refuse_replaced(owner, *args[:2])
    return args


def _checked_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter that is known to be harmless with them."""
    if name == "join":
        separator = args[1] if len(args) > 1 else kwargs.get("d", "")
        return (_joinable(args[0], str(_weighed(separator))), *args[1:])
    if name in TEXT_FILTERS:
        _weighed((args, kwargs))
    if name == "format":
        _refuse_wide(str(args[0]), (args[1:], kwargs))
    elif name == "replace":
        _refuse_replaced(*map(str, (*args, *kwargs.values())[:3]))
    elif name in ("indent", "tojson"):
        width = [*args[1:2], *(value for key, value in kwargs.items() if key in ("width", "indent"))]
        if any(_length(each) > WIDTH_MAX for each in width):
            raise TemplateFault("it indents too far")
        _refuse_long(_length(args[0]) + str(args[0]).count("\n") * WIDTH_MAX if name == "indent" else 0)
    return args


def _joinable(values: Iterable[Any], separator: str) -> list[Any]:
    listed = list(values)
    _refuse_long(_weight(listed) + len(listed) * len(separator))
    return listed


def _refuse_replaced(text: str, old: str = "", new: str = "") -> None:
    _refuse_long(len(text) + text.count(old) * len(new))


def _refuse_wide(form: str, values: Any) -> None:
    if _WIDE_FORMAT.search(form):
        raise TemplateFault("it formats to a width that it does not need")
    _refuse_long(len(form) * max(1, _weight(values)))  # each field of the form may show them all


def _refuse_long(num_chars: float) -> None:
    if num_chars > VALUE_CHARS_MAX:
        raise TemplateFault("it builds too long a text")


def _weighed(value: Any) -> Any:
    """The value, if its text is not too long: a small list of lists of lists can spell out a very long one."""
    _refuse_long(_weight(value))
    return value


def _weight(value: Any) -> int:
    """About the characters of `str(value)`, counted no further than what is too long."""
    if isinstance(value, str):
        return len(value)
    total, stack = 0, [value]
    while stack and total <= VALUE_CHARS_MAX:
        each = stack.pop()
        total += NODE_CHARS
        if isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, int):
            total += each.bit_length() // 3  # decimal digits, rounded up
        if isinstance(each, dict):
            stack += each.keys()
            stack += each.values()
        elif isinstance(each, list | tuple):
            stack += each
    return total


def _length(value: Any) -> float:
    """Characters, elements, or the number itself."""
    if isinstance(value, str | bytes | list | tuple | dict):
        return len(value)
    return abs(value) if isinstance(value, int | float) else 0


# ---- what a template may call ----------------------------------------------------------------------------


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as transformers spells it."""
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=bool(options.get("sort_keys")))


def _refuse(message: Any) -> None:
    raise TemplateFault(str(_weighed(message))[:MESSAGE_CHARS_MAX])


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def _fault_of(error: Exception) -> TemplateFault:
    if isinstance(error, TemplateFault):
        return error
    return TemplateFault(f"{type(error).__name__}: {error}"[:MESSAGE_CHARS_MAX])
