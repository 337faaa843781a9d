"""Other ways to put rollout on serving GPUs, and serving alone."""

from __future__ import annotations

from typing import ClassVar

from rose_sim.hardware import ModelShape
from rose_sim.loop import ps
from rose_sim.serving import Choose, warm_first
from rose_sim.sharing import Sharing
from rose_sim.systems.base import System
from rose_sim.transfer import dense_relay_s


def load_s(model: ModelShape) -> float:
    """Loading a cached checkpoint: a line through ServerlessLLM's figures, 0.7 s (8B) and 1.3 s (32B)."""
    return 0.5 + 0.0122 * model.weight_bytes / 1e9


class _DenseToServing(System):
    """Systems without a delta path: every version goes to the serving cluster whole."""

    shares_serving = True

    def deliver(self, step: int, version: int) -> None:
        """Whole, through the relay."""
        super().deliver(step, version)
        delay = dense_relay_s(self.world.rollout_model, self.world.scenario.network)
        for replica in self.world.elastic:
            self.deliver_later(replica, version, ps(delay))


class ServerlessLlm(System):
    """The serving fleet alone, all models loaded: what users see without rollout."""

    name = "serverlessllm"
    source = "the paper's serving-only row"
    trains = False


class ServerlessLlmRollout(_DenseToServing):
    """ServerlessLLM with the rollout model as a second model: one model on a GPU at a time."""

    name = "serverlessllm+rollout"
    source = "ServerlessLLM (OSDI'24), combined with rollout in the paper"
    assumptions: ClassVar[tuple[str, ...]] = (
        "one request an engine, no keep-alive: the defaults of its autoscaler (sllm/cli/default_config.json)",
        "a load takes 0.7 s (8B) to 1.3 s (32B), its figures for checkpoints cached on an H100 host",
        "rollout requests that are evicted are prefilled anew elsewhere",
        "its router goes by where models are loaded, not by prefixes: no affinity between turns",
        "the dense model goes through the relay",
    )
    affinity = False
    keep_alive_s = 0.0

    def sharing(self, number: int) -> Sharing:
        """One model at a time."""
        world = self.world
        serving, rollout = (load_s(model) for model in (world.serving_model, world.rollout_model))
        return world.swapping_device(number, (ps(serving), ps(rollout)), ps(self.keep_alive_s))

    def choose(self) -> Choose:
        """Loaded engines first."""
        return warm_first


class Prism(_DenseToServing):
    """Prism: memory shared by pages, idle models evicted; rollout's compute is not held back for serving."""

    name = "prism"
    source = "Prism / kvcached (arXiv 2505.04021)"
    assumptions: ClassVar[tuple[str, ...]] = (
        "both models resident; steps take twice as long while both have work",
        "page mapping costs 13% of decode and 4% of prefill (its own measurement, 32 req/s on A100)",
        "a serving model without requests for 45 s is evicted, and loaded again as fast as by ServerlessLLM",
        "requests go to loaded engines first",
        "turns are independent requests to it: no affinity between the turns of a trajectory",
        "prompts are prefilled in steps of up to 8192 tokens, as its engines do for serving",
        "the dense model goes through the relay",
    )
    affinity = False
    idle_s = 45.0
    decode_factor = 1.13
    prefill_factor = 1.04

    def sharing(self, number: int) -> Sharing:
        """Both models resident."""
        world = self.world
        eviction = (ps(self.idle_s), ps(load_s(world.serving_model)))
        device = world.contending_device(number, step_tokens_max=8192, eviction=eviction)
        for engine in (device.serving, device.rollout):
            assert engine is not None
            engine.cost = engine.cost.scaled(prefill=self.prefill_factor, decode=self.decode_factor)
        return device

    def choose(self) -> Choose:
        """Loaded engines first."""
        return warm_first


class StaticPartition(_DenseToServing):
    """Half of the device for each, always."""

    name = "static"
    source = "the paper's static partition"
    assumptions: ClassVar[tuple[str, ...]] = (
        "half of the compute (steps take twice as long) and half of the KV memory for each",
    )

    def sharing(self, number: int) -> Sharing:
        """Half for each."""
        return self.world.static_device(number)


class Naive(_DenseToServing):
    """Co-location without any policy, but with chunked prefill and affinity."""

    name = "naive"
    source = "ours: what happens without a gate"

    def sharing(self, number: int) -> Sharing:
        """Nothing regulated."""
        return self.world.contending_device(number, step_tokens_max=2048)
