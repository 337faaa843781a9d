"""One rollout engine in this process, put through everything its scheduler must survive.

Run by tests/integration/test_engine_rollout.py as `python rollout_engine.py MODEL RUN_DIR sync|async`; prints
one JSON object of facts.  A process of its own, as vLLM changes global state of the one it runs in.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

MODEL, RUN_DIR, SCHEDULING = sys.argv[1:4]
BLOCKS, BLOCK_TOKENS = 129, 32

from rose.engines.vllm.settings import PluginSettings  # noqa: E402

SETTINGS = PluginSettings(role="rollout", name="r0", run_dir=RUN_DIR, token_file="")
os.environ |= SETTINGS.to_environ() | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "rose",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams  # noqa: E402

from rose.boards import BoardReader, BoardWriter  # noqa: E402
from rose.core.readings import GateMode, GatePolicy, ReplicaReading, Unknown  # noqa: E402

if SCHEDULING == "async":
    # CPU platforms switch asynchronous scheduling off, though it works: GPUs have it on.
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config.__func__

    def keep_async(cls: Any, config: Any) -> None:
        checked(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keep_async)


class Rosed:
    """Stands in for rosed: sets the policy."""

    def __init__(self) -> None:
        self.writer = BoardWriter(SETTINGS.boards.gate("r0"), GatePolicy)
        self.policy = GatePolicy(0, GateMode.OPEN, 0, 0, 0, 0, 250_000_000, 60_000_000, 5_000_000)

    def set(self, **changes: int) -> None:
        changes = {"revision": self.policy.revision + 1} | changes
        self.policy = self.policy._replace(**changes, alive_until_ns=time.monotonic_ns() + 50_000_000_000)
        self.writer.publish(self.policy)
        self.writer.bell.ring()


rosed = Rosed()
rosed.set()
llm = LLM(
    model=MODEL,
    enforce_eager=True,
    max_model_len=1024,
    block_size=BLOCK_TOKENS,
    max_num_seqs=16,
    num_gpu_blocks_override=BLOCKS,
    kv_cache_memory_bytes=64 << 20,
    max_num_batched_tokens=512,
    enable_prefix_caching=True,
    scheduler_cls="rose.engines.vllm.rollout_scheduler.Rollout"
    + ("AsyncScheduler" if SCHEDULING == "async" else "Scheduler"),
    worker_cls="rose.engines.vllm.cpu_worker.RoseCPUWorker",
    weight_transfer_config={"backend": "rose"},
)
core = llm.llm_engine.engine_core.engine_core
scheduler = core.scheduler
pool = scheduler.kv_cache_manager.block_pool
GREEDY = SamplingParams(max_tokens=160, temperature=0, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [9 + i, 30 + i, 3, 4]} for i in range(8)]
facts: dict[str, Any] = {"scheduler": type(scheduler).__name__, "batch_queue": core.batch_queue_size}


def reading() -> ReplicaReading:
    record = BoardReader(SETTINGS.boards.replica("r0"), ReplicaReading).read()
    assert not isinstance(record, Unknown), record
    return record


def generate(prompts: list[Any] = PROMPTS, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, sampling, use_tqdm=False)]


def run(between: Any = None, tokens: int = 160) -> dict[int, dict[str, Any]]:
    """All prompts step by step; `between(step)` may interfere.  Outcome by prompt."""
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        llm.llm_engine.add_request(str(index), prompt, sampling)
    outcome: dict[int, dict[str, Any]] = {}
    step = 0
    while llm.llm_engine.has_unfinished_requests():
        for out in llm.llm_engine.step():
            if out.finished:
                completion = out.outputs[0]
                outcome[int(out.request_id.split("-")[0])] = {
                    "finish": completion.finish_reason,
                    "stop": completion.stop_reason,
                    "tokens": list(completion.token_ids),
                }
        step += 1
        if between is not None:
            between(step)
    return outcome


def held() -> list[int]:
    """Blocks that each request holds, ascending."""
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    return sorted(len(blocks) for blocks in manager.req_to_blocks.values())


reference = generate()
facts["distinct"] = [len(set(tokens)) for tokens in reference]

# A small cap: fewer tokens than requests.
rosed.set(token_cap=3)
facts["cap_identical"] = generate() == reference
rosed.set(token_cap=0)

# A gate that flaps.
before = reading()
stop = threading.Event()


def flap() -> None:
    while not stop.is_set():
        rosed.set(mode=GateMode.CLOSED)
        time.sleep(0.01)
        rosed.set(mode=GateMode.OPEN)
        time.sleep(0.01)


thread = threading.Thread(target=flap)
thread.start()
facts["flap_identical"] = generate() == reference
stop.set()
thread.join()
after = reading()
facts["flap"] = {
    "transitions": after.gate_transitions - before.gate_transitions,
    "empty_steps": after.empty_steps - before.empty_steps,
    "closed_ns": after.closed_ns - before.closed_ns,
}

# Closed: nothing runs; opened: it goes on where it was.
rosed.set(mode=GateMode.CLOSED)
closed_at: dict[str, int] = {}


def open_later(step: int) -> None:
    if step == 5:
        closed_at["tokens"] = reading().tokens
    if step == 10:
        facts["closed_scheduled_tokens"] = reading().tokens - closed_at["tokens"]
        rosed.set(mode=GateMode.OPEN)


outcome = run(open_later)
facts["closed_then_open_identical"] = [outcome[i]["tokens"] for i in range(8)] == reference

# A KV cut in mid-generation: as many as it takes end with what they have, the others go on.
scheduler.reset_prefix_cache()
cut: dict[str, int] = {}


def settled(seconds: float = 5) -> None:
    """Until the worker gave back the memory of what is parked."""
    deadline = time.monotonic() + seconds
    while not scheduler._rose_elastic.memory.settled and time.monotonic() < deadline:
        time.sleep(0.01)
        scheduler._rose_elastic.look(time.monotonic_ns())


def measured(seconds: float = 5) -> None:
    """Until the worker's figures are from after this call: it measures by its own clock, not every step."""
    memory, asked_ns = scheduler._rose_elastic.memory, time.monotonic_ns()
    deadline = time.monotonic() + seconds
    while memory.holding.stamp_ns < asked_ns and time.monotonic() < deadline:
        time.sleep(0.01)
        scheduler._rose_elastic.look(time.monotonic_ns())
    assert memory.holding.stamp_ns >= asked_ns, "the worker measured nothing"


def cut_at_130(step: int) -> None:
    if step == 128:
        measured()
    if step == 130:
        cut["blocks"] = sum(held()) - held()[-1] - held()[-2] - 1  # three victims at least
        cut["resident_before"] = reading().kv_resident_bytes
        cut["revision"] = rosed.policy.revision + 1
        rosed.set(kv_budget_blocks=cut["blocks"])
    if step == 132:
        settled()
    if step == 133:
        cut["held_after"] = sum(held())
        cut["in_use_bytes"] = scheduler._rose_elastic.memory.holding.mapped_bytes
        cut["resident_after"] = reading().kv_resident_bytes
        cut["reported_revision"] = reading().policy_revision
        cut["reported_budget"] = reading().kv_budget_blocks
        cut["limit_status"] = reading().limit_status


outcome = run(cut_at_130, tokens=148)  # survivors need no more blocks than they have
facts["cut"] = cut
facts["cut_outcome"] = [
    {
        "finish": outcome[i]["finish"],
        "stop": outcome[i]["stop"],
        "count": len(outcome[i]["tokens"]),
        "prefix_of_reference": outcome[i]["tokens"] == reference[i][: len(outcome[i]["tokens"])],
    }
    for i in range(8)
]
facts["cut_aborted"] = reading().aborted_requests

# Parked blocks must not fail a reset, nor come back by it.
parked = BLOCKS - 1 - cut["blocks"]
facts["reset_while_parked"] = scheduler.reset_prefix_cache()
facts["free_after_reset"] = pool.get_num_free_blocks() == cut["blocks"]
facts["used_after_cut"] = reading().kv_used_blocks

# A prompt that the budget cannot hold ends at once; one that outgrows it ends with what it has.
rosed.set(kv_budget_blocks=4)
out = llm.generate([{"prompt_token_ids": list(range(10, 210))}], GREEDY, use_tqdm=False)[0].outputs[0]
facts["over_budget"] = {"finish": out.finish_reason, "stop": out.stop_reason, "count": len(out.token_ids)}
out = llm.generate([{"prompt_token_ids": list(range(10, 70))}], GREEDY, use_tqdm=False)[0].outputs[0]
facts["outgrown"] = {"finish": out.finish_reason, "stop": out.stop_reason, "count": len(out.token_ids)}
facts["rejected"] = reading().rejected_requests

# Regrow; all blocks are back, and everything still gives the same tokens.
rosed.set(kv_budget_blocks=0)
facts["regrow_identical"] = generate() == reference
facts["free_after_regrow"] = pool.get_num_free_blocks() == BLOCKS - 1

# Without a request there is no step: the budget is applied all the same.
rosed.set(kv_budget_blocks=40)
deadline = time.monotonic() + 5
while reading().policy_revision != rosed.policy.revision or reading().kv_budget_blocks != 40:
    if time.monotonic() > deadline:
        break
    time.sleep(0.02)
facts["idle_budget"] = reading().kv_budget_blocks
rosed.set(kv_budget_blocks=0)

# Contradictory policies are refused whole.
generate(PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0))
rosed.set(revision=rosed.policy.revision, token_cap=7)
generate(PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0))
facts["conflict"] = reading().limit_status
rosed.set(revision=rosed.policy.revision - 3, token_cap=0)
generate(PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0))
facts["stale"] = reading().limit_status
rosed.set(revision=rosed.policy.revision + 10)
generate(PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0))
facts["accepted_again"] = reading().limit_status

# KV of an old weight version is never matched, and found again after a rollback.
long_prompt = [{"prompt_token_ids": list(range(3, 203))}]
few = SamplingParams(max_tokens=4, temperature=0)


def cached_tokens() -> int:
    return llm.generate(long_prompt, few, use_tqdm=False)[0].num_cached_tokens or 0


cached_tokens()
facts["cached_same_version"] = cached_tokens()
core.set_weight_version("1")
facts["cached_new_version"] = cached_tokens()
core.set_weight_version("0")
facts["cached_after_rollback"] = cached_tokens()
facts["weight_version"] = reading().weight_version

# A request in flight at a version change keeps mixed KV that nobody else may match.
llm.llm_engine.add_request(
    "mixed",
    {"prompt_token_ids": list(range(5, 205))},
    SamplingParams(max_tokens=80, temperature=0, ignore_eos=True),
)
for _ in range(10):
    llm.llm_engine.step()
core.set_weight_version("2")
while llm.llm_engine.has_unfinished_requests():
    for done in llm.llm_engine.step():
        mixed = [*range(5, 205), *done.outputs[0].token_ids]
again = llm.generate([{"prompt_token_ids": mixed}], few, use_tqdm=False)[0]
facts["cached_from_mixed"] = again.num_cached_tokens or 0

end = reading()
facts["overhead_us"] = {"p50": end.overhead_p50_ns / 1e3, "p99": end.overhead_p99_ns / 1e3}
facts["worker"] = llm.collective_rpc("rose_process")[0]
print("FACTS " + json.dumps(facts), flush=True)
