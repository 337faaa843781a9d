"""Whether a replica borrowed now would still pay, and which hardware suits a task."""

from __future__ import annotations

from rose.core.switching import SwitchCost
from rose.core.tokenmix import BANDWIDTH, COMPUTE, EITHER, TokenMix
from rose.units import NS_PER_S, JobId, ReplicaId

S = NS_PER_S
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
JOB = JobId("j")


def after_steps(*rollouts_s: float) -> SwitchCost:
    switching = SwitchCost(5 * S, 2)
    for took_s in rollouts_s:
        switching.step_began(0)
        switching.step_ended(round(took_s * S))
    return switching


def test_it_pays_while_nothing_is_known_and_between_steps() -> None:
    assert SwitchCost(5 * S, 2).pays(0, False)
    switching = after_steps(10)
    assert switching.pays(0, False)
    first = SwitchCost(5 * S, 2)
    first.step_began(0)
    assert first.pays(1000 * S, False)


def test_it_pays_until_too_little_of_the_step_is_left() -> None:
    switching = after_steps(60)
    switching.step_began(100 * S)
    assert switching.pays(149 * S, False)
    assert not switching.pays(151 * S, False)
    assert not switching.pays(151 * S, True)


def test_a_step_that_lasts_longer_pays_only_with_a_queue() -> None:
    switching = after_steps(60)
    switching.step_began(100 * S)
    assert not switching.pays(200 * S, False)
    assert switching.pays(200 * S, True)


def test_the_cost_is_measured_from_grant_to_first_use() -> None:
    switching = after_steps(60)
    switching.granted(R0, 0)
    switching.usable(R0, 20 * S)
    assert switching.cost_ns == 20 * S  # the prior is only a prior
    switching.usable(R0, 50 * S)
    assert switching.cost_ns == 20 * S
    switching.granted(R0, 0)
    switching.usable(R0, 30 * S)
    assert switching.cost_ns == 23 * S
    switching.granted(R1, 0)
    switching.ended(R1)
    switching.usable(R1, 900 * S)
    assert switching.cost_ns == 23 * S
    switching.step_began(0)
    assert not switching.pays(20 * S, False)


def test_a_task_s_mix_decides_its_hardware() -> None:
    mix = TokenMix(10)
    for _ in range(8):
        assert mix.suits(JOB, "reading") == EITHER
        mix.observe(JOB, "reading", 4000, 40)
        mix.observe(JOB, "thinking", 100, 3000)
    assert mix.suits(JOB, "reading") == COMPUTE
    assert mix.suits(JOB, "thinking") == BANDWIDTH
    assert mix.suits(JobId("other"), "reading") == EITHER
    mix.drop_job(JOB)
    assert mix.suits(JOB, "reading") == EITHER


def test_the_mixes_of_endless_tasks_take_bounded_memory() -> None:
    mix = TokenMix(10)
    for task in range(5000):
        mix.observe(JOB, str(task), 1, 1)
    assert len(mix._tasks) == 1024
