"""The manifests of deploy/kubernetes: shape, settings that load, and pods that are contained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose import config

FOLDER = Path(__file__).parents[2] / "deploy"
DOCUMENTS: list[dict[str, Any]] = [
    document
    for path in sorted((FOLDER / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
WORKLOADS = [each for each in DOCUMENTS if each["kind"] in ("DaemonSet", "StatefulSet")]


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def settings() -> str:
    (found,) = (each for each in DOCUMENTS if each["kind"] == "ConfigMap")
    text: str = found["data"]["rose.toml"]
    return text


def name(document: dict[str, Any]) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def test_everything_is_there_once() -> None:
    names = [name(each) for each in DOCUMENTS]
    assert len(set(names)) == len(names)
    assert {
        "DaemonSet/rosed",
        "StatefulSet/rose-scheduler",
        "StatefulSet/rose-relay",
        "ConfigMap/rose",
    } <= set(names)
    assert all(each["metadata"].get("namespace", "rose") == "rose" for each in DOCUMENTS)


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_the_settings_are_accepted_with_what_each_container_sets(workload: dict[str, Any]) -> None:
    for container in pod(workload)["containers"]:
        environ = {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
        document = tomllib.loads(settings().replace("@NODE@", "gpu-1"))
        config.build(
            document, "ConfigMap", {key: value for key, value in environ.items() if key.startswith("ROSE_")}
        )


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_pods_are_contained_and_labelled(workload: dict[str, Any]) -> None:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    spec = pod(workload)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == 977
    assert not spec["automountServiceAccountToken"]
    volumes = {each["name"] for each in spec["volumes"]}
    volumes |= {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
    for container in [*spec["initContainers"], *spec["containers"]]:
        inside = container["securityContext"]
        assert inside["readOnlyRootFilesystem"]
        assert not inside["allowPrivilegeEscalation"]
        assert inside["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for container in spec["containers"]:
        assert container["readinessProbe"]
        assert container["livenessProbe"]
        assert container["resources"]["requests"]


def test_rosed_takes_no_gpu_from_serving_and_shares_what_boards_need() -> None:
    (rosed,) = (pod(each) for each in WORKLOADS if each["kind"] == "DaemonSet")
    assert rosed["hostPID"]
    assert "nvidia.com/gpu" not in str(rosed)
    assert {"name": "boards", "hostPath": {"path": "/dev/shm/rose", "type": "DirectoryOrCreate"}} in rosed[
        "volumes"
    ]


def test_services_lead_to_the_ports_of_the_settings() -> None:
    document = config.build(tomllib.loads(settings().replace("@NODE@", "gpu-1")), "ConfigMap")
    ports = {
        each["metadata"]["name"]: {port["port"] for port in each["spec"]["ports"]}
        for each in DOCUMENTS
        if each["kind"] == "Service"
    }
    assert ports == {
        "rose-scheduler": {
            int(document.scheduler.control.rpartition(":")[2]),
            document.scheduler.gateway_port,
        },
        "rose-relay": {document.relay.port},
    }


def test_the_container_runs_as_the_user_of_the_manifests() -> None:
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER 977$", text, flags=re.MULTILINE)
    assert "--uid 977" in text
