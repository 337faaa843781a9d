"""The gateway's edges: bad input, limits, authentication, the job API, what nodes are told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_world import MESSAGES, MODEL, Node, World, world
from rose_daemon.scheduler import server
from rose_daemon.scheduler.process import running
from waiting import until

from rose import wire
from rose.client import Job, Scheduler
from rose.config import SchedulerConfig
from rose.errors import ConfigError, NotFound, NotReady, RoseError, TimedOut, VersionConflict
from rose.units import JobId, WeightVersion

CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}


BAD_REQUESTS: list[tuple[Any, int, str]] = [
    (b"{not json", 400, "invalid_json"),
    (b"[1, 2]", 400, "invalid_json"),
    (b"", 400, "invalid_json"),
    (b"\xff\xfe", 400, "invalid_json"),
    ({"messages": MESSAGES, "model": "other"}, 404, "model_not_found"),
    ({"model": MODEL}, 400, "bad_request"),
    ({"model": MODEL, "messages": []}, 400, "bad_request"),
    ({"model": MODEL, "messages": ["hello"]}, 400, "bad_request"),
    (CHAT | {"max_tokens": "many"}, 400, "bad_request"),
    (CHAT | {"max_tokens": -1}, 400, "bad_request"),
    (CHAT | {"max_tokens": 10**30}, 400, "bad_request"),
    (CHAT | {"max_completion_tokens": 1 << 64}, 400, "bad_request"),
    (b"[" * 100_000, 400, "invalid_json"),
    (CHAT | {"stream": "yes"}, 400, "bad_request"),
    (CHAT | {"n": 0}, 400, "bad_request"),
    (CHAT | {"model": 7}, 400, "bad_request"),
    (CHAT | {"use_beam_search": True}, 400, "unsupported"),
    (CHAT | {"prompt_logprobs": 1}, 400, "unsupported"),
]


async def test_bad_requests_are_refused_in_openai_shape(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for body, status, code in BAD_REQUESTS:
            got, answer = await made.post("/v1/chat/completions", body)
            assert (got, answer["error"]["code"]) == (status, code), body
            assert answer["error"]["message"]
        assert (await made.turns())["arrived"] == 0


async def test_openai_client_sees_its_own_error_types(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await made.openai.chat.completions.create(model="other", messages=MESSAGES)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError):
            await made.openai.chat.completions.create(model=MODEL, messages=[])


async def test_an_engines_own_refusal_is_passed_on_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        status, answer = await made.post("/v1/chat/completions", CHAT | {"temperature": -1})
        assert status == 400
        assert answer["error"]["type"] == "BadRequestError"
        counts = await made.turns()
        assert (counts["failed"], counts["interrupted"], counts["in_flight"]) == (1, 0, 0)
        assert (await made.post("/v1/chat/completions", CHAT))[0] == 200


async def test_unknown_paths(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for path in ("/", "/v1/nothing", "/rose/v1/jobs/none/nothing"):
            status, answer = await made.get(path)
            assert (status, answer["error"]["code"]) == (404, "not_found")
        status, answer = await made.get("/v1/completions")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


async def test_a_body_over_the_limit(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, body_bytes_max=1000) as made:
        status, answer = await made.post("/v1/completions", {"prompt": "x" * 2000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_a_slow_body_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.2)
    async with world(tmp_path, engines=1) as made:
        reader, writer = await _connect(made)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in answer
        writer.close()


async def test_a_slow_head_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose_daemon.scheduler.process.IDLE_TIMEOUT_S", 0.3)
    async with world(tmp_path, engines=1) as made:
        reader, writer = await _connect(made)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def _connect(made: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = made.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def test_no_job_and_unknown_job(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, job=False) as made:
        status, answer = await made.post("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"]) == (404, "job_unknown")
        await made.post("/rose/v1/jobs", {"job": "a", "model": MODEL})
        status, answer = await made.post("/v1/chat/completions", CHAT, x_rose_job="b")
        assert (status, answer["error"]["code"]) == (404, "job_unknown")
        await made.post("/rose/v1/jobs", {"job": "b", "model": MODEL})
        status, answer = await made.post("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"]) == (400, "job_not_named")
        assert (await made.post("/v1/chat/completions", CHAT, x_rose_job="a"))[0] == 200


async def test_a_full_queue_refuses(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, job=False, queue_max=2) as made:
        await made.post("/rose/v1/jobs", {"job": "a", "model": "not-here"})
        waiting = [asyncio.create_task(made.post("/v1/completions", {"prompt": "x"})) for _ in range(2)]

        async def queued() -> bool:
            return (await made.turns())["queued"] == 2

        await until(queued)
        status, answer = await made.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        await made.http.delete(f"{made.url}/rose/v1/jobs/a")
        for task in waiting:
            status, answer = await task
            assert (status, answer["error"]["code"]) == (410, "job_ended")


async def test_a_token_is_asked_for_when_configured(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    secret.chmod(0o600)
    async with world(tmp_path, engines=1, job=False, token_file=str(secret)) as made:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            status, answer = await made.post("/v1/completions", {"prompt": "x"}, **headers)
            assert (status, answer["error"]["code"]) == (401, "bad_token")
        await asyncio.to_thread(Job.create, made.url, "a", model=MODEL, n_serving_max=0, token_file=secret)
        status, _ = await made.post("/v1/completions", {"prompt": "x"}, authorization="Bearer s3cret")
        assert status == 200
        async with made.http.get(f"{made.url}/health") as response:
            assert response.status == 200


@pytest.mark.parametrize("name", ["x" * 300, "ünicode"])
async def test_a_header_that_cannot_be_a_name(tmp_path: Path, name: str) -> None:
    async with world(tmp_path, engines=1) as made:
        status, answer = await made.post("/v1/chat/completions", CHAT, x_rose_turn_id=name)
        assert (status, answer["error"]["code"]) == (400, "bad_header")


BAD_JOB_CALLS: list[tuple[str, Any, int]] = [
    ("/rose/v1/jobs", {"job": "a"}, 400),
    ("/rose/v1/jobs", {"job": "", "model": "m"}, 400),
    ("/rose/v1/jobs", {"job": "a", "model": "m", "n_rl": -1}, 400),
    ("/rose/v1/jobs", {"job": "a", "model": "m", "n_rl": 0, "n_serving_max": 0}, 400),
    ("/rose/v1/jobs", {"job": "a", "model": "m", "unknown": 1}, 400),
    ("/rose/v1/jobs", {"job": "job-0", "model": "other"}, 409),
    ("/rose/v1/jobs/none/steps", {"rl_step": 0, "required_version": 0}, 404),
    ("/rose/v1/jobs/job-0/steps", {"rl_step": -1, "required_version": 0}, 400),
    ("/rose/v1/jobs/job-0/steps", {"rl_step": 1}, 400),
    ("/rose/v1/jobs/job-0/steps/one/end", None, 400),
    ("/rose/v1/jobs/job-0/steps/9/end", None, 409),
    ("/rose/v1/jobs/job-0/versions", {"version": -1}, 400),
    ("/rose/v1/jobs/job-0/versions", {"version": 10**30}, 400),
    ("/rose/v1/jobs/job-0/versions", b"[" * 100_000, 400),
    ("/rose/v1/jobs/job-0/steps", {"rl_step": 1 << 63, "required_version": 0}, 400),
    ("/rose/v1/jobs/job-0/steps", {"rl_step": 1, "required_version": 1 << 63}, 400),
    (f"/rose/v1/jobs/job-0/steps/{'9' * 5000}/end", None, 400),
    ("/rose/v1/jobs/job-0/versions", b"{", 400),
]


async def test_bad_job_calls(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for path, body, status in BAD_JOB_CALLS:
            got, answer = await made.post(path, body)
            assert got == status, (path, body)
            assert answer["error"]["message"]


async def test_steps_are_idempotent_and_do_not_go_back(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        step = {"rl_step": 1, "required_version": 0}
        for _ in range(2):
            status, job = await made.post("/rose/v1/jobs/job-0/steps", step)
            assert (status, job["rl_step"], job["rolling"]) == (200, 1, True)
        assert (await made.post("/rose/v1/jobs/job-0/steps", step | {"required_version": 1}))[0] == 409
        for _ in range(2):
            _, job = await made.post("/rose/v1/jobs/job-0/steps/1/end", None)
            assert job["rolling"] is False
        assert (await made.post("/rose/v1/jobs/job-0/steps", step | {"rl_step": 0}))[0] == 409
        await until(lambda: bool(made.node.got(wire.Step)))
        assert {(told.rl_step, told.required_version) for told in made.node.got(wire.Step)} == {(1, 0)}


async def test_a_step_that_a_node_missed_is_told_again(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        made.scheduler.nodes._peers.clear()  # the connection just broke: what is sent now is lost
        await made.post("/rose/v1/jobs/job-0/steps", {"rl_step": 1, "required_version": 0})
        assert made.node.got(wire.Step) == []
        await until(lambda: bool(made.node.got(wire.Step)))
        assert made.node.got(wire.Step)[-1] == wire.Step(JobId("job-0"), 1, WeightVersion(0))


async def test_turns_that_come_while_it_shuts_down_are_told_so(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        await made.scheduler.dispatcher.close()
        status, answer = await made.post("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"]) == (503, "shutting_down")


async def test_the_job_client(tmp_path: Path) -> None:
    async with world(tmp_path, job=False) as made:

        def use() -> None:
            with Job.create(made.url, "walk", model=MODEL, n_rl=2, n_serving_max=0) as job:
                Job.create(made.url, "walk", model=MODEL, n_rl=2, n_serving_max=0)
                with pytest.raises(VersionConflict):
                    Job.create(made.url, "walk", model=MODEL, n_rl=1)
                with pytest.raises(VersionConflict):
                    Job.create(
                        made.url, "walk", model=MODEL, n_rl=2, n_serving_max=0, trajectory_staleness_max=1
                    )
                with Job.create(
                    made.url, "aged", model=MODEL, n_rl=0, n_serving_max=1, trajectory_staleness_max=1
                ) as aged:
                    assert aged.status().trajectories_stale == 0
                job.begin_step(0, 0)
                status = job.wait_for_version(0, replicas=2, timeout_s=60)
                assert status.rolling
                assert {replica.replica for replica in status.replicas} == {"replica-0", "replica-1"}
                job.end_step(0)
                job.published(1)
                job.begin_step(1, 1)
                with pytest.raises(TimedOut, match="version 1 is not on 2 replicas"):
                    job.wait_for_version(1, timeout_s=0.2)
                for engine in made.engines:
                    engine.state.version = 1
                job.wait_for_version(1, timeout_s=60)
            with pytest.raises(NotFound):
                job.status()
            job.end()

        await asyncio.to_thread(use)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:99999", "http://h:x"])
def test_the_client_refuses_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a scheduler"):
        Scheduler(url)


async def test_the_client_says_what_is_wrong() -> None:
    with pytest.raises(NotReady, match="is rose-scheduler running"):
        await asyncio.to_thread(Scheduler("http://127.0.0.1:9").status)
    with pytest.raises(ConfigError):
        Scheduler("somewhere")


async def test_turns_wait_for_the_required_version(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        await made.post("/rose/v1/jobs/job-0/steps", {"rl_step": 1, "required_version": 1})
        task = asyncio.create_task(made.post("/v1/chat/completions", CHAT))

        async def queued() -> bool:
            return (await made.turns())["queued"] == 1

        await until(queued)
        made.engines[0].state.version = 1
        status, answer = await task
        assert status == 200
        assert answer["rose"]["weight_versions"][0][2] == 1


async def test_garbage_from_nodes_is_dropped_and_counted(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for data in (b"", b"\x00" * 50, b"{}", wire.pack(wire.Welcome("a", "b"))):
            await made.node.send_raw(data)
        await made.node.send(wire.Register(99, "node-9", "s", ()))  # type: ignore[arg-type]

        async def counted() -> bool:
            async with made.http.get(f"{made.url}/metrics") as response:
                text = await response.text()
            return (
                'rose_dropped_total{kind="garbage_message"} 4.0' in text
                and 'rose_dropped_total{kind="protocol_mismatch"} 1.0' in text
            )

        await until(counted)
        assert (await made.post("/v1/chat/completions", CHAT))[0] == 200


async def test_a_daemon_that_another_of_its_name_replaced_is_not_welcome(tmp_path: Path) -> None:
    """Two daemons of one name would else take the node from each other as fast as they can register."""
    async with world(tmp_path, engines=1) as made:
        reports = [made.engines[0].report()]
        second = await Node(made.scheduler.nodes.address, lambda: reports).start()
        try:
            await until(lambda: len(made.node.got(wire.Unregistered)) >= 2)
            welcomes = len(made.node.got(wire.Welcome))
            await until(lambda: len(made.node.got(wire.Unregistered)) >= 5)
            assert len(made.node.got(wire.Welcome)) == welcomes
            assert all(each.replaced for each in made.node.got(wire.Unregistered))
            assert second.got(wire.Unregistered) == []
        finally:
            await second.stop()


async def test_a_node_that_was_cut_off_keeps_its_turns_and_hears_of_its_leases(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        await until(lambda: made.node.got(wire.Lease))
        (granted,) = made.node.got(wire.Lease)
        await made.node.register()
        await until(lambda: len(made.node.got(wire.Lease)) == 2)
        assert made.node.got(wire.Lease) == [granted, granted]
        assert made.node.got(wire.Unregistered) == []


async def test_a_silent_node_gets_no_turns(tmp_path: Path) -> None:
    fast = {"stall_timeout_ms": 200.0, "suspect_after_ms": 300.0, "dead_after_ms": 500.0}
    async with world(tmp_path, engines=1, **fast) as made:
        await made.node.stop()
        await made.ready(0)

        async def dead() -> bool:
            _, status = await made.get("/rose/v1/status")
            return [node["state"] for node in status["nodes"]] == ["dead"] and not status["replicas"]

        await until(dead)


async def test_metrics_and_status(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        await made.post("/v1/chat/completions", CHAT)
        async with made.http.get(f"{made.url}/metrics") as response:
            text = await response.text()
        for line in (
            'rose_turns_total{outcome="answer"} 1.0',
            'rose_rollout_tokens_total{replica="replica-0"} 4.0',
            'rose_turn_counts{kind="in_flight"} 0.0',
            'rose_replica_eligible{replica="replica-0"} 1.0',
            'rose_nodes{state="alive"} 1.0',
        ):
            assert line in text
        _, status = await made.get("/rose/v1/status")
        assert json.dumps(status)
        assert status["jobs"][0]["job"] == "job-0"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"control": "tcp://0.0.0.0:7701"}, "scheduler.control"),
        ({"control": "tcp://*:7701"}, "scheduler.control"),
        ({"control": "nonsense"}, "scheduler.control"),
        ({"gateway_host": "0.0.0.0"}, "scheduler.gateway_host"),
        ({"token_file": "/nonexistent/token"}, "scheduler.token_file"),
    ],
)
async def test_unsafe_settings_are_refused(tmp_path: Path, settings: dict[str, str], key: str) -> None:
    safe = {"control": "tcp://127.0.0.1:0", "state_dir": str(tmp_path)}
    config = SchedulerConfig(gateway_port=0, **(safe | settings))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=key):
        async with running(config):
            pass


async def test_taken_ports_and_directories_are_named(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        port = int(made.url.rpartition(":")[2])
        first = SchedulerConfig(control="tcp://127.0.0.1:0", gateway_port=port, state_dir=str(tmp_path / "b"))
        second = SchedulerConfig(control=made.scheduler.nodes.address, state_dir=str(tmp_path / "c"))
        third = SchedulerConfig(control="tcp://127.0.0.1:0", state_dir=str(tmp_path / "scheduler"))
        for config, text in (
            (first, f"cannot listen on 127.0.0.1:{port}"),
            (second, "scheduler.control: cannot listen"),
            (third, "another scheduler uses this directory"),
        ):
            with pytest.raises(NotReady, match=text):
                async with running(config):
                    pass


async def test_a_broken_state_file_is_named_not_overwritten(tmp_path: Path) -> None:
    state = tmp_path / "scheduler.sqlite3"
    state.write_bytes(b"this is no database" * 100)
    config = SchedulerConfig(control="tcp://127.0.0.1:0", gateway_port=0, state_dir=str(tmp_path))
    with pytest.raises(RoseError, match=r"scheduler\.sqlite3: cannot be used"):
        async with running(config):
            pass
    assert state.read_bytes().startswith(b"this is no database")
