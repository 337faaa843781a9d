"""Greedy tokens of an engine loaded afresh from a checkpoint: what a live update must reproduce.

Run as `python fresh_engine.py MODEL PROMPTS.json TOKENS`; prints `FACTS [[token, ...], ...]`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "none",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams

from rose.engines.vllm.plugin import keep_cpu_weights_in_place

keep_cpu_weights_in_place()  # the same arithmetic as in a rollout engine; packed weights round differently

model, prompts_file, tokens = sys.argv[1:4]
prompts = json.loads(Path(prompts_file).read_text())
llm = LLM(
    model=model,
    enforce_eager=True,
    max_model_len=2048,
    block_size=32,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    num_gpu_blocks_override=256,
    kv_cache_memory_bytes=64 << 20,
    enable_prefix_caching=True,
)
sampling = SamplingParams(max_tokens=int(tokens), temperature=0, ignore_eos=True)
outputs = [
    # One at a time, as the live engine is asked: sums depend on the size of a batch.
    list(llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
    for prompt in prompts
]
print("FACTS " + json.dumps(outputs), flush=True)
