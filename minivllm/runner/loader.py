"""From an `EngineConfig` to a runner that is ready: files, decoder, weights, KV cache, sampler.

The four stages report themselves in the log, in vLLM's words. Chapters 3 and 9 read this file.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from minivllm.base import UserError, format_bytes, format_seconds
from minivllm.config import EngineConfig, ModelConfig
from minivllm.kernels import ops
from minivllm.layers.attention import AttentionOp
from minivllm.models.decoder import Decoder
from minivllm.models.hub import resolve_model
from minivllm.models.model_config import read_model_config
from minivllm.models.tokenizer import Tokenizer, load_tokenizer
from minivllm.models.weights import load_weights
from minivllm.runner.memory import MemoryReport, allocate_kv_cache, plan_memory
from minivllm.runner.runner import ModelRunner
from minivllm.runner.sampler import Sampler

logger = logging.getLogger("minivllm")


@dataclass(frozen=True)
class Loaded:
    """A runner, and what the engine around it must know."""

    runner: ModelRunner
    config: EngineConfig  # resolved
    model: ModelConfig
    tokenizer: Tokenizer
    memory: MemoryReport


def load(
    config: EngineConfig,
    *,
    attention: AttentionOp | None = None,
    sampler: Callable[..., Sampler] | None = None,
) -> Loaded:
    """Load the model that `config` names and give it all the memory it may have.

    Args:
        config: as made by `EngineConfig.from_args`.
        attention: an attention op of one's own; same arguments as `kernels.ops.attention`.
        sampler: a sampler class of one's own; see `minivllm.runner.sampler`.

    Raises:
        UserError: the model cannot be used, or does not fit.
    """
    start = time.perf_counter()
    device = _device(config.device)
    files = resolve_model(
        config.model,
        tokenizer=config.tokenizer,
        revision=config.revision,
        download_dir=config.download_dir,
        load_format=config.load_format,
    )
    model_config = read_model_config(files)
    dtype = _dtype(config.dtype, device)
    config = config.resolve(model_config, device.type, dtype)
    tokenizer = load_tokenizer(files, chat_template=config.chat_template)
    assert config.max_model_len is not None

    torch_dtype = getattr(torch, dtype)
    model = Decoder(
        model_config,
        dtype=torch_dtype,
        device=device,
        max_model_len=config.max_model_len,
        attention=attention or ops.attention,
    )
    stats = load_weights(model, files, model_config, torch_dtype, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    logger.info(
        "Model loading took %s and %s", format_bytes(weights), format_seconds(stats.seconds)
    )

    make_sampler = sampler or Sampler
    drawing = make_sampler(
        config.scheduler.max_num_seqs,
        model_config.vocab_size,
        min(model_config.vocab_size, tokenizer.vocab_size),
        device,
    )
    memory = _measure(config, model_config, model, drawing, weights, device)
    kv_cache = allocate_kv_cache(model_config, config, memory.num_blocks, device)
    num_tokens = (memory.num_blocks - 1) * config.cache.block_size
    logger.info("KV cache size: %s tokens in %s", f"{num_tokens:,}", format_bytes(memory.kv_cache))
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{config.max_model_len:,}",
        num_tokens / config.max_model_len,
    )
    runner = ModelRunner(config, model, kv_cache, drawing, device)
    if runner.graphs is not None:
        begin = time.perf_counter()
        free = torch.cuda.mem_get_info(device)[0]
        runner.graphs.capture(progress=logger.isEnabledFor(logging.INFO))
        torch.cuda.empty_cache()  # what the first, unrecorded runs left to their stream
        taken = free - torch.cuda.mem_get_info(device)[0]
        logger.info(
            "Graph capturing finished in %s, took %s",
            format_seconds(time.perf_counter() - begin),
            format_bytes(taken),
        )
    logger.info("init engine took %s", format_seconds(time.perf_counter() - start))
    return Loaded(runner, config, model_config, tokenizer, memory)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is unknown: use 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported: use 'cpu' or 'cuda'")
    if device.type == "cuda" and device.index:
        raise UserError(
            f"device {name!r} is not supported: use 'cuda', and choose the GPU by setting "
            f"CUDA_VISIBLE_DEVICES={device.index}"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but torch sees none: run `minivllm doctor`")
    return device


def _dtype(name: str, device: torch.device) -> str:
    """`auto`: fp32 on a CPU, where it is exact and fast enough; bf16 on a GPU that has it."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def _measure(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    sampler: Sampler,
    weights: int,
    device: torch.device,
) -> MemoryReport:
    """On a GPU, run the largest step over a two-block cache and see what it takes."""
    if device.type == "cpu":
        return plan_memory(model_config, config, weights=weights)
    start = time.perf_counter()
    eager = replace(config, enforce_eager=True)  # a profile needs no graphs
    kv_cache = allocate_kv_cache(model_config, config, 2, device)
    probe = ModelRunner(eager, model, kv_cache, sampler, device)
    scheduler = config.scheduler
    activations = probe.profile(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    del probe, kv_cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    non_torch = total - free - torch.cuda.memory_reserved(device)
    report = plan_memory(
        model_config,
        config,
        weights=weights,
        activations=activations,
        non_torch=non_torch,
        total=total,
    )
    logger.info("Memory profiling took %s", format_seconds(time.perf_counter() - start))
    return report
