# SPDX-License-Identifier: Apache-2.0
"""Items → the prompt's ids, by the model's own chat template, in a sandbox and safe from forged turns.

Two different dangers meet here. A checkpoint's template is a program: it runs in jinja2's immutable sandbox,
with budgets for loops and output, and is tried when it is loaded. A person's text may spell control marks:
they are swapped for private characters before the template runs and come back as plain text after it, so
only the template itself can write a control token.

Policy for every door: system texts are joined at the front; a template without a system role gets them in
front of the first user turn; a template that wants alternating roles gets neighbours of one role joined.
"""

import re
import threading
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import orjson

from server.core.errors import error_of
from server.core.types import Item, Role
from server.engine.text.tokenizer import Tokenizer
from server.models.package import Manifest, PackageError

OUTPUT_CHARS_MAX = 4_000_000
LOOPS_MAX = 200_000  # iterations of all loops of one prompt together
TEMPLATE_CHARS_MAX = 200_000
OPEN, SHUT = "\ufdd0", "\ufdd1"  # noncharacters: no text may contain them, so they can stand for what does
JOINT = "\n\n"
FALLBACK = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
Message = dict[str, str]


class TemplateFault(Exception):
    """The template refused these messages or broke its limits."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox with sizes watched: what multiplies or joins text is checked before it happens."""

    intercepted_binops = frozenset(["*", "**", "+", "<<"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse numbers and texts beyond what a prompt can hold."""
        del context
        if operator == "+" and isinstance(left, str | list):
            if len(left) + len(right) > OUTPUT_CHARS_MAX:
                raise TemplateFault("the template builds too long a text")
        elif operator in ("*", "**", "<<") and not _is_small_product(left, right):
            raise TemplateFault("the template computes too large a value")
        return self.binop_table[operator](left, right)


def _is_small_product(left: Any, right: Any) -> bool:
    sizes = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
    return all(isinstance(size, int | float) and abs(size) <= 10_000 for size in sizes)  # noqa: PLR2004


class ChatTemplate:
    """One model's template, tried once when made.

    Args:
        source: Jinja text; None for a model without one.
        tokenizer: the model's.
        manifest: for the ids of the first and last token.

    Raises:
        PackageError: the template does not parse, reaches for what it must not, or runs without end.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer, manifest: Manifest) -> None:
        self._tokenizer = tokenizer
        self._bos_token_id = manifest.bos_token_id
        self._adds_bos = manifest.adds_bos
        self._marks = _pattern(tokenizer.control)
        self._unsafe = _pattern([*tokenizer.control, OPEN, SHUT])
        self._budget = threading.local()  # loops left for the prompt that this thread renders
        self._variables = {
            "bos_token": tokenizer.token(manifest.bos_token_id),
            "eos_token": tokenizer.token(manifest.eos_token_id),
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            self._template = self._compile(FALLBACK if source is None else source)
            self._supports_system = self._try_roles()
        except (jinja2.TemplateError, TemplateFault) as error:
            raise PackageError(f"the model's chat template cannot be used: {error}") from error

    def encode(self, items: Sequence[Item]) -> list[int]:
        """The prompt's ids, up to where the assistant speaks.

        Raises:
            ServerError: `invalid_value` for no items, or a combination that the template cannot take.
        """
        if not items:
            raise error_of("invalid_value", "there must be at least one message", param="messages")
        replaced: list[str] = []
        messages = self._messages(items, replaced)
        try:
            text = self._render(messages)
        except (jinja2.TemplateError, TemplateFault):
            text = self._render_alternating(messages)
        return self._one_bos(self._encode_text(text, replaced))

    def _messages(self, items: Sequence[Item], replaced: list[str]) -> list[Message]:
        """Messages with control marks swapped out, system texts in front."""
        system = JOINT.join(item.text for item in items if item.role is Role.SYSTEM and item.text)
        talk = [(item.role.value, item.text) for item in items if item.role is not Role.SYSTEM]
        if system and self._supports_system:
            talk.insert(0, ("system", system))
        elif system:
            first = next((place for place, (role, _) in enumerate(talk) if role == "user"), None)
            if first is None:
                talk.insert(0, ("user", system))
            else:
                talk[first] = ("user", f"{system}{JOINT}{talk[first][1]}")
        return [{"role": role, "content": self._swap_out(text, replaced)} for role, text in talk]

    def _swap_out(self, text: str, replaced: list[str]) -> str:
        def swap(match: re.Match[str]) -> str:
            replaced.append(match[0])
            return f"{OPEN}{len(replaced) - 1}{SHUT}"

        return self._unsafe.sub(swap, text)

    def _encode_text(self, text: str, replaced: list[str]) -> list[int]:
        """Template marks become control tokens; every run between them is plain text."""
        ids: list[int] = []
        place = 0
        for match in [*self._marks.finditer(text), None]:
            run = text[place : match.start() if match else len(text)]
            plain = re.sub(f"{OPEN}(\\d+){SHUT}", lambda found: replaced[int(found[1])], run)
            ids += self._tokenizer.encode(plain) if plain else ()
            if match:
                ids.append(self._tokenizer.control[match[0]])
                place = match.end()
        return ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Exactly one first token, whoever writes it: the template or the tokenizer."""
        bos = self._bos_token_id
        if bos is None:
            return ids
        while ids[:2] == [bos, bos]:
            ids = ids[1:]
        return [bos, *ids] if self._adds_bos and ids[:1] != [bos] else ids

    def _render_alternating(self, messages: list[Message]) -> str:
        """For templates that refuse two turns of one role, or a chat that the assistant opens."""
        joined: list[Message] = []
        for message in messages:
            if joined and joined[-1]["role"] == message["role"]:
                joined[-1] = {**message, "content": f"{joined[-1]['content']}{JOINT}{message['content']}"}
            else:
                joined.append(message)
        first = next(
            (place for place, message in enumerate(joined) if message["role"] != "system"), len(joined)
        )
        if first == len(joined) or joined[first]["role"] != "user":
            joined.insert(first, {"role": "user", "content": ""})
        try:
            return self._render(joined)
        except (jinja2.TemplateError, TemplateFault) as error:
            raise error_of(
                "invalid_value",
                "the model's chat template cannot take these messages in this order",
                param="messages",
            ) from error

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > TEMPLATE_CHARS_MAX:
            raise TemplateFault(f"it is longer than {TEMPLATE_CHARS_MAX} characters")
        sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        sandbox.filters |= {"tojson": _to_json, "bounded": self._bounded}
        for name in ("center", "format", "indent", "wordwrap", "xmlattr", "urlize", "pprint"):
            sandbox.filters.pop(name)
        sandbox.globals = {"raise_exception": _refuse, "strftime_now": _now, "range": sandbox.globals["range"],
                           "namespace": sandbox.globals["namespace"]}  # fmt: skip
        tree = sandbox.parse(source)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "bounded", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(sandbox)
        return jinja2.Template.from_code(sandbox, sandbox.compile(tree), sandbox.globals)

    def _render(self, messages: list[Message]) -> str:
        self._budget.loops = LOOPS_MAX
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=messages, **self._variables):
                length += len(piece)
                if length > OUTPUT_CHARS_MAX:
                    raise TemplateFault("the template writes too long a prompt")
                pieces.append(piece)
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise TemplateFault(str(error)) from error
        return "".join(pieces)

    def _bounded(self, values: Iterable[Any]) -> list[Any]:
        """Give out what a loop walks over while the prompt's budget lasts, as a list: `loop.length` works."""
        counted = list(values)
        self._budget.loops -= len(counted)
        if self._budget.loops < 0:
            raise TemplateFault("the template loops too often")
        return counted

    def _try_roles(self) -> bool:
        """Render a first chat; returns whether a system text arrives in the prompt."""
        self._render([{"role": "user", "content": "a"}])
        probe = "sampan-probe"
        try:
            return probe in self._render(
                [{"role": "system", "content": probe}, {"role": "user", "content": "a"}]
            )
        except (jinja2.TemplateError, TemplateFault):
            return False


def _pattern(marks: Iterable[str]) -> re.Pattern[str]:
    """Any of these strings, the longest first; a pattern that never matches when there are none."""
    ordered = sorted((mark for mark in marks if mark), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else 0).decode()


def _refuse(message: str) -> None:
    raise TemplateFault(message)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
