# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from GGUF metadata and from folders: the same ids, every end id, and refusals by name."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from server.models.readers.checkpoint import CheckpointError
from server.models.readers.gguf import GgufCheckpoint
from server.models.readers.vocab import PRE_TOKENIZERS, read_json, text_from_folder, text_from_gguf
from tests.data.tiny_models import BOS, CONTROL, EOS, MERGES, PIECES, TEMPLATE, TOKENS, tiny_tokenizer

HARD = [
    "Café déjà — 123 😊",
    "  two",
    "\r\n",
    "a\n\n  b",
    "你好，世界。",
    "don't DON'T",
    "<think>",
    "\u00a0x",
    "",
]
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * len(PIECES),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": EOS,
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "t", "h", "e", "th", "he", "the", "▁the", "▁a", "ab", "bab"]
SCORES = [-1000.0 - place for place in range(259)] + [
    -9.0, -10.0, -11.0, -12.0, -13.0, -14.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0,
]  # fmt: skip
SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, *WORDS],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS)],
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def library(metadata):
    return Tokenizer.from_str(text_from_gguf(metadata, "f").tokenizer_json)


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


# ---- byte-level ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD)
def test_ids_equal_the_original_tokenizers(text):
    """What is built from metadata gives the ids of the tokenizer that the metadata was taken from."""
    built, original = library(BYTE_LEVEL), tiny_tokenizer()
    assert ids(built, text) == ids(original, text)
    assert built.decode(ids(built, text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("gpt-2", "in 1234 DON'T", ["in", "Ġ1234", "ĠDON", "'", "T"]),
        ("gpt-2", "a\n\n  b", ["a", "ĊĊĠ", "Ġb"]),
        ("smollm", "in 1234", ["in", "Ġ", "1", "2", "3", "4"]),
        ("smollm", "it's", ["it", "'s"]),
        ("llama-bpe", "in 1234 DON'T", ["in", "Ġ", "123", "4", "ĠDON", "'T"]),
        ("llama-bpe", "a!!\n\nb", ["a", "!!ĊĊ", "b"]),
        ("llama3", "12345", ["123", "45"]),
        ("llama-v3", "12345", ["123", "45"]),
        ("qwen2", "in 123", ["in", "Ġ", "1", "2", "3"]),
        ("qwen2", "a\n\n  b", ["a", "ĊĊ", "Ġ", "Ġb"]),
    ],
)
def test_each_pre_tokeniser_cuts_as_its_name_says(pre, text, parts):
    """Digits, contractions, spaces and line ends are cut by the rules of the named pre-tokeniser."""
    tokenizer = library(BYTE_LEVEL | {"tokenizer.ggml.pre": pre})
    assert [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == parts


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_byte_level_text_comes_back(pre, text):
    """Any text is encoded and decoded to itself, or to its NFC where the model was trained on that."""
    tokenizer = library(BYTE_LEVEL | {"tokenizer.ggml.pre": pre})
    # The library's own NFC: Python's may know another version of Unicode.
    expected = normalizers.NFC().normalize_str(text) if pre == "qwen2" else text
    tokenizer.encode_special_tokens = True
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == expected


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_a_word_that_is_a_token_stays_whole_where_the_model_wants_it(pre, is_whole):
    """Llama 3 takes a word of the vocabulary as it is; others reach it by merges or not at all."""
    tokens = [*TOKENS, "zebra"]
    types = BYTE_LEVEL["tokenizer.ggml.token_type"] + [1]
    change = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.pre": pre}
    assert (ids(library(BYTE_LEVEL | change), "zebra") == [len(TOKENS)]) is is_whole


@pytest.mark.parametrize("kind", [3, 4])
def test_control_and_user_defined_tokens_are_one_id(kind):
    """An added token is never cut to pieces; only a control token is special, the other may be shown."""
    tokens = [*TOKENS, "<think>"]
    types = BYTE_LEVEL["tokenizer.ggml.token_type"] + [kind]
    tokenizer = library(BYTE_LEVEL | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    assert ids(tokenizer, "in<think>in") == [tokens.index("in"), len(TOKENS), tokens.index("in")]
    assert tokenizer.get_added_tokens_decoder()[len(TOKENS)].special is (kind == 3)


def test_an_ordinary_token_that_looks_like_a_mark_ends_nothing():
    """`<|end|>` as plain text of the vocabulary is not an end."""
    tokens = [*TOKENS, "<|end|>"]
    types = BYTE_LEVEL["tokenizer.ggml.token_type"] + [1]
    change = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert text_from_gguf(BYTE_LEVEL | change, "f").end_token_ids == (EOS,)


def test_every_end_that_a_gguf_file_names_is_one():
    """eos, eot, eom and each turn mark among the whole tokens end a turn: one is not enough."""
    marks = ["<|eot_id|>", "<|a|>", "<|b|>", "<end_of_turn>", "<|c|>"]
    first = len(TOKENS)
    change = {
        "tokenizer.ggml.tokens": TOKENS + marks,
        "tokenizer.ggml.token_type": BYTE_LEVEL["tokenizer.ggml.token_type"] + [3, 3, 3, 4, 3],
        "tokenizer.ggml.eot_token_id": first + 1,
        "tokenizer.ggml.eom_token_id": first + 2,
    }
    assert text_from_gguf(BYTE_LEVEL | change, "f").end_token_ids == (
        EOS,
        first,
        first + 1,
        first + 2,
        first + 3,
    )


@pytest.mark.parametrize(
    ("metadata", "change", "expected"),
    [
        (BYTE_LEVEL, {}, False),
        (BYTE_LEVEL, {"tokenizer.ggml.add_bos_token": True}, True),
        (BYTE_LEVEL, {"tokenizer.ggml.pre": "llama-bpe"}, True),
        (BYTE_LEVEL, {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        (BYTE_LEVEL, {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, False),
        (SENTENCE_PIECE, {}, True),
        (SENTENCE_PIECE, {"tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_who_writes_the_bos_token_is_recorded(metadata, change, expected):
    """The tokenizer's own BOS is a fact beside it, never a token it adds: so it can't come twice."""
    text = text_from_gguf(metadata | change, "f")
    assert text.adds_bos is expected
    tokenizer = Tokenizer.from_str(text.tokenizer_json)
    assert tokenizer.encode("a", add_special_tokens=True).ids == ids(tokenizer, "a")


def test_template_and_ids_are_taken_over():
    """Template, BOS, EOS and the number of ids are the file's."""
    text = text_from_gguf(BYTE_LEVEL | {"tokenizer.chat_template": TEMPLATE}, "f")
    assert (text.chat_template, text.bos_token_id, text.eos_token_id) == (TEMPLATE, BOS, EOS)
    assert text.num_tokens == len(TOKENS)
    assert text_from_gguf(BYTE_LEVEL, "f").chat_template is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tokens": None}, "holds no tokenizer"),
        ({"tokens": [1] * 4}, "tokens is no list of str"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "broken tokenizer"),
        ({"tokens": ["\udcff", *TOKENS[1:]]}, "text that is not UTF-8"),
        ({"token_type": [1]}, "1 types"),
        ({"token_type": "x"}, "token_type is no list of int"),
        ({"model": "bert"}, "kind 'bert'; supported: gpt2, llama"),
        ({"model": None}, "kind None"),
        ({"pre": None}, "does not name its pre-tokeniser"),
        ({"pre": "default"}, "unknown pre-tokeniser, 'default'"),
        ({"pre": ["gpt-2"]}, "unknown pre-tokeniser"),
        ({"merges": ["nospace"]}, "broken tokenizer"),
        ({"merges": ["x qqq"]}, "broken tokenizer"),
        ({"merges": [7]}, "merges is no list of str"),
        ({"bos_token_id": len(TOKENS)}, "as its bos token"),
        ({"eos_token_id": "</s>"}, "as its eos token"),
        ({"eot_token_id": -1}, "as its eot token"),
        ({"eos_token_id": None, "tokens": PIECES, "token_type": None}, "no token that ends a turn"),
    ],
)
def test_a_tokenizer_that_is_unknown_or_broken_is_refused_by_name(change, fault):
    """A wrong rule gives plausible ids and worse text, so nothing is guessed."""
    metadata = BYTE_LEVEL | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(CheckpointError, match=fault):
        text_from_gguf(metadata, "f")


@pytest.mark.slow
def test_the_default_models_tokenizer(smollm2_gguf):
    """The real vocabulary: text comes back, digits are one by one, marks are one id and end a turn."""
    text = GgufCheckpoint(smollm2_gguf).text()
    tokenizer = Tokenizer.from_str(text.tokenizer_json)
    for hard in HARD:
        assert tokenizer.decode(ids(tokenizer, hard)) == hard
    assert tokenizer.encode("in 4567").tokens == ["in", "Ġ", "4", "5", "6", "7"]
    assert ids(tokenizer, "<|im_start|>user") == [1, tokenizer.token_to_id("user")]
    assert (text.bos_token_id, text.eos_token_id, text.end_token_ids) == (1, 2, (0, 2))
    assert (text.num_tokens, text.adds_bos) == (49152, False)
    assert "<|im_start|>" in text.chat_template


# ---- SentencePiece ---------------------------------------------------------------------------------------


def by_scores(text):
    """The slow, obvious twin: join the neighbours whose whole has the best score until none has any."""
    tokens, scores = SENTENCE_PIECE["tokenizer.ggml.tokens"], SENTENCE_PIECE["tokenizer.ggml.scores"]
    best = dict(zip(tokens, scores, strict=True))
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(best[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in best]
        if not pairs:
            break
        place = -max(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    spelled = [[p] if p in best else [f"<0x{byte:02X}>" for byte in p.encode()] for p in pieces]
    return [tokens.index(token) for group in spelled for token in group]


@settings(deadline=None)
@given(text=st.text(st.sampled_from("abthe éñ😊\n"), max_size=24))
def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(text):
    """Ids are those of merging by score; a character outside the vocabulary is its bytes; text comes back."""
    tokenizer = library(SENTENCE_PIECE)
    assert ids(tokenizer, text) == by_scores(text)
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_the_prefix_space_can_be_off():
    """A file that says so gets no space before its first word."""
    tokenizer = library(SENTENCE_PIECE | {"tokenizer.ggml.add_space_prefix": False})
    tokens = SENTENCE_PIECE["tokenizer.ggml.tokens"]
    assert ids(tokenizer, "the") == [tokens.index("the")]
    assert tokenizer.decode(ids(tokenizer, " the")) == " the"


@pytest.mark.parametrize("scores", [None, [0.5], "x", [1] * len(SCORES)])
def test_sentence_piece_needs_its_scores(scores):
    """Without a score for each token the merges would be a guess."""
    with pytest.raises(CheckpointError, match="score"):
        text_from_gguf(SENTENCE_PIECE | {"tokenizer.ggml.scores": scores}, "f")


# ---- folders ---------------------------------------------------------------------------------------------

A, EOT = len(TOKENS), len(TOKENS) + 1  # added below


@pytest.fixture
def folder(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|a|>", special=True), AddedToken("<|eot_id|>", special=True)])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_a_folders_tokenizer_is_taken_as_it_is(folder):
    """tokenizer.json goes through byte for byte."""
    text = text_from_folder(folder, {"eos_token_id": 5})
    assert text.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert text.num_tokens == len(TOKENS) + 2


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ends"),
    [
        (4, [5, 6], "<|a|>", (EOS, 4, 5, 6, A, EOT)),
        ([4], 5, {"content": "<|a|>"}, (EOS, 4, 5, A, EOT)),
        (None, None, "<|a|>", (EOS, A, EOT)),
        (4, None, None, (EOS, 4, EOT)),
        (None, [5], "not a token", (EOS, 5, EOT)),
        (-1, [10**9, True, "x", None], None, (EOS, EOT)),
    ],
)
def test_every_end_that_a_folder_names_is_one(folder, config, generation, tokenizer, ends):
    """config, generation config, tokenizer and turn marks are joined, as a number, a list or absent."""
    write(folder, "generation_config.json", {"eos_token_id": generation})
    write(folder, "tokenizer_config.json", {"eos_token": tokenizer})
    assert text_from_folder(folder, {"eos_token_id": config}).end_token_ids == ends


def test_a_folder_without_any_end_is_refused(tmp_path):
    """A model that can't end a turn can't chat."""
    tokenizer = tiny_tokenizer().to_str().replace("<|im_end|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(CheckpointError, match="no token that ends a turn"):
        text_from_folder(tmp_path, {})


def test_eos_is_the_tokenizers_own_when_it_has_one(folder):
    """What the template calls eos_token is the tokenizer's; else the first of the ends."""
    assert text_from_folder(folder, {"eos_token_id": 7}).eos_token_id == EOS
    write(folder, "tokenizer_config.json", {"eos_token": "<|a|>"})
    assert text_from_folder(folder, {"eos_token_id": 7}).eos_token_id == A


@pytest.mark.parametrize(
    ("settings", "config", "generation", "expected"),
    [
        ({"bos_token": "<|im_start|>"}, {"bos_token_id": 9}, {}, BOS),
        ({}, {"bos_token_id": 9}, {"bos_token_id": 8}, 9),
        ({}, {}, {"bos_token_id": 8}, 8),
        ({}, {"bos_token_id": [9]}, {}, None),
        ({}, {"bos_token_id": 10**9}, {}, None),
    ],
)
def test_the_bos_token_of_a_folder(folder, settings, config, generation, expected):
    """The tokenizer's BOS comes first, then config's, then generation config's; a wrong one is none."""
    write(folder, "tokenizer_config.json", settings)
    write(folder, "generation_config.json", generation)
    assert text_from_folder(folder, config).bos_token_id == expected


def test_a_folders_own_bos_is_noticed(folder):
    """A tokenizer whose post-processor puts BOS in front is recorded as doing so."""
    assert not text_from_folder(folder, {"bos_token_id": BOS}).adds_bos
    value = json.loads((folder / "tokenizer.json").read_text())
    value["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [BOS], "tokens": ["<|im_start|>"]}},
    }
    write(folder, "tokenizer.json", value)
    assert text_from_folder(folder, {"bos_token_id": BOS}).adds_bos


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ x }}", "{{ x }}"),
        (None, None),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        (7, None),
    ],
)
def test_the_template_in_each_form(folder, template, expected):
    """A template may be a text or a list of named ones, of which the default is taken."""
    write(folder, "tokenizer_config.json", {"chat_template": template})
    assert text_from_folder(folder, {}).chat_template == expected


def test_the_template_file_wins(folder):
    """chat_template.jinja is the newer place and is read first."""
    write(folder, "tokenizer_config.json", {"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("new")
    assert text_from_folder(folder, {}).chat_template == "new"


@pytest.mark.parametrize("content", [None, b"{}", b"\xff\xfe"])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, content):
    """A folder without a fast tokenizer, or with a broken one, is refused."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        text_from_folder(tmp_path, {})


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000])
def test_json_that_is_no_object_is_refused(tmp_path, content):
    """Anything but an object is refused with the file's name; an absent file is an empty object."""
    path = tmp_path / "x.json"
    assert read_json(path) == {}
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.json"):
        read_json(path)
