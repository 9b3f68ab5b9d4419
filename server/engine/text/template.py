# SPDX-License-Identifier: Apache-2.0
"""Items → the prompt's ids, by the model's own chat template, safe from forged turns.

A person's text may spell control marks: the tokenizer shields them before the template runs and reads them as
plain text after it, so only the template itself can write a control token. What a checkpoint's template may
do is `sandbox`'s matter.

Policy for every door: system texts are joined at the front; a template without a system role gets them in
front of the first user turn; for a template that refuses an order of roles, neighbours of one role are
joined and a chat that the assistant opens gets an empty user turn before it.
"""

from collections.abc import Sequence

from server.core.errors import error_of
from server.core.types import Item, Role
from server.engine.text.sandbox import TemplateFault, TemplateProgram
from server.engine.text.tokenizer import Tokenizer
from server.models.package import Manifest, PackageError

JOINT = "\n\n"
FALLBACK = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_PROBE = "sampan-probe"
Message = dict[str, str]


class ChatTemplate:
    """One model's template, tried once when made. Threads may encode at once.

    Args:
        source: Jinja text; None for a model without one.
        tokenizer: the model's.
        manifest: for the ids of the first and last token.

    Raises:
        PackageError: the template does not parse, reaches for what it must not, runs without end, or cannot
            write the simplest chat.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer, manifest: Manifest) -> None:
        self._bos_token_id = manifest.bos_token_id
        self._adds_bos = manifest.adds_bos
        self._variables = {
            "bos_token": tokenizer.token(manifest.bos_token_id),
            "eos_token": tokenizer.token(manifest.eos_token_id),
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            self._program = TemplateProgram(FALLBACK if source is None else source)
            plain = self._render([_message("user", _PROBE)])
        except TemplateFault as fault:
            raise PackageError(f"the model's chat template cannot be used: {fault}") from fault
        if _PROBE not in plain:
            raise PackageError("the model's chat template cannot be used: it leaves out what the user says")
        with_system = self._try([_message("system", _PROBE), _message("user", "a")])
        self._has_system_role = _PROBE in with_system
        # Some write the system text inside the user turn that follows, and lose it when none does.
        self._needs_user = _PROBE not in self._try([_message("system", _PROBE)])
        # What it writes round a text is its own to write, also where the checkpoint calls it ordinary.
        own = plain.replace(_PROBE, "")
        marks = [mark for mark in tokenizer.marks if mark in own and not (mark.isalnum() or mark.isspace())]
        self._tokenizer = tokenizer.guarding(marks) if marks else tokenizer

    def encode(self, items: Sequence[Item]) -> list[int]:
        """The prompt's ids, up to where the assistant speaks.

        Raises:
            ServerError: `invalid_value` for no items, a text that is not Unicode, or roles in an order that
                the template cannot take.
        """
        if not items:
            raise error_of("invalid_value", "there must be at least one message", param="messages")
        messages = self._messages(items)
        try:
            text = self._render(messages)
        except TemplateFault:
            text = self._render_alternating(messages)
        try:
            return self._with_one_bos(self._tokenizer.encode_prompt(text))
        except ValueError as error:
            raise error_of("invalid_value", f"a message cannot be read: {error}", param="messages") from error

    def _messages(self, items: Sequence[Item]) -> list[Message]:
        """Messages with control marks shielded, system texts in front."""
        system = JOINT.join(item.text for item in items if item.role is Role.SYSTEM and item.text)
        talk = [(item.role.value, item.text) for item in items if item.role is not Role.SYSTEM]
        if system and self._has_system_role:
            if self._needs_user and (not talk or talk[0][0] != "user"):
                talk.insert(0, ("user", ""))
            talk.insert(0, ("system", system))
        elif system:
            first = next((place for place, (role, _) in enumerate(talk) if role == "user"), None)
            if first is None:
                talk.insert(0, ("user", system))
            else:
                talk[first] = ("user", f"{system}{JOINT}{talk[first][1]}")
        return [_message(role, self._tokenizer.shield(text)) for role, text in talk]

    def _render_alternating(self, messages: list[Message]) -> str:
        """For templates that refuse two turns of one role, or a chat that the assistant opens."""
        joined: list[Message] = []
        for message in messages:
            if joined and joined[-1]["role"] == message["role"]:
                joined[-1] = _message(message["role"], f"{joined[-1]['content']}{JOINT}{message['content']}")
            else:
                joined.append(message)
        place = int(bool(joined) and joined[0]["role"] == "system")
        if place == len(joined) or joined[place]["role"] != "user":
            joined.insert(place, _message("user", ""))
        try:
            return self._render(joined)
        except TemplateFault as fault:
            raise error_of(
                "invalid_value",
                "the model's chat template cannot take these messages in this order",
                param="messages",
            ) from fault

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Exactly one first token, whoever writes it: the template or the tokenizer."""
        bos = self._bos_token_id
        if bos is None:
            return ids
        first = next((place for place, index in enumerate(ids) if index != bos), len(ids))
        if first > 1:
            return ids[first - 1 :]
        return [bos, *ids] if self._adds_bos and not first else ids

    def _try(self, messages: list[Message]) -> str:
        try:
            return self._render(messages)
        except TemplateFault:
            return ""

    def _render(self, messages: list[Message]) -> str:
        return self._program.render({"messages": messages, **self._variables})


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
