"""The parts of vLLM that the plugin leans on are as they were in the release it was tested with.

Each entry also has a row in docs/vllm-internals.md, which says what it is used for.  When a new vLLM fails
here, read what changed there before the expectation is touched.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm-internals.md"

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
CORE = "vllm.v1.engine.core:EngineCore"
POOL = "vllm.v1.core.block_pool:BlockPool"
QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
REQUEST = "vllm.v1.request:Request"
SPIN = "vllm.distributed.device_communicators.shm_broadcast:SpinCondition"
TRANSFER = "vllm.distributed.weight_transfer.base:WeightTransferEngine"
ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
WORKER = "vllm.v1.worker.gpu_worker:Worker"

SIGNATURES = {
    f"{SCHEDULER}.__init__": "self vllm_config kv_cache_config structured_output_manager block_size "
    "hash_block_size mm_registry include_finished_set log_stats",
    f"{SCHEDULER}.schedule": "self throttle_prefills",
    f"{SCHEDULER}.update_from_output": "self scheduler_output model_runner_output",
    f"{SCHEDULER}.get_grammar_bitmask": "self scheduler_output",
    f"{SCHEDULER}.add_request": "self request",
    f"{SCHEDULER}.finish_requests": "self request_ids finished_status",
    f"{SCHEDULER}.reset_prefix_cache": "self reset_running_requests reset_connector",
    f"{SCHEDULER}.make_stats": "self spec_decoding_stats kv_connector_stats cudagraph_stats perf_stats "
    "ec_connector_stats",
    f"{ASYNC_SCHEDULER}.__init__": "self args kwargs",
    f"{CORE}.set_weight_version": "self weight_version",
    f"{POOL}.free_blocks": "self ordered_blocks",
    f"{POOL}.get_num_free_blocks": "self",
    f"{POOL}._maybe_evict_cached_block": "self block",
    f"{QUEUE}.popleft_n": "self n",
    f"{QUEUE}.remove": "self block",
    f"{REQUEST}.update_block_hashes": "self",
    f"{REQUEST}.take_events": "self",
    f"{SPIN}.wait": "self timeout_ms",
    f"{TRANSFER}.__init__": "self config vllm_config device model",
    f"{TRANSFER}.parse_update_info": "self update_dict",
    f"{TRANSFER}.update_weights": "self update_info",
    f"{ASYNC_LLM}.collective_rpc": "self method timeout args kwargs",
    f"{ASYNC_LLM}.update_weight_version": "self new_version",
    f"{ASYNC_LLM}.resume_generation": "self",
    f"{ASYNC_LLM}.abort": "self request_id internal",
    f"{ASYNC_LLM}._add_request": "self request prompt parent_req index queue",
    f"{WORKER}.load_model": "self load_dummy_weights",
    f"{WORKER}.initialize_from_config": "self kv_cache_config",
    f"{WORKER}._maybe_get_memory_pool_context": "self tag",
    f"{WORKER}.execute_model": "self scheduler_output",
    "vllm.v1.worker.utils:allocate_kv_cache": "kv_cache_config device layout kernel_block_sizes",
    "vllm.v1.worker.cpu_worker:CPUWorker.__init__": "self vllm_config local_rank rank "
    "distributed_init_method is_driver_worker",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": "self",
    "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async": "self mode clear_cache",
    "vllm.model_executor.layers.utils:check_cpu_sgl_kernel": "n k dtype",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "layer remove_weight",
    "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router": "self app",
    "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state": "self engine_client state args",
}
"""Functions we override, wrap or call, with their parameters."""

INSTANCE_ATTRIBUTES = {
    SCHEDULER: "waiting kv_holding_waiting running requests finished_req_ids kv_cache_manager "
    "max_num_scheduled_tokens max_model_len connector block_size vllm_config "
    "kv_cache_config max_num_running_reqs",
    CORE: "scheduler",
    POOL: "num_gpu_blocks blocks free_block_queue",
    QUEUE: "fake_free_list_head fake_free_list_tail",
    REQUEST: "cache_salt block_hashes num_computed_tokens num_prompt_tokens arrival_time client_index "
    "trace_headers lora_request",
    SPIN: "last_read busy_loop_s",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "block_pool coordinator watermark_blocks",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "single_type_managers",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": "req_to_blocks",
    "vllm.v1.engine.output_processor:OutputProcessor": "external_req_ids",
    ASYNC_LLM: "engine_core output_processor vllm_config",
    WORKER: "weight_transfer_engine",
    "vllm.model_executor.layers.linear:LinearBase": "input_size output_size",
    "vllm.model_executor.layers.linear:ColumnParallelLinear": "output_partition_sizes "
    "output_size_per_partition input_size_per_partition",
    "vllm.model_executor.layers.linear:RowParallelLinear": "input_size_per_partition "
    "output_size_per_partition",
    "vllm.model_executor.layers.linear:QKVParallelLinear": "total_num_kv_heads num_kv_heads",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": "org_vocab_size",
}
"""Attributes that `__init__` sets and we read or write."""

FIELDS = {
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id ref_cnt block_hash is_null next_free_block",
    "vllm.v1.core.sched.output:SchedulerOutput": "total_num_scheduled_tokens num_scheduled_tokens "
    "scheduled_new_reqs scheduled_cached_reqs preempted_req_ids",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_tensors",
    "vllm.v1.kv_cache_interface:KVCacheTensor": "size layers layer_stride block_stride offset host_resident",
    "vllm.v1.metrics.stats:SchedulerStats": "kv_cache_usage",
    "vllm.v1.core.sched.output:NewRequestData": "req_id num_computed_tokens",
    "vllm.v1.core.sched.output:CachedRequestData": "resumed_req_ids",
    "vllm.config:VllmConfig": "parallel_config kv_transfer_config device_config model_config",
    "vllm.config:DeviceConfig": "device_type",
    "vllm.config:ModelConfig": "model",
    "vllm.config:ParallelConfig": "data_parallel_index data_parallel_size tensor_parallel_size "
    "pipeline_parallel_size",
    "vllm.config:KVTransferConfig": "is_kv_producer is_kv_consumer",
    "vllm.v1.engine:EngineCoreOutput": "request_id new_token_ids finish_reason stop_reason events",
    "vllm.v1.engine:EngineCoreOutputs": "outputs",
    "vllm.v1.engine:FinishReason": "ABORT",
    "vllm.v1.request:RequestStatus": "FINISHED_ABORTED",
    "vllm.v1.core.sched.interface:PauseState": "UNPAUSED",
    "vllm.model_executor.models.qwen2:Qwen2ForCausalLM": "packed_modules_mapping",
    "vllm.model_executor.models.qwen3:Qwen3ForCausalLM": "packed_modules_mapping",
    "vllm.distributed.weight_transfer:WeightTransferEngineFactory": "_registry register_engine",
    "vllm._custom_ops:": "_supports_onednn",
}
"""Fields, members and module attributes."""


def resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    return found


def test_this_is_a_tested_release() -> None:
    from vllm.version import __version__ as version  # noqa: PLC0415 (only where vLLM is installed)

    from rose.engines.vllm.plugin import TESTED_SERIES  # noqa: PLC0415

    assert version.startswith(f"{TESTED_SERIES}.")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert " ".join(inspect.signature(resolve(name)).parameters) == SIGNATURES[name]


@pytest.mark.parametrize("name", INSTANCE_ATTRIBUTES)
def test_instance_attributes(name: str) -> None:
    kind = resolve(name)
    source = "\n".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("vllm"))
    for attribute in INSTANCE_ATTRIBUTES[name].split():
        assert re.search(rf"\bself\.{attribute}\b(\s*:[^=\n]+(\n[^=\n]*)*)?\s*=[^=]", source), attribute


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    kind = resolve(name)
    known = set(dir(kind)) | set(getattr(kind, "__struct_fields__", ()))
    if dataclasses.is_dataclass(kind):
        known |= {field.name for field in dataclasses.fields(kind)}
    assert set(FIELDS[name].split()) <= known


def test_the_scheduler_says_whether_it_is_paused() -> None:
    assert isinstance(resolve(SCHEDULER).pause_state, property)


def test_a_request_that_ends_with_an_output_is_named_as_finished() -> None:
    """The serving scheduler learns from `finished_req_ids` after `update_from_output` who ended in it."""
    assert "self.finished_req_ids.add(" in inspect.getsource(resolve(f"{SCHEDULER}._free_request"))


def test_the_set_of_finished_requests_is_replaced_not_cleared() -> None:
    """The serving scheduler keeps a step's set until it settles the step."""
    source = inspect.getsource(resolve(SCHEDULER))
    assert "self.finished_req_ids = set()" in source
    assert "self.finished_req_ids.clear(" not in source


def test_the_bitmask_is_asked_for_when_the_device_has_the_step() -> None:
    """There the serving and the rollout scheduler do what need not hold up the device."""
    for step in ("step", "step_with_batch_queue"):
        source = inspect.getsource(resolve(f"{CORE}.{step}"))
        dispatched = source.index("self.model_executor.execute_model(")
        assert dispatched < source.index("self.scheduler.get_grammar_bitmask(") < source.rindex(".result()")


def test_callers_cannot_write_the_trace_headers_that_carry_the_class() -> None:
    from vllm.tracing import extract_trace_headers  # noqa: PLC0415 (only where vLLM is installed)

    from rose.engines.vllm.slo_class import HEADER  # noqa: PLC0415

    assert HEADER not in (extract_trace_headers({HEADER: "premium", "traceparent": "x"}) or {})


def test_layers_look_the_packing_switches_up_when_they_load() -> None:
    """We replace module attributes: that works only while they are looked up by name at run time."""
    source = inspect.getsource(resolve("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm"))
    assert "if check_cpu_sgl_kernel(" in source
    assert "ops._supports_onednn" in source


def test_an_empty_step_is_scheduled_by_the_token_budget() -> None:
    source = inspect.getsource(resolve(f"{SCHEDULER}.schedule"))
    assert "token_budget = self.max_num_scheduled_tokens" in source


def test_the_free_list_is_linked_through_its_blocks() -> None:
    """`KvBudget` changes the class of a live free list, so the class must hold no state of its own."""
    source = inspect.getsource(resolve(f"{QUEUE}.__init__"))
    assert set(re.findall(r"self\.(\w+)", source)) == {
        "num_free_blocks", "fake_free_list_head", "fake_free_list_tail",
    }  # fmt: skip


def test_the_weight_backend_implements_all_that_is_abstract() -> None:
    from rose.engines.vllm.weights import RoseWeightTransferEngine  # noqa: PLC0415

    assert not RoseWeightTransferEngine.__abstractmethods__


def test_the_document_names_everything_compared_here() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    names = [name.rpartition(".")[2].rpartition(":")[2] for name in SIGNATURES]
    for table in (INSTANCE_ATTRIBUTES, FIELDS):
        names += [attribute for attributes in table.values() for attribute in attributes.split()]
    missing = sorted({name for name in names if f"`{name}`" not in document and name != "__init__"})
    assert not missing
