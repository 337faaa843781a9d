"""Mooncake's return codes, keys and settings, without a store."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rose_daemon.relay.mooncake import MooncakePool

from rose import config as configuration
from rose.config import RelayConfig
from rose.errors import ConfigError
from rose.units import JobId, WeightVersion
from rose.weights.relay import RelayFull
from rose.weights.relay.mooncake_store import MooncakeStore, ObjectLost, StoreTrouble

JOB = JobId("job-1")


def test_no_key_is_used_twice() -> None:
    pool = MooncakePool(MooncakeStore(None, None), RelayConfig(), "e1")
    key = (JOB, WeightVersion(7))
    keys = [pool.allocate(key, "bucket-00000.safetensors", 9).key for _ in range(3)]
    assert keys[0] == "rose/job-1/e1/7/0/bucket-00000.safetensors"
    pool.epoch = "e2"
    keys.append(pool.allocate(key, "bucket-00000.safetensors", 9).key)
    assert len(set(keys)) == 4


def scripted(**answers: object) -> MooncakeStore:
    """A store whose library answers as told."""
    calls = {name: (lambda *_arguments, _value=value: _value) for name, value in answers.items()}
    return MooncakeStore(SimpleNamespace(**calls), None)


@pytest.mark.parametrize("size", [-704, 5])
def test_a_put_that_says_done_without_its_object_is_an_error(size: int) -> None:
    with pytest.raises(ObjectLost):
        scripted(put_from=0, get_size=size).put("k", memoryview(b"four"))


@pytest.mark.parametrize(
    ("code", "error"), [(-200, RelayFull), (-900, StoreTrouble), (-800, StoreTrouble), (-1, StoreTrouble)]
)
def test_every_code_of_a_put_means_something(code: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        scripted(put_from=code, get_size=4).put("k", memoryview(b"four"))


def test_a_read_that_outlives_its_lease_says_what_to_raise() -> None:
    store = scripted(register_buffer=0, unregister_buffer=0, get_into_ranges=[[[-707]]])
    with pytest.raises(StoreTrouble, match="default_kv_lease_ttl"):
        store.read_into("k", memoryview(bytearray(4)), 0)


def test_a_host_without_mooncake_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match="libibverbs1"):
        MooncakeStore.connect(RelayConfig())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", '"redis"'),
        ("mooncake_master", '"nowhere"'),
        ("mooncake_master", '"host:port"'),
        ("mooncake_master", '"tcp://host:1"'),
        ("mooncake_host", '""'),
        ("mooncake_namespace", '"a/b"'),
        ("mooncake_replicas", "0"),
        ("mooncake_lease_s", "0"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, key: str, value: str) -> None:
    kind = "" if key == "kind" else 'kind = "mooncake"\n'
    (tmp_path / "rose.toml").write_text(f"schema = 1\n[relay]\n{kind}{key} = {value}\n")
    with pytest.raises(ConfigError, match=f"relay.{key}"):
        configuration.load(tmp_path / "rose.toml", {})
