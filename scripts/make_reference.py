"""Write data/reference/: what transformers says to data/prompts.jsonl, in fp32, greedily.

    python scripts/make_reference.py SmolLM2-135M-Instruct.Q4_1.gguf

The referee is transformers alone; nothing of minivllm is imported. Each prompt runs by itself, so
no padding is involved, and is computed twice: token by token over a KV cache, then in one forward
pass over the whole sequence. Both must choose the same tokens. End-of-sequence tokens do not stop
it, so every prompt has exactly NUM_TOKENS output tokens. A prompt whose two best logits come closer
than MIN_GAP anywhere is an error: edit it, so that no tie can ever excuse a difference.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

NUM_TOKENS = 40
MIN_GAP = 1e-3
NUM_LOGPROBS = 20
LOGPROB_PROMPTS = (
    "short-one-token",
    "short-counting",
    "short-opposites",
    "short-trailing-space",
    "chat-france",
    "code-python-function",
    "unicode-digit-runs",
    "long-table",
)
DATA = Path(__file__).resolve().parent.parent / "data"


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The GGUF's tokenizer, with the digit splitting that transformers' rebuild leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, prompt: dict[str, Any]) -> list[int]:
    """Token ids of a text, or of messages through the chat template; no BOS is added."""
    if "messages" not in prompt:
        return tokenizer(prompt["text"], add_special_tokens=False).input_ids
    encoded = tokenizer.apply_chat_template(
        prompt["messages"], add_generation_prompt=True, return_dict=True
    )
    return encoded["input_ids"]


def top2_gap(logits: torch.Tensor) -> torch.Tensor:
    """Distance of the two best logits. [num_tokens, vocab_size] -> [num_tokens]"""
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt_ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """NUM_TOKENS greedy tokens over a KV cache, and the logits [NUM_TOKENS, vocab_size]."""
    cache, ids, output, rows = None, torch.tensor([prompt_ids]), [], []
    for _ in range(NUM_TOKENS):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        rows.append(out.logits[0, -1])
        output.append(int(rows[-1].argmax()))
        ids = torch.tensor([output[-1:]])
    return output, torch.stack(rows)


@torch.inference_mode()
def full_forward(model: torch.nn.Module, prompt_ids: list[int], output: list[int]) -> torch.Tensor:
    """The same logits from one pass without a cache. [NUM_TOKENS, vocab_size]"""
    ids = torch.tensor([prompt_ids + output[:-1]])
    return model(ids, use_cache=False, logits_to_keep=NUM_TOKENS).logits[0]


def reference(model: torch.nn.Module, prompt: dict[str, Any], prompt_ids: list[int]) -> dict:
    """One record of smollm2_greedy.json, and its first logits under "logits"."""
    output, cached = greedy(model, prompt_ids)
    full = full_forward(model, prompt_ids, output)
    error = float((cached - full).abs().max())
    gap = float(torch.minimum(top2_gap(cached), top2_gap(full)).min())
    same = full.argmax(dim=-1).tolist() == output
    print(f"{prompt['id']:28} {len(prompt_ids):5} tokens  gap {gap:.5f}  error {error:.1e}")
    if not same or gap < MIN_GAP:
        print(f"  -> edit this prompt: {'near tie' if same else 'cached and full pass differ'}")
    return {
        "id": prompt["id"],
        "prompt_token_ids": prompt_ids,
        "output_token_ids": output,
        "min_gap": round(gap, 5),
        "ok": same and gap >= MIN_GAP,
        "logits": cached[0],
    }


def write(path: Path, head: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """JSON with one record a line, so that a diff shows which prompt changed."""
    lines = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{json.dumps(head)[:-1]}, "prompts": [\n{lines}\n]}}\n')
    print(f"wrote {path} ({path.stat().st_size:,} bytes)")


def main() -> None:
    """Compute and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the SmolLM2-135M-Instruct GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.gguf)
    model = AutoModelForCausalLM.from_pretrained(
        args.gguf.parent,
        gguf_file=args.gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").split("\n")
    prompts = [json.loads(line) for line in lines if line]
    records = [reference(model, prompt, encode(tokenizer, prompt)) for prompt in prompts]
    if not all(record.pop("ok") for record in records):
        raise SystemExit("nothing written: edit the prompts named above and run again")

    head = {
        "model": args.gguf.name,
        "sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest(),
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    logprobs = []
    for record in records:
        row = record.pop("logits").log_softmax(dim=-1).topk(NUM_LOGPROBS)
        if record["id"] in LOGPROB_PROMPTS:
            logprobs.append(
                {
                    "id": record["id"],
                    "prompt_token_ids": record["prompt_token_ids"],
                    "token_ids": row.indices.tolist(),
                    "logprobs": [round(value, 6) for value in row.values.tolist()],
                }
            )
    write(DATA / "reference" / "smollm2_greedy.json", head | {"num_tokens": NUM_TOKENS}, records)
    write(DATA / "reference" / "smollm2_logprobs.json", head, logprobs)


if __name__ == "__main__":
    main()
