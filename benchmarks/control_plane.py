"""What the control plane costs: one step of scheduler and KV manager, and `import minivllm`.

    python benchmarks/control_plane.py

No model and no torch: results are made up, so only the bookkeeping is timed. "decode" is a step in
which all requests are running; in "churn" requests also end and others take their place all the
time. The last line is JSON. Times vary with the machine; the targets are 1.0 ms and 0.2 s.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

from minivllm.cache.manager import KVCacheManager
from minivllm.cache.pool import BlockPool
from minivllm.config import SchedulerConfig
from minivllm.request import Request, SamplingParams
from minivllm.sched.plan import SampledToken, StepPlan, StepResult
from minivllm.sched.scheduler import Scheduler

BLOCK_SIZE = 16
IMPORT_PROBE = """
import sys, time
start = time.perf_counter()
import minivllm
minivllm.SamplingParams, minivllm.EngineConfig
print(time.perf_counter() - start, int("torch" in sys.modules), int("numpy" in sys.modules))
"""


def make_scheduler(num_requests: int) -> Scheduler:
    """A scheduler with room for `num_requests` requests of up to 1,024 tokens each."""
    pool = BlockPool(num_requests * 1024 // BLOCK_SIZE + 1)
    config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=2048)
    return Scheduler(config, KVCacheManager(pool, BLOCK_SIZE))


def no_op_result(plan: StepPlan, step: int) -> StepResult:
    """A token for each row that samples; which one does not matter."""
    return StepResult(
        plan.step, tuple(SampledToken(step % 1000) if row.samples else None for row in plan.rows)
    )


def step_times(num_requests: int, num_steps: int, longest_output: int | None) -> list[float]:
    """Milliseconds of schedule() + update() of `num_steps` steps with all requests running.

    Outputs are 1 to `longest_output` tokens long; None = no request ends.
    """
    rng = random.Random(0)
    scheduler, num_added, times = make_scheduler(num_requests), 0, []
    warming = True
    while len(times) < num_steps:
        while len(scheduler.requests) < num_requests:
            prompt = [rng.randrange(49_152) for _ in range(rng.randint(16, 256))]
            max_tokens = rng.randint(1, longest_output) if longest_output else None
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            scheduler.add(Request(f"r{num_added}", prompt, params, arrival=num_added))
            num_added += 1
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter() - start
        result = no_op_result(plan, len(times))
        warming = warming and bool(scheduler.waiting)  # until every request had its first turn
        start = time.perf_counter()
        scheduler.update(plan, result)
        if not warming:
            times.append((planned + time.perf_counter() - start) * 1e3)
    assert not scheduler.num_preemptions, "the pool was too small for a clean figure"
    scheduler.check()
    return times


def import_cost(repeats: int) -> tuple[float, bool, bool]:
    """Seconds of `import minivllm` in a fresh process (best of N); torch loaded?; numpy loaded?"""
    runs = []
    for _ in range(repeats):
        probe = [sys.executable, "-c", IMPORT_PROBE]
        out = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.split()
        runs.append((float(out[0]), bool(int(out[1])), bool(int(out[2]))))
    return min(runs)


def main() -> None:
    """Measure, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    card: dict[str, float | bool] = {"requests": args.requests}
    for name, longest_output in (("decode", None), ("churn", 128)):
        runs = [step_times(args.requests, args.steps, longest_output) for _ in range(args.repeats)]
        best = min(runs, key=statistics.mean)
        mean, p99 = statistics.mean(best), statistics.quantiles(best, n=100)[98]
        card |= {f"{name}_mean_ms": round(mean, 3), f"{name}_p99_ms": round(p99, 3)}
        print(f"{name}: {args.requests} running, {mean:.3f} ms a step (p99 {p99:.3f} ms)")
    seconds, torch_loaded, numpy_loaded = import_cost(args.repeats)
    card |= {"import_s": round(seconds, 4), "torch": torch_loaded, "numpy": numpy_loaded}
    print(f"import minivllm: {seconds:.3f} s, torch loaded: {torch_loaded}")
    print(json.dumps(card))


if __name__ == "__main__":
    main()
