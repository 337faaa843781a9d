"""Where a turn runs: one `Router` per job, over the replicas leased to it.

The order is the paper's, per turn:

1. `affinity`: the replica that holds the trajectory's prefix (its pin);
2. `group`: the replica that holds the prompt of the turn's group, unless much more loaded than the best;
3. `serving`: a borrowed replica, as long as it would then be loaded no more than the best dedicated one;
4. `least_loaded`: the least loaded dedicated replica;
5. `returned`: the replica that last interrupted the turn, once its back-off is over;
6. else the turn waits in the queue.

A trajectory that the client did not name is a guess: rule 1 then holds only while the pinned replica is
hardly more loaded than the best one, or turns that begin alike would all go to one.

Rule 3 with the load condition keeps both kinds busy: taken literally, "serving replicas first" would fill
those up to the cap while dedicated ones idle.  In rules 3 and 4 a replica on the kind of hardware that does
not suit the turn's task counts as more loaded than it is (RollArt's hardware affinity).

Before rule 1, in the tail of a step, when every trajectory left could have a dedicated replica to itself:
`tail`, an idle dedicated replica instead of the borrowed one that the trajectory is pinned to.  Stragglers
then end sooner than behind a gate, and serving has its devices to itself again.

Load is what the scheduler itself has sent and not seen end, never scraped: the larger of turns/cap and
tokens (prompt + most output)/KV budget.  At most `cap` turns run on a replica at a time; that bounds the
trajectories whose KV it must hold.

A gate that is closed at the moment is a tie-break only, since it may flip many times a second between two
heartbeats.  A gate not seen open for `gate_patience_ns` makes its replica `held`: it comes after all others,
even for the trajectories pinned to it, but still before the queue.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from rose.core.cluster_settings import RoutingSlack
from rose.core.membership import Replica
from rose.core.versions import ANY_VERSION, VersionWindow, VersionWish
from rose.units import ReplicaId, TurnId, WeightVersion

AFFINITY = "affinity"
GROUP = "group"
TAIL = "tail"
SERVING = "serving"
LEAST_LOADED = "least_loaded"
RETURNED = "returned"

_HEAP_SLACK = 64


class Condition(NamedTuple):
    """What decides whether a replica takes turns, as membership knows it."""

    takes_turns: bool
    weight_version: WeightVersion | None
    gate_open: bool
    gate_held: bool
    kv_budget_tokens: int
    """0 if not known."""
    hardware: str = ""
    """`compute` or `bandwidth`, what the device is rich in; empty if not known."""

    @classmethod
    def of(cls, replica: Replica) -> Condition:
        """As last reported."""
        report = replica.report
        return cls(
            replica.takes_turns,
            report.weight_version,
            replica.gate_open,
            replica.gate_held,
            report.kv_budget_tokens,
            report.hardware,
        )


class Want(NamedTuple):
    """What one turn needs."""

    tokens: int
    """Its weight: prompt and most output."""
    pin: ReplicaId | None = None
    avoid: ReplicaId | None = None
    """The replica that interrupted it last."""
    avoid_strictly: bool = False
    """Its back-off is not over."""
    versions: VersionWish = ANY_VERSION
    group_pin: ReplicaId | None = None
    """The replica that the turn's group ran on last."""
    hardware: str = ""
    """What its task wants to be rich; empty: no matter."""
    tail: bool = False
    """Its job's step is nearly over."""
    hint: bool = False
    """The pin is a guess."""


class Pick(NamedTuple):
    """A replica for a turn and the rule that chose it."""

    replica: ReplicaId
    why: str


@dataclass(slots=True)
class _Route:
    """A leased replica as the router sees it."""

    id: ReplicaId
    serving: bool
    order: int
    """Breaks ties; grows in order of the leases."""
    condition: Condition
    turns: dict[TurnId, int] = field(default_factory=dict)
    """Turns in flight here with their weights."""
    tokens: int = 0
    most: int | None = None
    """Turns it may run while it is not trusted: 0 while its attempts fail, 1 to try it again."""
    fit: bool = False
    """Takes turns of this job, as far as there is room."""
    open: bool = False
    """Takes a turn of this job now."""
    rank: _Rank = (True, 0.0, True)
    """How little it invites any turn, while it is open."""
    entry: _Entry | None = None
    """Its entry in a heap, no worse than its rank is now; None if it has none."""
    heap: list[_Entry] | None = None
    """Where that is.  Other entries of the route, anywhere, are outdated."""


_Rank = tuple[bool, float, bool]
_Entry = tuple[bool, float, bool, int, int, _Route]
"""Gate held, load, gate closed, order of the lease, a number that no other entry has, and the route."""


class Router:
    """Chooses among the replicas of one job and keeps count of what runs on each."""

    def __init__(self, cap: int, window: VersionWindow, slack: RoutingSlack | None = None) -> None:
        self._cap = cap
        self._window = window
        self._slack = slack or RoutingSlack()
        self._routes: dict[ReplicaId, _Route] = {}
        self._heaps: dict[tuple[bool, str], list[_Entry]] = {}
        """Open replicas by load, per kind and hardware.

        A replica that became more loaded keeps its entry until that comes to the top, and is put where it
        belongs then: turns come and go, and most of it evens out before anybody looks.
        """
        self._orders = 0
        self._entries = 0
        self._open_routes = 0
        self._open_dedicated = 0
        self._opened = False

    def __contains__(self, replica: ReplicaId) -> bool:
        return replica in self._routes

    def has_room(self) -> bool:
        """Whether any replica takes a turn that is not choosy."""
        return self._open_routes > 0

    @property
    def open_dedicated(self) -> int:
        """Dedicated replicas that take a turn now."""
        return self._open_dedicated

    def pop_opened(self) -> bool:
        """Whether, since last asked, a replica opened or changed its version: blocked turns may fit now."""
        opened, self._opened = self._opened, False
        return opened

    def is_open(self, replica: ReplicaId) -> bool:
        """Whether the replica takes a turn of this job now."""
        route = self._routes.get(replica)
        return route is not None and route.open

    def turns_on(self, replica: ReplicaId) -> list[TurnId]:
        """Turns in flight there, in order of dispatch."""
        route = self._routes.get(replica)
        return [] if route is None else list(route.turns)

    def count_on(self, replica: ReplicaId) -> int:
        """Number of turns in flight there."""
        route = self._routes.get(replica)
        return 0 if route is None else len(route.turns)

    def slots(self) -> tuple[int, int]:
        """Turns that (dedicated, borrowed) replicas could run at once, those with a closed gate left out."""
        found = [0, 0]
        for route in self._routes.values():
            if route.fit and route.condition.gate_open:
                found[route.serving] += self._most(route)
        return found[0], found[1]

    def busy(self) -> list[ReplicaId]:
        """Replicas with turns in flight."""
        return [route.id for route in self._routes.values() if route.turns]

    def add(self, replica: ReplicaId, serving: bool, condition: Condition) -> None:
        """A replica was leased to the job."""
        assert replica not in self._routes, f"{replica} is already routed to"
        self._orders += 1
        route = self._routes[replica] = _Route(replica, serving, self._orders, condition)
        self._refit(route)

    def remove(self, replica: ReplicaId) -> None:
        """Its lease ended; no turn may be in flight there any more."""
        route = self._routes[replica]
        assert not route.turns, f"{replica} is removed while it runs {len(route.turns)} turns"
        del self._routes[replica]
        self._count(route, -route.open)
        route.open, route.entry = False, None

    def update(self, replica: ReplicaId, condition: Condition) -> None:
        """A newer report of the replica arrived."""
        route = self._routes[replica]
        if condition == route.condition:
            return
        if condition.weight_version != route.condition.weight_version:
            self._opened = True
        route.condition = condition
        self._refit(route)

    def throttle(self, replica: ReplicaId, most: int | None) -> None:
        """Have the replica run so many turns at most (None: up to the cap); those in flight go on."""
        route = self._routes.get(replica)
        if route is not None and route.most != most:
            route.most = most
            self._refresh(route)

    def configure(self, cap: int, window: VersionWindow) -> None:
        """The job's cap or version window changed."""
        if (cap, window) == (self._cap, self._window):
            return
        self._cap, self._window = cap, window
        self._opened = True
        for route in self._routes.values():
            self._refit(route)

    def begin(self, replica: ReplicaId, turn: TurnId, tokens: int) -> None:
        """A turn was sent to the replica."""
        route = self._routes[replica]
        assert route.open, f"{turn} must not be sent to {replica}"
        assert turn not in route.turns, f"{turn} runs on {replica} already"
        route.turns[turn] = tokens
        route.tokens += tokens
        self._refresh(route)

    def end(self, replica: ReplicaId, turn: TurnId) -> None:
        """The turn's attempt there ended."""
        route = self._routes[replica]
        route.tokens -= route.turns.pop(turn)
        self._refresh(route)

    def pick(self, want: Want) -> Pick | None:
        """The replica for a turn, or None: it has to wait."""
        pinned = self._usable(want.pin, want)
        if pinned is not None and not pinned.condition.gate_held and not want.hint:
            idle = self._top(False, want) if want.tail and pinned.serving else None
            return Pick(pinned.id, AFFINITY) if idle is None or idle.turns else Pick(idle.id, TAIL)
        best = self._best(want)
        if best is None:
            return self._back_to(want)
        if pinned is not None and best.condition.gate_held and not want.hint:
            return Pick(pinned.id, AFFINITY)
        load = self._load(best, 1, want.tokens)
        bearable = (1 + self._slack.guess) * load + 1 / self._cap
        guess = self._near(want.pin, AFFINITY, bearable, want) if want.hint else None
        if near := guess or self._near(want.group_pin, GROUP, load + self._slack.group, want):
            return near
        return Pick(best.id, SERVING if best.serving else LEAST_LOADED)

    def could_run(self, versions: VersionWish) -> bool:
        """Whether any replica of the job, busy or not, runs a version that the job and the wish admit."""
        return any(
            self._window.admits(route.condition.weight_version)
            and versions.admits(route.condition.weight_version)
            for route in self._routes.values()
        )

    def will_run(self, versions: VersionWish) -> bool:
        """Whether the job's window leaves room for the wish: if not, waiting for a replica is no use."""
        minimum = versions.minimum
        in_reach = minimum is None or minimum <= self._window.ceiling
        return in_reach and (versions.exact is None or self._window.admits(versions.exact))

    def version_on(self, replica: ReplicaId) -> WeightVersion | None:
        """The version the replica runs, as last reported."""
        return self._routes[replica].condition.weight_version

    # ---- inside ------------------------------------------------------------------------------------

    def _usable(self, replica: ReplicaId | None, want: Want) -> _Route | None:
        """The replica, if the turn may go there now."""
        route = self._routes.get(replica) if replica is not None and replica != want.avoid else None
        return route if route is not None and route.open and self._suits(route, want) else None

    def _near(self, replica: ReplicaId | None, why: str, load_max: float, want: Want) -> Pick | None:
        """The replica, if the turn should go there for the prefix that it holds."""
        route = self._usable(replica, want)
        if route is None or route.condition.gate_held:
            return None
        return Pick(route.id, why) if self._load(route, 1, want.tokens) <= load_max else None

    def _suits(self, route: _Route, want: Want) -> bool:
        return want.versions is ANY_VERSION or want.versions.admits(route.condition.weight_version)

    def _back_to(self, want: Want) -> Pick | None:
        if want.avoid is None or want.avoid_strictly:
            return None
        route = self._routes.get(want.avoid)
        if route is None or not route.open or not self._suits(route, want):
            return None
        return Pick(route.id, RETURNED)

    def _best(self, want: Want) -> _Route | None:
        serving, dedicated = self._top(True, want), self._top(False, want)
        if serving is None or dedicated is None:
            return serving or dedicated
        return serving if self._rank(serving, want) <= self._rank(dedicated, want) else dedicated

    def _rank(self, route: _Route, want: Want) -> _Rank:
        """How little a replica invites the turn."""
        condition = route.condition
        load = self._load(route, 1, want.tokens)
        if want.hardware and condition.hardware and want.hardware != condition.hardware:
            load += self._slack.hardware
        return (condition.gate_held, load, not condition.gate_open)

    def _load(self, route: _Route, more_turns: int = 0, more_tokens: int = 0) -> float:
        turns = (len(route.turns) + more_turns) / self._cap
        budget = route.condition.kv_budget_tokens
        return max(turns, (route.tokens + more_tokens) / budget) if budget > 0 else turns

    def _top(self, serving: bool, want: Want) -> _Route | None:
        """The open replica of a kind that invites the turn most."""
        tops = [
            top
            for kind, hardware in self._heaps
            if kind is serving and (top := self._top_of(self._heaps[kind, hardware], want)) is not None
        ]
        return min(tops, key=lambda top: self._rank(top, want)) if len(tops) > 1 else next(iter(tops), None)

    def _top_of(self, heap: list[_Entry], want: Want) -> _Route | None:
        """The least loaded one of a heap that the turn may use."""
        aside: list[_Entry] = []
        found = None
        while heap:
            entry = heap[0]
            route = entry[-1]
            if entry is not route.entry:
                heapq.heappop(heap)
            elif not route.open:
                route.entry = None
                heapq.heappop(heap)
            elif entry[:3] != route.rank:
                route.entry = self._entry(route)
                heapq.heapreplace(heap, route.entry)
            elif route.id == want.avoid or not self._suits(route, want):
                aside.append(heapq.heappop(heap))
            else:
                found = route
                break
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def _refit(self, route: _Route) -> None:
        """Bring the route up to date after a change to its condition or to what the job asks."""
        condition = route.condition
        route.fit = condition.takes_turns and self._window.admits(condition.weight_version)
        self._refresh(route)

    def _most(self, route: _Route) -> int:
        """Turns it may run at once."""
        return self._cap if route.most is None else min(self._cap, route.most)

    def _refresh(self, route: _Route) -> None:
        """Bring the route's place in its heap up to date after any change to it."""
        is_open = route.fit and len(route.turns) < self._most(route)
        if is_open is not route.open:
            self._count(route, is_open - route.open)
            self._opened |= is_open
            route.open = is_open
        if not is_open:
            return
        condition = route.condition
        heap = self._heaps.get((route.serving, condition.hardware))
        if heap is None:
            heap = self._heaps[route.serving, condition.hardware] = []
        rank = route.rank = (condition.gate_held, self._load(route), not condition.gate_open)
        if route.entry is not None and route.heap is heap and route.entry[:3] <= rank:
            return  # it is put right when it comes to the top
        if len(heap) > 2 * len(self._routes) + _HEAP_SLACK:
            heap[:] = [entry for entry in heap if entry is entry[-1].entry]
            heapq.heapify(heap)
        route.entry, route.heap = self._entry(route), heap
        heapq.heappush(heap, route.entry)

    def _count(self, route: _Route, change: int) -> None:
        self._open_routes += change
        if not route.serving:
            self._open_dedicated += change

    def _entry(self, route: _Route) -> _Entry:
        self._entries += 1
        return (*route.rank, route.order, self._entries, route)
