"""vLLM's own schedulers driven without a device: real bookkeeping of real requests, made-up tokens.

For timing and testing what our schedulers add to a step.  Importing it takes seconds, as it imports vLLM.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rose.engines.vllm.settings import PluginSettings

BLOCK_TOKENS = 32
_TOKEN = 5
_CONTEXT_TOKENS_MAX = 2048


class Cost(NamedTuple):
    """Time of the thread that schedules, in nanoseconds."""

    wall_ns: int
    cpu_ns: int
    """Without waiting for a core."""


class StepCost(NamedTuple):
    """What one step cost."""

    vllm: Cost
    """vLLM's own scheduling."""
    on_step: Cost
    """What the plugin added before the device was given the step, and after it gave the tokens."""
    deferred: Cost
    """What it did while the device worked."""


class TimedScheduler(Scheduler):
    """vLLM's scheduler, which tells how long it took itself: goes after one of our mixins among the bases.

    With `again` set it does nothing but repeat that step, so that only the mixin's part remains.
    """

    again: tuple[Any, Any] | None = None
    own_wall_ns = own_cpu_ns = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As vLLM."""
        cpu_ns, wall_ns = time.thread_time_ns(), time.monotonic_ns()
        output = self.again[0] if self.again else super().schedule(throttle_prefills)
        self.own_wall_ns += time.monotonic_ns() - wall_ns
        self.own_cpu_ns += time.thread_time_ns() - cpu_ns
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM."""
        cpu_ns, wall_ns = time.thread_time_ns(), time.monotonic_ns()
        if self.again:
            outputs = self.again[1]
        else:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.own_wall_ns += time.monotonic_ns() - wall_ns
        self.own_cpu_ns += time.thread_time_ns() - cpu_ns
        return outputs


class StepLoop:
    """One scheduler, called as vLLM's core loop calls it, with `in_flight_max` steps given out at a time.

    `settings` are what the plugin in it finds in its environment, `config` a VllmConfig to share between
    loops (`engine_config`).
    """

    def __init__(
        self,
        scheduler_cls: type[Any],
        config: Any,
        settings: PluginSettings | None = None,
        *,
        in_flight_max: int = 1,
    ) -> None:
        spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=1024, dtype=torch.float32)
        blocks, page = config.cache_config.num_gpu_blocks, spec.page_size_bytes
        cache = KVCacheTensor(blocks * page, ["layer"], layer_stride=blocks * page, block_stride=page)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        with _environment(settings.to_environ() if settings is not None else {}):
            self.scheduler = scheduler_cls(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(
                    num_blocks=blocks,
                    kv_cache_tensors=[cache],
                    kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
                ),
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_TOKENS,
                hash_block_size=BLOCK_TOKENS,
                log_stats=False,
            )
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self._in_flight_max = in_flight_max
        self.device: Callable[[], None] = lambda: None
        """Called while the device is at work: sleep here to let it take its time."""
        self.tokens: dict[str, int] = {}
        """Tokens that each request was given so far."""

    def add(
        self,
        request_id: str,
        prompt: list[int],
        tokens_max: int,
        trace_headers: dict[str, str] | None = None,
    ) -> None:
        """A request arrives."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=tokens_max, temperature=0, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            trace_headers=trace_headers,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def step(self) -> Any:
        """Schedule a step and, once as many are in flight as may be, end the oldest; answers its outputs."""
        output = self.scheduler.schedule()
        self.scheduler.get_grammar_bitmask(output)
        self.in_flight.append((output, self._result(output)))
        self.device()
        if len(self.in_flight) < self._in_flight_max and output.total_num_scheduled_tokens:
            return {}
        return self.end_oldest()

    def timed_step(self) -> StepCost:
        """A step of a TimedScheduler, one at a time."""
        scheduler, wall, cpu = self.scheduler, time.monotonic_ns, time.thread_time_ns
        scheduler.own_wall_ns = scheduler.own_cpu_ns = 0
        began = wall(), cpu()
        output = scheduler.schedule()
        given = cpu(), wall()
        scheduler.get_grammar_bitmask(output)
        settled = cpu(), wall()
        result = self._result(output)
        self.device()
        answered = wall(), cpu()
        scheduler.update_from_output(output, result)
        ended = cpu(), wall()
        own = Cost(scheduler.own_wall_ns, scheduler.own_cpu_ns)
        spent_wall_ns = given[1] - began[0] + ended[1] - answered[0]
        spent_cpu_ns = given[0] - began[1] + ended[0] - answered[1]
        return StepCost(
            own,
            Cost(spent_wall_ns - own.wall_ns, spent_cpu_ns - own.cpu_ns),
            Cost(settled[1] - given[1], settled[0] - given[0]),
        )

    def repeat_one_step(self) -> None:
        """Have a TimedScheduler repeat a step from now on."""
        output = self.scheduler.schedule()
        self.scheduler.get_grammar_bitmask(output)
        self.scheduler.again = output, self.scheduler.update_from_output(output, self._result(output))

    def end_oldest(self) -> Any:
        """The oldest step in flight gives a token to each of its requests whose prompt is done."""
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        for client_outputs in outputs.values():
            for each in client_outputs.outputs:
                self.tokens[each.request_id] = self.tokens.get(each.request_id, 0) + len(each.new_token_ids)
        return outputs

    def _result(self, output: Any) -> Any:
        """What the device will answer; asked before the next step is scheduled."""
        ids = list(output.num_scheduled_tokens)
        sampled = [[_TOKEN] if self._samples(each) else [] for each in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def _samples(self, request_id: str) -> bool:
        request = self.scheduler.requests.get(request_id)
        return request is not None and not request.is_prefill_chunk


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables besides those there are."""
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def engine_config(
    model: Path, *, sequences_max: int = 64, kv_blocks: int = 4200, asynchronous: bool = False
) -> Any:
    """A VllmConfig for `StepLoop`, of a checkpoint directory whose weights are never read."""
    init_none_hash(sha256)
    config = EngineArgs(
        model=str(model),
        enforce_eager=True,
        max_model_len=_CONTEXT_TOKENS_MAX,
        block_size=BLOCK_TOKENS,
        max_num_seqs=sequences_max,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=kv_blocks,
        enable_prefix_caching=True,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = kv_blocks
    config.scheduler_config.async_scheduling = asynchronous
    return config
