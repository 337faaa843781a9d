"""Shapes of models and figures of GPUs.

Model figures follow from the published configurations (exact); GPU figures are the peak ones of the data
sheets as RollArt (arXiv 2512.22560, table 2) and aiconfigurator's system files give them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rose.errors import ConfigError

BF16_BYTES = 2


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder with grouped-query attention and a gated feed-forward part, in bf16."""

    name: str
    layers: int
    hidden: int
    ffn: int
    q_heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    tied: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.ffn, self.q_heads, self.kv_heads, self.vocab, self.head_dim)
        if min(sizes) <= 0:
            raise ConfigError(f"model {self.name}: all sizes must be above 0")

    @property
    def parameters(self) -> int:
        """Number of weights."""
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * q + 2 * self.hidden * kv
        attention += (q + 2 * kv) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + self.hidden + embeddings

    @property
    def weight_bytes(self) -> int:
        """Size of a full copy."""
        return BF16_BYTES * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * BF16_BYTES * self.layers * self.kv_heads * self.head_dim

    @property
    def gemm_flop_per_token(self) -> int:
        """Of the layers; embedding and output head are not counted."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return 2 * (self.parameters - embeddings)

    @property
    def attention_flop(self) -> int:
        """For one token and one token of its context: scores and their use."""
        return 4 * self.layers * self.q_heads * self.head_dim


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Peak figures of one GPU."""

    name: str
    tflops: float
    """bf16, dense."""
    bandwidth_tb_s: float
    memory_gb: float
    """1e9 bytes."""
    nvlink_gb_s: float

    @property
    def memory_bytes(self) -> int:
        """Device memory."""
        return round(self.memory_gb * 1e9)


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(name="Qwen2.5-7B", layers=28, hidden=3584, ffn=18944, q_heads=28, kv_heads=4, vocab=152064,
                   qkv_bias=True),
        ModelShape(name="Qwen2.5-32B", layers=64, hidden=5120, ffn=27648, q_heads=40, kv_heads=8,
                   vocab=152064, qkv_bias=True),
        ModelShape(name="Qwen3-8B", layers=36, hidden=4096, ffn=12288, q_heads=32, kv_heads=8, vocab=151936,
                   qk_norm=True),
        ModelShape(name="Qwen3-14B", layers=40, hidden=5120, ffn=17408, q_heads=40, kv_heads=8, vocab=151936,
                   qk_norm=True),
        ModelShape(name="Qwen3-32B", layers=64, hidden=5120, ffn=25600, q_heads=64, kv_heads=8, vocab=151936,
                   qk_norm=True),
    )
}  # fmt: skip

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="H800", tflops=989, bandwidth_tb_s=3.35, memory_gb=80, nvlink_gb_s=400),
        Gpu(name="H100", tflops=989, bandwidth_tb_s=3.35, memory_gb=80, nvlink_gb_s=900),
        Gpu(name="H200", tflops=989, bandwidth_tb_s=4.8, memory_gb=141, nvlink_gb_s=900),
        Gpu(name="H20", tflops=148, bandwidth_tb_s=4.0, memory_gb=96, nvlink_gb_s=900),
        Gpu(name="A100", tflops=312, bandwidth_tb_s=2.04, memory_gb=80, nvlink_gb_s=600),
    )
}


class _HfConfig(msgspec.Struct):
    """The members of a Hugging Face config.json that give a model's shape."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    model_type: str = ""


def model(name: str) -> ModelShape:
    """A model by name, or from the `config.json` that `name` is the path of.  Raises ConfigError."""
    known = MODELS.get(name)
    if known is not None:
        return known
    path = Path(name)
    if path.suffix != ".json":
        raise ConfigError(
            f"unknown model {name!r}",
            f"known: {', '.join(MODELS)}; or the path of a Hugging Face config.json",
        )
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_HfConfig)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a usable model configuration: {error}") from None
    heads = config.num_attention_heads
    return ModelShape(
        name=path.parent.name or path.stem,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        q_heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        vocab=config.vocab_size,
        head_dim=config.head_dim or config.hidden_size // max(1, heads),
        tied=config.tie_word_embeddings,
        qkv_bias=config.attention_bias or config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
    )


def gpu(name: str) -> Gpu:
    """A GPU by name.  Raises ConfigError."""
    if name not in GPUS:
        raise ConfigError(f"unknown GPU {name!r}", f"known: {', '.join(GPUS)}")
    return GPUS[name]
