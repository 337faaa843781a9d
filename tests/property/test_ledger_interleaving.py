"""The page ledger under every order of steps: callers stopped, overtaken and killed between any two words."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ledger_world import Helper, Line, Process, World, load_stepping

CAPACITY = 10
PAGES = st.integers(0, CAPACITY + 2)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_stepping(tmp_path_factory.mktemp("ledger"))


class LedgerSteps(RuleBasedStateMachine):
    """Hypothesis chooses who goes on, and finds the shortest order that goes wrong."""

    library: Any

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.library, CAPACITY)

    @invariant()
    def counts_are_right(self) -> None:
        self.world.check()

    @precondition(lambda self: self.world.can_join())
    @rule(limit=PAGES)
    def join(self, limit: int) -> None:
        self.world.join(limit)

    @precondition(lambda self: self.world.idle())
    @rule(data=st.data(), pages=PAGES, spare=st.integers(0, 4))
    def acquire(self, data: st.DataObject, pages: int, spare: int) -> None:
        self.world.acquire(data.draw(st.sampled_from(self.world.idle())), pages, max(0, pages - spare))

    @precondition(lambda self: self.world.idle())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.world.idle()))
        self.world.release(process, data.draw(st.integers(0, process.held)))

    @precondition(lambda self: self.world.idle())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.world.leave(data.draw(st.sampled_from(self.world.idle())))

    @precondition(lambda self: self.world.living())
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.world.kill(data.draw(st.sampled_from(self.world.living())))

    @precondition(lambda self: self.world.dead() and self.world.can_help())
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        self.world.reclaim(data.draw(st.sampled_from(self.world.dead())))

    @precondition(lambda self: self.world.idle() and self.world.can_help())
    @rule(data=st.data(), pages=PAGES)
    def set_limit(self, data: st.DataObject, pages: int) -> None:
        self.world.set_limit(data.draw(st.sampled_from(self.world.idle())), pages)

    @precondition(lambda self: self.world.helpers)
    @rule(data=st.data())
    def kill_helper(self, data: st.DataObject) -> None:
        self.world.kill_helper(data.draw(st.sampled_from(self.world.helpers)))

    @precondition(lambda self: self.world.busy())
    @rule(data=st.data(), steps=st.integers(1, 12))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        caller = data.draw(st.sampled_from(self.world.busy()))
        for _ in range(steps):
            if self.world.step(caller):
                break
            self.world.check()

    def teardown(self) -> None:
        self.world.finish()


def test_hypothesis_finds_no_order_that_miscounts(library: Any) -> None:
    LedgerSteps.library = library
    run_state_machine_as_test(
        LedgerSteps,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip


def act(world: World, dice: random.Random) -> None:
    """Begin some call, or kill somebody."""
    pages = dice.randrange(world.capacity + 2)
    idle, dead = world.idle(), world.dead()
    match dice.randrange(9):
        case 0 if world.can_join():
            world.join(pages if dice.random() < 0.3 else world.capacity)
        case 1 | 2 if idle:
            world.acquire(dice.choice(idle), pages, dice.randint(0, pages))
        case 3 if idle:
            process = dice.choice(idle)
            world.release(process, dice.randint(0, process.held))
        case 4 if idle:
            world.leave(dice.choice(idle))
        case 5 if world.living() and dice.random() < 0.5:
            world.kill(dice.choice(world.living()))
        case 6 | 7 if dead and world.can_help():
            world.reclaim(dice.choice(dead))
        case 8 if idle and world.can_help():
            world.set_limit(dice.choice(idle), pages)


@pytest.mark.parametrize("seed", range(40))
def test_random_orders_never_miscount(library: Any, seed: int) -> None:
    """Longer than hypothesis goes: callers are stopped for long, slots are used again and again."""
    dice = random.Random(seed)
    world = World(library, dice.choice([1, 3, 10]))
    stopped: set[object] = set()
    for _ in range(2500):
        busy = world.busy()
        if dice.random() < 0.02:
            stopped = {caller for caller in busy if dice.random() < 0.5}
        going = [caller for caller in busy if caller not in stopped]
        if going and dice.random() < 0.75:
            world.step(dice.choice(going))
        elif world.helpers and dice.random() < 0.05:
            world.kill_helper(dice.choice(world.helpers))
        else:
            act(world, dice)
        world.check()
    world.finish()


def advance(world: World, caller: Process | Helper, steps: int) -> bool:
    """Up to so many steps; whether the call is over."""
    for _ in range(steps):
        if caller not in world.busy() or world.step(caller):
            return True
        world.check()
    return caller not in world.busy()


def complete(world: World, caller: Process | Helper) -> None:
    while caller in world.busy():
        world.step(caller)
        world.check()


@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize("ahead", range(16))
def test_a_reclaimer_that_was_overtaken_does_no_harm_to_the_next_owner(
    library: Any, held: int, ahead: int
) -> None:
    """Two reclaim a dead owner: one stops anywhere, the other ends, and a third process takes the slot."""
    for behind, joined in product(range(16), range(0, 8, 2)):
        world = World(library, CAPACITY)
        world.join(CAPACITY)
        (first,) = world.processes
        complete(world, first)
        world.acquire(first, held, held)
        complete(world, first)
        world.kill(first)
        world.reclaim(first)
        world.reclaim(first)
        quick, slow = world.helpers
        advance(world, quick, ahead)
        advance(world, slow, behind)
        complete(world, quick)
        world.join(4)
        second = world.living()[0]
        complete(world, second)
        assert second.slot == first.slot
        assert world.lines()[second.identity] == Line(0, 4, 0)
        world.acquire(second, 4, 4)
        advance(world, second, joined)
        complete(world, slow)
        complete(world, second)
        assert world.lines()[second.identity] == Line(4, 4, 0)
        world.finish()


@pytest.mark.parametrize("steps", range(12))
def test_one_that_is_killed_while_it_joins_leaves_no_limit_to_the_next(library: Any, steps: int) -> None:
    for revised in range(10):
        world = World(library, CAPACITY)
        world.join(1)
        (first,) = world.processes
        advance(world, first, steps)
        if first.identity not in world.lines():
            continue  # nobody can have seen it yet
        first.slot = 0
        world.set_limit(first, 2)
        advance(world, world.helpers[0], revised)
        world.kill(first)
        assert world.looked() == world.lines()
        if first in world.dead():
            world.reclaim(first)
            complete(world, world.helpers[-1])
        world.join(7)
        second = world.living()[0]
        complete(world, second)
        for helper in list(world.helpers):
            complete(world, helper)
        assert world.lines()[second.identity] == Line(0, 7, 0)
        world.finish()
