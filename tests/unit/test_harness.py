"""Child processes, statistics and load of the demo and the benchmarks."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from aiohttp import web
from rose_daemon.harness import load, stats
from rose_daemon.harness.directory import working_in
from rose_daemon.harness.generator import COMMAND, LoadGenerator, Replay
from rose_daemon.harness.marked import end_marked, marked_environ, marked_pids
from rose_daemon.harness.processes import Placement, last_error, spawn, until
from rose_daemon.harness.stack import Cores, StackPlan, configuration, free_ports, toml

from rose.config import ReplicaConfig, build
from rose.errors import ConfigError, EngineFailed, TimedOut
from rose.outputs import check_report_path
from rose.traces import TraceRequest
from rose.units import NS_PER_MS, NS_PER_S, ReplicaId

# ---- processes ----------------------------------------------------------------------------------

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(60)",
]


def gone(pid: int, timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


async def test_child_runs_where_it_is_placed_and_stops(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    child = await spawn(
        "sleeper", SLEEP, tmp_path / "log", environ=os.environ, placement=Placement([core], idle=True)
    )
    assert os.sched_getaffinity(child.process.pid) == {core}
    assert os.sched_getscheduler(child.process.pid) == os.SCHED_IDLE
    assert os.getpgid(child.process.pid) == child.process.pid
    await child.stop(5)
    assert child.process.returncode == -signal.SIGTERM


async def test_child_that_ignores_terminate_is_killed(tmp_path: Path) -> None:
    child = await spawn("stubborn", STUBBORN, tmp_path / "log", environ=os.environ)

    async def up() -> bool:
        return "up" in (tmp_path / "log").read_text()

    await until("up", up, 10, 0.02)
    await child.stop(0.2)
    assert child.process.returncode == -signal.SIGKILL


async def test_failure_names_the_reason(tmp_path: Path) -> None:
    child = await spawn(
        "broken",
        [sys.executable, "-c", "raise SystemExit('Error: no such model')"],
        tmp_path / "log",
        environ=os.environ,
    )
    await child.process.wait()
    assert child.failure().what == "broken ended with exit code 1: Error: no such model"
    assert str(tmp_path / "log") in child.failure().hint


async def test_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="cannot be started"):
        await spawn("none", ["/no/such/program"], tmp_path / "log", environ=os.environ)


async def test_until_times_out() -> None:
    async def never() -> bool:
        return False

    with pytest.raises(TimedOut, match="the thing: not ready"):
        await until("the thing", never, 0.05, 0.01)


def test_last_error_prefers_errors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\nValueError: bad\nshutting down\n")
    assert last_error(log) == "ValueError: bad"
    log.write_text("starting\nstopped\n\n")
    assert last_error(log) == "stopped"
    assert last_error(tmp_path / "none") == ""


def test_marked_processes_are_found_in_other_groups_and_ended() -> None:
    stack_id = secrets.token_hex(8)
    environ = os.environ | marked_environ(stack_id)
    code = f"import subprocess, sys; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    bystander = subprocess.Popen(SLEEP)
    try:
        (orphan,) = marked_pids(stack_id)
        assert end_marked(stack_id, 0.0) >= 1
        assert gone(orphan)
        assert marked_pids(stack_id) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_reaper_sweeps_when_its_owner_is_killed(tmp_path: Path) -> None:
    """An owner killed outright leaves neither its child nor its grandchild."""
    stack_id = secrets.token_hex(8)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    owner_code = f"""
import subprocess, sys, os, time
from rose_daemon.harness.marked import marked_environ
import rose_daemon.harness.reaper as reaper
env = os.environ | marked_environ({stack_id!r})
child = subprocess.Popen({STUBBORN!r}, env=env, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
code = "import rose_daemon.harness.reaper as r, sys; r.GRACE_S = 0.3; sys.exit(r.main(sys.argv[1:]))"
r = subprocess.Popen([sys.executable, "-c", code, {stack_id!r}, {str(scratch)!r}], stdin=subprocess.PIPE)
print(child.pid, r.pid, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child, reaper = map(int, owner.stdout.readline().split())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert gone(child)
    assert gone(reaper)
    assert not scratch.exists()


# ---- configuration ------------------------------------------------------------------------------


def test_configuration_of_a_stack_is_valid(tmp_path: Path) -> None:
    replicas = tuple(
        ReplicaConfig(id=ReplicaId(kind), kind=kind, model="/m", cpus=(0,), engine_args=("--x", 'a"b'))
        for kind in ("opportunistic", "dedicated")
    )
    plan = StackPlan(directory=tmp_path, serving_model=tmp_path, replicas=replicas, cores=Cores(0, 1))
    ports = free_ports(6)
    text = toml(configuration(plan, tmp_path / "run", ports))
    config = build(tomllib.loads(text), "test")
    assert config.replicas[1].port == ports[5]
    assert config.replicas[0].engine_args == ("--x", 'a"b')
    assert config.control_socket == tmp_path / "run" / "rosed.sock"


def test_free_ports_differ() -> None:
    assert len(set(free_ports(10))) == 10


# ---- statistics ---------------------------------------------------------------------------------


def test_nothing_measured_is_no_number() -> None:
    assert stats.wilson(0, 0) == (0.0, 1.0)
    assert stats.percentile([], 99) is None
    assert stats.percentiles([], 50, 99) == {"p50": None, "p99": None}


def test_wilson_intervals() -> None:
    assert stats.wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert stats.wilson(10, 10) == pytest.approx((0.7225, 1), abs=1e-4)
    assert stats.wilson(995, 1000) == pytest.approx((0.98835, 0.99786), abs=1e-5)


# ---- load ---------------------------------------------------------------------------------------


def record(token_ms: list[float], **fields: object) -> load.RequestRecord:
    made = load.RequestRecord(0, planned_ns=0, prompt_tokens=1, output_tokens=len(token_ms), **fields)
    made.token_ns = [round(ms * NS_PER_MS) for ms in token_ms]
    return made


def test_latencies_of_a_request() -> None:
    one = record([50, 60, 90, 90])
    assert (one.ttft_ms, one.tpot_ms) == (50, pytest.approx(40 / 3))
    assert one.gaps_ms == [10, 30, 0]
    assert record([50]).tpot_ms is None
    assert record([]).ttft_ms is None


@pytest.mark.parametrize(
    ("one", "breach"),
    [
        (record([250, 310]), ""),
        (record([250.1, 260]), "ttft"),
        (record([10, 70.1]), "tpot"),
        (record([10]), ""),
        (record([]), "ttft"),
        (record([10, 20], error="gone"), "failed"),
    ],
)
def test_budgets(one: load.RequestRecord, breach: str) -> None:
    assert one.breach(load.Budgets(250, 60)) == breach


def test_repeat_goes_on_after_the_end() -> None:
    endless = load.repeat([TraceRequest(0, 1, 1), TraceRequest(5, 2, 2)], pause_ns=10)
    assert [next(endless).at_ns for _ in range(5)] == [0, 5, 15, 20, 30]


@pytest.fixture
async def engine():
    """A stand-in for vLLM's completions: streams the tokens asked for; prompts of 1, 2 and 3 tokens fail."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if len(body["prompt"]) == 1:
            return web.json_response({"error": "no"}, status=400)
        if not body.get("stream"):
            return web.json_response({"choices": [{"token_ids": [1] * body["max_tokens"]}]})
        response = web.StreamResponse()
        await response.prepare(request)
        count = body["max_tokens"] - (len(body["prompt"]) == 2)
        for _ in range(count):
            await response.write(b'data: {"choices": [{"token_ids": [7]}]}\n\n')
        if len(body["prompt"]) == 3:
            await response.write(b'data: {"error": {"message": "died"}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    application = web.Application()
    application.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    yield load.Target(f"http://127.0.0.1:{runner.addresses[0][1]}", "m")
    await runner.cleanup()


async def replay(target: load.Target, requests: list[TraceRequest]) -> list[load.RequestRecord]:
    async with load.open_client() as client:
        replayed = load.TraceLoad(client, target, seed=1)
        await replayed.run(iter(requests), asyncio.Event())
    return replayed.records


async def test_trace_load_measures_every_request(engine: load.Target) -> None:
    records = await replay(engine, [TraceRequest(0, 8, 3), TraceRequest(NS_PER_S // 20, 9, 5)])
    assert [len(one.token_ns) for one in records] == [3, 5]
    assert [one.error for one in records] == ["", ""]
    assert records[1].planned_ns - records[0].planned_ns == NS_PER_S // 20
    assert all(one.late_ms >= 0 for one in records)


async def test_trace_load_records_failures_as_failures(engine: load.Target) -> None:
    records = await replay(engine, [TraceRequest(0, prompt, 4) for prompt in (1, 2, 3)])
    assert [one.error for one in records] == [
        'HTTP 400: {"error": "no"}', "3 of 4 tokens came", "ValueError: {'message': 'died'}",
    ]  # fmt: skip
    gone_target = load.Target(f"http://127.0.0.1:{free_ports(1)[0]}", "m")
    assert "ClientConnectorError" in (await replay(gone_target, [TraceRequest(0, 5, 1)]))[0].error


async def test_trace_load_stops_when_told(engine: load.Target) -> None:
    stop = asyncio.Event()
    async with load.open_client() as client:
        replayed = load.TraceLoad(client, engine, seed=1)
        running = asyncio.create_task(
            replayed.run(load.repeat([TraceRequest(0, 5, 1)], NS_PER_S // 50), stop)
        )

        async def some() -> bool:
            return len(replayed.records) >= 3

        await until("records", some, 30, 0.02)
        stop.set()
        async with asyncio.timeout(30):
            await running


async def test_closed_load_counts_tokens_and_errors(engine: load.Target) -> None:
    async with load.open_client() as client:
        for prompt_tokens in (8, 1):
            closed = load.ClosedLoad(client, engine, seed=1)
            running = asyncio.create_task(closed.run(4, prompt_tokens, 16))

            async def ended(closed: load.ClosedLoad = closed) -> bool:
                return bool(closed.completions or closed.errors)

            await until("a request ended", ended, 30, 0.02)
            running.cancel()
            await asyncio.wait([running])
            assert (closed.completions > 0) == (prompt_tokens == 8)
            assert closed.tokens == 16 * closed.completions
            assert bool(closed.errors) == (prompt_tokens == 1)


# ---- the load generator's process ---------------------------------------------------------------


async def start_generator(tmp_path: Path) -> LoadGenerator:
    child = await spawn(
        "generator",
        COMMAND,
        tmp_path / "generator.log",
        environ=os.environ,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    return LoadGenerator(child)


async def test_generator_replays_and_reports(tmp_path: Path, engine: load.Target) -> None:
    generator = await start_generator(tmp_path)
    try:
        for seed in (1, 2):
            records: list[load.RequestRecord] = []
            requests = [TraceRequest(0, 8, 3), TraceRequest(1, 1, 2), TraceRequest(2, 9, 5)]
            await generator.replay(Replay(target=engine, seed=seed, requests=requests), records)
            assert [one.index for one in records] == [0, 1, 2]
            assert [len(one.token_ns) for one in records] == [3, 0, 5]
            assert "HTTP 400" in records[1].error
    finally:
        await generator.close(5)


async def test_generator_stops_an_endless_replay(tmp_path: Path, engine: load.Target) -> None:
    generator, stop = await start_generator(tmp_path), asyncio.Event()
    records: list[load.RequestRecord] = []
    replay = Replay(
        target=engine, seed=1, requests=[TraceRequest(0, 8, 1), TraceRequest(1, 8, 1)], endless=True
    )
    running = asyncio.create_task(generator.replay(replay, records, stop))

    async def some() -> bool:
        return len(records) >= 4

    await until("records", some, 10, 0.02)
    stop.set()
    async with asyncio.timeout(10):
        await running
    assert [one.index for one in records] == list(range(len(records)))
    await generator.close(5)


async def test_generator_that_dies_is_said_so(tmp_path: Path, engine: load.Target) -> None:
    generator = await start_generator(tmp_path)
    await generator.close(0)
    with pytest.raises(EngineFailed, match="generator was killed by signal 15"):
        await generator.replay(Replay(target=engine, seed=1, requests=[TraceRequest(0, 8, 1)]), [])


# ---- the directory of a run ---------------------------------------------------------------------


def run_in(directory: Path, *, keep: bool = False, fails: bool = False) -> None:
    with working_in(directory, keep=keep):
        for name in ("models", "state", "logs"):
            (directory / name).mkdir(exist_ok=True)
        if fails:
            raise EngineFailed("x")


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_a_directory_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with working_in(tmp_path, keep=False), pytest.raises(ConfigError, match="another run uses it"):
        run_in(tmp_path)
    run_in(tmp_path)
    assert left_in(tmp_path) == ["logs"]


def test_what_is_large_goes_unless_it_is_wanted(tmp_path: Path) -> None:
    run_in(tmp_path / "out", keep=True)
    assert left_in(tmp_path / "out") == ["logs", "models", "state"]
    with pytest.raises(EngineFailed):
        run_in(tmp_path / "out", fails=True)
    assert "state" in left_in(tmp_path / "out"), "a failed run leaves what explains it"


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run_in(tmp_path / "file" / "out")


def test_an_unusable_report_path_is_refused_before_the_run(tmp_path: Path) -> None:
    check_report_path(None)
    check_report_path(tmp_path / "new" / "folder" / "report.json")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "report.json", Path("/proc/x.json")):
        with pytest.raises(ConfigError, match="the report cannot be written"):
            check_report_path(path)


async def test_shared_memory_of_a_killed_child_is_removed(tmp_path: Path) -> None:
    script = (
        "import signal, time; from multiprocessing import shared_memory as m; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "b = m.SharedMemory(create=True, size=4096); print(b.name, flush=True); time.sleep(600)"
    )
    child = await spawn("child", [sys.executable, "-c", script], tmp_path / "log", environ=os.environ)

    async def named() -> bool:
        return bool((tmp_path / "log").read_text().strip())

    await until("the block", named, 30, 0.05)
    block = Path("/dev/shm") / (tmp_path / "log").read_text().strip()
    assert block.exists()
    await child.stop(0.1)
    assert not block.exists()
