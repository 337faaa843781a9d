"""A training step changes weights, and repeats; the process publishes what it says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
import torch
from rose_daemon.demo.grpo import accumulate_gradient, batches
from rose_daemon.demo.models import make_models
from rose_daemon.demo.trainer import Learner, changed_elements, digests
from rose_daemon.demo.training import Sample, Trainer, TrainerSettings, trainer_command
from rose_daemon.harness.processes import spawn
from rose_daemon.harness.stack import free_ports, toml
from rose_daemon.relay.server import serving

from rose.config import RelayConfig
from rose.errors import ConfigError, RoseError
from rose.units import JobId, WeightVersion
from rose.weights.relay.local import RelayClient

SAMPLES = [
    Sample(tuple(range(10, 20)), (3, 4, 5), 1.0),
    Sample(tuple(range(30, 50)), (6, 7, 8, 9), -0.5),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_models(tmp_path_factory.mktemp("models")).rollout


def test_a_step_changes_weights_and_repeats(model: Path) -> None:
    states = []
    for _ in range(2):
        learner = Learner.load(model)
        before = learner.copy()
        loss, norm = learner.step(SAMPLES)
        after = learner.copy()
        assert norm > 0
        assert loss == pytest.approx(-sum(s.advantage * len(s.output) for s in SAMPLES) / 7, abs=1e-5)
        changed = changed_elements(before, after)
        elements = sum(value.numel() for value in after.values())
        assert 0 < changed < 0.05 * elements
        assert digests(before) != digests(after)
        states.append(digests(after))
    assert states[0] == states[1]


def test_the_gradient_raises_what_was_good(model: Path) -> None:
    learner = Learner.load(model)
    sample = Sample((1, 2, 3), (4, 5), 1.0)
    net = learner._model

    def log_probability() -> float:
        ids = torch.tensor([[*sample.prompt, *sample.output]])
        with torch.no_grad():
            table = net(input_ids=ids).logits.log_softmax(-1)
        return float(table[0, 2, 4] + table[0, 3, 5])

    before = log_probability()
    accumulate_gradient(net, [sample])
    with torch.no_grad():
        for value in net.parameters():
            value.sub_(value.grad, alpha=1e-3)
    assert log_probability() > before


def test_padding_changes_nothing(model: Path) -> None:
    gradients = []
    for samples in (SAMPLES, SAMPLES[::-1], [*SAMPLES, Sample(tuple(range(200)), (1,), 0.0)]):
        net = Learner.load(model)._model
        accumulate_gradient(net, samples)
        weight = 7 if len(samples) == 2 else 8
        gradients.append(net.lm_head.weight.grad * weight)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-3, atol=1e-5)


def test_batches_hold_every_sample_once() -> None:
    samples = [Sample((1,) * (n % 7 + 1), (2,), float(n)) for n in range(50)]
    found = [sample.advantage for batch in batches(samples) for sample in batch]
    assert sorted(found) == [float(n) for n in range(50)]


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a Qwen3 checkpoint"):
        Learner.load(tmp_path)


# ---- the process --------------------------------------------------------------------------------


async def start(tmp_path: Path, model: Path, port: int) -> Trainer:
    config = tmp_path / "rose.toml"
    config.write_text(toml({"schema": 1, "relay": {"url": f"http://127.0.0.1:{port}", "port": port}}))
    settings = TrainerSettings(
        model=str(model), config=str(config), job="job-0", checkpoints=str(tmp_path / "checkpoints")
    )
    child = await spawn(
        "trainer",
        trainer_command(settings),
        tmp_path / "trainer.log",
        environ=os.environ,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    return Trainer(child)


async def test_trainer_process_publishes_what_it_says(tmp_path: Path, model: Path) -> None:
    (port,) = free_ports(1)
    async with serving(RelayConfig(url=f"http://127.0.0.1:{port}", port=port)):
        trainer = await start(tmp_path, model, port)
        try:
            first = (await trainer.started()).digests
            made = await trainer.train(1, SAMPLES)
            again = await trainer.train(2, SAMPLES)
        finally:
            await trainer.stop(5)
        relay = RelayClient(f"http://127.0.0.1:{port}")
        committed = await relay.manifest(JobId("job-0"), WeightVersion(2))
        await relay.aclose()
    assert first != made.digests != again.digests
    assert (made.version, made.tokens, made.elements) == (1, 7, 2129792)
    assert made.changed > 0
    assert made.delta_bytes < made.dense_bytes / 10
    assert committed.manifest.target_digests == again.digests
    saved = Learner.load(tmp_path / "checkpoints" / "v000002").copy()
    assert digests(saved) == again.digests


async def test_trainer_process_says_what_is_wrong(tmp_path: Path, model: Path) -> None:
    trainer = await start(tmp_path, tmp_path / "none", 1)
    with pytest.raises(RoseError, match=r"trainer: .*not a Qwen3 checkpoint"):
        await trainer.started()
    await trainer.stop(5)


def test_settings_survive_the_command_line() -> None:
    settings = TrainerSettings(model="/a b", config="c", job="j")
    assert msgspec.json.decode(trainer_command(settings)[-1], type=TrainerSettings) == settings
