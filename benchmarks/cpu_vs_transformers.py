"""minivllm against transformers `generate` on a CPU: SmolLM2-135M, fp32, greedy, same token ids.

    python benchmarks/cpu_vs_transformers.py [SmolLM2-135M-Instruct.Q4_1.gguf]

Both engines live in this process and take turns, and the best of N rounds counts, so that a busy
machine hits both alike: only the ratios mean something, and only while nothing else runs. A
batch of unequal requests goes through transformers as its users run it: left-padded to the longest
prompt, generated to the longest output; only the wanted tokens count. minivllm runs without prefix
caching, since every round repeats the same prompts. Peak memory and loading time come from a fresh
process that holds minivllm alone. The last line is JSON.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from minivllm import LLM, SamplingParams
from minivllm.models.hub import fetch

MIB = 1 << 20
BLOCK_SIZE = 16
NUM_BLOCKS = 1024  # of the speed runs: room for all 32 requests at once
NUM_BLOCKS_MEMORY = 256  # of the memory run: few enough for every block to be written
REFERENCE = Path(__file__).resolve().parent.parent / "data" / "reference" / "smollm2_greedy.json"


class Work(NamedTuple):
    """One request: the prompt, and how many tokens to generate whatever they are."""

    prompt_token_ids: list[int]
    num_output_tokens: int


Outputs = list[list[int]]


def workloads() -> dict[str, list[Work]]:
    """The three cases. Prompts are stretches of the long prompts in data/, so of real text."""
    rng = random.Random(0)
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    texts = [p["prompt_token_ids"] for p in prompts if len(p["prompt_token_ids"]) > 1000]

    def stretch(num_tokens: int) -> list[int]:
        ids = rng.choice(texts)
        start = rng.randrange(len(ids) - num_tokens)
        return ids[start : start + num_tokens]

    return {
        "one": [Work(stretch(17), 64)],
        "eight": [Work(stretch(17), 64) for _ in range(8)],
        "mixed": [Work(stretch(rng.randint(16, 256)), rng.randint(16, 128)) for _ in range(32)],
    }


def load_minivllm(gguf: str, num_blocks: int) -> Callable[[list[Work]], Outputs]:
    """The engine as a function from work to output ids."""
    llm = LLM(
        gguf,
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks,
        enable_prefix_caching=False,
    )

    def run(work: list[Work]) -> Outputs:
        prompts = [w.prompt_token_ids for w in work]
        params = [
            SamplingParams(temperature=0, max_tokens=w.num_output_tokens, ignore_eos=True)
            for w in work
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return run


def load_transformers(gguf: Path) -> tuple[Callable[[list[Work]], Outputs], int, int]:
    """transformers as the same function; bytes of its weights; KV bytes of a token."""
    from transformers import AutoModelForCausalLM, GgufConfig  # not in the memory run

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        attn_implementation="sdpa",
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    model.generation_config.eos_token_id = None  # every request runs to its length
    model.generation_config.pad_token_id = pad = 0

    @torch.inference_mode()
    def run(work: list[Work]) -> Outputs:
        width = max(len(w.prompt_token_ids) for w in work)
        padding = [width - len(w.prompt_token_ids) for w in work]
        ids = [[pad] * n + w.prompt_token_ids for n, w in zip(padding, work, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in padding]
        out = model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(w.num_output_tokens for w in work),
            do_sample=False,
        )
        rows = out[:, width:].tolist()
        return [row[: w.num_output_tokens] for row, w in zip(rows, work, strict=True)]

    config = model.config
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    head_dim = config.hidden_size // config.num_attention_heads
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
    return run, weight_bytes, kv_bytes


def peak_rss_bytes() -> int:
    """The most memory that this process ever held.

    Not `ru_maxrss`: Linux starts that of a child at the size of the parent that spawned it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc/self/status: measure memory on Linux")


def memory_run(gguf: str) -> dict[str, float]:
    """Load, run the mixed work, and say what it took; called in a process of its own."""
    start = time.perf_counter()
    run = load_minivllm(gguf, NUM_BLOCKS_MEMORY)
    loaded = time.perf_counter()
    run(workloads()["mixed"])
    return {
        "load_s": round(loaded - start, 2),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def compare(
    engines: dict[str, Callable[[list[Work]], Outputs]], work: list[Work], rounds: int
) -> dict[str, float]:
    """Best output tokens/s of each engine, their ratio, and how many requests agree."""
    best, outputs = dict.fromkeys(engines, float("inf")), {}
    for _ in range(rounds):
        for name, run in engines.items():
            start = time.perf_counter()
            outputs[name] = run(work)
            best[name] = min(best[name], time.perf_counter() - start)
    for name, rows in outputs.items():
        assert [len(row) for row in rows] == [w.num_output_tokens for w in work], name
    num_tokens = sum(w.num_output_tokens for w in work)
    speed = {name: round(num_tokens / seconds, 1) for name, seconds in best.items()}
    same = sum(a == b for a, b in zip(outputs["minivllm"], outputs["transformers"], strict=True))
    ratio = round(best["transformers"] / best["minivllm"], 2)
    return speed | {"ratio": ratio, "same_tokens": same, "requests": len(work)}


def main() -> None:
    """Measure, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, nargs="?", help="default: smollm2, fetched when missing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-run", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    gguf = args.gguf or fetch()
    torch.set_num_threads(args.threads)
    if args.memory_run:
        print(json.dumps(memory_run(str(gguf))))
        return

    child = [sys.executable, __file__, str(gguf), "--memory-run"]
    child += ["--threads", str(args.threads)]
    out = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True).stdout
    card = json.loads(out.splitlines()[-1])
    print(f"LLM(gguf), tokenizer included: {card['load_s']} s")

    transformers, weight_bytes, kv_bytes = load_transformers(gguf)
    pool_bytes = NUM_BLOCKS_MEMORY * BLOCK_SIZE * kv_bytes
    overhead = card["peak_rss_bytes"] - weight_bytes - pool_bytes
    card |= {"weight_bytes": weight_bytes, "pool_bytes": pool_bytes, "overhead_bytes": overhead}
    print(
        f"peak memory {card['peak_rss_bytes'] / MIB:.0f} MiB = weights {weight_bytes / MIB:.0f} "
        f"+ KV pool {pool_bytes / MIB:.0f} + {overhead / MIB:.0f} MiB"
    )

    engines = {
        "transformers": transformers,
        "minivllm": load_minivllm(str(gguf), NUM_BLOCKS),
    }
    for run in engines.values():
        run([Work(list(range(100, 116)), 4)])  # first-call costs are nobody's speed
    for name, work in workloads().items():
        card[name] = compare(engines, work, args.rounds)
        print(f"{name:6} {card[name]}")
    print(json.dumps(card))


if __name__ == "__main__":
    main()
