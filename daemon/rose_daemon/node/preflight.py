"""Checks before anything is started, so that a mistake is one clear line and leaves nothing behind."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import msgspec

from rose.boards import BoardPaths, BoardReader
from rose.config import Config, ReplicaConfig
from rose.core.readings import GatePolicy, SlackReading
from rose.errors import ConfigError, NotReady, RoseError
from rose.secret import read_secret
from rose.weights.checkpoint import open_checkpoint
from rose_daemon.node import adoption
from rose_daemon.node.engines import free_port, port_is_free


def check_host(config: Config) -> None:
    """Whether this host has what `rose.toml` names.  Changes nothing.

    Raises ConfigError; NotReady where another process has what is needed; RoseError for a directory that
    cannot be used, as the disk or the mount may be better the next time.
    """
    for key in ("state_dir", "run_dir"):
        _check_directory(key, Path(getattr(config.node, key)))
    held = adoption.ports_held(Path(config.node.run_dir))
    for section in config.replicas:
        _check_model(section)
        _check_cores(section.id, (*section.cpus, *section.api_cpus))
        ours = held.get(section.id) == section.port
        if section.port and not ours and not port_is_free(section.host, section.port):
            raise NotReady(
                f"replica {section.id}: port {section.port} on {section.host} is in use",
                f"end what listens there, or change replicas.{section.id}.port (0 takes a free one)",
            )
        _check_gate(config, section)
    if config.serving.mode == "metrics":
        _check_slack(config)
    if config.device.kind == "cpu":
        _check_cores("device", config.device.cpus)
    if (port := config.node.metrics_port) and not port_is_free("127.0.0.1", port):
        raise NotReady(f"port {port} for metrics is in use", "change node.metrics_port (0 turns metrics off)")
    _check_token(config.engine_token_file)


def prepare_host(config: Config) -> None:
    """Make the directories and the token of this host.  Raises RoseError."""
    for key, directory in (("state_dir", config.node.state_dir), ("run_dir", config.node.run_dir)):
        try:
            Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RoseError(f"node.{key}: {directory} cannot be made: {error.strerror}") from None
        _check_directory(key, Path(directory))
    make_token(config.engine_token_file)


def with_ports(config: Config) -> Config:
    """The same configuration, with a free port for every replica that asks for any.

    An engine that outlived its rosed keeps the one that it has.
    """
    held = adoption.ports_held(Path(config.node.run_dir))
    replicas = tuple(
        section
        if section.port
        else msgspec.structs.replace(section, port=held.get(section.id) or free_port(section.host))
        for section in config.replicas
    )
    return msgspec.structs.replace(config, replicas=replicas)


def make_token(path: Path) -> None:
    """Write a new token unless there is one.  Raises RoseError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise RoseError(f"node.token_file: {path} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")


def _check_directory(key: str, directory: Path) -> None:
    """Whether the daemon could make and use it; a directory that is not there yet is judged by its parent."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise RoseError(f"node.{key}: {there} is not a directory")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise RoseError(f"node.{key}: {there} is not writable", "check its owner, its mode, and its disk")


def _check_model(section: ReplicaConfig) -> None:
    model = Path(section.model)
    key = f"replicas.{section.id}.model"
    if not model.is_dir():
        raise ConfigError(f"{key}: {model}: no such directory", "name a checkpoint directory on this host")
    if not (model / "config.json").is_file():
        raise ConfigError(f"{key}: {model} has no config.json", "name a Hugging Face checkpoint directory")
    try:
        shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
        open_checkpoint(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {model / 'config.json'} cannot be read: {error}") from None
    except RoseError as error:
        raise ConfigError(f"{key}: {error.what}", "the engine could not load this checkpoint") from None
    if not isinstance(shape, dict):
        raise ConfigError(f"{key}: {model / 'config.json'} is not a JSON object")


def _check_cores(who: str, cores: tuple[int, ...]) -> None:
    present = range(os.cpu_count() or 1)
    missing = sorted(core for core in set(cores) if core not in present)
    if missing:
        raise ConfigError(f"{who}: this host has no core {missing[0]}", f"it has {len(present)}, from 0 on")


def _check_gate(config: Config, section: ReplicaConfig) -> None:
    """Two daemons that write one gate board would undo each other's decisions."""
    path = BoardPaths(Path(config.node.run_dir)).gate(section.id)
    try:
        owner = BoardReader(path, GatePolicy).owner
    except (OSError, ValueError):
        return
    if owner.pid != os.getpid() and owner.alive():
        raise NotReady(
            f"replica {section.id}: another rosed (pid {owner.pid}) writes {path}",
            "stop it, or give this one its own node.run_dir",
        )


def _check_slack(config: Config) -> None:
    """In mode metrics the board is ours to write; an engine that has the plugin writes a better one."""
    path = BoardPaths(Path(config.node.run_dir)).slack(config.serving.name)
    try:
        owner = BoardReader(path, SlackReading).owner
    except (OSError, ValueError):
        return
    if owner.pid != os.getpid() and owner.alive():
        raise NotReady(
            f"serving.mode metrics: process {owner.pid} writes {path}",
            "the serving engine has the plugin: set serving.mode to plugin",
        )


def _check_token(path: Path) -> None:
    if path.exists():
        read_secret(path, "node.token_file")
