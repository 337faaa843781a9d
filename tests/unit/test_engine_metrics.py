"""The serving engine's /metrics: names of several releases, several ranks, restarts, and frozen gauges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from rose_daemon.node.inferred import load_sample
from rose_daemon.telemetry.engine_metrics import (
    Averages,
    EngineMetrics,
    Histogram,
    PeriodAverage,
    parse,
)
from rose_daemon.telemetry.serving import MetricsWatch, Probe, probe, scrape

from rose.core.inferred import LoadSample
from rose.core.readings import Unknown
from rose.units import NS_PER_S

COMMON = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 500.0
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 99.0
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.5",model_name="m"} 100.0
vllm:request_prefill_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 100.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 100.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 8.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 9.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 18.0
"""


def gauge(name: str, value: float) -> str:
    return f'# TYPE {name} gauge\n{name}{{engine="0",model_name="m"}} {value}\n'


def histogram(name: str, total: float, count: float) -> str:
    labels = '{engine="0",model_name="m"}'
    return (
        f"# TYPE {name} histogram\n"
        f'{name}_bucket{{engine="0",le="+Inf",model_name="m"}} {count}\n'
        f"{name}_count{labels} {count}\n{name}_sum{labels} {total}\n"
    )


OLD_NAMES = gauge("vllm:gpu_cache_usage_perc", 0.25) + histogram("vllm:time_per_output_token_seconds", 6, 12)
OLD = COMMON + OLD_NAMES
NEW = (
    COMMON
    + gauge("vllm:kv_cache_usage_perc", 0.25)
    + histogram("vllm:inter_token_latency_seconds", 6, 12)
    + histogram("vllm:request_time_per_output_token_seconds", 1, 2)
)
BOTH = NEW + OLD_NAMES


def known(text: str) -> EngineMetrics:
    metrics = parse(text)
    assert isinstance(metrics, EngineMetrics)
    return metrics


# ---- one text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [OLD, BOTH, NEW], ids=["old", "both", "new"])
def test_every_release_gives_the_same_view(text: str) -> None:
    assert known(text) == EngineMetrics(
        running=3,
        waiting=1,
        kv_used_share=0.25,
        tokens=1500,
        ttft=Histogram(((float("inf"), 9),), 18, 9),
        inter_token=Histogram(((float("inf"), 12),), 6, 12),
        prefill=Histogram(((0.3, 99), (0.5, 100), (float("inf"), 100)), 8, 100),
    )
    assert load_sample(known(text)) == LoadSample(3, 1, 1500, 300_000_000)


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("vllm:num_requests_running", "running"),
        ("vllm:num_requests_waiting", "waiting"),
        ("vllm:kv_cache_usage_perc", "kv_used_share"),
        ("vllm:prompt_tokens_total", "tokens"),
        ("vllm:generation_tokens_total", "tokens"),
        ("vllm:inter_token_latency_seconds", "inter_token"),
        ("vllm:time_to_first_token_seconds", "ttft"),
    ],
)
def test_a_missing_name_is_printed(name: str, signal: str) -> None:
    metrics = known("\n".join(line for line in NEW.splitlines() if not line.startswith(name)))
    assert getattr(metrics, signal) == Unknown(f"metrics_missing: {name}")
    others = [each for each in EngineMetrics._fields if each != signal]
    assert [getattr(metrics, each) for each in others] == [getattr(known(NEW), each) for each in others]


def test_the_time_of_a_prefill_is_bounded_by_the_better_of_two_histograms() -> None:
    def p99_ms(prefill: Histogram | Unknown, ttft: Histogram | Unknown) -> object:
        sample = load_sample(known(NEW)._replace(prefill=prefill, ttft=ttft))
        return sample.prefill_p99_ns / 1e6 if isinstance(sample, LoadSample) else sample

    inf, missing = float("inf"), Unknown("metrics_missing: x")
    coarse, fine = Histogram(((0.3, 10), (inf, 10)), 1, 10), Histogram(((0.08, 10), (inf, 10)), 1, 10)
    slow, none = Histogram(((0.3, 0), (inf, 10)), 99, 10), Histogram(((0.3, 0), (inf, 0)), 0, 0)
    assert [p99_ms(coarse, fine), p99_ms(coarse, missing), p99_ms(missing, fine)] == [80, 300, 80]
    assert [p99_ms(slow, fine), p99_ms(none, none), p99_ms(none, missing)] == [80, 0, 0]
    assert [p99_ms(slow, missing), p99_ms(missing, missing)] == [Unknown("beyond_buckets"), missing]


def test_ranks_are_added_up_and_the_fullest_counts() -> None:
    metrics = known(
        'vllm:num_requests_running{engine="0"} 9\nvllm:num_requests_running{engine="1"} 0\n'
        'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 2\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.95\nvllm:kv_cache_usage_perc{engine="1"} 0.05\n'
        'vllm:prompt_tokens_total{engine="0"} 5\nvllm:prompt_tokens_total{engine="1"} 7\n'
        'vllm:generation_tokens_total{engine="0"} 1\nvllm:generation_tokens_total{engine="1"} 1\n'
        + "".join(
            f'vllm:time_to_first_token_seconds_bucket{{engine="{rank}",le="1.0"}} {rank}\n'
            f'vllm:time_to_first_token_seconds_bucket{{engine="{rank}",le="+Inf"}} {2 * rank}\n'
            f'vllm:time_to_first_token_seconds_sum{{engine="{rank}"}} {rank}.5\n'
            f'vllm:time_to_first_token_seconds_count{{engine="{rank}"}} {2 * rank}\n'
            for rank in (1, 2)
        )
    )
    assert (metrics.running, metrics.waiting, metrics.kv_used_share, metrics.tokens) == (9, 3, 0.95, 14)
    assert metrics.ttft == Histogram(((1.0, 3), (float("inf"), 6)), 4, 6)


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1.5"])
def test_senseless_values_are_unknown(value: str) -> None:
    metrics = known(f"vllm:kv_cache_usage_perc {value}\nvllm:num_requests_running {value}\n")
    assert metrics.kv_used_share == Unknown("metrics_contradictory")
    assert metrics.running == (2 if value == "1.5" else Unknown("metrics_contradictory"))


@pytest.mark.parametrize("text", ["", "# nothing\n", "other_metric 3\n", "<html>404</html>"])
def test_a_text_that_holds_nothing_of_interest(text: str) -> None:
    assert known(text).running == Unknown("metrics_missing: vllm:num_requests_running")


@pytest.mark.parametrize("text", ["vllm:kv_cache_usage_perc { nonsense\n", "vllm:num_requests_running abc\n"])
def test_a_text_that_is_broken(text: str) -> None:
    assert parse(text) == Unknown("metrics_malformed")


def test_a_quantile_is_never_less_than_it_is() -> None:
    ttft = Histogram(((0.1, 50), (0.2, 98), (0.4, 99), (float("inf"), 100)), 1, 100)
    assert [ttft.quantile_bound(share) for share in (0.5, 0.51, 0.98, 0.99)] == [0.1, 0.2, 0.2, 0.4]
    assert ttft.quantile_bound(0.995) == Unknown("beyond_buckets")
    assert Histogram((), 0, 0).quantile_bound(0.5) == Unknown("no_samples")


# ---- from one text to the next -------------------------------------------------------------------------


def test_a_restart_gives_the_average_of_the_new_process_and_never_a_negative_one() -> None:
    average = PeriodAverage()
    seen = [average.observe(Histogram((), *each)) for each in [(18, 9), (9, 2), (9, 2), (12, 3), (0, 0)]]
    assert seen == [Unknown("first_sample"), 4.5, Unknown("no_samples"), 3.0, Unknown("no_samples")]


def test_averages_of_an_engine_that_cannot_be_read_are_unknown() -> None:
    averages = Averages()
    averages.observe(parse(NEW))
    averages.observe(Unknown("metrics_unreachable"))
    assert averages.ttft_s == averages.inter_token_s == Unknown("metrics_unreachable")


def test_stale_metrics_are_unknown_with_their_age() -> None:
    watch = MetricsWatch(10 * NS_PER_S)
    assert watch.latest(0).running == Unknown("not_observed")
    watch.observe(parse(NEW), 0)
    watch.observe(Unknown("metrics_unreachable"), 5 * NS_PER_S)
    assert watch.latest(10 * NS_PER_S).running == 3
    stale = watch.latest(12 * NS_PER_S)
    assert all(str(signal) == "metrics_stale age=12.0s" for signal in stale)


def test_gauges_that_freeze_when_all_requests_are_cancelled_are_not_those_of_a_full_engine() -> None:
    watch = MetricsWatch(10 * NS_PER_S, frozen_ns=30 * NS_PER_S)
    full = known(NEW)._replace(kv_used_share=0.99)
    for second in range(0, 31, 5):
        watch.observe(full, second * NS_PER_S)
        assert watch.latest(second * NS_PER_S).kv_used_share == 0.99
    watch.observe(full, 35 * NS_PER_S)
    frozen = watch.latest(35 * NS_PER_S)
    assert (
        frozen.running == frozen.waiting == frozen.kv_used_share == Unknown("metrics_frozen", 35 * NS_PER_S)
    )
    assert frozen.tokens == 1500
    watch.observe(full._replace(tokens=1501), 40 * NS_PER_S)
    assert watch.latest(40 * NS_PER_S).kv_used_share == 0.99


def test_an_idle_engine_is_not_frozen() -> None:
    watch = MetricsWatch(10 * NS_PER_S, frozen_ns=NS_PER_S)
    idle = known(NEW)._replace(running=0, waiting=0)
    for second in range(0, 60, 5):
        watch.observe(idle, second * NS_PER_S)
    assert watch.latest(55 * NS_PER_S) == idle


# ---- over HTTP ---------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(health: Handler, metrics: Handler) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_get("/health", health)
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def answer(_: web.Request) -> web.Response:
    return web.Response(text=NEW)


async def refuse(_: web.Request) -> web.Response:
    return web.Response(status=503)


async def hang(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def ask(url: str) -> Probe:
    async with aiohttp.ClientSession() as session:
        return await probe(session, url, 0.3)


async def test_probe_of_a_healthy_engine() -> None:
    async with serving(answer, answer) as url:
        assert await ask(url) == (True, known(NEW))
    assert await ask(url) == (False, Unknown("serving_down"))  # nobody listens any more


async def test_metrics_that_come_in_pieces_are_read_whole() -> None:
    async def pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(NEW), 700):
            await response.write(NEW[start : start + 700].encode())
            await asyncio.sleep(0.005)
        return response

    async with serving(answer, pieces) as url:
        assert (await ask(url)).metrics == known(NEW)


async def test_metrics_without_end_are_given_up() -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(80):
            await response.write(b"x" * 65_535 + b"\n")
        return response

    async with serving(answer, flood) as url, aiohttp.ClientSession() as session:
        assert await scrape(session, url, 10) == Unknown("metrics_too_long")


async def test_probe_of_an_engine_in_trouble() -> None:
    async with serving(refuse, answer) as url:
        assert await ask(url) == (False, Unknown("serving_down"))
    async with serving(hang, answer) as url:
        assert await ask(url) == (Unknown("health_timeout"), Unknown("health_timeout"))
    async with serving(answer, hang) as url:
        assert await ask(url) == (True, Unknown("metrics_unreachable"))
    async with serving(answer, refuse) as url:
        assert await ask(url) == (True, Unknown("metrics_refused"))
