"""A mock SGLang server: what the gateway uses of one, after SGLang's documentation."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from rose_daemon import mock_model
from rose_daemon.mock_sampling import Sampler

_SAMPLING = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


@dataclass
class SglangState:
    """What it is and does."""

    model: str = "rollout"
    weight_version: str = "default"
    token_ms: float = 1.0
    incremental: bool = False
    """Streams what is new, not everything so far (`--incremental-streaming-output`)."""
    healthy: bool = True
    served: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    flushed: int = 0
    abort: bool = False


class SglangEngine:
    """The server, in this process."""

    def __init__(self, state: SglangState) -> None:
        self.state = state
        self.url = ""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/model_info", self._info),
                web.post("/generate", self._generate),
                web.post("/v1/chat/completions", self._chat),
                web.post("/flush_cache", self._flush),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)

    async def start(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.state.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.state.model, "object": "model", "max_model_len": 2048}
        return web.json_response({"object": "list", "data": [card]})

    async def _info(self, _: web.Request) -> web.Response:
        info = {"model_path": "/models/x", "is_generation": True, "weight_version": self.state.weight_version}
        return web.json_response(info)

    async def _flush(self, _: web.Request) -> web.Response:
        self.state.flushed += 1
        return web.Response(text="Cache flushed.\n")

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.state.served.append(body)
        params = body.get("sampling_params") or {}
        if params.get("temperature", 0) < 0:
            error = {"error": {"message": "temperature must be non-negative, got -1."}}
            return web.json_response(error, status=400)
        prompt = body["input_ids"] if "input_ids" in body else mock_model.encode(body["text"])
        options = {_SAMPLING.get(name, name): value for name, value in params.items()}
        sampler = Sampler(prompt, options, 0, params["max_new_tokens"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        text, logprobs, tops, reason, shown = "", [], [], None, (0, 0)
        self.state.running += 1
        try:
            while reason is None:
                await asyncio.sleep(self.state.token_ms / 1000)
                if self.state.abort:
                    self.state.abort = False
                    reason = {"type": "abort", "message": "Abort in the scheduler"}
                else:
                    step = sampler.step(0)
                    text += step.text
                    sampled, second = step.sample.token, step.sample.second
                    names = [mock_model.decode([token]) for token in (sampled, second)]
                    logprobs.append([step.sample.logprob, sampled, names[0]])
                    best = [step.sample.second_logprob, second, names[1]]
                    tops.append([logprobs[-1], best])
                    if step.finish_reason == "length":
                        reason = {"type": "length", "length": len(sampler.output)}
                    elif step.finish_reason == "stop":
                        matched = sampled if step.stop_reason is None else step.stop_reason
                        reason = {"type": "stop", "matched": matched}
                meta: dict[str, Any] = {
                    "id": "x", "finish_reason": reason, "prompt_tokens": len(prompt), "cached_tokens": 3,
                    "completion_tokens": len(sampler.output), "weight_version": self.state.weight_version,
                }  # fmt: skip
                characters, tokens = shown if self.state.incremental else (0, 0)
                if body.get("return_logprob"):
                    meta["output_token_logprobs"] = logprobs[tokens:]
                    meta["output_top_logprobs"] = [top[: body["top_logprobs_num"]] for top in tops[tokens:]]
                chunk = {"text": text[characters:], "output_ids": sampler.output[tokens:], "meta_info": meta}
                shown = (len(text), len(sampler.output))
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.state.running -= 1
        return response

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        """Its OpenAI API: it shows no token ids, and as 0.5.23 refuses to stream where they are asked for."""
        body = await http.json()
        if body.get("stream") and body.get("return_token_ids"):
            text = "return_token_ids is not supported with streaming on /v1/chat/completions."
            return web.json_response({"object": "error", "message": text, "code": 400}, status=400)
        self.state.served.append(body)
        prompt = mock_model.chat_prompt(body["messages"])
        sampler = Sampler(prompt, body, 0, body["max_tokens"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        reason, delta = None, {"role": "assistant", "content": ""}
        while True:
            choice = {"index": 0, "delta": delta, "finish_reason": reason, "matched_stop": None}
            await response.write(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n")
            if reason is not None:
                break
            await asyncio.sleep(self.state.token_ms / 1000)
            step = sampler.step(0)
            reason, delta = step.finish_reason, {"content": step.text}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampler.output)}
        usage["total_tokens"] = sum(usage.values())
        await response.write(
            b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n"
        )
        await response.write(b"data: [DONE]\n\n")
        return response
