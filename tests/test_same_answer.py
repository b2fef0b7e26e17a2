"""The same answer: greedy SmolLM2 in fp32 equals transformers token for token, however it is run.

`data/reference/smollm2_greedy.json` is what transformers says (scripts/make_reference.py); both
sides get the same token ids, and no prompt has a near tie. `make test` runs a few combined settings
over a sample of the prompts, `make test-full` every setting over all 64.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams

REFERENCE = Path(__file__).parent.parent / "data" / "reference" / "smollm2_greedy.json"
DATA = json.loads(REFERENCE.read_text(encoding="utf-8"))
PROMPTS: list[dict[str, Any]] = DATA["prompts"]
# Every fourth, and one long one so that chunks and a small pool mean something.
LONG = next(prompt for prompt in PROMPTS if len(prompt["prompt_token_ids"]) > 1000)
SAMPLE = [prompt for prompt in PROMPTS[::4] if len(prompt["prompt_token_ids"]) < 1000] + [LONG]
GREEDY = SamplingParams(temperature=0, max_tokens=DATA["num_tokens"], ignore_eos=True)

# What one run changes; everything else is the default.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "budget-16": {"max_num_batched_tokens": 16},
    "budget-64": {"max_num_batched_tokens": 64},
    "block-1": {"block_size": 1},
    "block-8": {"block_size": 8},
    "block-24": {"block_size": 24},
    "block-32": {"block_size": 32},
    "no-chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "few-rows": {"max_num_seqs": 3},
    "overlapped": {"async_scheduling": True, "max_num_seqs": 8},
    "overlapped-tiny-pool": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 112,
        "max_num_batched_tokens": 256,
    },
    "plain": {"async_scheduling": False, "enforce_eager": True},  # on a GPU both are on by default
    # Of two settings that pull apart, both at once:
    "tiny-pool": {"num_gpu_blocks_override": 112, "max_num_batched_tokens": 256},
    "tiny-pool-no-cache": {
        "num_gpu_blocks_override": 220,
        "block_size": 8,
        "enable_prefix_caching": False,
    },
    "priority": {"scheduling_policy": "priority", "num_gpu_blocks_override": 112},
}
QUICK = ("budget-64", "block-24", "overlapped-tiny-pool")


def run(llm: LLM, prompts: list[dict[str, Any]], **kwargs: Any) -> list[list[int]]:
    """Token ids that the engine gives for prompts, all at once."""
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    outputs = llm.generate(ids, GREEDY, use_tqdm=False, **kwargs)
    return [output.outputs[0].token_ids for output in outputs]


def assert_same(tokens: list[list[int]], prompts: list[dict[str, Any]]) -> None:
    for got, prompt in zip(tokens, prompts, strict=True):
        assert got == prompt["output_token_ids"], f"{prompt['id']} differs from transformers"


def check_setting(name: str, prompts: list[dict[str, Any]]) -> None:
    """Cold and warm: the second run finds the first one's blocks, where they are kept."""
    with LLM("smollm2", dtype="float32", **SETTINGS[name]) as llm:
        extra = {"priority": [-i % 5 for i in range(len(prompts))]} if name == "priority" else {}
        assert_same(run(llm, prompts, **extra), prompts)
        scheduler = llm.engine.scheduler
        if "pool" in name or name == "priority":
            least = 10 if len(prompts) == len(PROMPTS) else 1
            assert scheduler.num_preemptions >= least, "the pool is too large to preempt"
        touched = scheduler.kv.pool.num_touched
        assert_same(run(llm, prompts, **extra), prompts)
        if llm.config.cache.enable_prefix_caching:
            assert scheduler.kv.pool.num_touched > touched, "the warm run found nothing"
        llm.engine.check()


@pytest.mark.weights
@pytest.mark.parametrize("name", QUICK)
def test_sample_equals_transformers(name: str) -> None:
    check_setting(name, SAMPLE)


@pytest.mark.weights
def test_one_by_one_equals_transformers() -> None:
    with LLM("smollm2", dtype="float32", paranoid=True) as llm:
        for prompt in SAMPLE[::2]:
            assert_same(run(llm, [prompt]), [prompt])


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SETTINGS)
def test_all_prompts_equal_transformers(name: str) -> None:
    check_setting(name, PROMPTS)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_prompts_one_by_one_equal_transformers() -> None:
    with LLM("smollm2", dtype="float32") as llm:
        for prompt in PROMPTS:
            assert_same(run(llm, [prompt]), [prompt])


def test_the_reference_is_what_the_test_needs() -> None:
    assert len(PROMPTS) == 64
    assert all(prompt["min_gap"] >= 1e-3 for prompt in PROMPTS)
    assert all(len(prompt["output_token_ids"]) >= 32 for prompt in PROMPTS)
