"""W6: requests that come when they come, whether or not the engine keeps up.

A closed loop asks only when it has been answered, so a stalled engine is asked less, and the stall
counts once. Here every latency runs from the moment a request was *meant* to arrive:

```
 meant to arrive      a      b  c        d
 engine               [ step ........ stalled ][ step ][ step ]
 seen by the engine          .                 b c d
 b waited                    |<--------------->|              counted from b, not from `seen`
```

(Without that, "coordinated omission": Gil Tene, "How NOT to measure latency", 2013.)

Mirrors vllm/benchmarks/serve.py, within one process. Chapter 16 reads this file.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minivllm.bench.workload import OpenLoop, Work
from minivllm.engine.engine import Engine, EngineStepError

LOAD = 0.7  # offered, of what the engine can do
GRACE = 5.0  # seconds after the last arrival; what has not ended then counts as not completed


@dataclass
class Served:
    """One request's times, in seconds since the run began."""

    work: Work
    arrival: float  # when it was meant to arrive
    tokens: list[float] = field(default_factory=list)  # when each of its tokens was there

    @property
    def completed(self) -> bool:
        """Whether every token came."""
        return len(self.tokens) == self.work.num_output_tokens

    @property
    def time_to_first_token(self) -> float:
        """Counted from the intended arrival; infinite if there is none."""
        return self.tokens[0] - self.arrival if self.tokens else float("inf")

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


class Station:
    """An engine with a clock beside it: requests in, times of their tokens out.

    Args:
        engine: idle.
        overlap: use `step_overlapped`.
        clock: seconds, monotonic.
    """

    def __init__(
        self, engine: Engine, *, overlap: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine, self._clock, self._start = engine, clock, clock()
        self._step = engine.step_overlapped if overlap else engine.step
        self.live: dict[str, Served] = {}
        self.steps: list[float] = []  # seconds between the results of two steps

    def now(self) -> float:
        """Seconds since this was made."""
        return self._clock() - self._start

    def add(self, work: Work, arrival: float) -> Served:
        """Hand a request over that was meant to arrive at `arrival`."""
        output = self.engine.add_request(work.prompt_token_ids, work.params)
        served = self.live[output.request_id] = Served(work, arrival)
        return served

    def step(self) -> list[Served]:
        """One step; the requests that it ended.

        Raises:
            EngineStepError: it failed, and the measurement with it.
        """
        before = self.now()
        report = self._step()
        if report.error is not None:
            raise EngineStepError(f"step {report.step} failed: {report.error}") from report.error
        now, ended = self.now(), []
        self.steps.append(now - before)
        for output in report.outputs:
            served = self.live[output.request_id]
            new = len(output.outputs[0].token_ids) - len(served.tokens)
            served.tokens += [now] * new
            if output.finished:
                ended.append(self.live.pop(output.request_id))
        return ended

    def abort(self) -> None:
        """Give up what is left."""
        self.engine.abort(list(self.live))
        self.live.clear()


def capacity(station: Station, loop: OpenLoop, *, warm_up: float, seconds: float) -> float:
    """Short requests a second that a closed loop completes with every row in use.

    Long prompts come as in the open loop, and take a row while they run. A machine too slow to
    complete one in `seconds` gets the time that one needs.
    """
    short, long = loop.short(), loop.long()
    next_long, completed = next(long), 0
    while (now := station.now()) < warm_up + seconds or not completed:
        while len(station.live) < loop.max_num_seqs:
            if next_long.arrival <= now:
                station.add(next_long, now)
                next_long = next(long)
            else:
                station.add(next(short), now)
        for served in station.step():
            is_short = len(served.work.prompt_token_ids) == loop.size.of(512)
            completed += is_short and served.tokens[-1] >= warm_up
    elapsed = station.now() - warm_up
    station.abort()
    return completed / elapsed


def serve(
    station: Station,
    offered: list[Work],  # in order of arrival
    *,
    grace: float = GRACE,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Served]:
    """Hand every request over when its time has come; the times of all, in order of arrival."""
    waiting, all_served = deque(offered), []
    deadline = offered[-1].arrival + grace if offered else 0.0
    while (waiting or station.live) and (now := station.now()) < deadline:
        while waiting and waiting[0].arrival <= now:
            work = waiting.popleft()
            all_served.append(station.add(work, work.arrival))
        if station.live:
            station.step()
        else:
            sleep(waiting[0].arrival - now)
    all_served += [Served(work, work.arrival) for work in waiting]  # the engine never saw them
    station.abort()
    return all_served


def summary(served: list[Served], steps: list[float]) -> dict[str, float]:
    """The figures of an open-loop run; times in milliseconds."""
    gaps = [gap for s in served for gap in s.gaps]
    first = [s.time_to_first_token for s in served]
    return {
        "offered": len(served),
        "completed_share": sum(s.completed for s in served) / len(served),
        "itl_p50_ms": percentile(gaps, 50) * 1e3,
        "itl_p99_ms": percentile(gaps, 99) * 1e3,
        "itl_max_ms": percentile(gaps, 100) * 1e3,
        "ttft_p50_ms": percentile(first, 50) * 1e3,
        "ttft_p99_ms": percentile(first, 99) * 1e3,
        "step_p50_ms": percentile(steps, 50) * 1e3,
        "step_p99_ms": percentile(steps, 99) * 1e3,
    }


def percentile(values: list[float], percent: float) -> float:
    """The value that `percent` % of the values do not exceed: one that was really measured.

    Nearest rank, so that a request without a first token (infinite) is seen and not averaged.
    """
    if not values:
        return float("nan")
    return float(np.percentile(values, percent, method="inverted_cdf"))
