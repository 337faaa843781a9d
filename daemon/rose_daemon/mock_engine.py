"""A mock engine, for tests only: vLLM's HTTP surface and ROSE's endpoints and boards, without a model.

    python -m rose_daemon.mock_engine --port 8001 --served-model-name rollout

It takes vLLM's names of options and ignores those it has no use for, and reads the same ROSE_ENGINE_*
variables as the plugin, so that it can stand in wherever a test would start an engine.  Tests upset it
through /mock/v1/*: cut, stall, fail, die, latency.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rose.engines.vllm.settings import PluginSettings
from rose_daemon import mock_model
from rose_daemon.mock_boards import Boards
from rose_daemon.mock_cache import PrefixCache
from rose_daemon.mock_script import Reply, read_script
from rose_daemon.mock_shapes import Generation, Shaper, understand

_ABORT_CUT = "rose:kv_budget_cut"
_PREFILL_BOUND_S = 0.05
_PARAMETERS = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")


@dataclass
class MockState:
    """What a mock engine is and does; tests in the same process may change it at any time."""

    model: str = "rollout"
    name: str = "mock"
    role: str = "rollout"
    token: str = ""
    version: int = 0
    context_tokens_max: int = 2048
    token_ms: float = 2.0
    stalled: bool = False
    fail_status: int = 0
    """Answer the next `fail_count` generation requests with this status."""
    fail_count: int = 0
    requests: dict[str, Running] = field(default_factory=dict)
    served: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all generation requests, oldest first."""
    traceparents: list[str | None] = field(default_factory=list)
    """Their headers of that name."""
    tokens: int = 0
    prompt_tokens: int = 0
    prefills: int = 0
    prefill_s: float = 0
    """Seconds that the prefills so far took together."""
    aborted: int = 0
    obeys: bool = False
    """Obey the policy on its gate board, at once; the others never confirm one."""
    silent_s: float = 0.0
    """Time before a request is taken in, in which nothing is answered."""
    prefixes: PrefixCache = field(default_factory=PrefixCache)
    script: list[Reply] = field(default_factory=list)
    """What chats are answered with, in place of the model."""

    def root(self, body: dict[str, Any]) -> tuple[object, ...]:
        """What sets a request's prefixes apart, beside their tokens."""
        return (self.version, body.get("cache_salt"))

    def abort(self, reason: str | None, names: list[str] | None = None) -> int:
        """End requests in flight (all, or the named ones) as an abort; answers how many."""
        chosen = [run for name, run in self.requests.items() if names is None or name in names]
        for run in chosen:
            run.aborted = reason or ""
            run.woken.set()
        self.aborted += len(chosen)
        return len(chosen)


@dataclass
class Running:
    """One request in flight."""

    aborted: str | None = None
    """The stop reason it is to end with; "" for none."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)


def build_app(state: MockState) -> web.Application:
    """The engine as an aiohttp application."""
    handlers = _Handlers(state)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", handlers.health),
            web.get("/metrics", handlers.metrics),
            web.get("/v1/models", handlers.models),
            web.post("/v1/chat/completions", handlers.chat),
            web.post("/v1/completions", handlers.completion),
            web.post("/tokenize", handlers.tokenize),
            web.post("/detokenize", handlers.detokenize),
            web.get("/rose/v1/engine", handlers.guarded(handlers.engine)),
            web.post("/rose/v1/weights/update", handlers.guarded(handlers.update)),
            web.post("/rose/v1/weights/stage", handlers.guarded(handlers.stage)),
            web.post("/rose/v1/weights/apply", handlers.guarded(handlers.apply)),
            web.post("/rose/v1/weights/undo", handlers.guarded(handlers.undo)),
            web.post("/rose/v1/weights/settle", handlers.guarded(handlers.settle)),
            web.get("/rose/v1/weights/digests", handlers.guarded(handlers.digests)),
            web.post("/rose/v1/abort", handlers.guarded(handlers.abort)),
            web.post("/mock/v1/{what}", handlers.upset),
        ]
    )
    return app


class _Handlers:
    def __init__(self, state: MockState) -> None:
        self._state = state
        self._staged: int | None = None
        self._version_before: int | None = None

    # ---- vLLM's surface ----------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._state.model,
            "object": "model",
            "created": 0,
            "owned_by": "mock",
            "max_model_len": self._state.context_tokens_max,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, _: web.Request) -> web.Response:
        label = f'{{engine="0",model_name="{self._state.model}"}}'
        lines = [
            f"vllm:num_requests_running{label} {len(self._state.requests)}",
            f"vllm:num_requests_waiting{label} 0",
            f"vllm:kv_cache_usage_perc{label} 0.0",
            f"vllm:prompt_tokens_total{label} {self._state.prompt_tokens}",
            f"vllm:generation_tokens_total{label} {self._state.tokens}",
            f"vllm:request_prefill_time_seconds_sum{label} {self._state.prefill_s}",
            f"vllm:request_prefill_time_seconds_count{label} {self._state.prefills}",
            *(
                f'vllm:request_prefill_time_seconds_bucket{{le="{bound}",{label[1:]} {self._state.prefills}'
                for bound in (_PREFILL_BOUND_S, "+Inf")
            ),
        ]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def tokenize(self, http: web.Request) -> web.Response:
        body = await http.json()
        tokens = (
            mock_model.chat_prompt(body["messages"])
            if "messages" in body
            else mock_model.encode(body["prompt"])
        )
        return web.json_response(
            {"count": len(tokens), "max_model_len": self._state.context_tokens_max, "tokens": tokens}
        )

    async def detokenize(self, http: web.Request) -> web.Response:
        body = await http.json()
        return web.json_response({"prompt": mock_model.decode(body["tokens"])})

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, chat=True)

    async def completion(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, chat=False)

    async def _generate(self, http: web.Request, *, chat: bool) -> web.StreamResponse:
        state = self._state
        try:
            body = msgspec.json.decode(await http.read(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            return _error(400, f"Invalid JSON: {error}")
        if body.get("model") not in (None, state.model):
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        if state.fail_count > 0:
            state.fail_count -= 1
            return _error(state.fail_status, "asked to fail")
        understood = understand(chat, body, state.context_tokens_max, state.script)
        if isinstance(understood, str):
            return _error(400, understood)
        state.served.append(body)
        state.traceparents.append(http.headers.get("traceparent"))
        if state.silent_s:
            await asyncio.sleep(state.silent_s)
        base = http.headers.get("X-Request-Id") or uuid.uuid4().hex
        shown = f"chatcmpl-{base}" if chat else f"cmpl-{base}"
        name = shown if chat else f"{shown}-0"
        run = state.requests[name] = Running()
        try:
            shaper = Shaper(shown, state.model, understood)
            shaper.cached_tokens = state.prefixes.look_up(understood.prompts, state.root(body))
            if understood.stream:
                return await self._stream(http, understood, run, shaper)
            async for _ in self._sampled(understood, run, shaper):
                pass
            return web.json_response(shaper.whole())
        finally:
            del state.requests[name]

    async def _stream(
        self, http: web.Request, generation: Generation, run: Running, shaper: Shaper
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        async for chunk in self._sampled(generation, run, shaper):
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        if (generation.body.get("stream_options") or {}).get("include_usage"):
            await response.write(b"data: " + msgspec.json.encode(shaper.usage_chunk()) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _sampled(self, generation: Generation, run: Running, shaper: Shaper) -> Any:
        """Chunks, one a token.  Weights may change in between, as they do in an engine."""
        state = self._state
        if generation.chat:
            yield shaper.opening()
        state.prompt_tokens += sum(map(len, generation.prompts))
        began_s, first = time.monotonic(), True
        while running := [choice for choice in shaper.choices if choice.open]:
            await self._pause(run)
            if first:
                state.prefills, first = state.prefills + 1, False
                state.prefill_s += time.monotonic() - began_s
            for choice in running:
                if run.aborted is not None:
                    yield shaper.end(choice, "abort", run.aborted or None)
                    continue
                step = choice.sampler.step(state.version)
                state.tokens += 1
                yield shaper.token(choice, step)
                if not choice.open:
                    state.prefixes.keep(choice.prompt + choice.sampler.output, state.root(generation.body))

    async def _pause(self, run: Running) -> None:
        """The time of one token; for ever while stalled, until the request is aborted."""
        due_s = time.monotonic() + self._state.token_ms / 1000
        while run.aborted is None and (self._state.stalled or time.monotonic() < due_s):
            left_s = 0.02 if self._state.stalled else due_s - time.monotonic()
            try:
                async with asyncio.timeout(max(left_s, 0)):
                    await run.woken.wait()
            except TimeoutError:
                continue

    # ---- ROSE's endpoints --------------------------------------------------------------------------

    def guarded(
        self, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Ask for the engine's token, as the plugin does."""

        async def check(http: web.Request) -> web.Response:
            if not self._state.token or http.headers.get("Authorization") != f"Bearer {self._state.token}":
                return web.json_response({"error": "unauthorized", "detail": "send the token"}, status=401)
            return await handler(http)

        return check

    async def engine(self, _: web.Request) -> web.Response:
        state = self._state
        return web.json_response(
            {
                "role": state.role,
                "name": state.name,
                "model": state.model,
                "weight_version": state.version,
                "vllm_version": "mock",
                "rose_version": "mock",
                "kv_total_blocks": state.context_tokens_max // 2,
                "block_tokens": 32,
            }
        )

    async def update(self, http: web.Request) -> web.Response:
        answer = await self.stage(http)
        if answer.status == 200:
            body = await http.json()
            self._write(body["version"], abort=body.get("abort_in_flight", False))
            self._version_before = None
            ms = {"stage": 0.0, "pause": 0.0, "apply": 0.0, "total": 0.0}
            answer = web.json_response({"version": body["version"], "changed": 1, "ms": ms})
        return answer

    async def stage(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body["base_version"] != self._state.version:
            return web.json_response({"error": "wrong_base", "version_held": self._state.version}, status=409)
        try:
            manifest = Path(body["path"]) / "manifest.json"
            msgspec.json.decode(manifest.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            return web.json_response({"error": "corrupt_delta", "detail": str(error)}, status=422)
        self._staged = body["version"]
        return web.json_response({"version": body["version"], "changed": 1, "ms": {"stage": 0.0}})

    async def apply(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body["version"] != self._staged:
            return web.json_response({"error": "not_staged", "version_held": self._state.version}, status=409)
        self._write(body["version"], abort=body.get("abort_in_flight", False))
        ms = {"pause": 0.0, "apply": 0.0}
        return web.json_response({"version": body["version"], "changed": 1, "ms": ms})

    def _write(self, version: int, *, abort: bool) -> None:
        if abort:
            self._state.abort("rose:weight_update")
        self._version_before, self._staged = self._state.version, None
        self._state.version = version

    async def undo(self, _: web.Request) -> web.Response:
        if self._version_before is not None:
            self._state.version, self._version_before = self._version_before, None
        return web.json_response({"version_held": self._state.version})

    async def settle(self, _: web.Request) -> web.Response:
        self._version_before = None
        return web.json_response({"version_held": self._state.version})

    async def digests(self, _: web.Request) -> web.Response:
        version = self._state.version
        digests = {
            name: hashlib.blake2b(f"{name}@{version}".encode(), digest_size=16).hexdigest()
            for name in _PARAMETERS
        }
        return web.json_response({"version": version, "digests": digests})

    async def abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        asked = [str(name) for name in body.get("request_ids", ())]
        names = [name for each in asked for name in (each, f"chatcmpl-{each}", f"cmpl-{each}-0")]
        aborted = self._state.abort(None, None if body.get("all") else names)
        return web.json_response({"aborted": aborted})

    # ---- for tests ---------------------------------------------------------------------------------

    async def upset(self, http: web.Request) -> web.Response:
        """POST /mock/v1/{cut, stall, fail, die, latency, version}."""
        body = await http.json() if http.can_read_body else {}
        match http.match_info["what"]:
            case "cut":
                return web.json_response({"aborted": self._state.abort(_ABORT_CUT)})
            case "stall":
                self._state.stalled = bool(body.get("on", True))
            case "fail":
                self._state.fail_status, self._state.fail_count = body["status"], body["count"]
            case "latency":
                self._state.token_ms = float(body["token_ms"])
            case "version":
                self._state.version = int(body["version"])
            case "die":
                os._exit(1)
            case _:
                raise web.HTTPNotFound
        return web.json_response({})


def _error(status: int, text: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return web.json_response(
        {"error": {"message": text, "type": kind, "param": None, "code": status}}, status=status
    )


async def serve(state: MockState, host: str, port: int, settings: PluginSettings | None = None) -> None:
    """Serve until cancelled; prints `ready <port>` once it answers."""
    runner = web.AppRunner(build_app(state), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(f"ready {runner.addresses[0][1]}", flush=True)
    try:
        if settings is not None:
            await Boards(state, settings).run()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    """Command line: vLLM's options of these names, others are ignored."""
    parser = argparse.ArgumentParser(description="Mock engine, for tests only.", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--served-model-name", default="rollout")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--token-ms", type=float, default=2.0)
    parser.add_argument("--obey", action="store_true")
    parser.add_argument("--script", type=Path, help="JSON list of replies, see rose_daemon.mock_script")
    options, _ = parser.parse_known_args()
    settings = PluginSettings.from_environ()
    state = MockState(
        model=options.served_model_name,
        context_tokens_max=options.max_model_len,
        token_ms=options.token_ms,
        obeys=options.obey,
        name=settings.name if settings else "mock",
        role=settings.role if settings else "rollout",
        token=Path(settings.token_file).read_text().strip() if settings else "",
        script=read_script(options.script) if options.script else [],
    )
    try:
        asyncio.run(serve(state, options.host, options.port, settings))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
