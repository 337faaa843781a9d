"""Lakes, rewards, the ledger, and episodes against a stand-in for the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from rose_daemon.demo.episodes import EpisodePlan, Player, advantages
from rose_daemon.demo.lake import ACTIONS, Lake, Move, Outcome, distances, read_move, reward
from rose_daemon.demo.ledger import CUT, FINISHED, Answer, Attempt, TurnLedger

# ---- lake ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("L", Move(0, 1.0)),
        ("xyD then R", Move(1, 1 / 3)),
        ("up? U", Move(3, 1 / 5)),
        ("left down right", None),
        ("", None),
    ],
)
def test_first_letter_decides(text: str, move: Move | None) -> None:
    found = read_move(text, [5, 6])
    if move is None:
        assert found.format_score == 0
        assert found.action in range(len(ACTIONS))
        assert found == read_move("other words", [5, 6])
    else:
        assert found == move


def test_answers_without_a_letter_still_move_everywhere() -> None:
    assert {read_move("", [token]).action for token in range(50)} == {0, 1, 2, 3}


def outcome(**fields: Any) -> Outcome:
    defaults: dict[str, Any] = {
        "distance_start": 6, "distance_end": 6, "distance_best": 6, "reached": False, "format_scores": (0.0,),
    }  # fmt: skip
    return Outcome(**defaults | fields)


def test_rewards_are_ordered_as_people_would() -> None:
    nothing = reward(outcome())
    wandered = reward(outcome(distance_best=3))
    stayed_there = reward(outcome(distance_best=3, distance_end=3))
    reached = reward(outcome(distance_best=0, distance_end=0, reached=True))
    polite = reward(outcome(format_scores=(1.0, 0.5)))
    assert nothing < polite < wandered < stayed_there < reached
    assert reached == pytest.approx(2.0)
    assert reward(outcome(distance_end=99)) == nothing, "a hole costs nothing beyond no progress"


def test_distances_go_around_holes() -> None:
    found = distances(["SH", "FG"])
    assert found == {(1, 1): 0, (1, 0): 1, (0, 0): 2}


def test_lakes_repeat_and_can_be_crossed() -> None:
    for seed in range(5):
        with Lake(seed) as lake, Lake(seed) as again:
            assert lake.rows == again.rows
            for _ in range(20):
                here = lake.outcome().distance_end
                if lake.done:
                    break
                lake.play(_best_move(seed, lake, here))
            final = lake.outcome()
            assert (final.reached, final.distance_end, final.distance_best) == (True, 0, 0)


def _best_move(seed: int, lake: Lake, distance: int) -> Move:
    ways = distances(lake.rows)
    _, y, _, x = lake.describe().split()
    for action, (dy, dx) in enumerate(((0, -1), (1, 0), (0, 1), (-1, 0))):
        if ways.get((int(y) + dy, int(x) + dx), 99) < distance:
            return Move(action, 1.0)
    raise AssertionError(seed)


def test_advantages_are_normalised_within_the_group() -> None:
    values = advantages([1.0, 2.0, 3.0])
    assert sum(values) == pytest.approx(0)
    assert values[2] == pytest.approx(1.2247, rel=1e-3)
    assert advantages([0.5, 0.5]) == [0.0, 0.0]


# ---- ledger -------------------------------------------------------------------------------------


def answer(turn_id: str, **fields: Any) -> Answer:
    defaults: dict[str, Any] = {
        "completion_id": f"chatcmpl-{turn_id}", "text": "L", "prompt_ids": (1,), "output_ids": (2, 3),
        "finish_reason": "length", "attempts": (Attempt("a", 2, FINISHED),), "weight_versions": ((0, 1, 4),),
    }  # fmt: skip
    return Answer(turn_id=turn_id, **defaults | fields)


def test_ledger_counts_a_clean_run() -> None:
    ledger = TurnLedger()
    ledger.ask("t1")
    ledger.ask("t2")
    ledger.answer("t1", answer("t1"), [4])
    moved = (Attempt("a", 1, CUT), Attempt("b", 5, FINISHED))
    ledger.answer("t2", answer("t2", attempts=moved), [4])
    ledger.replay("t1", answer("t1"))
    assert (ledger.lost, ledger.duplicated, ledger.aborted, ledger.replayed) == (0, 0, 1, 1)
    assert [one.turn_id for one in ledger.rerouted] == [one.turn_id for one in ledger.cut] == ["t2"]
    assert ledger.tokens_by_replica() == {"a": 3, "b": 5}
    assert ledger.turns_by_replica() == {"a": 1, "b": 1}
    assert ledger.faults == []


def test_a_turn_that_goes_on_at_its_own_replica_was_not_rerouted() -> None:
    ledger = TurnLedger()
    ledger.ask("t1")
    ledger.answer("t1", answer("t1", attempts=(Attempt("a", 1, CUT), Attempt("a", 5, FINISHED))), [4])
    assert (ledger.aborted, len(ledger.cut), ledger.rerouted) == (1, 1, [])


def test_ledger_counts_what_was_never_answered() -> None:
    ledger = TurnLedger()
    for turn in ("t1", "t2", "t3"):
        ledger.ask(turn)
    ledger.answer("t1", answer("t1"), [4])
    ledger.fail("t2", "HTTP 503")
    assert ledger.lost == 2
    assert ledger.faults == ["t2: HTTP 503"]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"completion_id": "chatcmpl-t0"}, "got the completion of t0"),
        (
            {"attempts": (Attempt("a", 1, FINISHED), Attempt("b", 1, FINISHED))},
            "ran ['finished', 'finished']",
        ),
        ({"attempts": (Attempt("a", 1, CUT),)}, "ran ['rose:kv_budget_cut']"),
    ],
)
def test_ledger_sees_turns_that_ran_twice(fields: dict[str, Any], fault: str) -> None:
    ledger = TurnLedger()
    ledger.ask("t0")
    ledger.answer("t0", answer("t0"), [4])
    ledger.ask("t1")
    ledger.answer("t1", answer("t1", **fields), [4])
    assert ledger.duplicated == 1
    assert ledger.faults == [f"t1: {fault}"]


def test_ledger_sees_swapped_answers_and_other_replays() -> None:
    ledger = TurnLedger()
    ledger.ask("t1")
    ledger.answer("t1", answer("t2"), [4])
    assert ledger.duplicated == 1
    ledger.ask("t3")
    ledger.answer("t3", answer("t3"), [4])
    ledger.replay("t3", answer("t3", output_ids=(9,)))
    assert ledger.duplicated == 2


def test_ledger_sees_stale_weights() -> None:
    ledger = TurnLedger()
    ledger.ask("t1")
    ledger.answer("t1", answer("t1"), [5])
    assert ledger.faults == ["t1: sampled from weight versions [4]"]


def test_turn_ids_are_used_once() -> None:
    ledger = TurnLedger()
    ledger.ask("t1")
    with pytest.raises(AssertionError):
        ledger.ask("t1")


# ---- episodes -----------------------------------------------------------------------------------

Reply = Callable[[dict[str, Any], str, int], dict[str, Any] | int]


def completion(body: dict[str, Any], turn_id: str, text: str, tokens: list[int]) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{turn_id}",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": text},
                "token_ids": tokens,
            }
        ],
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": len(tokens), "total_tokens": 2 + len(tokens)},
        "rose": {
            "turn_id": turn_id,
            "trajectory": "x",
            "attempts": [{"replica": "r0", "tokens": len(tokens), "end": "finished"}],
            "weight_versions": [[0, 1, 0]],
        },
    }


class Gateway:
    """Answers as `reply` says; the same turn id gets the same answer, as the real one does."""

    def __init__(self, reply: Reply) -> None:
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self._reply = reply
        self._done: dict[str, dict[str, Any]] = {}

    async def handle(self, request: web.Request) -> web.Response:
        body, turn_id = await request.json(), request.headers["x-rose-turn-id"]
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        if turn_id not in self._done:
            made = self._reply(body, turn_id, len(self.bodies))
            if isinstance(made, int):
                return web.json_response({"error": {"message": "no"}}, status=made)
            self._done[turn_id] = made
        return web.json_response(self._done[turn_id])


@pytest.fixture
async def start() -> AsyncIterator[Callable[[Gateway], Any]]:
    runners: list[web.AppRunner] = []

    async def start_gateway(gateway: Gateway) -> str:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", gateway.handle)
        runner = web.AppRunner(application)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start_gateway
    for runner in runners:
        await runner.cleanup()


PLAN = EpisodePlan(groups=2, group_size=3, turns_max=3, answer_tokens=4)


def player(url: str, ledger: TurnLedger, plan: EpisodePlan = PLAN) -> Player:
    return Player(url, "job-0", "rollout", plan, ledger, seed=3)


def varied(body: dict[str, Any], turn_id: str, count: int) -> dict[str, Any]:
    return completion(body, turn_id, "LDRU"[count % 4] + "x", [count, count + 1])


async def test_episodes_play_to_the_end_and_vary(start: Any) -> None:
    gateway, ledger = Gateway(varied), TurnLedger()
    playing = player(await start(gateway), ledger)
    groups = await playing.play_step(1, [0])
    await playing.close()
    assert len(groups) == 2
    assert playing.trajectories_finished >= sum(len(group.trajectories) for group in groups) == 6
    assert all(any(group.advantages) for group in groups)
    assert (ledger.lost, ledger.duplicated, ledger.replayed, ledger.faults) == (0, 0, 1, [])
    first = gateway.headers[0]
    assert first["x-rose-job"] == "job-0"
    assert first["x-rose-turn-id"] == f"{first['x-rose-trajectory']}-t0"
    assert first["x-rose-trajectory"].startswith(first["x-rose-group"])
    assert gateway.bodies[0]["return_token_ids"] is True
    longest = max(gateway.bodies, key=lambda body: len(body["messages"]))
    assert [message["role"] for message in longest["messages"]][:4] == ["system", "user", "assistant", "user"]


async def test_groups_without_variance_are_played_again_then_given_up(start: Any) -> None:
    def same(body: dict[str, Any], turn_id: str, _count: int) -> dict[str, Any]:
        return completion(body, turn_id, "R", [1])

    ledger = TurnLedger()
    playing = player(await start(Gateway(same)), ledger, EpisodePlan(groups=1, group_size=2, turns_max=1))
    (group,) = await playing.play_step(1, [0])
    await playing.close()
    assert group.resampled == 3
    assert group.advantages == (0.0, 0.0)
    assert ledger.asked == 8


async def test_lost_turns_end_their_episode_only(start: Any) -> None:
    def refuse_one(body: dict[str, Any], turn_id: str, count: int) -> dict[str, Any] | int:
        return 400 if turn_id == "s1-g0-e1-t0" else varied(body, turn_id, count)

    ledger = TurnLedger()
    playing = player(await start(Gateway(refuse_one)), ledger)
    groups = await playing.play_step(1, [0])
    await playing.close()
    assert (playing.trajectories_lost, ledger.lost) == (1, 1)
    assert "s1-g0-e1-t0" in ledger.failures
    assert len(groups) == 2


async def test_an_answer_without_token_ids_is_a_lost_turn(start: Any) -> None:
    def bare(body: dict[str, Any], turn_id: str, count: int) -> dict[str, Any]:
        made = varied(body, turn_id, count)
        del made["rose"]
        return made

    ledger = TurnLedger()
    playing = player(await start(Gateway(bare)), ledger)
    assert await playing.play_step(1, [0]) == []
    await playing.close()
    assert ledger.lost == ledger.asked == 6


async def test_a_replay_that_differs_is_counted(start: Any) -> None:
    class Forgetful(Gateway):
        async def handle(self, request: web.Request) -> web.Response:
            self._done.clear()
            return await super().handle(request)

    ledger = TurnLedger()
    playing = player(await start(Forgetful(varied)), ledger)
    await playing.play_step(1, [0])
    await playing.close()
    assert (ledger.replayed, ledger.duplicated) == (1, 1)
