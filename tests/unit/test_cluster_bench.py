"""`rose bench cluster`: one seed is one world, and prefixes are found again at a bearable load."""

from __future__ import annotations

import json
from pathlib import Path

from rose_daemon.bench.cluster import LOAD_SPREAD_GOAL, PREFIX_HIT_SHARE_GOAL, ClusterBench
from rose_daemon.bench.cluster_load import Cache, ClusterLoad
from rose_daemon.bench.command import app
from typer.testing import CliRunner

from rose.units import TrajectoryId

FOUR = ClusterLoad(replicas=4, trajectories=48, decisions=2_000)


def run(load: ClusterLoad) -> ClusterBench:
    bench = ClusterBench(load)
    bench.run()
    return bench


def test_multi_turn_episodes_over_four_replicas_find_their_prefixes_at_a_bearable_load() -> None:
    bench = run(FOUR)
    assert bench.placed.hit_tokens >= PREFIX_HIT_SHARE_GOAL * bench.placed.ideal_tokens > 0
    assert sum(bench.placed.spreads) <= LOAD_SPREAD_GOAL * len(bench.placed.spreads)


def test_one_seed_is_one_course_of_events() -> None:
    first, again, other = run(FOUR), run(FOUR), run(FOUR._replace(seed=2))
    assert (first.costs.why, first.placed) == (again.costs.why, again.placed)
    assert first.placed != other.placed


def test_turns_are_neither_lost_nor_failed() -> None:
    bench = run(FOUR._replace(interrupted_share=0.2))
    counts = bench.machine.counts()
    assert counts.failed == 0
    assert counts.interrupted > 0
    assert counts.arrived == counts.finished + counts.queued + counts.in_flight


def test_more_turns_than_room_wait_and_are_counted() -> None:
    bench = run(ClusterLoad(replicas=4, trajectories=200, decisions=500, environment_s=0.1))
    assert bench.machine.counts().queued > 0
    assert bench.machine.counts().failed == 0


def test_a_cache_forgets_what_was_used_least_recently() -> None:
    cache = Cache(budget_tokens=10)
    a, b, c = TrajectoryId("a"), TrajectoryId("b"), TrajectoryId("c")
    cache.keep(a, 4)
    cache.keep(b, 4)
    assert cache.use(a) == 4
    cache.keep(c, 4)
    assert [cache.use(name) for name in (a, b, c)] == [4, 0, 4]
    assert cache.tokens == 8


def test_the_command_reports_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    args = ["cluster", "--replicas", "8", "--trajectories", "64", "--decisions", "400", "--json", str(path)]
    outcome = CliRunner().invoke(app, args)
    report = json.loads(path.read_text())
    assert outcome.exit_code == (0 if report["ok"] else 1), outcome.output
    assert report["turns"]["failed"] == 0
    assert sum(report["decisions_by_rule"].values()) >= 400
    assert "prefix_hit_share" in outcome.output
