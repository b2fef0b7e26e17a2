"""What only a new process can show: how long a start takes, and each rung of the ladder alone.

`run_fresh` starts `python -m minivllm.bench.fresh`, which builds an engine, does some work and
prints one line of JSON. Start-up is counted from before the process was there, so the interpreter
and all imports are in it. Chapter 16 names this file.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from minivllm.bench.engines import open_engine
from minivllm.bench.workload import Work
from minivllm.request import SamplingParams

TIMEOUT_SECONDS = 900


def run_fresh(
    engine: str,
    model: str,
    engine_args: Mapping[str, Any],
    shapes: list[tuple[int, int, int]],
    *,
    environment: Mapping[str, str] | None = None,
    vocab_size: int = 256,
) -> dict[str, Any]:
    """Build an engine in a new process and do work there.

    Args:
        engine: "minivllm", "vllm" or "transformers".
        model: as `LLM` takes it.
        engine_args: vLLM's names.
        shapes: (requests, prompt tokens, output tokens), greedy, one run after the other; the first
            ends the start-up.
        environment: variables to add.
        vocab_size: prompts use ids below this.

    Returns:
        `imported_s`, `built_s`, `first_s` (seconds since the process was asked for) and `runs`: for
        each shape its `seconds` and the `token_ids` of its requests.

    Raises:
        RuntimeError: the process failed; the message is the last thing it said.
    """
    spec = {"engine": engine, "model": model, "engine_args": dict(engine_args), "shapes": shapes,
            "vocab_size": vocab_size}  # fmt: skip
    begin = time.monotonic()  # one clock for all processes of a machine
    done = subprocess.run(
        [sys.executable, "-m", "minivllm.bench.fresh", json.dumps(spec)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise RuntimeError(f"a fresh process with {engine} failed and said: {said[-1][:300]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    for name in ("imported_s", "built_s", "first_s"):
        result[name] -= begin
    return result


def uniform_work(
    requests: int, prompt: int, output: int, vocab_size: int, turn: int = 0
) -> list[Work]:
    """Greedy requests of one shape, whose ids count on from each other and from `turn`."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    return [
        Work([(turn + 7 * r + 13 * i * (r + 1)) % vocab_size for i in range(prompt)], params)
        for r in range(requests)
    ]


def main(arguments: list[str]) -> None:
    """The new process."""
    spec = json.loads(arguments[0])
    getattr(importlib.import_module(spec["engine"]), "LLM", None)  # resolved lazily: imports now
    imported = time.monotonic()
    engine = open_engine(spec["engine"], spec["model"], spec["engine_args"])
    built = time.monotonic()
    first, runs = None, []
    for number, shape in enumerate(spec["shapes"]):
        work = uniform_work(*shape, spec["vocab_size"], turn=number)
        start = time.monotonic()
        token_ids = engine.generate(work)
        end = time.monotonic()
        first = first or end
        runs.append({"seconds": end - start, "token_ids": token_ids})
    engine.close()
    print(json.dumps({"imported_s": imported, "built_s": built, "first_s": first, "runs": runs}))


if __name__ == "__main__":
    main(sys.argv[1:])
