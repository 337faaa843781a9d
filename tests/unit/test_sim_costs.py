"""Cost model against the tables and the exact figures of the published model shapes."""

from __future__ import annotations

import json

import pytest
from rose_sim.costs import step_cost
from rose_sim.hardware import GPUS, MODELS, gpu, model
from rose_sim.loop import PS_PER_MS
from rose_sim.tables import BATCHES, PREFILL_TOKENS, PROFILES

from rose.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "parameters_b", "gib", "kv_bytes"),
    [
        ("Qwen2.5-7B", 7.616, 14.19, 57_344),
        ("Qwen2.5-32B", 32.764, 61.03, 256 * 1024),
        ("Qwen3-8B", 8.191, 15.26, 144 * 1024),
        ("Qwen3-14B", 14.768, 27.51, 160 * 1024),
        ("Qwen3-32B", 32.762, 61.02, 256 * 1024),
    ],
)
def test_model_sizes_are_exact(name: str, parameters_b: float, gib: float, kv_bytes: int) -> None:
    shape = model(name)
    assert round(shape.parameters / 1e9, 3) == parameters_b
    assert round(shape.weight_bytes / 2**30, 2) == gib
    assert shape.kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: f"{profile.model} {profile.gpu}")
def test_tables_are_reproduced(profile) -> None:
    cost = step_cost(MODELS[profile.model], GPUS[profile.gpu], profile.tp)
    for tokens, wanted in zip(PREFILL_TOKENS, profile.prefill_ms, strict=True):
        assert (cost.prefill_ps(tokens) - cost.overhead) / PS_PER_MS == pytest.approx(wanted, rel=0.15)
    for context, row in profile.decode_ms.items():
        for batch, wanted in zip(BATCHES, row, strict=True):
            found = (cost.decode_ps(batch, batch * context) - cost.overhead) / PS_PER_MS
            assert found == pytest.approx(wanted, rel=0.10)


@pytest.mark.parametrize(
    ("name", "tp", "wanted"),
    [("Qwen3-8B", 1, (12.9, 13.8, 16.3, 19.7, 26.4)), ("Qwen3-32B", 4, (21.9, 22.1, 24.4, 27.4, 33.3))],
)
def test_a_chunk_after_a_cached_prefix(name: str, tp: int, wanted: tuple[float, ...]) -> None:
    cost = step_cost(MODELS[name], GPUS["H100"], tp)
    for past, expected in zip((0, 2048, 8192, 16384, 30720), wanted, strict=True):
        assert (cost.prefill_ps(512, past) - cost.overhead) / PS_PER_MS == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(("batch", "wanted"), [(1, 6.95), (16, 7.5), (32, 8.1), (64, 9.5), (128, 12.0)])
def test_decode_against_the_measured_qwen3_8b(batch: int, wanted: float) -> None:
    # The benchmark does not say how long contexts were on average; 640 tokens are assumed.
    cost = step_cost(MODELS["Qwen3-8B"], GPUS["H100"], 1)
    assert cost.decode_ps(batch, batch * 640) / PS_PER_MS == pytest.approx(wanted, rel=0.10)


def test_h800_is_slower_than_h100_only_where_gpus_talk() -> None:
    small = MODELS["Qwen3-8B"]
    assert step_cost(small, GPUS["H800"], 1) == step_cost(small, GPUS["H100"], 1)
    big = MODELS["Qwen3-32B"]
    assert step_cost(big, GPUS["H800"], 4).prefill_ps(4096) > step_cost(big, GPUS["H100"], 4).prefill_ps(4096)


def test_compute_poor_bandwidth_rich() -> None:
    h20, h800 = (step_cost(MODELS["Qwen3-8B"], GPUS[name], 1) for name in ("H20", "H800"))
    assert h20.prefill_ps(4096) > 4 * h800.prefill_ps(4096)
    assert h20.decode_ps(64, 64 * 8192) < h800.decode_ps(64, 64 * 8192)


def test_a_model_from_its_configuration(tmp_path) -> None:
    config = {
        "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model(str(path)).parameters == MODELS["Qwen3-8B"].parameters


@pytest.mark.parametrize("text", ["", "{}", '{"hidden_size": "x"}', "[1]"])
def test_a_bad_configuration_says_what_is_wrong(tmp_path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a usable model configuration"):
        model(str(path))


def test_unknown_names_are_named() -> None:
    with pytest.raises(ConfigError, match="Qwen9"):
        model("Qwen9")
    with pytest.raises(ConfigError, match="H9"):
        gpu("H9")
