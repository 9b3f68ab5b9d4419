# SPDX-License-Identifier: Apache-2.0
"""Small llama models made on the spot: the same weights as a Hugging Face folder and as a GGUF file.

    tensors = tiny_tensors()                            Hugging Face names → float32
    write_folder(tmp_path / "hf", tensors)              safetensors, config, tokenizer
    write_gguf(tmp_path / "tiny.gguf", tensors)         as llama.cpp's converter would, rotary rows interleaved

The vocabulary is the 256 bytes, a few merged pieces and the marks of a chat; nothing here is trained.
"""

import json

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MERGES = ["t h", "th e", "Ġ the", "i n"]
CONTROL = ["<|im_start|>", "<|im_end|>"]
PIECES = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
TOKENS = [*CONTROL, *PIECES]
BOS, EOS = 0, 1
SETTINGS = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 128,
    "vocab_size": len(TOKENS),
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_tensors(settings=None, seed=0, *, has_head=False):
    """Every tensor of a llama with these settings, by its Hugging Face name."""
    settings = SETTINGS | (settings or {})
    random = np.random.default_rng(seed)
    hidden, wide = settings["hidden_size"], settings["intermediate_size"]
    head = settings.get("head_dim", hidden // settings["num_attention_heads"])
    queries, keys = (settings[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens": (settings["vocab_size"], hidden), "model.norm": (hidden,)}
    if has_head:
        shapes["lm_head"] = shapes["model.embed_tokens"]
    for layer in range(settings["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{role}": shape
            for role, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (wide, hidden),
                "mlp.up_proj": (wide, hidden),
                "mlp.down_proj": (hidden, wide),
            }.items()
        }
    return {
        f"{name}.weight": (
            random.standard_normal(shape) / np.sqrt(shape[-1])
            if len(shape) > 1
            else random.uniform(0.5, 2, shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def tiny_tokenizer():
    """The vocabulary as a byte-level tokenizer of the `tokenizers` library."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split()) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    return tokenizer


def write_folder(folder, tensors, settings=None, *, num_shards=1, files=None):
    """Write a Hugging Face folder and return it; `files` adds or replaces JSON files, None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{part:05}-of-{num_shards:05}.safetensors" for part in range(1, num_shards + 1)]
    if num_shards == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {name: names[place % num_shards] for place, name in enumerate(tensors)}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)
    for part, name in enumerate(names):
        save_file({key: tensors[key] for key in list(tensors)[part::num_shards]}, folder / name)
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    contents = {
        "config.json": SETTINGS | (settings or {}),
        "tokenizer_config.json": {"chat_template": TEMPLATE, "bos_token": CONTROL[0], "eos_token": CONTROL[1]},
        "generation_config.json": {"eos_token_id": EOS},
    }
    for name, content in (contents | (files or {})).items():
        if content is not None:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def interleave(weight, num_heads):
    """Reorder query or key rows from half-split to neighbouring rotary pairs, as a GGUF file holds them."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name):
    """The GGUF name of a Hugging Face tensor name."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, role = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_GGUF_NAMES[role]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"


def write_gguf(path, tensors, settings=None, *, kind="F32", metadata=None, extra=None, **options):
    """Write a GGUF file and return its path.

    `kind` is the type of every matrix; `metadata` adds or replaces whole keys, None leaves one out; `extra`
    adds tensors by their GGUF names, (bytes, type) for one that is packed already; `options` go to the writer
    (endianess).
    """
    settings = SETTINGS | (settings or {})
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_license("apache-2.0")
    for key, value in (_metadata(settings) | (metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    heads = {"q_proj": settings["num_attention_heads"], "k_proj": settings["num_key_value_heads"]}
    for name, weight in tensors.items():
        role = name.split(".")[-2]
        rows = interleave(weight, heads[role]) if role in heads else weight
        _add_tensor(writer, gguf_name(name), rows, kind if rows.ndim > 1 else "F32")
    for name, weight in (extra or {}).items():
        data, form = weight if isinstance(weight, tuple) else (weight, None)
        writer.add_tensor(name, data, raw_dtype=form and gguf.GGMLQuantizationType[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(settings):
    return {
        "llama.block_count": settings["num_hidden_layers"],
        "llama.context_length": settings["max_position_embeddings"],
        "llama.embedding_length": settings["hidden_size"],
        "llama.feed_forward_length": settings["intermediate_size"],
        "llama.attention.head_count": settings["num_attention_heads"],
        "llama.attention.head_count_kv": settings["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": settings["rms_norm_eps"],
        "llama.rope.freq_base": settings["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * len(PIECES),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer, key, value):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _add_tensor(writer, name, weight, kind):
    form = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        writer.add_tensor(name, weight.astype(np.float16 if kind == "F16" else np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(weight, form), raw_dtype=form)
