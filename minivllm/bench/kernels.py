"""Each op of the model alone: microseconds, and how near the device's ceiling that is.

`cases` lists what is timed, at the shapes of one model; a new op is a new entry. The ops are those
of `kernels.ops`, so on a CPU the plain twins are timed, on smaller batches. On a GPU a call is
recorded in a CUDA graph, which leaves launch gaps of the host out. Inputs of the small ops stay in
the L2 cache, as they do in a step. Chapter 5 names this file.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minivllm.base import cdiv
from minivllm.config import ModelConfig
from minivllm.kernels import ops
from minivllm.kernels.batch import Batch

BLOCK_SIZE = 16
SAMPLES = 15


class Case(NamedTuple):
    """One op at one shape, and what it must at least move and compute."""

    name: str
    call: Callable[[], object]
    num_bytes: int = 0  # 0 = not what limits it
    flops: int = 0


def cases(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """What is timed."""
    on_gpu = device.type == "cuda"
    rows = 256 if on_gpu else 8
    found = []
    for num_rows, context in ((rows, 1024), (1, 32768)) if on_gpu else ((rows, 256),):
        found.append(_attention(model, device, dtype, [1] * num_rows, context))
    prompt = 8192 if on_gpu else 256
    found.append(_attention(model, device, dtype, [prompt], prompt))
    return found + _small_ops(model, device, dtype, rows) + _sampling(model, device, rows)


def _attention(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, new: list[int], context: int
) -> Case:
    """Rows of equal context: decodes where `new` is 1, whole prompts where it is the context."""
    batch = _batch(new, context, device)
    num_blocks = len(new) * batch.block_tables.shape[1] + 1
    shape = (num_blocks, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    place: dict[str, Any] = {"dtype": dtype, "device": device}
    k, v = torch.randn(shape, **place), torch.randn(shape, **place)
    q = torch.randn(sum(new), model.num_heads, model.head_dim, **place)
    scale = model.head_dim**-0.5
    decode = new[0] == 1
    kv_bytes = 2 * len(new) * context * model.num_kv_heads * model.head_dim * dtype.itemsize
    pairs = sum(n * context - n * (n - 1) // 2 for n in new)  # causal
    kind = "decode" if decode else "prefill"
    return Case(
        f"attention {kind} {len(new)} x {context:,}",
        lambda: ops.attention(q, k, v, batch, scale),
        num_bytes=kv_bytes if decode else 0,
        flops=0 if decode else 4 * pairs * model.num_heads * model.head_dim,
    )


def _batch(new: list[int], context: int, device: torch.device) -> Batch:
    """Rows of one context length, each with blocks of its own."""
    blocks = cdiv(context, BLOCK_SIZE)
    tables = torch.arange(1, len(new) * blocks + 1, dtype=torch.int32).view(len(new), blocks)
    starts = torch.tensor([0, *new]).cumsum(0)
    positions = torch.cat([torch.arange(context - n, context) for n in new])
    row = torch.arange(len(new)).repeat_interleave(torch.tensor(new))
    slots = tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return Batch(
        token_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        query_start=starts.to(device, torch.int32),
        seq_lens=torch.full((len(new),), context, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        logits_index=(starts[1:] - 1).to(device),
        num_decode_rows=sum(n == 1 for n in new),
        max_query_len=max(new),
        max_seq_len=context,
    )


def _small_ops(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, rows: int
) -> list[Case]:
    """Norm, RoPE with the KV write, SiLU * mul: their bytes are what they read and write."""
    place: dict[str, Any] = {"dtype": dtype, "device": device}
    hidden, inner, eps = model.hidden_size, model.intermediate_size, model.rms_norm_eps
    x, residual = torch.randn(rows, hidden, **place), torch.randn(rows, hidden, **place)
    weight, gate_up = torch.ones(hidden, **place), torch.randn(rows, 2 * inner, **place)
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    qkv = torch.randn(rows, width, **place)
    gain = torch.ones(model.head_dim, **place) if model.qk_norm else None
    cos_sin = torch.randn(rows, model.head_dim, device=device)
    shape = (cdiv(rows, BLOCK_SIZE) + 1, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    k, v = torch.zeros(shape, **place), torch.zeros(shape, **place)
    positions = torch.arange(rows, device=device)
    slots = positions + BLOCK_SIZE
    size = dtype.itemsize
    return [
        Case(f"add_rms_norm {rows} rows", lambda: ops.add_rms_norm(x, residual, weight, eps),
             4 * rows * hidden * size),
        Case(f"rope_and_cache {rows} rows", lambda: ops.rope_and_cache(
            qkv, positions, cos_sin, gain, gain, eps, k, v, slots), 2 * rows * width * size),
        Case(f"silu_mul {rows} rows", lambda: ops.silu_mul(gate_up), 3 * rows * inner * size),
    ]  # fmt: skip


def _sampling(model: ModelConfig, device: torch.device, rows: int) -> list[Case]:
    """Draws from fp32 logits; the floor is one read of them."""
    logits = torch.randn(rows, model.vocab_size, device=device) * 3
    u = torch.rand(rows, device=device).clamp_(1e-6, 1 - 1e-6)

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    def case(name: str, temperature: float, top_k: int, top_p: float) -> Case:
        wants = (full(temperature), full(top_k, torch.int64), full(top_p), full(0.0))
        name = f"sample {rows} x {model.vocab_size:,} {name}"
        return Case(name, lambda: ops.sample(logits, *wants, u), logits.numel() * 4)

    return [
        case("greedy", 0.0, 0, 1.0),
        case("temperature", 0.8, 0, 1.0),
        case("top_k 50 top_p 0.9", 0.8, 50, 0.9),
    ]


def seconds_of(call: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    """Seconds of one call: the median of `SAMPLES` batches of `calls`, after a first that warms up.

    Raises:
        RuntimeError: the op failed.
    """
    if device.type != "cuda":
        call()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    graph = _recorded(call, calls)
    times = []
    for _ in range(SAMPLES + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times[2:])


def _recorded(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """`calls` calls as one CUDA graph, after one outside: compiling cannot be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph
