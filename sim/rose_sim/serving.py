"""The serving fleet: requests of a trace, spread over the serving engines, and what their users saw."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rose.errors import ConfigError
from rose.traces import Trace
from rose_sim.loop import PS_PER_MS, PS_PER_NS, Loop
from rose_sim.sharing import Sharing
from rose_sim.steps import Request

API_PS = 15_600_000_000
"""Time a request spends in the API server, half before the engine and half after (BLIS: 15.6 ms)."""

Choose = Callable[[list[Sharing], int], Sharing]
"""(devices, number of the request) -> the device that takes it."""


def least_loaded(devices: list[Sharing], number: int) -> Sharing:
    """The engine with the fewest requests; equal ones take turns."""
    count = len(devices)
    best = devices[number % count]
    least = best.serving.load
    for offset in range(1, count):
        if not least:
            break
        device = devices[(number + offset) % count]
        if (load := device.serving.load) < least:
            best, least = device, load
    return best


def warm_first(devices: list[Sharing], number: int) -> Sharing:
    """One request an engine: a loaded engine without one, else a cold one, else the least loaded.

    ServerlessLLM's default autoscaling (concurrency, target 1; sllm/cli/default_config.json).
    """
    cold = None
    for device in devices:
        if device.serving.load == 0:
            if device.loaded():
                return device
            cold = cold or device
    return cold or least_loaded(devices, number)


class ServingLoad:
    """Replays a trace against the devices, again after every `period_ps`, and records TTFT and TPOT."""

    def __init__(
        self, loop: Loop, devices: list[Sharing], trace: Trace, choose: Choose, period_ps: int
    ) -> None:
        self.loop = loop
        self.devices = devices
        self.ttft_ms = array("d")
        self.tpot_ms = array("d")
        self.arrived = 0
        self._choose = choose
        self._at_ps: list[int] = (trace.at_ns * PS_PER_NS).tolist()
        self._prompts = np.maximum(1, trace.prompt_tokens).tolist()
        self._outputs = np.maximum(1, trace.output_tokens).tolist()
        self._period_ps = period_ps
        self.answered: Callable[[int, float, float], None] | None = None
        """Told of each complete answer: when its request came (ps), TTFT and TPOT in ms (0: of one token)."""
        self._owner: dict[int, tuple[Sharing, int]] = {}
        """Of requests in flight: their device and when they came."""
        self._next()

    def _next(self) -> None:
        self.loop.at(self._came_ps(self.arrived) + API_PS // 2, self._arrive)

    def _came_ps(self, number: int) -> int:
        turn, index = divmod(number, len(self._at_ps))
        return turn * self._period_ps + self._at_ps[index]

    def _arrive(self, _now_ps: int, _: object) -> None:
        number = self.arrived
        self.arrived += 1
        index = number % len(self._at_ps)
        request = Request(self._prompts[index], self._outputs[index], owner=number)
        self._send(request, self.devices, self._came_ps(number))
        self._next()

    def _send(self, request: Request, devices: list[Sharing], came_ps: int) -> None:
        number: int = request.owner
        device = self._choose(devices, number)
        self._owner[number] = (device, came_ps)
        device.arriving(request)
        if not device.serving.submit(request):
            tokens = max(0, device.serving.kv.capacity)
            raise ConfigError(
                f"a serving request of {request.prompt} + {request.output} tokens fits no engine:"
                f" its KV memory holds {tokens} tokens",
                "take a GPU with more memory, more GPUs an engine (tp), other models, or shorter requests",
            )
        device.arrived(request)

    def first_token(self, request: Request, now_ps: int) -> None:
        """For the engines: a first token."""
        number: int = request.owner
        device, came_ps = self._owner[number]
        self.ttft_ms.append((now_ps + API_PS // 2 - came_ps) / PS_PER_MS)
        device.first_token(request)

    def finished(self, request: Request, now_ps: int) -> None:
        """For the engines: a complete answer."""
        number: int = request.owner
        device, came_ps = self._owner.pop(number)
        tpot_ms = 0.0
        if request.output > 1:
            tpot_ms = (now_ps - request.first_ps) / (request.output - 1) / PS_PER_MS
            self.tpot_ms.append(tpot_ms)
        if self.answered is not None:
            self.answered(came_ps, (request.first_ps + API_PS // 2 - came_ps) / PS_PER_MS, tpot_ms)
        device.finished(request)

    @property
    def in_flight(self) -> int:
        """Requests not complete yet."""
        return len(self._owner)


class HandOver(NamedTuple):
    """What is left of a request after its prefill."""

    rest: Request
    came_ps: int


class DisaggregatedLoad(ServingLoad):
    """The same with prefill and decode on engines of their own (the paper's serving cluster).

    A prefill engine gives the first token; the KV of the prompt then goes over the wire, and a decode engine
    gives the rest.  TPOT contains that hand-over.
    """

    def __init__(
        self,
        loop: Loop,
        devices: list[Sharing],
        trace: Trace,
        choose: Choose,
        period_ps: int,
        *,
        prefilling: int,
        token_ps: int,
    ) -> None:
        """The first `prefilling` devices prefill; handing a token's KV over takes `token_ps`."""
        self._prefillers, self._decoders = devices[:prefilling], devices[prefilling:]
        self._token_ps = token_ps
        self._firsts_ps: dict[int, int] = {}
        """When requests that were prefilled got their first token."""
        self._tokens: dict[int, int] = {}
        super().__init__(loop, devices, trace, choose, period_ps)

    def _send(self, request: Request, devices: list[Sharing], came_ps: int) -> None:
        assert isinstance(request.owner, int)
        self._tokens[request.owner] = request.output
        prefill = Request(request.prompt, 1, owner=request.owner)
        super()._send(prefill, self._prefillers, came_ps)

    def first_token(self, request: Request, now_ps: int) -> None:
        """For the engines: a first token, or the first of a decode engine."""
        assert isinstance(request.owner, int)
        if request.owner in self._firsts_ps:
            self._owner[request.owner][0].first_token(request)
        else:
            self._firsts_ps[request.owner] = now_ps
            super().first_token(request, now_ps)

    def finished(self, request: Request, now_ps: int) -> None:
        """For the engines: a prefill or an answer is complete."""
        number: int = request.owner
        device, came_ps = self._owner[number]
        device.finished(request)
        output = self._tokens[number]
        if request.kept == 0 and output > 1:
            # The first token is part of what the decode engine reads; its KV is the one to be computed.
            rest = Request(request.prompt + 1, output - 1, owner=number)
            rest.kept = request.prompt
            self.loop.after(request.prompt * self._token_ps, self._handed_over, HandOver(rest, came_ps))
            return
        if output > 1:
            self.tpot_ms.append((now_ps - self._firsts_ps[number]) / (output - 1) / PS_PER_MS)
        del self._owner[number], self._firsts_ps[number], self._tokens[number]

    def _handed_over(self, _now_ps: int, handed: HandOver) -> None:
        super()._send(handed.rest, self._decoders, handed.came_ps)
