"""`rose weights`: the versions on this host and at the relay, and the orders to take one back.

What reads or writes weights loads NumPy when it is called; `rollback` and `follow` only talk to rosed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from rose import config as configuration
from rose import wire
from rose.cli.control import ask
from rose.cli.options import ConfigOption, JsonOption, SocketOption, socket_path
from rose.errors import ConfigError, NotFound, NotReady, TimedOut
from rose.units import MIB, JobId, WeightVersion

if TYPE_CHECKING:
    from rose.weights.inspection import Change

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="List, check, pull, compare, publish weight versions; take them back.",
)

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]
VersionArgument = Annotated[int, typer.Argument(metavar="VERSION", min=0)]
RelayOption = Annotated[bool, typer.Option("--relay", help="Ask the relay, not this host's store.")]

_POLL_S = 0.1
_CONNECT_S = 3.0


# ---- what there is --------------------------------------------------------------------------------


@app.command("list")
def list_versions(
    job: JobArgument, relay: RelayOption = False, as_json: JsonOption = False, config: ConfigOption = None
) -> None:
    """List a job's versions: those on this host, or those at the relay; exit code 4 if there are none."""
    from rose.weights import inspection  # noqa: PLC0415
    from rose.weights.store import WeightStore  # noqa: PLC0415

    settings = configuration.load(config)
    rows: list[tuple[WeightVersion, WeightVersion | None, int, float | None]]
    if relay:
        stat = asyncio.run(_stat(settings, JobId(job)))
        rows = [(each.version, each.base_version, each.bytes, None) for each in stat.committed]
    else:
        store = WeightStore(Path(settings.node.state_dir))
        found = [
            inspection.summary(store.manifest(JobId(job), version)) for version in store.versions(JobId(job))
        ]
        rows = [
            (each.version, each.base_version, each.delta_bytes, each.changed / max(1, each.elements))
            for each in found
        ]
    if not rows:
        where = "at the relay" if relay else "on this host"
        raise NotFound(f"no version of {job} lies {where}", "is that the job's id?  job.id of rose.toml")
    if as_json:
        keys = ("version", "base_version", "bytes", "density")
        _print_json("list", job=job, versions=[dict(zip(keys, row, strict=True)) for row in rows])
        return
    _print_table(
        ("version", "base", "MiB", "changed"),
        (
            (str(version), "anchor" if base is None else str(base), _mib(size), _share(density))
            for version, base, size, density in rows
        ),
    )


@app.command()
def show(
    job: JobArgument,
    version: VersionArgument,
    relay: RelayOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Show what a version changes, by kind of tensor."""
    from rose.weights import inspection  # noqa: PLC0415
    from rose.weights.store import WeightStore  # noqa: PLC0415

    settings = configuration.load(config)
    if relay:
        manifest = asyncio.run(_manifest(settings, JobId(job), WeightVersion(version)))
    else:
        manifest = WeightStore(Path(settings.node.state_dir)).manifest(JobId(job), WeightVersion(version))
    kinds = inspection.changes(manifest)
    if as_json:
        facts = {
            "base_version": manifest.base_version,
            "fingerprint": manifest.fingerprint,
            "buckets": len(manifest.buckets),
            "delta_bytes": manifest.delta_bytes,
            "dense_bytes": manifest.dense_bytes,
            "bytes_per_changed": manifest.delta_bytes / max(1, manifest.changed),
        }
        _print_json("show", job=job, version=version, **facts, kinds=_plain(kinds))
        return
    base = "an anchor" if manifest.base_version is None else f"a delta on version {manifest.base_version}"
    per_changed = manifest.delta_bytes / max(1, manifest.changed)
    ratio = manifest.dense_bytes / max(1, manifest.delta_bytes)
    print(
        f"version {version} of {job}: {base}, {_mib(manifest.delta_bytes)} MiB (1/{ratio:.0f} of dense), "
        f"{per_changed:.2f} B/changed"
    )
    _print_changes(kinds)


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Checkpoint directory.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Checkpoint directory.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit by bit, by kind of tensor."""
    from rose.weights import inspection  # noqa: PLC0415
    from rose.weights.checkpoint import open_checkpoint  # noqa: PLC0415

    kinds = inspection.compare(open_checkpoint(old).state, open_checkpoint(new).state)
    if as_json:
        _print_json("diff", old=str(old), new=str(new), kinds=_plain(kinds))
    else:
        _print_changes(kinds)


@app.command()
def verify(
    job: JobArgument,
    version: Annotated[int | None, typer.Argument(metavar="[VERSION]", min=0, help="Default: all.")] = None,
    config: ConfigOption = None,
) -> None:
    """Read every byte of what lies on this host and check its digests, the host's copy included."""
    from rose.weights import hostcopy, inspection  # noqa: PLC0415
    from rose.weights.store import WeightStore  # noqa: PLC0415

    store = WeightStore(Path(configuration.load(config).node.state_dir))
    wanted = store.versions(JobId(job)) if version is None else (WeightVersion(version),)
    for manifest in inspection.verify_staged(store, JobId(job), wanted):
        print(f"version {manifest.version}: {len(manifest.parameters)} parameters, whole")
    if version is not None:
        return
    try:
        held = hostcopy.audit(store.directory(JobId(job)) / "copy", JobId(job))
    except NotFound:
        if not wanted:
            raise NotFound(f"nothing of {job} lies on this host") from None
        return
    print(f"copy of the checkpoint: version {held}, whole")


@app.command()
def squash(
    job: JobArgument,
    start: Annotated[int, typer.Argument(metavar="FROM", min=0, help="Version to start from.")],
    version: VersionArgument,
    out: Annotated[Path, typer.Option("--out", help="Directory to make.")],
    config: ConfigOption = None,
) -> None:
    """Make one version of those staged on this host that lead from FROM to VERSION."""
    from rose.weights import container  # noqa: PLC0415
    from rose.weights import squash as squashing  # noqa: PLC0415
    from rose.weights.decoding import patches_path  # noqa: PLC0415
    from rose.weights.store import WeightStore  # noqa: PLC0415

    store = WeightStore(Path(configuration.load(config).node.state_dir))
    versions = store.chain(JobId(job), WeightVersion(start), WeightVersion(version))
    chain = [patches_path(path) for path in versions]
    before = sum(container.read_manifest(each).delta_bytes for each in chain)
    encoded = squashing.squash(chain)
    if out.exists():
        raise ConfigError(f"{out} is there already", "name a directory that is not")
    container.write_version(out, encoded)
    print(
        f"{len(chain)} versions, {_mib(before)} MiB, are now one of {_mib(encoded.manifest.delta_bytes)} MiB"
    )


# ---- relay ----------------------------------------------------------------------------------------


@app.command()
def pull(
    job: JobArgument,
    version: VersionArgument,
    out: Annotated[Path | None, typer.Option("--out", help="Directory to make; default: the store.")] = None,
    config: ConfigOption = None,
) -> None:
    """Pull a version from the relay, verified, into this host's store or a directory of yours."""
    from rose.weights.store import WeightStore  # noqa: PLC0415

    settings = configuration.load(config)
    store = WeightStore(Path(settings.node.state_dir))
    directory = out or store.destination(JobId(job), WeightVersion(version))
    began = time.monotonic()
    path = asyncio.run(_pull(settings, JobId(job), WeightVersion(version), directory))
    print(f"version {version} of {job} is in {path} ({(time.monotonic() - began) * 1e3:.0f} ms)")


@app.command()
def publish(
    job: JobArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory to publish.")],
    base: Annotated[
        Path | None, typer.Option("--base", help="Checkpoint of the newest version; default: an anchor.")
    ] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Default: the newest one plus 1.")] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Publish a checkpoint directory as the job's next version: whole, or as a delta on `--base`."""
    import msgspec  # noqa: PLC0415

    from rose.weights.checkpoint import open_checkpoint  # noqa: PLC0415
    from rose.weights.digests import digest_state  # noqa: PLC0415
    from rose.weights.publisher import Publisher  # noqa: PLC0415

    settings = configuration.load(config)
    state = open_checkpoint(directory).state
    stat = asyncio.run(_stat(settings, JobId(job)))
    newest = max(stat.versions, default=WeightVersion(0))
    base_state = state if base is None else open_checkpoint(base).state
    if base is not None and newest:
        held = asyncio.run(_manifest(settings, JobId(job), newest)).target_digests
        found = digest_state(base_state)
        if any(found.get(name) != digest for name, digest in held.items()):
            raise ConfigError(
                f"{base} is not version {newest} of {job}", "name the checkpoint of that version"
            )
    anchors = 1 if base is None else None
    with Publisher.connect(
        settings.relay, JobId(job), base_state, base_version=newest, anchor_every=anchors
    ) as publisher:
        report = publisher.publish(WeightVersion(newest + 1 if version is None else version), state)
    if as_json:
        _print_json("publish", job=job, **msgspec.to_builtins(report))
        return
    kind = "an anchor" if report.base_version is None else f"a delta on version {report.base_version}"
    print(f"version {report.version} of {job} is published: {kind}, {_mib(report.delta_bytes)} MiB")


# ---- orders to rosed ------------------------------------------------------------------------------


@app.command()
def rollback(
    job: JobArgument,
    version: VersionArgument,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the engines.")] = 60,
    config: ConfigOption = None,
    socket: SocketOption = None,
) -> None:
    """Take this host's engines back to a version, without a download, and hold them there.

    New versions wait until `rose weights follow JOB`.
    """
    path = socket_path(config, socket)
    began = time.monotonic()
    ask(path, wire.PinRequest(JobId(job), WeightVersion(version)))
    while True:
        replicas = ask(path, wire.StatusRequest())["replicas"]
        left = [
            each["id"]
            for each in replicas
            if each["weight_version"] != version or each["state"] == "updating"
        ]
        if not left:
            break
        if time.monotonic() - began >= wait_s:
            raise TimedOut(f"not at version {version} yet: {', '.join(left)}", "see `rose status`")
        time.sleep(_POLL_S)
    print(f"{len(replicas)} replica(s) at version {version} after {(time.monotonic() - began) * 1e3:.0f} ms")
    print(f"new versions wait until `rose weights follow {job}`")


@app.command()
def follow(job: JobArgument, config: ConfigOption = None, socket: SocketOption = None) -> None:
    """Let this host's engines follow new versions again."""
    ask(socket_path(config, socket), wire.PinRequest(JobId(job), None))
    print("engines follow new versions")


# ---- inside ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _relay(settings: configuration.Config) -> AsyncIterator[Any]:
    """A client of the relay; raises NotReady when nothing listens there, as its own patience is long."""
    from rose.weights.relay.connecting import connect  # noqa: PLC0415

    address = urlsplit(settings.relay.address)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(address.hostname, port)
    except (OSError, TimeoutError):
        raise NotReady(
            f"no relay answers at {settings.relay.address}", "start it with `rose relay`, or mend [relay] url"
        ) from None
    writer.close()
    async with connect(settings.relay) as relay:
        yield relay


async def _stat(settings: configuration.Config, job: JobId) -> Any:
    async with _relay(settings) as relay:
        return await relay.stat(job)


async def _manifest(settings: configuration.Config, job: JobId, version: WeightVersion) -> Any:
    async with _relay(settings) as relay:
        return (await relay.manifest(job, version)).manifest


async def _pull(settings: configuration.Config, job: JobId, version: WeightVersion, directory: Path) -> Path:
    from rose.weights import receiver  # noqa: PLC0415

    async with _relay(settings) as relay:
        timeout_s = settings.node.weights_timeout_s
        return (await receiver.pull(relay, job, version, directory, timeout_s=timeout_s)).path


def _plain(kinds: Iterable[Change]) -> list[dict[str, Any]]:
    import msgspec  # noqa: PLC0415

    return [{**msgspec.to_builtins(kind), "density": kind.density} for kind in kinds]


def _print_json(command: str, **facts: Any) -> None:
    print(json.dumps({"schema": 1, "command": f"weights {command}", **facts}, indent=2))


def _print_changes(kinds: Sequence[Change]) -> None:
    from rose.weights import inspection  # noqa: PLC0415

    rows = (*kinds, inspection.total(kinds))
    _print_table(
        ("kind", "parameters", "elements", "changed", "share", "B/changed"),
        (
            (
                each.kind,
                str(each.parameters),
                str(each.elements),
                str(each.changed),
                _share(each.density),
                "-" if each.bytes_per_changed is None else f"{each.bytes_per_changed:.2f}",
            )
            for each in rows
        ),
    )


def _print_table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        cells = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
        print("  ".join((line[0].ljust(widths[0]), *cells)))


def _mib(size: int) -> str:
    return f"{size / MIB:.2f}"


def _share(density: float | None) -> str:
    return "-" if density is None else f"{density:.2%}"
