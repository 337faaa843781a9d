"""What an update took and changed is shown by rosed, the relay and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from rose_daemon.node.engines import free_port
from test_rosed_process import until
from weights_site import JOB, REPLICAS, Site


def scrape(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def test_what_an_update_took_is_in_status_and_metrics(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    site = Site(tmp_path, keys=f"metrics_port = {port}")
    try:
        site.start("applier")
        _check(site, port)
    finally:
        site.end()


def _check(site: Site, port: int) -> None:
    site.check(site.publish())
    until(lambda: len((site.status() or {})["updates"]) == len(REPLICAS), site.explain)
    status = site.status()
    assert status is not None
    staging = status["last_staging"]
    assert (staging["version"], staging["base_version"]) == (1, 0)
    assert 0.015 < staging["density"] < 0.025
    assert staging["delta_bytes"] == pytest.approx(staging["bytes_per_changed"] * staging["changed"])
    assert set(staging["density_by_kind"]) == {"embed_tokens", "mlp.up_proj", "norm", "self_attn.q_proj"}
    assert staging["encode_ms"] > 0
    assert staging["push_ms"] >= 0
    assert [each["version"] for each in status["stagings"]] == [1]
    for update in status["updates"]:
        assert set(update["engine_ms"]) >= {"stage", "pause", "apply", "total"}
        assert update["at_monotonic_s"] >= staging["at_monotonic_s"], "engines follow"
    text = scrape(port)
    for line in (
        "rose_weight_staged_version 1.0",
        "rose_weight_versions_staged_total 1.0",
        'rose_weight_density{kind="mlp.up_proj"} 0.0',
        'rose_weight_staging_seconds{phase="encode"} ',
        'rose_weight_staging_seconds{phase="decode"} ',
        'rose_weight_update_seconds{phase="pause",replica="ded-0"} ',
        'rose_weight_version{replica="ded-1"} 1.0',
    ):
        assert f"\n{line}" in text, line
    text = scrape(site.relay_port)
    for line in ("version", "update_bytes", "encode_seconds", "push_seconds", "versions"):
        assert f'\nrose_relay_{line}{{job="{JOB}"}} ' in text, line
    shown = subprocess.run(
        [sys.executable, "-m", "rose.cli.main", "status", "--config", str(site.config)],
        capture_output=True, text=True, check=False, timeout=60,
    ).stdout  # fmt: skip
    assert "v1 staged" in shown
    assert "pause" in shown
