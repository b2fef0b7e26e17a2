"""Compile every Triton kernel at real shapes, compare with its twin, take a first reading of time.

    python benchmarks/check_kernels_gpu.py

The twin runs on the GPU in fp32, on the same inputs upcast. A line a check: relative error
||out - ref|| / ||ref|| (draws: the share of rows that differ) against its bound. Fresh memory is
NaN, the cache is NaN wherever no query may look, outputs lie between guards; each violation makes
the error infinite. The last line is one JSON object.
"""

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from minivllm.kernels import attention, fused, ops, reference, sampling  # noqa: E402
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
    out, expected = out.double(), expected.double()
    return ((out - expected).norm() / expected.norm()).item()


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
        split_len = max(16, batch.max_seq_len // 8)
        attention.paged_decode(q, *caches, batch, scale, window, out, split_len=split_len)
    if (buffer[0] != 7.0).any() or (buffer[-1] != 7.0).any():
        return math.inf
    return max(error, relative_error(out.flatten(1), expected))


def graph_error() -> float:
    """Captured and replayed on other data, the kernels compute what an ordinary launch computes."""
    batch = make_batch([700] * 8, [], 16)
    caches = make_caches(batch, BF16, 8, 16, 128)
    q, logits = draw(8, 16, 128, dtype=BF16), draw(8, 151936)
    one = torch.ones(8, device=DEVICE)
    filters = (one * 0.8, torch.full((8,), 50, device=DEVICE), one * 0.9, one * 0, one * 0.5)

    def step() -> tuple[Tensor, Tensor]:
        return attention.attention(q, *caches, batch, 0.1), sampling.sample(logits, *filters)

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
    return (drawn != reference.sample(values.float(), *args)).double().mean().item()


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
    add("uniform, numbers that differ", 0.0, uniform_error)
    add("CUDA graph, outputs that differ", 0.0, graph_error)

    normal = lambda: draw(256, 151936) * 3  # noqa: E731
    flat = lambda: draw(256, 151936) * 0.01  # noqa: E731
    tied = lambda: (draw(256, 49152) * 3).round()  # noqa: E731
    add("sample greedy", 0.0, sample_error, normal, temperature=0.0)
    add("sample temperature 0.8", 0.02, sample_error, normal, temperature=0.8)
    add("sample top_k 50", 0.01, sample_error, normal, top_k=50)
    add("sample top_k 50, top_p 0.9", 0.01, sample_error, normal, top_k=50, top_p=0.9)
    add("sample top_k 1000, top_p 0.9", 0.02, sample_error, normal, top_k=1000, top_p=0.9)
    add("sample top_p 0.9", 0.02, sample_error, normal, top_p=0.9)
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


def median_us(call: Callable[[], object], calls: int = 1) -> float:
    """Microseconds of one call: median of 15 replays of a graph of `calls` of them."""

    def step() -> None:
        for _ in range(calls):
            call()

    graph, _ = capture(step)
    times = []
    for _ in range(17):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[2:])


def copy_rate() -> float:
    """TB/s of a large copy on the device, bytes read plus bytes written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source)) / 1e6


def timings() -> dict[str, float]:
    """Qwen3-0.6B's shapes in bf16; each printed with its share of the ceiling measured here."""
    copy_tbs = copy_rate()
    found = {"copy_TB_s": copy_tbs}
    print(f"copy of 1 GiB: {copy_tbs:.2f} TB/s")

    for lens in ([1024] * 256, [1024], [32768]):
        batch = make_batch(lens, [], 16)
        caches = make_caches(batch, BF16, 8, 16, 128)
        q = draw(len(lens), 16, 128, dtype=BF16)
        us = median_us(lambda: attention.attention(q, *caches, batch, 0.1))  # noqa: B023
        tbs = sum(lens) * 8 * 128 * 2 * 2 / us / 1e6
        share = tbs / copy_tbs
        found[f"decode_{len(lens)}x{lens[0]}_us"] = us
        print(f"decode {len(lens)} x {lens[0]}: {us:.1f} us, {tbs:.2f} TB/s, {share:.2f} of copy")
    for lens in ([2048] * 4, [8192]):
        batch = make_batch([], [(n, n) for n in lens], 16)
        caches = make_caches(batch, BF16, 8, 16, 128)
        q = draw(sum(lens), 16, 128, dtype=BF16)
        us = median_us(lambda: attention.attention(q, *caches, batch, 0.1))  # noqa: B023
        tflops = sum(2 * n * n * 16 * 128 for n in lens) / us / 1e6  # causal: half of 4 n^2 d
        found[f"prefill_{len(lens)}x{lens[0]}_TFLOP_s"] = tflops
        print(f"prefill {len(lens)} x {lens[0]}: {us:.1f} us, {tflops:.0f} TFLOP/s")

    rows = 256
    full = lambda value, dtype=FP32: torch.full((rows,), value, dtype=dtype, device=DEVICE)  # noqa: E731
    u = torch.rand(rows, device=DEVICE).clamp(1e-6, 1 - 1e-6)
    normal, flat = draw(rows, 151936) * 3, draw(rows, 151936) * 0.01
    one_read = normal.numel() * 4 / copy_tbs / 1e6
    for name, logits, t, k, p in (
        ("greedy", normal, 0.0, 0, 1.0),
        ("temperature", normal, 0.8, 0, 1.0),
        ("top_k 50 top_p 0.9", normal, 0.8, 50, 0.9),
        ("top_p 0.9", normal, 0.8, 0, 0.9),
        ("top_p 0.5 flat", flat, 1.0, 0, 0.5),
    ):
        args = (full(t), full(k, torch.int64), full(p), full(0.0), u)
        us = median_us(lambda: sampling.sample(logits, *args))  # noqa: B023
        found[f"sample {name}_us"] = us
        print(f"sample {rows} x 151936 {name}: {us:.1f} us, {us / one_read:.1f} x one read")

    x, residual, weight = (draw(*s, dtype=BF16) for s in ((rows, 1024), (rows, 1024), (1024,)))
    gate_up, qkv = draw(rows, 6144, dtype=BF16), draw(rows, 32 * 128, dtype=BF16)
    caches = [draw(1024, 8, 16, 128, dtype=BF16) for _ in range(2)]
    positions, cos_sin, gain = torch.arange(rows, device=DEVICE), draw(rows, 128), weight[:128]
    for name, call in (
        ("add_rms_norm", lambda: fused.add_rms_norm(x, residual, weight, 1e-6)),
        ("silu_mul", lambda: fused.silu_mul(gate_up)),
        ("rope_and_cache", lambda: fused.rope_and_cache(
            qkv, positions, cos_sin, gain, gain, 1e-6, *caches, positions + 16)),
    ):  # fmt: skip
        us = median_us(call, calls=20)
        found[f"{name}_us"] = us
        print(f"{name} {rows} rows: {us:.2f} us (data in the L2 cache)")
    return found


def main() -> int:
    if not torch.cuda.is_available():
        print("check_kernels_gpu: no CUDA device; on a CPU run pytest tests/test_kernels.py")
        return 2
    began = time.perf_counter()
    backend = ops.choose(DEVICE)
    properties = torch.cuda.get_device_properties(DEVICE)
    print(f"{properties.name}, torch {torch.__version__}: {backend.name} ({backend.reason})")
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
    checked_s = time.perf_counter() - began
    print(f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks pass in {checked_s:.0f} s")
    times = timings()
    print(
        json.dumps(
            {
                "device": properties.name,
                "torch": torch.__version__,
                "backend": backend.reason,
                "checks": len(CHECKS),
                "failed": failed,
                "errors": {name: f"{error:.2e}" for name, error in results.items()},
                "times": {name: round(value, 2) for name, value in times.items()},
                "seconds": round(time.perf_counter() - began),
            }
        )
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
