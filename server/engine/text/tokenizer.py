# SPDX-License-Identifier: Apache-2.0
"""Text ⇄ ids over the `tokenizers` library, with control tokens kept apart from what people write.

Invariant: no call changes the tokenizer (no truncation, no padding), so threads may share it. A control token
comes only out of `encode_prompt`, and there only from text that `shield` has not seen: the library itself is
told to read every control mark as plain text, and knows the true ones by aliases drawn at random when this
object was made, which nobody outside can spell.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from server.models.package import ModelPackage, PackageError

MARK_CHARS_MAX = 256
SECRET_CHARS = 10  # of 6 400 each: nobody guesses 2**126
_PRIVATE = 0xE000, 0x1900  # characters without a meaning or a case: first and how many
_ALIASES, _SHIELDS = 0xF0000, 0xF8000  # last characters of aliases and shields, one for each mark
_MARKS_MAX = 0x8000
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PIECE_DECODERS = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


class Tokenizer:
    """One model's tokenizer. `control` maps each control mark's spelling to its id; read it only.

    Args:
        path: its tokenizer.json.
        control_ids: ids that end an answer or begin a prompt, whatever the file says of them.
        marks: more spellings that only a template may write; unlike control tokens they are shown.

    Raises:
        PackageError: the file cannot be read, or decodes in a way that is not known here.
    """

    def __init__(self, path: Path, *, control_ids: Iterable[int] = (), marks: Iterable[str] = ()) -> None:
        self._path, self._control_ids = path, frozenset(control_ids)
        settings, self._library = _open(path, frozenset(marks))
        self._library.encode_special_tokens = True
        self._library.no_truncation()
        self._library.no_padding()
        added = self._library.get_added_tokens_decoder()
        hidden = {entry["id"] for entry in settings.get("added_tokens") or () if entry["special"]}
        hidden |= self._control_ids
        self.marks = frozenset(token.content for index, token in added.items() if index not in hidden)
        self.control = {
            token.content: index for index, token in added.items() if token.special or index in hidden
        }
        self._bytes, self.strips_first_space = _byte_table(self._library, settings, path)
        for index in hidden & added.keys():
            self._bytes[index] = b""
        self._learn_aliases({token.content: token for token in added.values()})

    @classmethod
    def of(cls, package: ModelPackage) -> "Tokenizer":
        """Open the tokenizer of a package."""
        manifest = package.manifest
        ends = {*manifest.end_token_ids, manifest.bos_token_id, manifest.eos_token_id} - {None}
        return cls(package.tokenizer_path, control_ids=(index for index in ends if index is not None))

    def guarding(self, marks: Iterable[str]) -> "Tokenizer":
        """The same tokenizer, with more spellings that only a template may write."""
        return Tokenizer(self._path, control_ids=self._control_ids, marks=marks)

    def encode(self, text: str) -> list[int]:
        """Ids of what a person wrote: never a control token.

        Raises:
            ValueError: the text holds half a surrogate pair, which no UTF-8 can spell.
        """
        try:
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise ValueError("the text holds a lone surrogate") from error
        return ids

    def shield(self, text: str) -> str:
        """The text with every control mark in it replaced by what `encode_prompt` reads as plain text."""
        return self._spelled.sub(lambda found: self._shields[found[0]], text)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a rendered template: control marks are control tokens, what was shielded is plain text.

        Raises:
            ValueError: as `encode`.
        """
        ids = self.encode(self._shielded_or_spelled.sub(lambda found: self._swaps[found[0]], text))
        return [self._aliased.get(index, index) for index in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for, maybe a part of a character; none for a control token."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token(self, token_id: int | None) -> str:
        """A token's own spelling, or nothing for an id that is None or unknown."""
        return "" if token_id is None else self._library.id_to_token(token_id) or ""

    def _learn_aliases(self, added: Mapping[str, AddedToken]) -> None:
        """Give each control mark an alias that the library knows and a shield that it does not."""
        if len(self.control) > _MARKS_MAX or any(len(mark) > MARK_CHARS_MAX for mark in self.control):
            raise PackageError(
                f"{self._path} has {len(self.control)} control tokens; "
                f"at most {_MARKS_MAX} of {MARK_CHARS_MAX} characters each are supported"
            )
        alias, shield = _secret(), _secret()
        aliases = {mark: alias + chr(_ALIASES + place) for place, mark in enumerate(self.control)}
        self._shields = {mark: shield + chr(_SHIELDS + place) for place, mark in enumerate(self.control)}
        self._library.add_tokens([_alias_of(added[mark], aliases[mark]) for mark in self.control])
        self._aliased = {self._library.token_to_id(aliases[mark]): self.control[mark] for mark in self.control}
        self._swaps = aliases | {spelled: mark for mark, spelled in self._shields.items()}
        self._spelled = _pattern(self.control)
        self._shielded_or_spelled = _pattern(self._swaps)


def _open(path: Path, marks: frozenset[str]) -> tuple[dict[str, Any], Library]:
    """The file's JSON, and the library with `marks` made special."""
    try:
        source = path.read_text(encoding="utf-8")
        settings: dict[str, Any] = json.loads(source)
        if marks:
            added = [{**each, "special": each["special"] or each["content"] in marks}
                     for each in settings["added_tokens"]]  # fmt: skip
            source = json.dumps({**settings, "added_tokens": added})
        return settings, Library.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise PackageError(f"{path} cannot be read: {error}") from error


def _secret() -> str:
    first, count = _PRIVATE
    return "".join(chr(first + secrets.randbelow(count)) for _ in range(SECRET_CHARS))


def _alias_of(token: AddedToken, alias: str) -> AddedToken:
    """A token that is found as this one is, by another spelling."""
    return AddedToken(
        alias,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _pattern(spellings: Iterable[str]) -> re.Pattern[str]:
    """Any of these, the longest that fits. A tree, so that a text costs the same for 3 marks and for 3 000."""
    tree: dict[str, Any] = {}
    for spelling in spellings:
        place = tree
        for character in spelling:
            place = place.setdefault(character, {})
        if spelling:
            place[""] = {}
    return re.compile(_branch(tree) if tree else r"(?!)")


def _branch(tree: dict[str, Any]) -> str:
    branches = [re.escape(character) + _branch(rest) for character, rest in tree.items() if character]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


def _byte_table(library: Library, settings: dict[str, Any], path: Path) -> tuple[list[bytes], bool]:
    """Bytes of every id, and whether the very first space of a text is the tokenizer's own."""
    steps = _decoders(settings.get("decoder"))
    kinds = {step.get("type") for step in steps}
    pieces = library.get_vocab(with_added_tokens=True)
    table = [b""] * (max(pieces.values(), default=-1) + 1)
    if kinds == {"ByteLevel"}:
        alphabet = _byte_alphabet()
        for piece, index in pieces.items():
            table[index] = _spelled_bytes(piece, alphabet)
        for index, token in library.get_added_tokens_decoder().items():
            table[index] = token.content.encode()
        return table, False
    if not kinds or not kinds <= _PIECE_DECODERS or not all(map(_is_known, steps)):
        raise PackageError(f"{path} decodes in a way that is not supported; byte-level and SentencePiece are")
    for piece, index in pieces.items():
        table[index] = _piece_bytes(piece)
    return table, any(map(_strips_space, steps))


def _decoders(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder in order, sequences laid flat."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for each in decoder.get("decoders") or () for step in _decoders(each)]


def _is_known(step: dict[str, Any]) -> bool:
    """Whether this step of a SentencePiece decoder does what is done here."""
    match step["type"]:
        case "Replace":
            return bool(step.get("pattern") == {"String": "▁"} and step.get("content") == " ")
        case "Metaspace":
            return bool(step.get("replacement", "▁") == "▁")
        case "Strip":
            return bool(step.get("content") == " " and step.get("start") in (0, 1) and not step.get("stop"))
    return True


def _strips_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True))
    return bool(step["type"] == "Strip" and step["start"] == 1)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level vocabularies: GPT-2's own mapping of 256 bytes to characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _spelled_bytes(piece: str, alphabet: dict[str, int]) -> bytes:
    """A piece that has a character outside the alphabet is an added one, spelled as it is."""
    if any(character not in alphabet for character in piece):
        return piece.encode()
    return bytes(alphabet[character] for character in piece)


def _piece_bytes(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()
