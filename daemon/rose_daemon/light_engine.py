"""A light engine: the plugin's live weights over a plain torch module, behind the endpoints of an engine.

    python -m rose_daemon.light_engine --model CHECKPOINT --port N        (ROSE_ENGINE_* as for a real engine)

It starts in a second or two and runs the code that a vLLM worker runs for an update, but generates nothing.
For tests, and for `rose bench link`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from rose.engines.live import LiveWeights, Staged
from rose.engines.vllm.settings import PluginSettings
from rose.errors import CorruptDelta, WrongBase
from rose.weights.bits import Bits, State
from rose.weights.checkpoint import open_checkpoint

_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def module_of(state: State) -> torch.nn.Module:
    """A module tree whose parameters have these names and bits."""
    root = torch.nn.Module()
    for name, bits in state.items():
        owner = root
        *path, leaf = name.split(".")
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, torch.nn.Parameter(_tensor(bits), requires_grad=False))
    return root


def _tensor(bits: Bits) -> torch.Tensor:
    words = torch.from_numpy(bits.words.copy().view(f"<i{bits.words.itemsize}"))
    return words.view(_TORCH[bits.dtype]).reshape(bits.shape)


class LightEngine:
    """The endpoints."""

    _staged: Staged

    def __init__(self, settings: PluginSettings, model: Path) -> None:
        self._settings = settings
        state = open_checkpoint(model).state
        self._live = LiveWeights(module_of(state), version=settings.weight_version)

    async def engine(self, _: web.Request) -> web.Response:
        """What runs here."""
        return web.json_response(
            {
                "role": "rollout",
                "name": self._settings.name,
                "weight_version": self._live.version,
                "pid": os.getpid(),
                "started_from": self._settings.weight_version,
            }
        )

    async def update(self, request: web.Request) -> web.Response:
        """Stage a version and apply it."""
        body = await request.json()
        began = time.monotonic()
        if refusal := self._stage(body):
            return refusal
        answer = self._apply()
        self._live.settle()
        ms = {"stage": self._staged.stage_ms, **answer["ms"], "total": (time.monotonic() - began) * 1e3}
        return web.json_response({**answer, "ms": ms})

    async def stage(self, request: web.Request) -> web.Response:
        """Stage a version."""
        if refusal := self._stage(await request.json()):
            return refusal
        ms = {"stage": self._staged.stage_ms}
        return web.json_response({"version": self._staged.version, "changed": self._staged.changed, "ms": ms})

    async def apply(self, _: web.Request) -> web.Response:
        """Apply what is staged."""
        return web.json_response(self._apply())

    async def undo(self, _: web.Request) -> web.Response:
        """Take back what was applied."""
        return web.json_response(self._live.undo_applied())

    async def settle(self, _: web.Request) -> web.Response:
        """Let go of the way back."""
        return web.json_response(self._live.discard())

    def _stage(self, body: dict[str, Any]) -> web.Response | None:
        """Stage it, or answer the refusal."""
        try:
            self._live.settle()
            self._staged = self._live.stage(Path(body["path"]), body["version"], body["base_version"])
        except (WrongBase, CorruptDelta) as error:
            code, status = ("wrong_base", 409) if isinstance(error, WrongBase) else ("corrupt_delta", 422)
            return web.json_response(
                {"error": code, "detail": error.what, "version_held": self._live.version}, status=status
            )
        return None

    def _apply(self) -> dict[str, Any]:
        applying = time.monotonic()
        self._live.apply(self._staged)
        ms = (time.monotonic() - applying) * 1e3
        staged = self._staged
        return {"version": staged.version, "changed": staged.changed, "ms": {"pause": ms, "apply": ms}}

    async def digests(self, _: web.Request) -> web.Response:
        """Digests of the live parameters."""
        return web.json_response(self._live.digests())


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = LightEngine(PluginSettings.require("rollout"), arguments.model)
    application: Any = web.Application()
    application.router.add_get("/health", _healthy)
    application.router.add_get("/rose/v1/engine", engine.engine)
    for call in (engine.update, engine.stage, engine.apply, engine.undo, engine.settle):
        application.router.add_post(f"/rose/v1/weights/{call.__name__}", call)
    application.router.add_get("/rose/v1/weights/digests", engine.digests)
    web.run_app(application, host="127.0.0.1", port=arguments.port, print=None)


if __name__ == "__main__":
    main()
