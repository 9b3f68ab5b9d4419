# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: float weights in one file or many, and refusals by name."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from server.models.readers.checkpoint import CheckpointError
from server.models.readers.safetensors import FolderCheckpoint, arch_config
from tests.data.tiny_models import EOS, SETTINGS, TOKENS, tiny_tensors, write_folder

TENSORS = tiny_tensors()


def refused(folder, fault):
    with pytest.raises(CheckpointError, match=fault) as caught:
        FolderCheckpoint(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_float32_equals_the_source_bit_for_bit(tmp_path, num_shards):
    """Every tensor comes back exactly, from one file or from shards."""
    found = FolderCheckpoint(write_folder(tmp_path, TENSORS, num_shards=num_shards))
    assert found.names() == TENSORS.keys()
    for name, weight in TENSORS.items():
        assert found.tensor(name).dtype == np.float32
        assert np.array_equal(found.tensor(name), weight), name


def test_halves_are_widened_exactly(tmp_path):
    """A float16 tensor is the float32 of the same values."""
    halves = {name: weight.astype(np.float16) for name, weight in TENSORS.items()}
    found = FolderCheckpoint(write_folder(tmp_path, halves))
    for name, weight in halves.items():
        assert np.array_equal(found.tensor(name), weight.astype(np.float32))


def test_bfloat16_is_the_upper_half_of_float32(tmp_path):
    """A bfloat16 tensor is a float32 without its lower 16 bits."""
    upper = {name: (weight.view(np.uint32) >> 16).astype("<u2") for name, weight in TENSORS.items()}
    folder = write_folder(tmp_path, upper)
    path = folder / "model.safetensors"
    change_header(path, lambda header: [entry.update(dtype="BF16") for entry in header.values()])
    found = FolderCheckpoint(folder)
    for name, bits in upper.items():
        assert np.array_equal(found.tensor(name).view(np.uint32), bits.astype(np.uint32) << 16)


def change_header(path, change):
    """Rewrite a safetensors file with its header changed in place by `change`."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_the_config_is_read(tmp_path):
    """Every number comes from config.json; the size of a head may be left out."""
    config = FolderCheckpoint(write_folder(tmp_path, TENSORS)).config
    assert (config.family, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        2,
        64,
        96,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 8)
    assert (config.norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 10_000.0, None)
    assert (config.context_length, config.vocab_size, config.tie_word_embeddings) == (128, len(TOKENS), True)


def test_a_head_of_its_own_size(tmp_path):
    """`head_dim` may be other than hidden size over heads."""
    change = {"head_dim": 16}
    config = FolderCheckpoint(write_folder(tmp_path, tiny_tensors(change), change)).config
    assert config.head_dim == 16


@pytest.mark.parametrize(
    ("change", "scaling", "theta"),
    [
        ({"rope_scaling": None}, None, 10_000.0),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}, 10_000.0),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            {"rope_type": "yarn", "factor": 2.0},
            10_000.0,
        ),
        ({"rope_scaling": {"rope_type": "default"}}, None, 10_000.0),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            None,
            5e5,
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 5e5}},
            {"rope_type": "linear", "factor": 4, "rope_theta": 5e5},
            5e5,
        ),
    ],
)
def test_rope_scaling_in_each_spelling(change, scaling, theta):
    """`type` or `rope_type`, under `rope_scaling` or the newer `rope_parameters`, mean the same."""
    config = arch_config(SETTINGS | change, "f")
    assert (config.rope_scaling, config.rope_theta) == (scaling, theta)


def test_the_text_comes_with_it(tmp_path):
    """Tokenizer, template and ids come out of the same folder."""
    text = FolderCheckpoint(write_folder(tmp_path, TENSORS)).text()
    assert (text.end_token_ids, text.num_tokens) == ((EOS,), len(TOKENS))


def test_the_licence_stands_in_the_readme(tmp_path):
    """`license:` in the head of README.md is the licence; without one it is unknown."""
    found = FolderCheckpoint(write_folder(tmp_path, TENSORS))
    assert found.license is None
    for text, expected in (
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# M", "apache-2.0"),
        ("---\nlicense:\n---\n", None),
        ("---\nlicense: mit\nno end", None),
        ("# M\nlicense: mit\n---\n", None),
    ):
        (tmp_path / "README.md").write_text(text)
        assert found.license == expected


def test_weights_have_no_4_bit_grid(tmp_path):
    """Float weights have none; a tensor that is not there is named."""
    found = FolderCheckpoint(write_folder(tmp_path, TENSORS))
    assert found.packed("model.norm.weight") is None
    with pytest.raises(CheckpointError, match="has no tensor nothing"):
        found.tensor("nothing")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"model_type": "mamba"}, "'mamba', which is not supported; supported: llama"),
        ({"model_type": ["llama"]}, "which is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "holds gptq weights, which are not supported yet"),
        ({"quantization_config": "awq"}, "holds awq weights"),
        ({"attention_bias": True}, "sets attention_bias"),
        ({"mlp_bias": True}, "sets mlp_bias"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head"),
        ({"num_hidden_layers": 3}, r"no tensor model\.layers\.2\."),
        ({"num_hidden_layers": "many"}, "lacks or spoils"),
        ({"num_attention_heads": 0}, "impossible num_heads"),
        ({"hidden_size": None}, "lacks or spoils"),
        ({"rms_norm_eps": []}, "lacks or spoils"),
        ({"rope_scaling": "linear"}, "lacks or spoils"),
        ({"rope_parameters": 7}, "lacks or spoils"),
        ({"max_position_embeddings": float("inf")}, "lacks or spoils"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"vocab_size": 9}, "the shape"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(tmp_path, change, fault):
    """What a config.json lacks, spoils or asks beyond this family is named."""
    refused(write_folder(tmp_path, TENSORS, change), fault)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_broken_config_is_refused(tmp_path, text):
    """A config.json that is no object is a refusal, not a traceback."""
    write_folder(tmp_path, TENSORS)
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json")


def test_pickles_are_never_read(tmp_path):
    """A folder with pickled weights only is refused, with the reason."""
    write_folder(tmp_path, TENSORS)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pickled weights only; they can run code. Use safetensors")
    (tmp_path / "pytorch_model.bin").unlink()
    refused(tmp_path, r"has no \*\.safetensors file")


def test_one_whole_file_wins_over_strays(tmp_path):
    """Beside model.safetensors other weight files are of no interest, whatever they hold."""
    write_folder(tmp_path, TENSORS)
    (tmp_path / "consolidated.safetensors").write_bytes(b"junk")
    assert FolderCheckpoint(tmp_path).names() == TENSORS.keys()


def test_a_missing_shard_is_named(tmp_path):
    """A shard that the index names must be there."""
    write_folder(tmp_path, TENSORS, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00002.safetensors is missing")
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "has no tensor")


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "names a file outside the folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "names a file outside the folder"),
        ({"weight_map": {"a": 7}}, "maps no tensors to files"),
        ({"weight_map": ["a"]}, "maps no tensors to files"),
    ],
)
def test_an_index_stays_in_its_folder(tmp_path, index, fault):
    """An index names files beside itself and nothing else."""
    write_folder(tmp_path, TENSORS)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, fault)


def test_other_types_are_refused_by_name(tmp_path):
    """A tensor of integers is not taken for weights."""
    save_file({"a": np.zeros(3, np.int64)}, write_folder(tmp_path, TENSORS) / "model.safetensors")
    refused(tmp_path, "a tensor of type I64; supported: F32, F16, BF16")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda header: header["model.norm.weight"].update(data_offsets=[0, 2**40]), "lies beyond its end"),
        (lambda header: header["model.norm.weight"].update(data_offsets=[-8, 248]), "do not fit"),
        (lambda header: header["model.norm.weight"].update(data_offsets=[256, 0]), "do not fit"),
        (lambda header: header["model.norm.weight"].update(data_offsets=[0]), "broken header"),
        (lambda header: header["model.norm.weight"].update(shape=[63]), "do not fit"),
        (lambda header: header["model.norm.weight"].update(shape=[1e400]), "broken header"),
        (lambda header: header["model.norm.weight"].pop("dtype"), "broken header"),
        (lambda header: header.update({"model.norm.weight": 7}), "broken header"),
    ],
)
def test_offsets_are_checked(tmp_path, change, fault):
    """A place outside the file, or of another size than the shape needs, is refused before it is read."""
    write_folder(tmp_path, TENSORS)
    change_header(tmp_path / "model.safetensors", change)
    refused(tmp_path, fault)


@pytest.mark.parametrize(
    "data", [b"", b"1234567", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 9) + b"{}"]
)
def test_a_file_shorter_than_its_header_is_refused(tmp_path, data):
    """A length beyond the file is never allocated."""
    (write_folder(tmp_path, TENSORS) / "model.safetensors").write_bytes(data)
    refused(tmp_path, "is truncated or no safetensors file")


def test_a_truncated_file_is_refused(tmp_path):
    """One byte short is recognised at opening."""
    path = write_folder(tmp_path, TENSORS) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(tmp_path, "is truncated")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_end_in_anything_but_a_refusal(tmp_path_factory, data):
    """Whatever bytes of the header change, the folder opens or is refused by name."""
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    if not folder.exists():
        write_folder(folder, TENSORS)
        (folder / "model.safetensors").rename(folder / "whole")
    changed = bytearray((folder / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        changed[data.draw(st.integers(0, 1800))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(changed)
    assert str(folder) in fault_of(folder, str(folder))


def fault_of(folder, fallback):
    """Read everything there is and return the refusal, or `fallback` when there was none."""
    try:
        found = FolderCheckpoint(folder)
        for name in found.names():
            found.tensor(name)
    except CheckpointError as error:
        return str(error)
    return fallback
