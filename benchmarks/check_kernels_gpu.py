"""Compile every Triton kernel at real shapes, compare with its twin, time it and its variants.

    python benchmarks/check_kernels_gpu.py [checks | times]

The twin runs on the GPU in fp32, on the same inputs upcast. A line a check: relative error
||out - ref|| / ||ref|| (draws: the share of rows that differ) against its bound. Fresh memory is
NaN, the cache is NaN wherever no query may look, outputs lie between guards; each violation makes
the error infinite.

Times are medians of CUDA graph replays; buffers are rotated, so that the L2 cache serves no data
(the small ops are said to be otherwise). A line a reading: microseconds, rate, share of the ceiling
measured in the same run (copies, bf16 products), pass or miss against the target. Tile sizes in
parentheses are variants beside the default. The last line is one JSON object.
"""

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from minivllm.kernels import attention, cascade, fused, ops, reference, sampling  # noqa: E402
from minivllm.kernels.batch import Batch  # noqa: E402

DEVICE = torch.device("cuda", 0)
NAN = float("nan")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}


class Check(NamedTuple):
    name: str
    bound: float
    compare: Callable[[], float]

    def run(self) -> float:
        """The error; inf if an output is NaN or a guard was overwritten."""
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
        try:
            error = self.compare()
        finally:
            torch.use_deterministic_algorithms(False)
        return error if math.isfinite(error) else math.inf


def relative_error(out: Tensor, expected: Tensor) -> float:
    """inf where anything is NaN: max() of errors would lose a NaN."""
    out, expected = out.double(), expected.double()
    error = ((out - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


def draw(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


# ── the comparisons ──────────────────────────────────────────────────────────────────────────────


def norm_error(dtype: torch.dtype, rows: int, hidden: int) -> float:
    x, residual, weight = (
        draw(*s, dtype=dtype) for s in ((rows, hidden), (rows, hidden), (hidden,))
    )
    normed, total = fused.add_rms_norm(x, residual, weight, 1e-6)
    expected = reference.rms_norm(total.float(), weight.float(), 1e-6)
    plain = fused.rms_norm(x, weight, 1e-6)
    return max(
        relative_error(normed, expected),
        relative_error(total, x.float() + residual.float()),
        relative_error(plain, reference.rms_norm(x.float(), weight.float(), 1e-6)),
    )


def silu_error(dtype: torch.dtype, rows: int, intermediate: int) -> float:
    gate_up = draw(rows, 2 * intermediate, dtype=dtype)
    return relative_error(fused.silu_mul(gate_up), reference.silu_mul(gate_up.float()))


def rope_error(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, norm: bool
) -> float:
    tokens, num_blocks = 300, 400 // block_size + 2
    qkv = draw(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weights = [draw(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    angles = draw(4096, head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
    slots = torch.randperm((num_blocks - 1) * block_size, device=DEVICE)[:tokens] + block_size
    shape = (num_blocks, kv_heads, block_size, head_dim)
    caches = [torch.full(shape, NAN, dtype=dtype, device=DEVICE) for _ in range(2)]
    twins = [torch.full(shape, NAN, device=DEVICE) for _ in range(2)]
    wide = [None if w is None else w.float() for w in weights]
    q = fused.rope_and_cache(qkv, positions, cos_sin, *weights, 1e-6, *caches, slots)
    expected = reference.rope_and_cache(qkv.float(), positions, cos_sin, *wide, 1e-6, *twins, slots)
    errors = [relative_error(q, expected)]
    for cache, twin in zip(caches, twins, strict=True):
        if not torch.equal(cache.isnan(), twin.isnan()):
            return math.inf  # wrote beside its slots
        errors.append(relative_error(cache.nan_to_num(), twin.nan_to_num()))
    return max(errors)


def make_batch(decode_lens: list[int], chunks: list[tuple[int, int]], block_size: int) -> Batch:
    """Rows of these lengths, chunks as (new tokens, context with them), over shuffled blocks."""
    seq_lens = decode_lens + [length for _, length in chunks]
    query_lens = [1] * len(decode_lens) + [new for new, _ in chunks]
    counts = [-(-length // block_size) for length in seq_lens]
    ids = torch.randperm(sum(counts), device=DEVICE).int() + 1
    tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32, device=DEVICE)
    for row, (count, blocks) in enumerate(zip(counts, ids.split(counts), strict=True)):
        tables[row, :count] = blocks
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    unused = torch.zeros(int(starts[-1]), dtype=torch.int64, device=DEVICE)
    return Batch(
        token_ids=unused,
        positions=unused,
        slot_mapping=unused,
        query_start=starts.to(DEVICE, torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        block_tables=tables,
        logits_index=unused[:0],
        num_decode_rows=len(decode_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def make_caches(
    batch: Batch, dtype: torch.dtype, kv_heads: int, block_size: int, head_dim: int
) -> list[Tensor]:
    """K and V: random where a row's context lies, NaN in every other slot."""
    num_blocks = int(batch.block_tables.max()) + 3
    t = torch.arange(batch.block_tables.shape[1] * block_size, device=DEVICE)
    slots = batch.block_tables.long()[:, t // block_size] * block_size + t % block_size
    used = torch.zeros(num_blocks * block_size, dtype=torch.bool, device=DEVICE)
    used[slots[t[None, :] < batch.seq_lens[:, None]]] = True
    unused = ~used.view(num_blocks, 1, block_size, 1)
    shape = (num_blocks, kv_heads, block_size, head_dim)
    return [draw(*shape, dtype=dtype).masked_fill_(unused, NAN) for _ in range(2)]


def attention_error(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    decode_lens: list[int],
    chunks: list[tuple[int, int]],
    block_size: int = 16,
    window: int | None = None,
) -> float:
    batch = make_batch(decode_lens, chunks, block_size)
    caches = make_caches(batch, dtype, kv_heads, block_size, head_dim)
    q = draw(batch.num_tokens, heads, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    wide = [cache.nan_to_num().float() for cache in caches]
    expected = reference.attention(q.float(), *wide, batch, scale, window)
    error = relative_error(attention.attention(q, *caches, batch, scale, window), expected)
    buffer = torch.full((batch.num_tokens + 2, heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    out, first = buffer[1:-1], batch.num_decode_rows
    if chunks:
        attention.paged_prefill(q, *caches, batch, scale, window, out)
        if (out[:first] != 7.0).any():
            return math.inf
    if decode_lens:  # once more with many parts, most of them empty in the short rows
        attention.paged_decode(q, *caches, batch, scale, window, out, num_splits=8)
    if (buffer[0] != 7.0).any() or (buffer[-1] != 7.0).any():
        return math.inf
    return max(error, relative_error(out.flatten(1), expected))


def shared_batch(rows: int, shared: int, own: int, block_size: int = 16) -> Batch:
    """Decode rows of at most `own` tokens each behind `shared` common ones."""
    own_lens = torch.randint(1, own + 1, (rows,)).tolist()
    batch = make_batch([shared + n for n in own_lens], [], block_size)
    tables = batch.block_tables.clone()
    tables[:, : shared // block_size] = tables[0, : shared // block_size]
    return replace(batch, block_tables=tables, num_shared_tokens=shared)


def cascade_error(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rows: int, shared: int
) -> float:
    batch = shared_batch(rows, shared, 60)
    caches = make_caches(batch, dtype, kv_heads, 16, head_dim)
    q = draw(rows, heads, head_dim, dtype=dtype)
    wide = [cache.nan_to_num().float() for cache in caches]
    expected = reference.attention(q.float(), *wide, batch, head_dim**-0.5)
    buffer = torch.full((rows + 2, heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    error = 0.0
    for num_slices in (None, 3):
        out = buffer[1:-1].fill_(NAN)
        cascade.paged_decode_shared(q, *caches, batch, head_dim**-0.5, out, num_slices=num_slices)
        error = max(error, relative_error(out.flatten(1), expected))
    return error if (buffer[[0, -1]] == 7.0).all() else math.inf


def graph_error() -> float:
    """Captured and replayed on other data, the kernels compute what an ordinary launch computes."""
    batch = make_batch([700] * 8, [], 16)
    caches = make_caches(batch, BF16, 8, 16, 128)
    q, logits = draw(8, 16, 128, dtype=BF16), draw(8, 151936)
    one = torch.ones(8, device=DEVICE)
    filters = (one * 0.8, torch.full((8,), 50, device=DEVICE), one * 0.9, one * 0, one * 0.5)

    common = shared_batch(8, 640, 60)
    common_caches = make_caches(common, BF16, 8, 16, 128)

    def step() -> tuple[Tensor, ...]:
        shared = torch.empty_like(q)
        cascade.paged_decode_shared(q, *common_caches, common, 0.1, shared)
        plain = attention.attention(q, *caches, batch, 0.1)
        return plain, shared, sampling.sample(logits, *filters)

    graph, results = capture(step)
    q.normal_()
    logits.normal_()
    for result in results:
        result.zero_()
    graph.replay()
    return float(not all(torch.equal(a, b) for a, b in zip(results, step(), strict=True)))


def uniform_error() -> float:
    seeds = torch.randint(-(2**63), 2**63 - 1, (100_000,), device=DEVICE)
    positions = torch.randint(0, 1 << 20, (100_000,), device=DEVICE)
    return float((sampling.uniform(seeds, positions) != reference.uniform(seeds, positions)).sum())


def sample_error(
    logits: Callable[[], Tensor], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> float:
    """The share of rows that draw another token than the twin."""
    values = logits()
    rows = values.shape[0]
    full = lambda value, dtype=FP32: torch.full((rows,), value, dtype=dtype, device=DEVICE)  # noqa: E731
    u = torch.rand(rows, device=DEVICE).clamp(1e-6, 1 - 1e-6)
    args = (full(temperature), full(top_k, torch.int64), full(top_p), full(min_p), u)
    drawn = sampling.sample(values, *args)
    return (drawn != reference.sample(values, *args)).double().mean().item()


def mixed_sample_error() -> float:
    """Every row with filters of its own, some greedy, in bf16 logits, so with many ties."""
    values = draw(256, 49152).mul(3).bfloat16()
    pick = lambda *choices: torch.tensor(choices, device=DEVICE)[  # noqa: E731
        torch.randint(0, len(choices), (256,), device=DEVICE)
    ]
    args = (
        pick(0.0, 0.3, 0.7, 1.0, 1.5),
        pick(0, 1, 20, 50, 1000, 60_000),
        pick(1.0, 0.95, 0.5, 0.01),
        pick(0.0, 0.0, 0.05, 0.5),
        torch.rand(256, device=DEVICE).clamp(1e-6, 1 - 1e-6),
    )
    drawn = sampling.sample(values, *args)
    return (drawn != reference.sample(values, *args)).double().mean().item()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def all_checks() -> list[Check]:
    checks: list[Check] = []

    def add(name: str, bound: float, compare: Callable[..., float], *args, **kwargs) -> None:
        checks.append(Check(name, bound, lambda: compare(*args, **kwargs)))

    for dtype in (BF16, FP16, FP32):
        label, bound = name_of(dtype), BOUND[dtype]
        for rows, hidden in ((1, 1024), (300, 576), (64, 4096)):
            add(f"norms {rows} x {hidden} {label}", bound, norm_error, dtype, rows, hidden)
        for rows, intermediate in ((1, 3072), (300, 1536)):
            add(
                f"silu_mul {rows} x {intermediate} {label}",
                bound,
                silu_error,
                dtype,
                rows,
                intermediate,
            )
        for shape in ((16, 8, 128, 16, True), (9, 3, 64, 16, False), (32, 4, 80, 24, True)):
            add(f"rope_and_cache {shape} {label}", bound, rope_error, dtype, *shape)
        mixed = ([1, 17, 300, 1000], [(1, 1), (5, 300), (200, 200), (130, 777)])
        for shape in ((16, 8, 128), (9, 3, 64)):
            add(f"attention {shape} mixed {label}", bound, attention_error, dtype, *shape, *mixed)
        long = ([5000], [(3, 5000)])
        add(f"attention 1 x 5000 {label}", bound, attention_error, dtype, 16, 8, 128, *long)
    bound = BOUND[BF16]
    for shape in ((8, 8, 128), (16, 4, 128), (16, 2, 64), (16, 1, 128), (14, 2, 64), (8, 2, 80),
                  (12, 4, 96), (8, 2, 256), (40, 1, 128)):  # fmt: skip
        add(f"attention {shape} mixed bfloat16", bound, attention_error, BF16, *shape, *mixed)
    qwen = (BF16, 16, 8, 128)
    for block_size in (1, 24, 64):
        name = f"attention block {block_size} bfloat16"
        add(name, bound, attention_error, *qwen, *mixed, block_size=block_size)
    for window in (1, 100, 512):
        name = f"attention window {window} bfloat16"
        add(name, bound, attention_error, *qwen, *mixed, window=window)
    lens = torch.randint(100, 1025, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    add("attention 256 decodes bfloat16", bound, attention_error, *qwen, lens, [])
    whole = [(2048, 2048)] * 4
    add("attention 4 x 2048 chunks bfloat16", bound, attention_error, *qwen, [], whole)
    add("attention head_dim 256 float32", BOUND[FP32], attention_error, FP32, 8, 1, 256, *mixed)
    for shape in ((16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 2, 80), (8, 1, 256)):
        for rows, shared in ((256, 2048), (5, 144)):
            name = f"cascade {shape} {rows} x {shared} bfloat16"
            add(name, bound, cascade_error, BF16, *shape, rows, shared)
    add("cascade float32", BOUND[FP32], cascade_error, FP32, 16, 8, 128, 33, 496)
    add("uniform, numbers that differ", 0.0, uniform_error)
    add("CUDA graph, outputs that differ", 0.0, graph_error)

    normal = lambda: draw(256, 151936) * 3  # noqa: E731
    flat = lambda: draw(256, 151936) * 0.01  # noqa: E731
    half = lambda: (draw(256, 151936) * 3).to(BF16)  # noqa: E731
    tied = lambda: (draw(256, 49152) * 3).round()  # noqa: E731
    add("sample greedy", 0.0, sample_error, normal, temperature=0.0)
    add("sample temperature 0.8", 0.02, sample_error, normal, temperature=0.8)
    add("sample top_k 50", 0.01, sample_error, normal, top_k=50)
    add("sample top_k 50, top_p 0.9", 0.01, sample_error, normal, top_k=50, top_p=0.9)
    add("sample top_k 1000, top_p 0.9", 0.02, sample_error, normal, top_k=1000, top_p=0.9)
    add("sample top_p 0.9", 0.02, sample_error, normal, top_p=0.9)
    add("sample top_p 0.9, bf16 logits", 0.02, sample_error, half, temperature=0.8, top_p=0.9)
    add("sample top_p 0.99, bf16 logits (whole rows)", 0.02, sample_error, half, top_p=0.99)
    add("sample min_p 0.1", 0.01, sample_error, normal, min_p=0.1)
    add("sample top_p 0.5, flat (whole rows)", 0.05, sample_error, flat, top_p=0.5)
    add("sample top_k 5000, flat (whole rows)", 0.05, sample_error, flat, top_k=5000)
    add("sample ties, top_k 50, top_p 0.9", 0.01, sample_error, tied, top_k=50, top_p=0.9)
    add("sample mixed rows, bf16 logits", 0.02, mixed_sample_error)
    return checks


CHECKS = all_checks()


# ── time ─────────────────────────────────────────────────────────────────────────────────────────


def capture(step: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """(graph, what the captured call returned). Runs once before: compiling cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def median_us(*calls: Callable[[], object], repeat: int = 1) -> float:
    """Microseconds of one call: median of 15 replays of a graph of all of them, `repeat` times."""

    def step() -> None:
        for _ in range(repeat):
            for call in calls:
                call()

    graph, _ = capture(step)
    times = []
    for _ in range(17):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeat * len(calls)))
    return statistics.median(times[2:])


def copy_rate() -> float:
    """Bytes a microsecond of a kernel that moves 4 GiB, read plus written.

    Not `copy_`: in a graph that is the copy engine, which is a third slower than a kernel.
    """
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / median_us(lambda: torch.neg(source, out=target))


class Report:
    """Prints readings and keeps them; the ceilings are measured first."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.missed: list[str] = []
        self.bytes_per_us = copy_rate()
        a, b = draw(8192, 8192, dtype=BF16), draw(8192, 8192, dtype=BF16)
        self.flops_per_us = 2 * 8192**3 / median_us(lambda: a @ b)
        self.found["copy_TB_s"] = self.bytes_per_us / 1e6
        self.found["matmul_TFLOP_s"] = self.flops_per_us / 1e6
        print(f"copy of 4 GiB: {self.bytes_per_us / 1e6:.2f} TB/s, read plus written")
        print(f"bf16 product of 8192: {self.flops_per_us / 1e6:.0f} TFLOP/s")

    def line(
        self,
        name: str,
        us: float,
        *,
        num_bytes: float = 0,
        flops: float = 0,
        share: float | None = None,  # of the ceiling that is wanted
        at_most_us: float | None = None,
    ) -> None:
        text, reached = f"{name:62s} {us:8.1f} us", 0.0
        if num_bytes:
            reached = num_bytes / us / self.bytes_per_us
            text += f" {num_bytes / us / 1e6:6.2f} TB/s   {reached:.2f}"
        if flops:
            reached = flops / us / self.flops_per_us
            text += f" {flops / us / 1e6:6.0f} TFLOP/s {reached:.2f}"
        verdict = None
        if share is not None:
            verdict = f" (target {share:.2f})", reached >= share
        if at_most_us is not None:
            verdict = f" (target {at_most_us:.0f} us)", us <= at_most_us
        if verdict is not None:
            text += f"{verdict[0]} {'pass' if verdict[1] else 'MISS'}"
            if not verdict[1]:
                self.missed.append(name)
        self.found[name] = us
        print(text, flush=True)

    def attempt(self, name: str, measure: Callable[[], float], **about) -> None:
        """A variant that does not compile or fit must not end the run."""
        try:
            us = measure()
        except Exception as problem:
            print(f"{name:62s} {type(problem).__name__}: {str(problem)[:100]}")
        else:
            self.line(name, us, **about)


# Decode: (lengths, query heads of 8 KV heads, wanted share of the copy rate, variants), a variant
# being (parts or None for the default, keys a step, warps, stages).
DECODES: list[tuple[list[int], int, float | None, list[tuple[int | None, int, int, int]]]] = [
    ([1024] * 256, 16, 0.95, [(1, 128, 4, 2), (1, 128, 4, 5), (1, 64, 2, 4), (1, 32, 1, 4)]),
    ([1024] * 256, 32, 0.95, [(1, 64, 2, 4)]),
    ([512] * 256, 16, None, [(1, 128, 4, 3), (1, 64, 2, 4)]),
    ([160] * 512, 16, 0.92, [(1, 128, 4, 3), (1, 32, 1, 6), (1, 16, 1, 6), (1, 64, 2, 4)]),
    ([1024] * 40, 16, None, [(1, 128, 4, 3), (2, 128, 4, 3), (3, 128, 4, 3)]),
    ([4096] * 8, 16, None, [(4, 128, 4, 3), (4, 128, 4, 5), (8, 128, 4, 3), (6, 128, 4, 3)]),
    ([32768], 16, 0.75, [(16, 128, 4, 5), (32, 128, 4, 3), (32, 128, 4, 5), (48, 128, 4, 3),
                         (64, 128, 4, 3), (64, 64, 2, 4), (32, 128, 8, 5), (48, 64, 4, 5)]),
    ([1024], 16, None, [(8, 128, 4, 1), (16, 64, 4, 1), (16, 64, 8, 1), (16, 32, 2, 1)]),
]  # fmt: skip

# Prefill: (query heads packed with the tokens, keys a step, warps, stages).
PREFILL_TILES = [(128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2)]

# Shared prefix: (slices, block, keys, warps, stages; keys, warps, stages of the own part).
CASCADES = {
    16: [(4, 128, 128, 8, 2, 16, 1, 3), (4, 64, 64, 4, 3, 16, 1, 3), (4, 128, 128, 8, 3, 32, 1, 4),
         (4, 128, 128, 8, 3, 64, 1, 1), (2, 128, 128, 8, 3, 16, 1, 3)],
    32: [(2, 128, 128, 8, 2, 16, 1, 3), (4, 128, 64, 4, 3, 16, 1, 3), (4, 128, 128, 8, 3, 16, 1, 3),
         (2, 128, 128, 8, 3, 32, 1, 4)],
}  # fmt: skip
WHERE_CASCADE_PAYS = [(8, 2048), (16, 1024), (16, 4096), (64, 256), (64, 512), (256, 128)]

# Constants of the sampling kernels and the values tried beside their own.
SAMPLING_CONSTANTS = [
    ("top_p 0.9", "GATHER", (2048, 8192)),
    ("top_p 0.9", "MAX_CANDIDATES", (2048,)),
    ("top_k 50 top_p 0.9", "GATHER", (2048, 8192)),
    ("top_k 50 top_p 0.9", "FEW_CANDIDATES", (256, 1024)),
    ("temperature", "CHUNKS_PER_PROGRAM", (16, 64)),
    ("top_p 0.5 flat", "ROW_TILE", (4096, 16384)),
]


def tile_of(block_m: int, keys: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_M": block_m, "TILE": keys, "STAGES": stages, "num_warps": warps}


def rotated(
    lens: list[int], kv_heads: int, copies: int | None = None
) -> tuple[list[Batch], list[Tensor]]:
    """Batches over different blocks of one cache, together far larger than the L2 cache."""
    rows, num_bytes = len(lens), sum(lens) * kv_heads * 128 * 4
    copies = copies or min(32, -(-(400 << 20) // num_bytes))
    whole = make_batch(lens * copies, [], 16)
    caches = make_caches(whole, BF16, kv_heads, 16, 128)
    batches = [
        replace(
            whole,
            token_ids=whole.token_ids[:rows],
            query_start=whole.query_start[: rows + 1],
            seq_lens=whole.seq_lens[first : first + rows],
            block_tables=whole.block_tables[first : first + rows],
            num_decode_rows=rows,
        )
        for first in range(0, rows * copies, rows)
    ]
    return batches, caches


def time_decode(report: Report) -> None:
    for lens, heads, share, variants in DECODES:
        batches, caches = rotated(lens, 8)
        q = draw(len(lens), heads, 128, dtype=BF16)
        out = torch.empty_like(q)

        def measure(num_splits=None, tile=None) -> float:
            return median_us(*(
                lambda batch=batch: attention.paged_decode(
                    q, *caches, batch, 0.1, None, out, num_splits=num_splits, tile=tile  # noqa: B023
                )
                for batch in batches  # noqa: B023
            ))  # fmt: skip

        name = f"decode {len(lens)} x {lens[0]} G={heads // 8}"
        num_bytes = sum(lens) * 8 * 128 * 4
        report.line(name, measure(), num_bytes=num_bytes, share=share)
        for num_splits, *tile in variants:
            label = f"{name} (parts {num_splits}, TILE {tile[0]}, warps {tile[1]}, st {tile[2]})"
            run = lambda n=num_splits, t=tile: measure(n, tile_of(16, *t))  # noqa: E731, B023
            report.attempt(label, run, num_bytes=num_bytes)


def time_prefill(report: Report) -> None:
    for rows, length in ((4, 2048), (1, 8192)):
        batch = make_batch([], [(length, length)] * rows, 16)
        caches = make_caches(batch, BF16, 8, 16, 128)
        q = draw(rows * length, 16, 128, dtype=BF16)
        out = torch.empty_like(q)
        flops = rows * 2 * length**2 * 16 * 128  # causal: half of 4 n^2 d
        name, share = f"prefill {rows} x {length}", 0.5 if length == 8192 else None

        def measure(tile=None) -> float:
            return median_us(
                lambda: attention.paged_prefill(q, *caches, batch, 0.1, None, out, tile=tile)  # noqa: B023
            )

        report.line(name, measure(), flops=flops, share=share)
        for tile in PREFILL_TILES:
            label = f"{name} (BLOCK_M {tile[0]}, TILE {tile[1]}, warps {tile[2]}, st {tile[3]})"
            report.attempt(label, lambda t=tile: measure(tile_of(*t)), flops=flops)  # noqa: B023
        keys = [cache.nan_to_num() for cache in caches]
        report.attempt(
            f"{name} (cuDNN, K and V gathered from their blocks)",
            lambda: median_us(lambda: cudnn_prefill(q, *keys, batch, rows)),  # noqa: B023
            flops=flops,
        )


def cudnn_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, rows: int) -> Tensor:
    """Fresh rows of one length through torch's own attention: the paged kernel's competitor."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tables = batch.block_tables[:, : batch.max_seq_len // 16]
    k, v = (
        cache[tables].transpose(1, 2).reshape(rows, 8, batch.max_seq_len, 128)
        for cache in (k_cache, v_cache)
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q.view(rows, -1, 16, 128).transpose(1, 2), k, v, is_causal=True, enable_gqa=True
        )


def time_cascade(report: Report) -> None:
    def pair(rows: int, heads: int, shared: int) -> tuple[float, Callable[..., float]]:
        batches, caches = rotated([shared + 48] * rows, 8, copies=4)
        for batch in batches:
            batch.block_tables[:, : shared // 16] = batch.block_tables[:1, : shared // 16]
        batches = [replace(batch, num_shared_tokens=shared) for batch in batches]
        q = draw(rows, heads, 128, dtype=BF16)
        out = torch.empty_like(q)

        def time_calls(decode: Callable[..., None], *rest, **sizes) -> float:
            calls = (lambda b=b: decode(q, *caches, b, 0.1, *rest, out, **sizes) for b in batches)
            return median_us(*calls)

        plain_us = time_calls(attention.paged_decode, None)
        return plain_us, lambda **sizes: time_calls(cascade.paged_decode_shared, **sizes)

    for heads, variants in CASCADES.items():
        plain_us, measure = pair(256, heads, 2048)
        name = f"decode 256 x (2048 shared + 48) G={heads // 8}"
        report.line(f"{name}, plain", plain_us)
        report.line(f"{name}, cascade", measure(), at_most_us=45 if heads == 16 else 52)
        for slices, block, keys, warps, stages, *own in variants:
            label = f"{name} ({slices} slices, {block} x {keys} w{warps} st{stages}, own {own})"
            sizes = {
                "num_slices": slices,
                "tile": tile_of(block, keys, warps, stages),
                "tile_own": tile_of(16, *own),
            }
            report.attempt(label, lambda s=sizes: measure(**s))  # noqa: B023
    for rows, shared in WHERE_CASCADE_PAYS:
        plain_us, measure = pair(rows, 16, shared)
        report.line(f"decode {rows} x ({shared} shared + 48), plain", plain_us)
        report.line(f"decode {rows} x ({shared} shared + 48), cascade", measure())


@contextmanager
def constant(name: str, value: int):
    """`sampling.<name>` is another number for a while."""
    before = getattr(sampling, name)
    setattr(sampling, name, value)
    try:
        yield
    finally:
        setattr(sampling, name, before)


def time_sampling(report: Report) -> None:
    rows, vocab = 256, 151936
    full = lambda value, dtype=FP32: torch.full((rows,), value, dtype=dtype, device=DEVICE)  # noqa: E731
    u = torch.rand(rows, device=DEVICE).clamp(1e-6, 1 - 1e-6)
    normal = [(draw(rows, vocab) * 3).to(BF16) for _ in range(4)]
    flat = [(draw(rows, vocab) * 0.01).to(BF16) for _ in range(2)]
    wide = [draw(rows, vocab) * 3 for _ in range(2)]
    modes = {
        "greedy": (normal, 0.0, 0, 1.0, 30),
        "temperature": (normal, 0.8, 0, 1.0, 30),
        "top_k 50": (normal, 0.8, 50, 1.0, 60),
        "top_k 50 top_p 0.9": (normal, 0.8, 50, 0.9, 60),
        "top_k 1000 top_p 0.9": (normal, 0.8, 1000, 0.9, None),
        "top_p 0.9": (normal, 0.8, 0, 0.9, 150),
        "top_p 0.5 flat": (flat, 1.0, 0, 0.5, None),
        "greedy, fp32 logits": (wide, 0.0, 0, 1.0, None),
        "temperature, fp32 logits": (wide, 0.8, 0, 1.0, None),
        "top_k 50 top_p 0.9, fp32 logits": (wide, 0.8, 50, 0.9, None),
        "top_p 0.9, fp32 logits": (wide, 0.8, 0, 0.9, None),
    }

    def measure(mode: str) -> float:
        buffers, t, k, p, _ = modes[mode]
        args = (full(t), full(k, torch.int64), full(p), full(0.0), u)
        return median_us(*(lambda x=x: sampling.sample(x, *args) for x in buffers))

    for mode, (buffers, *_, at_most_us) in modes.items():
        num_bytes = buffers[0].numel() * buffers[0].element_size()
        name = f"sample {rows} x {vocab} {mode}"
        report.line(name, measure(mode), num_bytes=num_bytes, at_most_us=at_most_us)
    for mode, name, values in SAMPLING_CONSTANTS:
        for value in values:
            with constant(name, value):
                report.attempt(f"sample {mode} ({name} {value})", lambda m=mode: measure(m))
    time_chunks = lambda x: sampling.chunk_statistics(x, full(0.8))  # noqa: E731
    us = median_us(*(lambda x=x: time_chunks(x) for x in normal))
    report.line("sample, its first pass alone", us, num_bytes=normal[0].numel() * 2)


def time_small_ops(report: Report) -> None:
    rows = 256
    x, residual, weight = (draw(*s, dtype=BF16) for s in ((rows, 1024), (rows, 1024), (1024,)))
    gate_up, qkv = draw(rows, 6144, dtype=BF16), draw(rows, 32 * 128, dtype=BF16)
    caches = [draw(1024, 8, 16, 128, dtype=BF16) for _ in range(2)]
    positions, cos_sin, gain = torch.arange(rows, device=DEVICE), draw(rows, 128), weight[:128]
    ops_of: dict[str, Callable[[], object]] = {
        "add_rms_norm": lambda: fused.add_rms_norm(x, residual, weight, 1e-6),
        "silu_mul": lambda: fused.silu_mul(gate_up),
        "rope_and_cache": lambda: fused.rope_and_cache(
            qkv, positions, cos_sin, gain, gain, 1e-6, *caches, positions + 16
        ),
    }
    for name, call in ops_of.items():
        us = median_us(call, repeat=20)
        report.line(f"{name} {rows} rows (data in the L2 cache)", us, at_most_us=3)
    own = fused.ROPE_HEADS
    for heads in (8, 32):
        fused.ROPE_HEADS = heads
        us = median_us(ops_of["rope_and_cache"], repeat=20)
        report.line(f"rope_and_cache (ROPE_HEADS {heads})", us)
    fused.ROPE_HEADS = own


def timings() -> Report:
    """Qwen3-0.6B's shapes in bf16 (G=4: the 8B's heads)."""
    report = Report()
    for part in (time_small_ops, time_sampling, time_decode, time_prefill, time_cascade):
        part(report)
        torch.cuda.empty_cache()
    return report


def run_checks() -> tuple[dict[str, float], list[str]]:
    """(error of each check, names of those that fail)."""
    began = time.perf_counter()
    results = {}
    for check in CHECKS:
        start = time.perf_counter()
        try:
            error = check.run()
        except Exception as problem:  # a kernel that does not compile must not hide the others
            print(f"  {type(problem).__name__}: {str(problem)[:300]}")
            error = math.inf
        verdict = "pass" if error <= check.bound else "FAIL"
        results[check.name] = error
        seconds = time.perf_counter() - start
        print(
            f"{verdict} {check.name:44s} {error:.1e} <= {check.bound:.0e} {seconds:5.1f} s",
            flush=True,
        )
    failed = [check.name for check in CHECKS if results[check.name] > check.bound]
    passed, seconds = len(CHECKS) - len(failed), time.perf_counter() - began
    print(f"{passed} of {len(CHECKS)} checks pass in {seconds:.0f} s")
    return results, failed


def main(arguments: Sequence[str]) -> int:
    wanted = arguments or ["checks", "times"]
    if not set(wanted) <= {"checks", "times"}:
        print(f"check_kernels_gpu: {' '.join(arguments)} is not 'checks' or 'times'")
        return 2
    if not torch.cuda.is_available():
        print("check_kernels_gpu: no CUDA device; on a CPU run pytest tests/test_kernels.py")
        return 2
    began = time.perf_counter()
    backend = ops.choose(DEVICE)
    properties = torch.cuda.get_device_properties(DEVICE)
    print(f"{properties.name}, torch {torch.__version__}: {backend.name} ({backend.reason})")
    results, failed = run_checks() if "checks" in wanted else ({}, [])
    report = timings() if "times" in wanted else None
    print(
        json.dumps(
            {
                "device": properties.name,
                "torch": torch.__version__,
                "backend": backend.reason,
                "failed": failed,
                "errors": {name: f"{error:.2e}" for name, error in results.items()},
                "times": {k: round(v, 2) for k, v in report.found.items()} if report else {},
                "missed": report.missed if report else [],
                "seconds": round(time.perf_counter() - began),
            }
        )
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
