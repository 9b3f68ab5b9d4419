# SPDX-License-Identifier: Apache-2.0
"""GGUF files: what comes back equals what went in, and what is wrong is refused by name."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.models.readers.checkpoint import CheckpointError
from server.models.readers.gguf import ITEMS_MAX, GgufCheckpoint
from tests.data.tiny_models import (
    BOS,
    CONTROL,
    EOS,
    TOKENS,
    gguf_name,
    interleave,
    tiny_tensors,
    write_gguf,
)

TENSORS = tiny_tensors()
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
         "num_hidden_layers": 1}  # fmt: skip


def refused(path, fault):
    with pytest.raises(CheckpointError, match=fault) as caught:
        GgufCheckpoint(path)
    assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return GgufCheckpoint(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TENSORS))


def test_float32_equals_the_source_bit_for_bit(whole):
    """Every tensor is the Hugging Face one exactly: query and key rows are back in half-split order."""
    assert whole.names() == TENSORS.keys()
    for name, weight in TENSORS.items():
        found = whole.tensor(name)
        assert found.dtype == np.float32
        assert np.array_equal(found, weight), name


def test_the_config_is_read(whole):
    """Every number of the architecture comes from the metadata; the vocabulary from the embedding."""
    config = whole.config
    assert (config.family, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        2,
        64,
        96,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 8)
    assert (config.norm_eps, config.rope_theta) == (pytest.approx(1e-5), 10_000.0)
    assert (config.context_length, config.vocab_size) == (128, len(TOKENS))
    assert (config.rope_scaling, config.tie_word_embeddings) == (None, True)
    assert whole.license == "apache-2.0"


def test_an_own_head_unties(tmp_path):
    """`output.weight` is the head, and a file that has it is not tied."""
    tensors = tiny_tensors(has_head=True)
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert found.config.tie_word_embeddings is False
    assert np.array_equal(found.tensor("lm_head.weight"), tensors["lm_head.weight"])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
def test_quantised_tensors_are_the_reference_readers(tmp_path, kind):
    """Each type decodes as the reference does, then unpermutes: within the type's error of the source."""
    path = write_gguf(tmp_path / "m.gguf", TENSORS, kind=kind)
    found = GgufCheckpoint(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    name = "model.layers.1.mlp.down_proj.weight"
    raw = stored[gguf_name(name)]
    assert np.array_equal(found.tensor(name), gguf.quants.dequantize(raw.data, raw.tensor_type).reshape(64, 96))
    for name in TENSORS:
        spread = np.abs(TENSORS[name]).max()
        assert np.abs(found.tensor(name) - TENSORS[name]).max() <= spread / 7, name


@pytest.mark.parametrize(("kind", "num_bytes"), [("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210)])
def test_k_formats_are_the_reference_readers(tmp_path, kind, num_bytes):
    """The formats with large blocks decode as the reference does, rotated rows in their order."""
    change = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    tensors = tiny_tensors(change)
    name = "model.layers.0.self_attn.q_proj.weight"
    blocks = np.random.default_rng(0).integers(0, 100, (256, num_bytes), np.uint8)  # small bytes: finite scales
    rest = {key: weight for key, weight in tensors.items() if key != name}
    path = write_gguf(tmp_path / "m.gguf", rest, change, extra={gguf_name(name): (blocks, kind)})
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(expected).all()
    found = GgufCheckpoint(path)
    assert np.array_equal(interleave(found.tensor(name), 2), expected)
    assert found.packed(name) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_4_bit_grid_comes_in_the_same_row_order(tmp_path, kind):
    """`packed` and `tensor` are the same numbers, row by row, also for rotated weights."""
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", TENSORS, kind=kind))
    for role in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
        packed = found.packed(f"model.layers.0.{role}.weight")
        spread = packed.scales.repeat(32, axis=1) * packed.values + packed.minimums.repeat(32, axis=1)
        assert np.allclose(spread, found.tensor(f"model.layers.0.{role}.weight"), rtol=0, atol=1e-6)
    assert found.packed("model.norm.weight") is None


def test_floats_have_no_grid(whole):
    """Weights that are not packed say so."""
    assert whole.packed("model.embed_tokens.weight") is None


def test_the_text_comes_with_it(whole):
    """Tokenizer, template and ids come out of the same file."""
    text = whole.text()
    assert (text.bos_token_id, text.eos_token_id, text.num_tokens) == (BOS, EOS, len(TOKENS))
    assert CONTROL[0] in text.chat_template


def test_an_unknown_tensor_is_named(whole):
    """Asking for what is not there names it."""
    with pytest.raises(CheckpointError, match="has no tensor nothing"):
        whole.tensor("nothing")


def test_grouped_heads_are_unpermuted_by_their_own_count(tmp_path):
    """The key rows of a model with fewer key heads are not shuffled across heads."""
    change = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 32}
    tensors = tiny_tensors(change)
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, change))
    for role in ("q_proj", "k_proj"):
        name = f"model.layers.0.self_attn.{role}.weight"
        assert np.array_equal(found.tensor(name), tensors[name])


def test_frequency_divisors_are_the_scaling(tmp_path):
    """The divisors that Llama 3.x files carry as a tensor become the rope scaling, not a weight."""
    divisors = np.array([1, 2, 4, 8], np.float32)
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", TENSORS, extra={"rope_freqs.weight": divisors}))
    assert found.config.rope_scaling == {"rope_type": "divisors", "divisors": [1, 2, 4, 8]}
    assert found.names() == TENSORS.keys()


def test_a_named_scaling_is_handed_on(tmp_path):
    """The scaling's type is for the builder to know or to refuse."""
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", TENSORS, metadata=scaling))
    assert found.config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("divisors", [[1, 2], [1, 2, 0, 8], [1, 2, np.nan, 8]])
def test_divisors_must_fit_the_heads(tmp_path, divisors):
    """Divisors of another number, or that are none, are refused."""
    extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    refused(write_gguf(tmp_path / "m.gguf", TENSORS, extra=extra), "rope_freqs")


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        ({"llama.block_count": None}, "lacks the metadata llama.block_count"),
        ({"llama.block_count": "two"}, "llama.block_count = 'two'"),
        ({"llama.block_count": 3}, r"no tensor model\.layers\.2\."),
        ({"llama.attention.head_count": 0}, "impossible num_heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "one whole number is needed"),
        ({"llama.attention.head_count": 16}, "the shape"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "one number is needed"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count other than"),
        ({"llama.attention.value_length": 4}, "value_length other than"),
        ({"llama.context_length": 2**31}, "positions, at most"),
        ({"general.alignment": 48}, "impossible alignment of 48"),
        ({"general.alignment": "x"}, "impossible alignment of 'x'"),
        ({"split.count": 2}, "one part of a split file"),
        ({"general.architecture": "mamba"}, "'mamba', which is not supported; supported: llama"),
    ],
)
def test_metadata_that_cannot_be_is_refused_by_name(tmp_path, metadata, fault):
    """A number that is missing, of a wrong kind or impossible is named; nothing is guessed in its place."""
    path = write_gguf(tmp_path / "m.gguf", TENSORS, metadata=metadata)
    refused(path, fault)


def test_a_tensor_of_another_architecture_is_refused(tmp_path):
    """A tensor that a llama does not have means that this is no plain llama."""
    extra = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    refused(
        write_gguf(tmp_path / "m.gguf", TENSORS, extra=extra), "blk.0.attn_q_norm.weight that this architecture"
    )


def test_an_unsupported_type_is_refused_by_its_name(tmp_path):
    """The type, the tensor and the types that would do are named."""
    path = write_gguf(tmp_path / "m.gguf", TENSORS)
    data = path.read_bytes()
    key = gguf_name("model.norm.weight").encode()
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4 + 8  # name, dimensions, one size
    for kind, label in ((10, "Q2_K"), (77, "number 77")):
        path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
        refused(path, f"output_norm.weight is of type {label}, which is not supported; F32, F16")


def test_a_big_endian_file_is_refused(tmp_path):
    """Swapped bytes are recognised, not read as nonsense."""
    refused(write_gguf(tmp_path / "m.gguf", TENSORS, endianess=gguf.GGUFEndian.BIG), "is big-endian")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "cannot be opened"),
        (b"GG", "is truncated"),
        (b"PK\x03\x04" + b"\0" * 64, "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "of version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "is truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "is truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "is truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, ITEMS_MAX + 1), "claims an array"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, ITEMS_MAX), "is truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 13), "unknown type 13"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 9,
            "unknown type 9",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0), "is empty"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**62, 0, 0), "lies beyond its end"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 0, 2**63), "lies beyond its end"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 2, 0), "no multiple of 32"),
    ],
)
def test_hostile_headers_are_refused_before_they_cost_anything(tmp_path, data, fault):
    """Counts, lengths, offsets and nesting beyond the file are refused, not allocated or followed."""
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused(path, fault)


def test_a_tensor_named_twice_is_refused(tmp_path):
    """Two tensors of one name would leave it to chance which is read."""
    path = tmp_path / "m.gguf"
    entry = struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entry * 2 + b"\0" * 64)
    refused(path, "names a tensor twice")


def test_an_absent_file_is_named(tmp_path):
    """A path that does not exist is a refusal like any other."""
    refused(tmp_path / "none.gguf", "cannot be opened")


@pytest.mark.slow
def test_the_default_model_is_the_reference_readers(smollm2_gguf):
    """Every tensor of the real file is bit for bit what the reference reads, rotated rows put back."""
    found = GgufCheckpoint(smollm2_gguf)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    assert {gguf_name(name) for name in found.names()} == stored.keys()
    heads = {"q_proj": found.config.num_heads, "k_proj": found.config.num_kv_heads}
    for name in found.names():
        raw, weight = stored[gguf_name(name)], found.tensor(name)
        expected = gguf.quants.dequantize(raw.data, raw.tensor_type).reshape(weight.shape)
        role = name.split(".")[-2]
        assert np.array_equal(interleave(weight, heads[role]) if role in heads else weight, expected), name


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The bytes of a valid file of some 8 KiB."""
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    return write_gguf(path, tiny_tensors(SMALL), SMALL, kind="F16").read_bytes()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.99])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, small, share):
    """A download that stopped is recognised at any length, down to the last byte."""
    path = tmp_path / "m.gguf"
    for length in (int(len(small) * share), len(small) - 64):
        path.write_bytes(small[:length])
        refused(path, "is truncated")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_end_in_anything_but_a_refusal(tmp_path_factory, small, data):
    """Whatever bytes change, the file opens or is refused by name: no other error, no endless loop."""
    changed = bytearray(small)
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, 1500) | st.integers(0, len(small) - 1))  # mostly in the header
        changed[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(changed)
    assert str(path) in fault_of(path, str(path))


def fault_of(path, fallback):
    """Read everything there is and return the refusal, or `fallback` when there was none."""
    try:
        found = GgufCheckpoint(path)
        found.text()
        for name in found.names():
            found.tensor(name)
    except CheckpointError as error:
        return str(error)
    return fallback
