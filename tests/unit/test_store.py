"""The store: only whole versions are listed, chains lead back to a base, no name leads out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_states import JOB, delta, model

from rose.errors import ConfigError, NotFound, WrongBase
from rose.units import JobId, WeightVersion
from rose.weights.container import write_version
from rose.weights.encoding import encode_version
from rose.weights.store import WeightStore


def stage(store: WeightStore, version: int, base: int | None) -> None:
    state = model()
    encoded = encode_version(
        JOB,
        WeightVersion(version),
        None if base is None else WeightVersion(base),
        None if base is None else state,
        state,
    )
    write_version(store.destination(JOB, WeightVersion(version)), encoded)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path)


def test_an_empty_host_has_no_versions(store: WeightStore) -> None:
    assert store.versions(JOB) == ()
    assert store.prune(JOB, 1) == ()
    with pytest.raises(NotFound):
        store.path(JOB, WeightVersion(1))


def test_versions_are_listed_in_order_and_only_when_whole(store: WeightStore, tmp_path: Path) -> None:
    for version in (2, 10, 1):
        stage(store, version, version - 1)
    directory = store.directory(JOB)
    for name in (".v11.partial", "v012", "v", "vx", "v-1", "notes"):
        (directory / name).mkdir()
    (directory / "v13").write_text("a file")
    (directory / "v14").symlink_to(tmp_path)
    assert store.versions(JOB) == (1, 2, 10)
    assert store.manifest(JOB, WeightVersion(10)).base_version == 9
    for odd in (13, 14):
        with pytest.raises(NotFound):
            store.path(JOB, WeightVersion(odd))


@pytest.mark.parametrize("job", ["..", ".", "", "a/b", "/etc", "a\0b", "../job-1", "job\n"])
def test_job_names_do_not_lead_out(store: WeightStore, job: str) -> None:
    with pytest.raises(ConfigError):
        store.directory(JobId(job))


@pytest.mark.parametrize("version", [-1, 1 << 60])
def test_versions_that_are_none_are_refused(store: WeightStore, version: int) -> None:
    with pytest.raises(ConfigError):
        store.path(JOB, WeightVersion(version))


def test_a_chain_leads_from_the_version_held(store: WeightStore) -> None:
    for version in (1, 2, 3):
        stage(store, version, version - 1)
    names = [path.name for path in store.chain(JOB, WeightVersion(1), WeightVersion(3))]
    assert names == ["v2", "v3"]
    assert store.chain(JOB, WeightVersion(3), WeightVersion(3)) == []


def test_a_chain_starts_afresh_at_an_anchor(store: WeightStore) -> None:
    stage(store, 5, None)
    stage(store, 6, 5)
    assert [path.name for path in store.chain(JOB, WeightVersion(0), WeightVersion(6))] == ["v5", "v6"]


def test_a_chain_with_a_hole_or_past_the_base_is_an_error(store: WeightStore) -> None:
    stage(store, 3, 2)
    with pytest.raises(NotFound, match="version 2"):
        store.chain(JOB, WeightVersion(1), WeightVersion(3))
    stage(store, 5, 3)
    with pytest.raises(WrongBase):
        store.chain(JOB, WeightVersion(4), WeightVersion(5))


def test_pruning_keeps_the_newest_and_those_held(store: WeightStore) -> None:
    for version in range(1, 7):
        stage(store, version, version - 1)
    (store.directory(JOB) / ".v1.partial").mkdir()
    (store.directory(JOB) / ".v9.partial").mkdir()
    (store.directory(JOB) / ".v3.lock").write_text("")
    assert store.prune(JOB, 2, held=[WeightVersion(2)]) == (1, 3, 4)
    assert sorted(path.name for path in store.directory(JOB).iterdir()) == [".v9.partial", "v2", "v5", "v6"]
    assert store.prune(JOB, 0) == (2, 5, 6)


def test_jobs_are_apart(store: WeightStore) -> None:
    write_version(store.destination(JOB, WeightVersion(1)), delta()[2])
    assert store.versions(JobId("other")) == ()


def test_the_pin_is_kept_until_it_is_taken_back(store: WeightStore) -> None:
    assert store.pin(JOB) is None
    store.set_pin(JOB, WeightVersion(7))
    assert store.pin(JOB) == 7
    assert store.versions(JOB) == ()
    store.set_pin(JOB, None)
    store.set_pin(JOB, None)
    assert store.pin(JOB) is None


@pytest.mark.parametrize("text", ["", "-1", "seven", "9" * 30, "\xff"])
def test_a_pin_that_is_no_version_is_an_error(store: WeightStore, text: str) -> None:
    store.set_pin(JOB, WeightVersion(7))
    (store.directory(JOB) / "pin").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="pin"):
        store.pin(JOB)
