"""Floors: the least time that work can take on this device, from its bytes and its operations.

```
 decode step    max( (weights + KV of every running row) / copy rate , operations / matmul rate )
 prefill        operations / matmul rate
```

The model says what a step reads and computes (`models.decoder.bytes_read`, `flops`); how fast the
device copies and multiplies is measured here, on large arrays, in the model's dtype. A measured
time is then a share of a floor, and a share above 1 is an error in one of the two. What cannot be
measured is None and printed as "unknown".

The roofline model is Williams, Waterman and Patterson's (2009). Chapters 1 and 16 read this file.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from minivllm.bench.workload import Work, Workload
from minivllm.config import ModelConfig
from minivllm.models.decoder import bytes_read, flops

COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}  # far beyond any cache
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
SAMPLES, CALLS = 5, {"cuda": 10, "cpu": 2}  # the median of so many, each of so many calls


@dataclass(frozen=True)
class Ceiling:
    """What a device can do at best, measured. None = could not be measured."""

    copy_bytes_per_s: float | None = None  # bytes read plus bytes written
    matmul_flops_per_s: float | None = None


@dataclass(frozen=True)
class Floor:
    """The least seconds of a workload; None where the device's ceiling is unknown."""

    prefill_flops: int
    decode_bytes: int
    prefill_s: float | None
    decode_s: float | None

    @property
    def seconds(self) -> float | None:
        """Prefill, then decode."""
        if self.prefill_s is None or self.decode_s is None:
            return None
        return self.prefill_s + self.decode_s


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Copy and matmul rates of a device that is otherwise idle. Needs 1.5 GiB on a GPU."""
    kind = device.type
    try:
        # A kernel that moves everything once; `copy_` may be the slower copy engine's.
        source = torch.ones(COPY_BYTES[kind] // 4, device=device)
        target = torch.empty_like(source)
        copy = 2 * 4 * source.numel() / _seconds(lambda: torch.neg(source, out=target), kind)
        n = MATMUL_SIZE[kind]
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        return Ceiling(copy, 2 * n**3 / _seconds(lambda: torch.mm(a, b), kind))
    except (RuntimeError, KeyError):  # out of memory, or a device of another kind
        return Ceiling()
    finally:
        source = target = a = b = None  # noqa: F841  the engine wants the memory
        if kind == "cuda":
            torch.cuda.empty_cache()


def _seconds(call: Callable[[], object], kind: str) -> float:
    """Seconds of one call: the median of `SAMPLES`, after one that warms up."""
    synchronize = torch.cuda.synchronize if kind == "cuda" else lambda: None
    times = []
    for _ in range(SAMPLES + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS[kind]):
            call()
        synchronize()
        times.append((time.perf_counter() - start) / CALLS[kind])
    return statistics.median(times[1:])


def workload_floor(
    workload: Workload,
    model: ModelConfig,
    ceiling: Ceiling,
    *,
    dtype: str,
    share: bool = True,
) -> Floor:
    """The least time of a workload whose requests all run at once: weights are read least often.

    Args:
        workload: what is asked.
        model: the model's shape.
        ceiling: what the device can do.
        dtype: of weights and KV cache, e.g. "bfloat16".
        share: a prefix that all requests share is read once a step, and not once a request.
    """
    prefill = flops(model, _prefill_rows(workload))
    total_bytes, seconds = 0, 0.0
    for rows in decode_steps(workload.work):
        step_bytes = bytes_read(model, rows, dtype=dtype)
        if share and workload.shared_prefix:
            again = (len(rows) - 1) * workload.shared_prefix
            step_bytes -= again * model.kv_bytes_per_token(dtype)
        total_bytes += step_bytes
        if ceiling.copy_bytes_per_s and ceiling.matmul_flops_per_s:
            computing = flops(model, rows) / ceiling.matmul_flops_per_s
            seconds += max(step_bytes / ceiling.copy_bytes_per_s, computing)
    known = ceiling.copy_bytes_per_s and ceiling.matmul_flops_per_s
    return Floor(
        prefill,
        total_bytes,
        prefill / ceiling.matmul_flops_per_s if ceiling.matmul_flops_per_s else None,
        seconds if known else None,
    )


def _prefill_rows(workload: Workload) -> Iterable[tuple[int, int]]:
    """(new tokens, context) of each prompt; a shared prefix is computed for the first only."""
    for number, work in enumerate(workload.work):
        length = len(work.prompt_token_ids)
        yield length - (workload.shared_prefix if number else 0), length


def decode_steps(work: list[Work]) -> Iterable[list[tuple[int, int]]]:
    """The rows of each step after the prompts, as (new tokens, context): all still running ones."""
    longest = max(w.num_output_tokens for w in work)
    for step in range(1, longest):  # the first output token comes with the prompt
        yield [(1, len(w.prompt_token_ids) + step) for w in work if w.num_output_tokens > step]


def share_of(floor: float | None, measured: float) -> str:
    """`floor / measured` in words: how much of what is possible was reached."""
    return "unknown" if floor is None else f"{floor / measured:.0%}"


def rate(value: float | None, unit: str) -> str:
    """`4.26e12, "B/s"` -> `4,260 GB/s`; None is "unknown"."""
    return "unknown" if value is None else f"{value / 1e9:,.0f} G{unit}"
