# SPDX-License-Identifier: Apache-2.0
"""One small tokenizer of each kind that models come with, as tokenizer.json files.

    write("byte_level", folder)    GPT-2, Llama 3, Qwen: pieces spell bytes
    write("prefixed", folder)      Llama 2: a space is put before the text and taken away again; bytes as <0x..>
    write("bare", folder)          Gemma: SentencePiece without that space
    write("metaspace", folder)     the same by the newer pre-tokenizer, the space before the first word only

Every kind has the same control tokens; `<s>` is 1, `</s>` is 2 and the marks of a turn are 3 and 4.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BOS, EOS, START, END = 1, 2, 3, 4
CONTROL = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>"]
ORDINARY = ["<think>", "▁▁"]  # added, but not control
WORDS = ["th", "the", "rain", "Rain", "fall", "falls", ",", "then", "st", "stop", "stops", "in", "龘", "é"]
KINDS = ("byte_level", "prefixed", "bare", "metaspace")


def make(kind):
    """The tokenizer as an object of the `tokenizers` library."""
    tokenizer = _byte_level() if kind == "byte_level" else _sentence_pieces(kind)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in CONTROL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ORDINARY])
    return tokenizer


def write(kind, folder, name="tokenizer.json"):
    """Write it and return the path."""
    path = folder / name
    path.write_text(make(kind).to_str(), encoding="utf-8")
    return path


def _byte_level():
    pieces = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in ("the", "Ġthe", "in", "Ġin", "Rain"):
        merges += _merges_of(word, pieces)
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(kind):
    pieces = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "\n"]
    merges = []
    for word in (*WORDS, *("▁" + word for word in WORDS)):
        merges += _merges_of(word, pieces)
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        # Metaspace alone joins no bytes: files of this kind have both.
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
        )
        return tokenizer
    spaces = normalizers.Replace(" ", "▁")
    strip = [decoders.Strip(" ", 1, 0)] if kind == "prefixed" else []
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if kind == "prefixed" else spaces
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of(word, pieces):
    """Merges that build a word from its left, and its pieces put among the others."""
    merges = []
    for length in range(1, len(word)):
        merge = (word[:length], word[length])
        for piece in (word[length], "".join(merge)):
            if piece not in pieces:
                pieces.append(piece)
        if word[:1] not in pieces:
            pieces.append(word[:1])
        merges.append(merge)
    return merges
