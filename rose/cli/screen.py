"""The screen of `rose top` (Textual).  It shows what `look` answers, and orders what keys ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import DataTable, Footer, Header, Sparkline, Static

from rose import wire
from rose.cli.status import lending_line
from rose.errors import RoseError
from rose.units import MIB, ReplicaId

_HISTORY = 120
_REPLICAS = ("replica", "kind", "state", "version", "gate", "KV used/budget/total", "turns", "why")
_HOSTS = ("host", "state", "heard", "takes turns", "jobs", "versions", "in flight")
_JOBS = ("job", "step", "needs", "latest", "queued", "in flight", "replicas")


class Snapshot(NamedTuple):
    """What was read: rosed's status, and the scheduler's; None with the reason where one does not answer."""

    node: dict[str, Any] | None
    node_error: str = ""
    fleet: dict[str, Any] | None = None
    fleet_error: str = ""


class Top(App[None]):
    """The application.  `order` None: nothing can be changed."""

    TITLE = "rose top"
    CSS = """
    #host { height: auto; padding: 0 1; }
    #gate { height: 3; margin: 0 1; }
    DataTable { height: 1fr; }
    #hosts { height: 6; }
    #jobs { height: 6; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("d", "drain(True)", "Drain"),
        Binding("u", "drain(False)", "Undrain"),
        Binding("l", "lend", "Lending on/off"),
    ]

    def __init__(
        self,
        look: Callable[[], Snapshot],
        order: Callable[[wire.ControlRequest], None] | None,
        period_s: float,
    ) -> None:
        super().__init__()
        self._look, self._order, self._period_s = look, order, period_s
        self._latest: Snapshot | None = None
        self._open: deque[float] = deque([0.0] * _HISTORY, maxlen=_HISTORY)

    def compose(self) -> ComposeResult:
        """Host, gate timeline, replicas, the scheduler's hosts, jobs."""
        yield Header()
        with Vertical():
            yield Static("looking ...", id="host", markup=False)
            yield Sparkline(list(self._open), id="gate")
            yield DataTable(id="replicas", cursor_type="row")
            yield DataTable(id="hosts", cursor_type="none")
            yield DataTable(id="jobs", cursor_type="none")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one("#replicas", DataTable).add_columns(*_REPLICAS)
        self.query_one("#hosts", DataTable).add_columns(*_HOSTS)
        self.query_one("#jobs", DataTable).add_columns(*_JOBS)
        self.set_interval(self._period_s, self.refresh_snapshot)
        self.refresh_snapshot()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Without orders, the keys for them are not there."""
        return self._order is not None or action not in {"drain", "lend"}

    @work(thread=True, exclusive=True)
    def refresh_snapshot(self) -> None:
        """Read, beside the event loop."""
        snapshot = self._look()
        self.call_from_thread(self.show, snapshot)

    def show(self, snapshot: Snapshot) -> None:
        """Draw what was read."""
        self._latest = snapshot
        self.query_one("#host", Static).update("\n".join(host_lines(snapshot)))
        gate = (snapshot.node or {}).get("gate") or {}
        self._open.append(1.0 if gate.get("open") else 0.0)
        self.query_one("#gate", Sparkline).data = list(self._open)
        _fill(self.query_one("#replicas", DataTable), replica_rows(snapshot))
        _fill(self.query_one("#hosts", DataTable), host_rows(snapshot))
        _fill(self.query_one("#jobs", DataTable), job_rows(snapshot))

    # ---- orders -----------------------------------------------------------------------------------

    def action_drain(self, drain: bool) -> None:
        """Take the chosen replica out of use, or back."""
        table = self.query_one("#replicas", DataTable)
        if table.row_count:
            replica = ReplicaId(str(table.get_row_at(table.cursor_row)[0]))
            self._give(wire.DrainRequest(replica, drain), f"{replica}: {'draining' if drain else 'in use'}")

    def action_lend(self) -> None:
        """Switch lending off, or on again."""
        if self._latest is not None and self._latest.node is not None:
            off = bool(self._latest.node["lending"]["switched_off"])
            self._give(wire.LendRequest(on=off), f"lending is {'on' if off else 'off'}")

    @work(thread=True)
    def _give(self, request: wire.ControlRequest, done: str) -> None:
        assert self._order is not None
        try:
            self._order(request)
        except RoseError as error:
            self.call_from_thread(self.notify, str(error), severity="error", markup=False)
        else:
            self.call_from_thread(self.notify, done, markup=False)
        self.call_from_thread(self.refresh_snapshot)


def host_lines(snapshot: Snapshot) -> list[str]:
    """The lines above the tables."""
    node = snapshot.node
    if node is None:
        return [f"rosed does not answer: {snapshot.node_error}"]
    devices = ", ".join(f"{each['name']} ({_share(each['utilisation'])} busy)" for each in node["devices"])
    serving, gate, memory = node["serving"], node["gate"], node["memory"]
    load = (
        "" if serving.get("waiting") is None else ", {waiting} waiting, {running} running".format(**serving)
    )
    health = "healthy" if node["healthy"] else "NOT READY"
    held = ", ".join(f"{name} {_mib(memory[f'{name}_bytes'])}" for name in ("budget", "serving", "headroom"))
    lines = [
        f"{node['node']} on {node['host']['name']}   {health}   {devices}",
        f"serving {serving['state']}{load}   gate {'open' if gate['open'] else 'closed'} ({gate['reason']})",
        f"lending {lending_line(node['lending'])}" if "lending" in node else "",
        f"memory {memory['state']}, {held}",
    ]
    lines += [f"not ready: {problem}" for problem in node["problems"]]
    if snapshot.fleet_error:
        lines.append(f"rose-scheduler does not answer: {snapshot.fleet_error}")
    return [line for line in lines if line]


def replica_rows(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """One row a replica of this host."""
    rows: list[tuple[str, ...]] = []
    for each in (snapshot.node or {}).get("replicas", ()):
        kv, gate = each["kv_blocks"], each["gate"]
        blocks = "/".join(_dash(kv[name]) for name in ("used", "budget", "total"))
        shown = f"{'open' if gate['open'] else 'closed'} ({gate['reason']})"
        version, turns = _dash(each["weight_version"]), _dash(each["turns_in_flight"])
        rows.append((each["id"], each["kind"], each["state"], version, shown, blocks, turns, each["reason"]))
    return rows


def host_rows(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """One row a host that the scheduler knows."""
    rows: list[tuple[str, ...]] = []
    fleet = snapshot.fleet or {}
    for node in fleet.get("nodes", ()):
        held = [each for each in fleet.get("replicas", ()) if each["node"] == node["node"]]
        eligible = sum(bool(each["eligible"]) for each in held)
        jobs = sorted({each["job"] for each in held if each["job"] is not None})
        versions = sorted({each["weight_version"] for each in held if each["weight_version"] is not None})
        rows.append(
            (
                node["node"],
                node["state"],
                f"{node['silent_ms'] / 1000:.1f} s ago",
                f"{eligible}/{len(held)}",
                " ".join(jobs) or "-",
                " ".join(f"v{each}" for each in versions) or "-",
                str(sum(each["turns_in_flight"] for each in held)),
            )
        )
    return rows


def job_rows(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """One row a job of the scheduler."""
    rows: list[tuple[str, ...]] = []
    for job in (snapshot.fleet or {}).get("jobs", ()):
        eligible = sum(bool(each["eligible"]) for each in job["replicas"])
        versions = f"v{job['required_version']}", f"v{job['latest_version']}"
        turns = str(job["turns_queued"]), str(job["turns_in_flight"])
        replicas = f"{eligible}/{len(job['replicas'])}"
        rows.append((job["job"], _dash(job["rl_step"]), *versions, *turns, replicas))
    return rows


def _fill(table: DataTable[Any], rows: list[tuple[str, ...]]) -> None:
    """New rows, the cursor where it was.  As Text, or brackets in a reason would be taken for markup."""
    row = table.cursor_row
    table.clear()
    table.add_rows([Text(cell) for cell in cells] for cells in rows)
    if rows:
        table.move_cursor(row=min(row, len(rows) - 1))


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"


def _mib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / MIB:,.0f} MiB"


def _dash(value: Any) -> str:
    return "-" if value is None else str(value)
