# SPDX-License-Identifier: Apache-2.0
"""Text ⇄ ids over the `tokenizers` library, with control tokens kept apart from what people write.

Invariant: no call changes the tokenizer (no truncation, no padding), so threads may share it. Only `encode`
with `allows_control` can make a control id; whatever a person wrote goes through the other branch.
"""

import json
import re
from pathlib import Path

from tokenizers import Tokenizer as Library

from server.models.package import ModelPackage, PackageError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's tokenizer.

    Args:
        path: its tokenizer.json.

    Raises:
        PackageError: the file cannot be read, or decodes in a way that is not known here.
    """

    def __init__(self, path: Path) -> None:
        try:
            source = path.read_text(encoding="utf-8")
            self._marked = Library.from_str(source)
            self._plain = Library.from_str(source)
        except Exception as error:  # the library raises bare Exception
            raise PackageError(f"{path} cannot be read: {error}") from error
        self._plain.encode_special_tokens = True
        added = self._marked.get_added_tokens_decoder()
        self.control = {token.content: index for index, token in added.items() if token.special}
        self._bytes, self.strips_first_space = _byte_table(self._marked, json.loads(source), path)
        for index, token in added.items():
            self._bytes[index] = b"" if token.special else token.content.encode()

    @classmethod
    def of(cls, package: ModelPackage) -> "Tokenizer":
        """Open the tokenizer of a package."""
        return cls(package.tokenizer_path)

    def encode(self, text: str, *, allows_control: bool = False) -> list[int]:
        """Ids of a text; control marks in it are control tokens only with `allows_control`."""
        library = self._marked if allows_control else self._plain
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for, maybe a part of a character; none for a control token."""
        return self._bytes.get(token_id, b"")

    def token(self, token_id: int | None) -> str:
        """A token's own spelling, or nothing for an id that is None or unknown."""
        return "" if token_id is None else self._marked.id_to_token(token_id) or ""


def _byte_table(library: Library, settings: dict[str, object], path: Path) -> tuple[dict[int, bytes], bool]:
    """Bytes of every id, and whether the very first space of a text is the tokenizer's own."""
    decoder = json.dumps(settings.get("decoder"))
    pieces = library.get_vocab(with_added_tokens=False)
    if '"ByteLevel"' in decoder:
        alphabet = _byte_alphabet()
        table = {index: _spelled_bytes(piece, alphabet) for piece, index in pieces.items()}
        return table, False
    if '"ByteFallback"' in decoder or '"Metaspace"' in decoder:
        strips = '"Strip"' in decoder or '"prepend_scheme": "always"' in decoder
        return {index: _piece_bytes(piece) for piece, index in pieces.items()}, strips
    raise PackageError(f"{path} decodes in a way that is not supported; byte-level and SentencePiece are")


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level vocabularies: GPT-2's own mapping of 256 bytes to characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _spelled_bytes(piece: str, alphabet: dict[str, int]) -> bytes:
    if any(character not in alphabet for character in piece):
        return piece.encode()
    return bytes(alphabet[character] for character in piece)


def _piece_bytes(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()
