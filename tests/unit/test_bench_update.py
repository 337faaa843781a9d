"""`rose bench link`: the synthetic model moves as a chain does, and stages add up to the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rose_daemon.bench import update_bench
from rose_daemon.bench.update_model import SyntheticModel, shapes
from rose_daemon.bench.worker import worker

from rose.errors import RoseError
from rose.weights.checkpoint import open_checkpoint


@pytest.mark.parametrize("elements", [1 << 16, 1 << 21, 1 << 24, 1 << 29])
def test_a_model_has_about_the_size_asked_for(elements: int) -> None:
    sizes = {name: int(np.prod(shape)) for name, shape in shapes(elements).items()}
    assert sum(sizes.values()) == pytest.approx(elements, rel=0.2)
    assert "model.layers.0.self_attn.q_proj.weight" in sizes


def test_steps_move_a_few_weights_from_the_checkpoint_on(tmp_path: Path) -> None:
    model = SyntheticModel.make(tmp_path / "model", 1 << 18, 2, seed=1)
    held = open_checkpoint(tmp_path / "model").state
    again = SyntheticModel.open(tmp_path / "model", 1 << 18)
    before = again.state(0)
    assert held.keys() == before.keys()
    assert all(np.array_equal(held[name].words, bits.words) for name, bits in before.items())
    for step in (1, 2):
        after = again.state(step)
        changed = sum(int(np.count_nonzero(before[name].words != after[name].words)) for name in after)
        assert 0.005 < changed / model.elements < 0.05
        before = after


def test_stages_add_up_to_the_time_until_the_last_replica_committed() -> None:
    published = {
        "began_monotonic_s": 10.0, "ended_monotonic_s": 10.5, "encode_ms": 300.0, "self_check_ms": 100.0,
        "push_ms": 80.0, "bytes": 1000, "density": 0.02, "bytes_per_changed": 0.8,
    }  # fmt: skip
    staging = {"version": 3, "at_monotonic_s": 11.0, "pull_ms": 200.0, "verify_ms": 50.0, "decode_ms": 150.0}
    update = {"version": 3, "ok": True, "ms": 400.0, "engine_ms": {"stage": 250.0, "pause": 60.0}}
    status = {
        "stagings": [{**staging, "version": 2}, staging],
        "updates": [
            {**update, "ok": False, "at_monotonic_s": 11.05},
            {**update, "at_monotonic_s": 11.5},
            {**update, "at_monotonic_s": 11.45, "engine_ms": {"stage": 1.0, "pause": 90.0}},
        ],
    }
    found = update_bench.timeline(published, status, 3)
    assert found["total_ms"] == pytest.approx(1500)
    assert found["pause_ms"] == 90, "the longest of any replica"
    stages = found["stages_ms"]
    assert tuple(stages) == update_bench.STAGES
    assert stages["announce"] == pytest.approx(100)
    assert stages["hand over"] == pytest.approx(100)
    assert stages["prove"] == pytest.approx(90)
    assert sum(stages.values()) == pytest.approx(1500)
    report = update_bench.summarise([found], {})
    assert report["goals"]["total_ms"] == {"at_most": 2500.0, "met": True}
    assert update_bench.summarise([{**found, "pause_ms": 101}], {})["goals"]["pause_ms"]["met"] is False


def test_a_worker_that_ends_is_an_error() -> None:
    with pytest.raises(RoseError, match="has ended"), worker("rose_daemon.bench.link_worker"):
        pass
