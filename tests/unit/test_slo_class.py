"""Request classes: who may choose one, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.core.slo import SloBudgets
from rose.engines.vllm import slo_class
from rose.engines.vllm.launch import serving_command
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slo_class import HEADER, TOKEN_HEADER, SloClassMiddleware, budgets_of
from rose.errors import ConfigError
from rose.units import ms_to_ns

TOKEN = "front-end-secret"
CLASSES = "premium=100/30, batch=2000/200.5,small/premium=150/40,small/=300/60"


def settings(**more: Any) -> PluginSettings:
    given = {"role": "serving", "name": "s", "run_dir": "/r", "token_file": "/t", "slo_classes": CLASSES}
    return PluginSettings(**(given | more))


def budgets(ttft_ms: float, tpot_ms: float) -> SloBudgets:
    return SloBudgets(ms_to_ns(ttft_ms), ms_to_ns(tpot_ms))


def test_classes_come_from_the_environment() -> None:
    table = PluginSettings.from_environ(settings().to_environ())
    assert table is not None
    assert table.slo_table.budgets("premium") == budgets(100, 30)
    assert table.slo_table.budgets("batch") == budgets(2000, 200.5)
    assert table.slo_table.budgets("premium", "small") == budgets(150, 40)
    assert table.slo_table.budgets("", "small") == budgets(300, 60)
    assert table.slo_table.budgets("") == budgets(250, 60)
    assert settings(slo_classes="").slo_table.budgets("premium") == budgets(250, 60)


@pytest.mark.parametrize(
    "text",
    ["premium", "premium=100", "premium=100/", "premium=0/30", "premium=1.2.3/4", "=100/30", "a=1/1,,b=1/1",
     "a=100/30,a=200/30", "a b=100/30", "x/y/z=1/1", "premium=-1/30", "premium=nan/30", "premium=1e3/30"],
)  # fmt: skip
def test_senseless_classes_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)slo_classes"):
        _ = settings(slo_classes=text).slo_table


class Caller:
    """An HTTP client of an engine behind the middleware."""

    def __init__(self, middleware: Any) -> None:
        self.middleware = middleware
        self.seen: list[str] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(slo_class._class_of_this_request.get())

    async def asks(self, kind: str = "http", **headers: str) -> str:
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self.middleware({"type": kind, "method": "POST", "headers": pairs}, None, None)
        assert slo_class._class_of_this_request.get() == ""
        return self.seen.pop()


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caller:
    tokens = tmp_path / "front-end.token"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    for name, value in settings(slo_token_file=str(tokens)).to_environ().items():
        monkeypatch.setenv(name, value)
    caller = Caller(None)
    caller.middleware = SloClassMiddleware(caller.app)
    return caller


async def test_a_front_end_with_the_token_chooses_the_class(caller: Caller) -> None:
    assert await caller.asks(x_rose_slo_class="premium", x_rose_token=TOKEN) == "premium"
    assert await caller.asks(x_rose_slo_class="batch", authorization=f"bearer {TOKEN}") == "batch"
    with_key = {"authorization": "Bearer of-vllm", "x_rose_token": TOKEN}
    assert await caller.asks(x_rose_slo_class="premium", **with_key) == "premium"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x_rose_token": ""},
        {"x_rose_token": "guess"},
        {"authorization": "Bearer guess"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"authorization": f"Bearer {TOKEN}", "x_rose_token": "guess"},
    ],
)
async def test_nobody_else_does(caller: Caller, headers: dict[str, str]) -> None:
    assert await caller.asks(x_rose_slo_class="premium", **headers) == ""


@pytest.mark.parametrize("name", ["", "Premium", "gold", "small/premium", "small/", "premium ", "\xff"])
async def test_a_class_that_is_not_configured_is_none(caller: Caller, name: str) -> None:
    assert await caller.asks(x_rose_slo_class=name, x_rose_token=TOKEN) == ""


async def test_a_class_ends_with_its_request(caller: Caller) -> None:
    assert await caller.asks(x_rose_slo_class="premium", x_rose_token=TOKEN) == "premium"
    assert await caller.asks() == ""
    assert await caller.asks(kind="lifespan") == ""


def test_a_middleware_without_a_token_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings(token_file=str(tmp_path / "none")).to_environ().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="cannot be read"):
        SloClassMiddleware(None)


@pytest.mark.parametrize(
    ("headers", "adapter", "expected"),
    [
        (None, None, budgets(250, 60)),
        ({"traceparent": "00-1"}, None, budgets(250, 60)),
        ({HEADER: "premium"}, None, budgets(100, 30)),
        ({HEADER: "premium"}, "small", budgets(150, 40)),
        ({HEADER: "premium"}, "other", budgets(100, 30)),
        (None, "small", budgets(300, 60)),
    ],
)
def test_budgets_of_a_request_of_the_scheduler(headers: Any, adapter: Any, expected: SloBudgets) -> None:
    lora = None if adapter is None else SimpleNamespace(lora_name=adapter)
    request = SimpleNamespace(trace_headers=headers, lora_request=lora)
    assert budgets_of(request, settings().slo_table) == expected


def test_an_engine_with_classes_gets_the_middleware_and_others_do_not() -> None:
    given: dict[str, Any] = {"model": "/m", "port": 1, "run_dir": "/r", "token_file": "/t"}
    plain = serving_command(**given)
    assert "--middleware" not in plain.argv
    classes = serving_command(**given, slo_classes=CLASSES, slo_token_file="/f")
    assert classes.argv[classes.argv.index("--middleware") + 1].endswith("slo_class.SloClassMiddleware")
    assert classes.env["ROSE_ENGINE_SLO_CLASSES"] == CLASSES
    assert classes.env["ROSE_ENGINE_SLO_TOKEN_FILE"] == "/f"
    assert TOKEN_HEADER == "x-rose-token"
