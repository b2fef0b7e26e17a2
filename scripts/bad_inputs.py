"""What a user reads after a mistake: bad inputs, one sentence each, and the engine goes on.

    python scripts/bad_inputs.py

Uses a tiny random model, so it needs no download. The table is also a test (test_engine_cases.py).
"""

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.base import UserError
from minivllm.runner.tiny import TinyRandom

VOCAB_SIZE, CONTEXT = 512, 64


class BadInput(NamedTuple):
    """A mistake: how it is written, what it does, and a part of the sentence it must give."""

    code: str
    call: Callable[[LLM, Path], Any]  # the Path is a folder that has a sound model in "tiny"
    sentence: str


def sampling(**values: Any) -> Callable[[LLM, Path], Any]:
    return lambda llm, folder: llm.generate("hello", SamplingParams(**values))


def prompt(value: Any, **values: Any) -> Callable[[LLM, Path], Any]:
    return lambda llm, folder: llm.generate(value, SamplingParams(**values), use_tqdm=False)


def engine(**values: Any) -> Callable[[LLM, Path], Any]:
    return lambda llm, folder: LLM(str(folder / "tiny"), **values)


def folder_without_a_model(llm: LLM, folder: Path) -> Any:
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    return LLM(str(empty))


def truncated_gguf(llm: LLM, folder: Path) -> Any:
    path = folder / "half.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size // 2)
    return LLM(str(path))


def wrong_shape(llm: LLM, folder: Path) -> Any:
    broken = TinyRandom(max_position=CONTEXT).save(folder / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, broken / "model.safetensors")
    return LLM(str(broken))


def same_id_twice(llm: LLM, folder: Path) -> Any:
    llm.add_request("hello", request_id="a")
    try:
        llm.add_request("hello", request_id="a")
    finally:
        llm.abort("a")


TABLE = [
    BadInput('chat("Hi")', lambda llm, folder: llm.chat("Hi"), "messages must be a list like"),
    BadInput('stream(["a", "b"])', lambda llm, folder: next(llm.stream(["a", "b"])), "one prompt"),
    BadInput('LLM(..., attention="flash")', engine(attention="flash"), "attention must be a class"),
    BadInput('generate("")', prompt(""), "the prompt is empty"),
    BadInput("generate([[]])", prompt([[]]), "the prompt is empty"),
    BadInput(r'generate("\ud800")', prompt("\ud800"), "a lone surrogate"),
    BadInput("generate([3, 512])", prompt([3, 512]), "512 is not in the vocabulary (0 to 511)"),
    BadInput("generate([-1])", prompt([-1]), "-1 is not in the vocabulary"),
    BadInput("generate([2**40])", prompt([2**40]), "1099511627776 is not in the vocabulary"),
    BadInput("generate(None)", prompt(None), "must be text, token ids or a list of them"),
    BadInput("generate([None])", prompt([None]), "a text or a list of token ids, not None"),
    BadInput('generate({"text": "hello"})', prompt({"text": "hello"}), "holds 'prompt'"),
    BadInput(
        'generate({"prompt": "hello", "cache_salt": ["a"]})',
        prompt({"prompt": "hello", "cache_salt": ["a"]}),
        "cache salt must be of type str",
    ),
    BadInput(
        "generate([5] * 64)  # of 64",
        prompt([5] * CONTEXT),
        "the prompt has 64 tokens, but max_model_len is 64",
    ),
    BadInput(
        "generate([5] * 60, max_tokens=5)",
        prompt([5] * 60, max_tokens=5),
        "60 tokens and max_tokens is 5, together more than max_model_len 64",
    ),
    BadInput(
        "temperature=nan",
        sampling(temperature=math.nan),
        "temperature must be a number in [0, inf]",
    ),
    BadInput("temperature=-0.1", sampling(temperature=-0.1), "temperature must be a number"),
    BadInput('temperature="hot"', sampling(temperature="hot"), "temperature must be a number"),
    BadInput(
        "max_tokens=-1", sampling(max_tokens=-1), "max_tokens must be an integer of at least 1"
    ),
    BadInput("max_tokens=2.5", sampling(max_tokens=2.5), "max_tokens must be an integer"),
    BadInput("top_p=1.5", sampling(top_p=1.5), "top_p must be a number in [0, 1]"),
    BadInput("n=0", sampling(n=0), "n must be an integer of at least 1"),
    BadInput("n=10**9", sampling(n=10**9), "n must be at most 16,384"),
    BadInput('stop=[""]', sampling(stop=[""]), "stop holds an empty string"),
    BadInput("stop=[1]", sampling(stop=[1]), "stop must be a list of strings"),
    BadInput("logprobs=21", sampling(logprobs=21), "logprobs 21 exceeds max_logprobs 20"),
    BadInput("logit_bias={999: 5}", sampling(logit_bias={999: 5}), "names token 999"),
    BadInput("logit_bias={3: 1000}", sampling(logit_bias={3: 1000}), "must be in [-100, 100]"),
    BadInput(
        "allowed_token_ids=[]", sampling(allowed_token_ids=[]), "no token could ever be chosen"
    ),
    BadInput("temprature=1", sampling(temprature=1), "did you mean 'temperature'?"),
    BadInput(
        "min_tokens=9, max_tokens=3",
        sampling(min_tokens=9, max_tokens=3),
        "min_tokens 9 exceeds max_tokens 3",
    ),
    BadInput(
        "[two sampling_params for one prompt]",
        lambda llm, folder: llm.generate("hello", [SamplingParams()] * 2),
        "sampling_params has 2 entries for 1 prompts",
    ),
    BadInput(
        "generate(..., priority=[1])",
        lambda llm, folder: llm.generate("hello", priority=[1]),
        "start with scheduling_policy='priority'",
    ),
    BadInput("[the same request_id twice]", same_id_twice, "request id 'a' is in use"),
    BadInput(
        'chat([{"role": "user", ...}])  # no template',
        lambda llm, folder: llm.chat([{"role": "user", "content": "hello"}]),
        "no chat template",
    ),
    BadInput("LLM(..., block_sise=16)", engine(block_sise=16), "did you mean 'block_size'?"),
    BadInput(
        "LLM(..., block_size=0)", engine(block_size=0), "block_size must be a positive integer"
    ),
    BadInput(
        "LLM(..., block_size='16')", engine(block_size="16"), "block_size must be of type int"
    ),
    BadInput("LLM(..., dtype='float8')", engine(dtype="float8"), "dtype must be one of"),
    BadInput(
        "LLM(..., max_model_len=100)  # of 64",
        engine(max_model_len=100),
        "exceeds the model's context of 64 tokens",
    ),
    BadInput(
        "LLM(..., enable_chunked_prefill=False, max_num_batched_tokens=32)",
        engine(enable_chunked_prefill=False, max_num_batched_tokens=32),
        "without chunked prefill a prompt must fit one step",
    ),
    BadInput(
        "LLM(..., num_gpu_blocks_override=1)",
        engine(num_gpu_blocks_override=1),
        "needs at least 2",
    ),
    BadInput("LLM(folder without a model)", folder_without_a_model, "holds no model"),
    BadInput("LLM('./nowhere')", lambda llm, folder: LLM(str(folder / "nowhere")), "nowhere"),
    BadInput("LLM(truncated GGUF)", truncated_gguf, "lies beyond its end"),
    BadInput("LLM(safetensors with a wrong shape)", wrong_shape, "has shape [63]"),
]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = TinyRandom(max_position=CONTEXT).save(folder / "tiny")
        with LLM(str(path), paranoid=True) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=5)
            expected = llm.generate("hello", greedy, use_tqdm=False)[0].outputs[0].token_ids
            for bad in TABLE:
                try:
                    bad.call(llm, folder)
                except UserError as error:
                    assert bad.sentence in str(error), error
                    print(f"{bad.code}\n    {str(error).replace(name, '…')}")
                else:
                    raise SystemExit(f"{bad.code} was not refused")
                after = llm.generate("hello", greedy, use_tqdm=False)[0].outputs[0].token_ids
                assert after == expected, f"the request after {bad.code} differs"
    print(f"\n{len(TABLE)} bad inputs, one sentence each; the request after each was served.")


if __name__ == "__main__":
    main()
