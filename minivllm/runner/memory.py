"""The bill of memory: what the device holds, and how many KV blocks are left over.

```
 |<------------------------- total x gpu_memory_utilization ------------------------->|
 | weights | peak activation | non-torch | KV cache = num_blocks x bytes of a block    |
```

Mirrors vllm/v1/worker/gpu_worker.py (determine_available_memory). Chapter 9 reads this file.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.base import GIB, UserError, cdiv, format_bytes
from minivllm.config import EngineConfig, ModelConfig

CPU_KV_CACHE_BYTES = GIB  # on a CPU, where memory is shared with everything else


@dataclass(frozen=True)
class MemoryReport:
    """Who holds the device's memory. All in bytes, but the last."""

    total: int
    weights: int
    activations: int  # peak of the largest step
    non_torch: int  # CUDA context and other processes
    kv_cache: int
    block: int
    num_blocks: int


def block_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of one KV block over all layers."""
    return model.kv_bytes_per_token(config.dtype) * config.cache.block_size


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    *,
    weights: int,
    activations: int = 0,
    non_torch: int = 0,
    total: int | None = None,
) -> MemoryReport:
    """Decide the number of KV blocks, the null block included.

    `config` is resolved. `total` is the device's memory in bytes, None on a CPU.

    Raises:
        UserError: the cache could not hold one request of `max_model_len` tokens; the sentence
            names the longest that fits.
    """
    cache, size = config.cache, block_bytes(model, config)
    assert config.max_model_len is not None, "the config is not resolved"
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    else:
        if cache.kv_cache_memory_bytes is not None:
            available = cache.kv_cache_memory_bytes
        elif total is None:
            available = CPU_KV_CACHE_BYTES
        else:
            share = cache.gpu_memory_utilization - cache.reserved_memory_ratio
            available = int(total * share) - weights - activations - non_torch
        num_blocks = available // size
        needed = cdiv(config.max_model_len, cache.block_size) + 1  # and the null block
        if num_blocks < needed:
            longest = max(0, num_blocks - 1) * cache.block_size
            remedy = (
                f"lower max_model_len to at most {longest:,}"
                if longest
                else "free memory, or use a smaller model"
            )
            raise UserError(
                f"one request of max_model_len {config.max_model_len:,} tokens needs "
                f"{format_bytes(needed * size)} of KV cache, but {format_bytes(max(0, available))} "
                f"are available: {remedy}, or give the cache more memory "
                f"(gpu_memory_utilization, kv_cache_memory_bytes)"
            )
        # More than every row at full length is never used.
        most = config.scheduler.max_num_seqs * (needed - 1) + 1
        num_blocks = min(num_blocks, most)
    return MemoryReport(
        total=total or _host_memory(),
        weights=weights,
        activations=activations,
        non_torch=non_torch,
        kv_cache=num_blocks * size,
        block=size,
        num_blocks=num_blocks,
    )


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 0


def allocate_kv_cache(
    model: ModelConfig, config: EngineConfig, num_blocks: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """K and V of every layer: [num_blocks, num_kv_heads, block_size, head_dim] each, zeroed.

    Raises:
        UserError: the device does not have that much memory.
    """
    shape = (num_blocks, model.num_kv_heads, config.cache.block_size, model.head_dim)
    dtype = getattr(torch, config.dtype)
    try:
        return [
            (
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
            )
            for _ in range(model.num_layers)
        ]
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain one on a CPU
        size = format_bytes(num_blocks * block_bytes(model, config))
        raise UserError(f"a KV cache of {size} does not fit: ask for fewer blocks") from error
