"""The serving fleet: requests of a trace, spread over the serving engines, and what their users saw."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

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
    for offset in range(1, count):
        if not best.serving.load:
            break
        device = devices[(number + offset) % count]
        if device.serving.load < best.serving.load:
            best = device
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
        device = self._choose(self.devices, number)
        self._owner[number] = (device, self._came_ps(number))
        device.arriving(request)
        if not device.serving.submit(request):
            raise AssertionError(
                f"serving request of {request.prompt} + {request.output} tokens fits nowhere"
            )
        device.arrived(request)
        self._next()

    def first_token(self, request: Request, now_ps: int) -> None:
        """For the engines: a first token."""
        number = request.owner
        assert isinstance(number, int)
        device, came_ps = self._owner[number]
        self.ttft_ms.append((now_ps + API_PS // 2 - came_ps) / PS_PER_MS)
        device.first_token(request)

    def finished(self, request: Request, now_ps: int) -> None:
        """For the engines: a complete answer."""
        number = request.owner
        assert isinstance(number, int)
        if request.output > 1:
            self.tpot_ms.append((now_ps - request.first_ps) / (request.output - 1) / PS_PER_MS)
        self._owner.pop(number)[0].finished(request)

    @property
    def in_flight(self) -> int:
        """Requests not complete yet."""
        return len(self._owner)
