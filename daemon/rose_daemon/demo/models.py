"""The two small random models of the demo and of the tests: made here, nothing downloaded.

`make_models` writes two ordinary Hugging Face checkpoint directories that vLLM and transformers load:
serving is Qwen2-like, rollout Qwen3-like, of different shape.  The same seed gives the same bytes.
Weights are wide (std 0.15 and more), so that greedy outputs wander instead of repeating one token.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SEED = 20260506
CONTEXT_TOKENS_MAX = 2048
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_END_ID, _PAD_ID = 258, 259
VOCABULARY = 256 + len(_SPECIALS)
"""Token ids 0..255 are the bytes themselves, then the special tokens."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ModelShape(NamedTuple):
    """Dimensions of a decoder-only transformer with grouped-query attention."""

    family: str
    """`qwen2` (biases on q, k, v) or `qwen3` (norms on q and k)."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    std: float
    """Standard deviation of all matrices."""


SERVING = ModelShape("qwen2", 256, 640, 4, 8, 4, 32, 0.15)
ROLLOUT = ModelShape("qwen3", 192, 512, 5, 6, 3, 32, 0.16)


class DemoModels(NamedTuple):
    """Checkpoint directories."""

    serving: Path
    rollout: Path


def make_models(directory: Path, seed: int = SEED) -> DemoModels:
    """Write both checkpoints below `directory`; about a second, a few MiB each.  Raises OSError."""
    made = DemoModels(directory / "serving", directory / "rollout")
    _write_checkpoint(made.serving, SERVING, seed)
    _write_checkpoint(made.rollout, ROLLOUT, seed + 1)
    return made


def _write_checkpoint(directory: Path, shape: ModelShape, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(shape))
    _write_json(directory / "generation_config.json", {"eos_token_id": _END_ID, "pad_token_id": _PAD_ID})
    _write_tokenizer(directory)
    weights = {name: _random(name, size, shape, seed) for name, size in sorted(_parameters(shape))}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _config(shape: ModelShape) -> dict[str, Any]:
    name = shape.family.capitalize()
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": shape.family,
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "initializer_range": shape.std,
        "torch_dtype": "bfloat16",
        "eos_token_id": _END_ID,
        "pad_token_id": _PAD_ID,
        "bos_token_id": None,
    }


def _parameters(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names (as in a checkpoint) and sizes of all parameters."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (VOCABULARY, shape.hidden)
    yield "lm_head.weight", (VOCABULARY, shape.hidden)
    yield "model.norm.weight", (shape.hidden,)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (shape.hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (shape.hidden,)
        for projection, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{layer}.self_attn.{projection}_proj.weight", (rows, shape.hidden)
            if shape.family == "qwen2":
                yield f"{layer}.self_attn.{projection}_proj.bias", (rows,)
        if shape.family == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (shape.hidden, queries)
        for projection in ("gate", "up"):
            yield f"{layer}.mlp.{projection}_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{layer}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)


def _random(name: str, size: tuple[int, ...], shape: ModelShape, seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=torch.bfloat16)
    # One generator a parameter: adding a layer leaves the bytes of the others alone.
    generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    return (torch.randn(size, generator=generator) * shape.std).to(torch.bfloat16)


def _byte_symbols() -> list[str]:
    """The printable character that the byte-level pre-tokenizer puts in place of each byte, by value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def _write_tokenizer(directory: Path) -> None:
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS_MAX,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
