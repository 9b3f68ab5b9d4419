# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, chat template and end ids, from a Hugging Face folder or out of GGUF metadata.

A GGUF file says only the name of its pre-tokeniser; the rules behind each name stand in a table here, and
an unknown name is refused, since a wrong rule gives plausible ids and quietly worse text. End ids are the
union of everything the source names, and of the turn marks that the vocabulary holds as whole tokens.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from server.models.readers.checkpoint import CheckpointError, TextFiles

# Marks that end a turn or a text wherever a vocabulary has them as whole tokens.
END_MARKS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end|>",
        "</s>",
    }
)
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
PIECE_LENGTH_MAX = 256  # a longer "token" is no token


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SPACES}")


# name of the pre-tokeniser → how it cuts text
PRE_TOKENIZERS: Mapping[str, Any] = {
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": lambda: _split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SPACES}"),
}
_NORMALIZED = frozenset({"qwen2"})  # whose text is brought to NFC first
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})  # a word that is a token is never cut by merges


def text_from_gguf(metadata: Mapping[str, Any], where: str) -> TextFiles:
    """Build the tokenizer that GGUF metadata describes.

    Raises:
        CheckpointError: no tokenizer, or a model, pre-tokeniser or array that is not known or not whole.
    """
    tokens = _array(metadata, "tokens", str, where)
    if not tokens:
        raise CheckpointError(f"{where} holds no tokenizer")
    types = _array(metadata, "token_type", int, where) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{where} has a broken tokenizer: {len(tokens)} tokens, {len(types)} types")
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{where} has a tokenizer of kind {kind!r}; supported: gpt2, llama")
    build = _byte_pair if kind == "gpt2" else _sentence_piece
    tokenizer = build(metadata, tokens, types, where)
    _add_tokens(tokenizer, tokens, types)
    named = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    _check_ids(named, len(tokens), where)
    template = metadata.get("tokenizer.chat_template")
    marks = {token: index for index, token in enumerate(tokens) if types[index] in (_CONTROL, _USER_DEFINED)}
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    return TextFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=template if isinstance(template, str) else None,
        bos_token_id=named["bos"],
        eos_token_id=named["eos"],
        end_token_ids=_end_ids([named[name] for name in ("eos", "eot", "eom")], marks, len(tokens), where),
        num_tokens=len(tokens),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and named["bos"] is not None,
    )


def text_from_folder(folder: Path, config: Mapping[str, Any]) -> TextFiles:
    """Take tokenizer.json, template and ids of a Hugging Face folder whose config.json is `config`.

    Raises:
        CheckpointError: tokenizer.json is missing or cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; a fast tokenizer is needed")
    try:
        source = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    settings = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    num_tokens = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    marks = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
    bos, eos = (tokenizer.token_to_id(_content(settings.get(f"{name}_token")) or "") for name in ("bos", "eos"))
    others = (config.get("eos_token_id"), generation.get("eos_token_id"))
    ends = _end_ids([eos, *others], marks, num_tokens, str(folder))
    if bos is None:
        named = (config.get("bos_token_id"), generation.get("bos_token_id"))
        bos = next((one for one in named if _is_id(one, num_tokens)), None)
    return TextFiles(
        tokenizer_json=source,
        chat_template=_folder_template(folder, settings),
        bos_token_id=bos,
        eos_token_id=ends[0] if eos is None else eos,
        end_token_ids=ends,
        num_tokens=num_tokens,
        adds_bos=bos is not None and tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos],
    )


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object, or an empty one when the file is not there.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold an object")
    return value


def _array(metadata: Mapping[str, Any], name: str, kind: type, where: str) -> list[Any]:
    """An array of the tokenizer, empty when absent, checked entry by entry."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return []
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise CheckpointError(f"{where} has a broken tokenizer: {name} is no list of {kind.__name__}")
    try:
        "".join(values if kind is str else ()).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where} has a broken tokenizer: {name} holds text that is not UTF-8") from error
    return values


def _is_id(value: object, num_tokens: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_tokens


def _check_ids(named: Mapping[str, object], num_tokens: int, where: str) -> None:
    for name, value in named.items():
        if value is not None and not _is_id(value, num_tokens):
            raise CheckpointError(f"{where} names {value!r} as its {name} token, of {num_tokens} tokens")


def _byte_pair(metadata: Mapping[str, Any], tokens: list[str], types: list[int], where: str) -> Tokenizer:
    """Byte-level pairs: merges in order, under the rules that the pre-tokeniser's name stands for."""
    del types  # control tokens are whole words of the vocabulary already
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        said = "does not name its pre-tokeniser" if pre is None else f"names an unknown pre-tokeniser, {pre!r}"
        raise CheckpointError(
            f"{where} {said} ({known} are known); convert the model again with a newer converter, or use its "
            "safetensors"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges", str, where)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA3)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{where} has a broken tokenizer: {error}") from error
    tokenizer = Tokenizer(model)
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], types: list[int], where: str) -> Tokenizer:
    """SentencePiece BPE: merges are all splits of a piece into two pieces, best score first."""
    scores = _array(metadata, "scores", float, where)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{where} has a SentencePiece tokenizer without a score for each token")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(tokens, types, scores, vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer = Tokenizer(model)
    replace: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        replace.insert(0, normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(replace)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    found: list[tuple[float, int, int, str, str]] = []
    for index, piece in enumerate(tokens):
        if types[index] != _NORMAL or len(piece) > PIECE_LENGTH_MAX:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are whole but ordinary. Their ids stay as they are."""
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=is_special, normalized=False)
            for token, own in zip(tokens, types, strict=True)
            if own == kind
        ]
        if is_special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _end_ids(named: Iterable[object], marks: Mapping[str, int], num_tokens: int, where: str) -> tuple[int, ...]:
    """All that ends a turn; an id that the tokenizer cannot make ends nothing and is left out."""
    ids = {marks[mark] for mark in END_MARKS & set(marks)}
    for value in named:
        many = value if isinstance(value, list) else [value]
        ids.update(one for one in many if _is_id(one, num_tokens))
    if not ids:
        raise CheckpointError(f"{where} names no token that ends a turn; every answer would run to its limit")
    return tuple(sorted(ids))


def _content(token: object) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
