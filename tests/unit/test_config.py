"""rose.toml: what is refused, and whether the refusal names the key and what to do."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rose import config
from rose.cli import template
from rose.errors import ConfigError, Exit

REPLICA = {"id": "r-0", "kind": "dedicated", "model": "/models/m"}


def build(**document: object) -> config.Config:
    return config.build(dict(document), "rose.toml")


def test_an_empty_document_is_the_defaults() -> None:
    assert build() == config.Config()


def test_the_template_loads_to_the_defaults() -> None:
    document = tomllib.loads(template.render())
    assert config.build(document, "template") == config.Config()
    assert set(document) == set(config.Config.__struct_fields__) - {"replicas"}


def test_the_template_documents_every_key() -> None:
    lines = template.render().splitlines()
    for number, line in enumerate(lines):
        if " = " in line and not line.startswith("# "):
            assert lines[number - 1].startswith("# ") or line.startswith("schema"), line


def test_the_templates_replica_loads_once_uncommented() -> None:
    text = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") else line
        for line in template.render().splitlines()
        if line != "#"
    )
    document = tomllib.loads(text)
    document["serving"]["url"] = "http://127.0.0.1:8000"
    built = config.build(document, "template")
    assert built.replica(built.replicas[0].id).kind == "opportunistic"


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"nodee": {}}, "nodee"),
        ({"node": {"tick": 1}}, "tick"),
        ({"node": {"tick_ms": "fast"}}, "node.tick_ms"),
        ({"node": 3}, "node"),
        ({"node": {"tick_ms": 0}}, "node.tick_ms"),
        ({"node": {"tick_ms": float("nan")}}, "node.tick_ms"),
        ({"node": {"heartbeat_ms": float("inf")}}, "node.heartbeat_ms"),
        ({"node": {"id": "a/../b"}}, "node.id"),
        ({"node": {"gate_lease_ms": 60}}, "node.gate_lease_ms"),
        ({"admission": {"board_stale_ms": 299}}, "admission.board_stale_ms"),
        ({"node": {"gate_lease_ms": 60_001}}, "node.gate_lease_ms"),
        ({"node": {"restart_backoff_s": 90}}, "node.restart_backoff_max_s"),
        ({"schema": 9}, "schema"),
        ({"admission": {"mode": "lax"}}, "admission.mode"),
        ({"serving": {"boards": ["a/b"]}}, "serving.boards"),
        ({"device": {"kind": "tpu"}}, "device.kind"),
        ({"memory": {"cut_share": 1}}, "memory.cut_share"),
        ({"memory": {"headroom_share": 1.5}}, "memory.headroom_share"),
        ({"scheduler": {"control": "tcp://10.0.0.1:7701"}}, "scheduler.control"),
        ({"scheduler": {"control": "somewhere"}}, "scheduler.control"),
        ({"scheduler": {"control": "tcp://127.0.0.1"}}, "scheduler.control"),
        ({"scheduler": {"control": "tcp://127.0.0.1:99999"}}, "scheduler.control"),
        ({"scheduler": {"gateway_host": "0.0.0.0"}}, "scheduler.gateway_host"),
        ({"scheduler": {"gateway_port": 70000}}, "scheduler.gateway_port"),
        ({"scheduler": {"borrow_kv_share_max": 1.1}}, "scheduler.borrow_kv_share_max"),
        ({"scheduler": {"lease_min_s": -1}}, "scheduler.lease_min_s"),
        ({"scheduler": {"stall_timeout_ms": 500}}, "scheduler.stall_timeout_ms"),
        ({"relay": {"host": "0.0.0.0"}}, "relay.host"),
        ({"scheduler": {"workers": ["10.0.0.1:8000"]}}, "scheduler.workers"),
        ({"scheduler": {"otlp_traces_endpoint": "collector:4318"}}, "scheduler.otlp_traces_endpoint"),
        ({"scheduler": {"otlp_traces_endpoint": "http://10.0.0.1:4318/v1/traces"}}, "not loopback"),
        ({"relay": {"url": "127.0.0.1:7702"}}, "relay.url"),
        ({"serving": {"url": "http://127.0.0.1:port"}}, "serving.url"),
        ({"serving": {"url": "http://[::1"}}, "serving.url"),
        ({"serving": {"name": ""}}, "serving.name"),
        ({"serving": {"name": "a/b"}}, "serving.name"),
        ({"job": {"id": "a/b"}}, "job.id"),
        ({"replicas": [{"id": "r", "kind": "dedicated"}]}, "model"),
        ({"replicas": [{**REPLICA, "kind": "borrowed"}]}, "replicas[0].kind"),
        ({"replicas": [{**REPLICA, "kind": "opportunistic"}]}, "replicas.r-0"),
        ({"replicas": [REPLICA, REPLICA]}, "replicas"),
        ({"replicas": [{**REPLICA, "id": "../r"}]}, "replicas"),
        ({"replicas": [{**REPLICA, "port": 70000}]}, "replicas.r-0.port"),
        ({"replicas": [{**REPLICA, "port": 81}, {**REPLICA, "id": "b", "port": 81}]}, "replicas.b.port"),
        ({"replicas": [{**REPLICA, "kv_blocks": 64}]}, "replicas.r-0.kv_blocks"),
        ({"replicas": [{**REPLICA, "sequences_max": 0}]}, "replicas.r-0.sequences_max"),
    ],
)
def test_bad_values_name_the_file_and_the_key(document: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(**document)
    assert refusal.value.what.startswith("rose.toml: ")
    assert key in refusal.value.what
    assert "\n" not in str(refusal.value)
    assert refusal.value.code == Exit.USAGE


def test_the_environment_goes_before_the_file() -> None:
    environ = {
        "ROSE_NODE__TICK_MS": "20",
        "ROSE_NODE__ID": "123",
        "ROSE_DEVICE__CPUS": "[0, 1]",
        "ROSE_ENGINE_ROLE": "serving",
        "HOME": "/root",
    }
    built = config.build({"node": {"tick_ms": 50}}, "rose.toml", environ)
    assert (built.node.tick_ms, built.node.id, built.device.cpus) == (20, "123", (0, 1))


@pytest.mark.parametrize("name", ["ROSE_NODDE__TICK_MS", "ROSE_REPLICAS__PORT", "ROSE_SCHEMA__X"])
def test_a_variable_for_no_section_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        config.build({}, "rose.toml", {name: "1"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ROSE_NODE_TICK_MS", "ROSE_NODE__TICK_MS"),
        ("ROSE_RELAY_PORT", "ROSE_RELAY__PORT"),
        ("ROSE_SERVING_TTFT_SLO_MS", "ROSE_SERVING__TTFT_SLO_MS"),
    ],
)
def test_a_variable_with_one_underscore_too_few_is_not_ignored(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=name) as refusal:
        config.build({}, "rose.toml", {name: "1"})
    assert meant in str(refusal.value.hint)


def test_files_that_cannot_be_read_or_parsed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        config.load(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path, {})
    bad = tmp_path / "rose.toml"
    bad.write_text("[node\nid = 3")
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 1"):
        config.load(bad, {})
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(bad, {})


def test_rose_config_names_the_file(tmp_path: Path) -> None:
    named = tmp_path / "other.toml"
    named.write_text('[node]\nid = "n-7"\n')
    assert config.load(None, {"ROSE_CONFIG": str(named)}).node.id == "n-7"


METRICS = """
[serving]
url = "http://127.0.0.1:8000"
mode = "metrics"
{serving}
[[replicas]]
id = "a"
kind = "opportunistic"
model = "/m"
{replica}
"""


def test_serving_without_the_plugin_is_accepted_with_a_profile() -> None:
    text = METRICS.format(serving="", replica='profile = "/p.json"')
    assert build(**tomllib.loads(text)).serving.mode == "metrics"


@pytest.mark.parametrize(
    ("serving", "replica", "key"),
    [
        ("metrics_ms = 15000", 'profile = "/p"', "serving.metrics_stale_ms"),
        ("metrics_ms = 15000\nmetrics_stale_ms = 200", 'profile = "/p"', "serving.metrics_stale_ms"),
        ("metrics_ms = 249", 'profile = "/p"', "serving.metrics_ms"),
        ("ttft_slo_ms = 501", 'profile = "/p"', "serving.metrics_ms"),
        ("quiet_ms = 499", 'profile = "/p"', "serving.quiet_ms"),
        ("quiet_ms = 0", 'profile = "/p"', "serving.quiet_ms"),
        ('boards = ["a"]', 'profile = "/p"', "serving.boards"),
        ("[memory]\nshared_kv_bytes = 1073741824", 'profile = "/p"', "memory.shared_kv_bytes"),
        ("", "", "replicas.a.profile"),
    ],
)
def test_metrics_settings_that_could_harm_serving_or_never_open_are_refused(
    serving: str, replica: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        build(**tomllib.loads(METRICS.format(serving=serving, replica=replica)))


def test_a_poll_slower_than_the_limit_of_its_freshness_is_refused_beside_the_plugin_too() -> None:
    with pytest.raises(ConfigError, match=r"serving.metrics_stale_ms"):
        build(serving={"probe_ms": 15000.0, "metrics_stale_ms": 200.0})
