"""`minivllm bench`: measure as a user would, with what was possible beside what was reached.

```
 throughput   W1 W3 W4 W5   a warm-up run, then measured ones with other prompts
 latency      W2 W6         one user alone; many users who do not wait for each other
 startup      W7            fresh processes: with empty compile caches, then with full ones
 kernels                    each op alone
 ladder                     what each optimisation brought, in fresh processes
```

Tables go to stdout, and as the last line one JSON object: command, machine, versions, commit,
figures.

Mirrors vllm/benchmarks (throughput.py, latency.py, startup.py). Chapter 16 reads this file.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from minivllm.base import UserError, did_you_mean, format_seconds
from minivllm.bench import kernels
from minivllm.bench.engines import BenchEngine, VllmApi, check_installed, open_engine
from minivllm.bench.fresh import run_fresh, uniform_work
from minivllm.bench.open_loop import LOAD, Station, capacity, serve, summary
from minivllm.bench.plot import check_plotting, plot_ladder
from minivllm.bench.presets import SHAPES, shape_folder
from minivllm.bench.record import circumstances, plain
from minivllm.bench.roofline import (
    Ceiling,
    Floor,
    measure_ceiling,
    rate,
    share_of,
    workload_floor,
)
from minivllm.bench.workload import PRESETS, OpenLoop, Size, Workload, closed
from minivllm.config import ModelConfig
from minivllm.models.hub import DEFAULT_MODEL, fetch, resolve_model
from minivllm.models.model_config import read_model_config

REPEATS = {"throughput": 1, "latency": 3, "startup": 3}
CPU_BATCHED_TOKENS = 2048  # a CPU gains nothing from larger steps, and they take memory
FIRST_TOKENS = 5  # samples of the time to the first token
START_SHAPE = (1, 128, 1)  # what ends a start-up: requests, prompt tokens, output tokens
COMPILE_CACHES = (  # environment variables that say where they lie
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "VLLM_CACHE_ROOT",
)


@dataclass(frozen=True)
class Rung:
    """One optimisation more than the rung below."""

    name: str
    engine_args: Mapping[str, bool]
    environment: Mapping[str, str] = field(default_factory=dict)


_EAGER, _GRAPHS = {"enforce_eager": True}, {"enforce_eager": False}
_WAIT, _OVERLAP = {"async_scheduling": False}, {"async_scheduling": True}
GPU_RUNGS = (
    Rung("plain PyTorch", _EAGER | _WAIT, {"MINIVLLM_KERNELS": "torch"}),
    Rung("Triton kernels", _EAGER | _WAIT),
    Rung("CUDA graphs", _GRAPHS | _WAIT),
    Rung("overlap", _GRAPHS | _OVERLAP),
)
CPU_RUNGS = (Rung("plain PyTorch", _EAGER | _WAIT), Rung("overlap", _EAGER | _OVERLAP))


@dataclass(frozen=True)
class Options:
    """What the command line asks for. `None` = the default of the command or the device."""

    what: str
    presets: Sequence[str] | None = None
    model: str | None = None
    engine: str = "minivllm"
    repeats: int | None = None
    scale: float = 1.0  # of the workloads' counts and lengths
    seconds: float = 30.0  # how long W6 offers requests
    plot: str | None = None  # a PNG of the ladder
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.what not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise UserError(f"bench {self.what!r} is unknown{did_you_mean(self.what, COMMANDS)}: "
                            f"use one of {known}")  # fmt: skip
        if not 0 < self.scale <= 1:
            raise UserError(f"scale must be above 0 and at most 1, not {self.scale!r}")
        if self.repeats is not None and self.repeats < 1:
            raise UserError(f"repeats must be at least 1, not {self.repeats!r}")
        if not 0 < self.seconds < float("inf"):
            raise UserError(f"seconds must be a positive number, not {self.seconds!r}")
        for preset in self.presets or ():
            home = next((what for what, names in PRESETS.items() if preset in names), None)
            if home is None:
                names = [name for names in PRESETS.values() for name in names]
                raise UserError(
                    f"preset {preset!r} is unknown{did_you_mean(preset, names)}: W1 to W7"
                )
            if home != self.what:
                raise UserError(f"{preset} is run by `minivllm bench {home}`, not {self.what}")
        if self.engine != "minivllm" and (
            self.what in ("kernels", "ladder") or "W6" in (self.presets or ())
        ):
            raise UserError(f"only minivllm can run this here: leave --engine {self.engine} out")
        if self.engine == "transformers" and self.what == "startup":
            raise UserError("transformers has no engine to start: use --engine minivllm or vllm")
        if self.plot is not None and self.what != "ladder":
            raise UserError(f"--plot draws the ladder; bench {self.what} has no plot: leave it out")


class Bench:
    """One measurement: the model, the device, its ceiling, and what the engine is built with."""

    def __init__(self, options: Options) -> None:
        check_installed(options.engine)
        self.options = options
        asked = options.engine_args.get("device", "auto")
        on_gpu = torch.cuda.is_available() if asked == "auto" else asked == "cuda"
        if on_gpu and not torch.cuda.is_available():
            raise UserError(
                "device 'cuda' was asked for, but torch sees none: run `minivllm doctor`"
            )
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.name = options.model or ("qwen3-0.6b" if on_gpu else "tiny")
        self.model, self.engine_args = self._model(), {"dtype": self._dtype()}
        self.engine_args |= {"load_format": "dummy"} if self.name in SHAPES else {}
        load_format = options.engine_args.get("load_format", self.engine_args.get("load_format"))
        self.shape: ModelConfig = read_model_config(
            resolve_model(self.model, load_format=load_format or "auto")
        )
        self.presets = list(options.presets or PRESETS.get(options.what, ())[:1])
        self.repeats = options.repeats or REPEATS.get(options.what, 1)
        self.ceiling = Ceiling()

    def _model(self) -> str:
        """What the engine is given as its model."""
        if self.name in SHAPES:
            return str(shape_folder(self.name, self.options.engine_args.get("download_dir")))
        if self.name == DEFAULT_MODEL and self.options.engine != "minivllm":
            return str(fetch(self.name))  # the others know no such name, but can read the file
        return self.name

    def _dtype(self) -> str:
        """Stated to every engine, so that all compute in the same one."""
        asked = self.options.engine_args.get("dtype", "auto")
        if asked != "auto":
            return str(asked)
        if self.device.type == "cpu":
            return "float32"
        return "bfloat16" if torch.cuda.get_device_capability(self.device) >= (8, 0) else "float16"

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV cache."""
        return str(self.engine_args["dtype"])

    def size(self, run: int = 0) -> Size:
        """The workload's size in one run: legal ids, and other ones each time."""
        return Size(self.options.scale, min(self.shape.vocab_size, 10_001), run)

    def measure_ceiling(self) -> None:
        """Before the engine takes the memory."""
        self.ceiling = measure_ceiling(self.device, getattr(torch, self.dtype))

    def floor(self, workload: Workload) -> Floor:
        """The least time of a workload on this device."""
        return workload_floor(workload, self.shape, self.ceiling, dtype=self.dtype)

    def open(self, needs: Sequence[Workload | OpenLoop]) -> BenchEngine:
        """An engine that is large enough for all of them; flags of the command line win."""
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens"):
            self.engine_args[name] = max(getattr(need, name) for need in needs)
        if self.device.type == "cpu":
            least = min(CPU_BATCHED_TOKENS, self.engine_args["max_num_batched_tokens"])
            self.engine_args["max_num_batched_tokens"] = least
        self.engine_args |= dict(self.options.engine_args)
        self.engine_args["dtype"] = self._dtype()
        _say(f"building {self.options.engine} with {_pairs(self.engine_args)}")
        return open_engine(self.options.engine, self.model, self.engine_args)


# ── what is measured ─────────────────────────────────────────────────────────────────────────────


def throughput(bench: Bench) -> list[dict[str, Any]]:
    """Seconds of whole workloads; an entry each."""
    engine = bench.open([closed(name, bench.size()) for name in bench.presets])
    try:
        return [_throughput(bench, engine, name) for name in bench.presets]
    finally:
        engine.close()


def _throughput(bench: Bench, engine: BenchEngine, name: str) -> dict[str, Any]:
    seconds = []
    for run in range(bench.repeats + 1):
        workload = closed(name, bench.size(run))
        seconds.append(_timed(engine, workload))
        _say(f"{name} {'warm-up' if run == 0 else f'run {run}'}: {seconds[-1]:.3f} s")
    median, floor = statistics.median(seconds[1:]), bench.floor(workload)
    return {
        "preset": name,
        "what": workload.what,
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "seconds": median,
        "runs_s": seconds[1:],
        "warm_up_s": seconds[0],
        "prompt_tokens_per_s": workload.num_prompt_tokens / median,
        "output_tokens_per_s": workload.num_output_tokens / median,
        "floor": asdict(floor),
        "floor_s": floor.seconds,
    }


def _timed(engine: BenchEngine, workload: Workload) -> float:
    """Seconds of one run from a cold prefix cache.

    Raises:
        RuntimeError: the engine did less than it was asked for.
    """
    engine.forget()
    start = time.perf_counter()
    outputs = engine.generate(workload.work)
    seconds = time.perf_counter() - start
    made = sum(map(len, outputs))
    if made != workload.num_output_tokens:
        raise RuntimeError(
            f"{workload.name} asked for {workload.num_output_tokens:,} tokens, but the engine made "
            f"{made:,}: the run does not count"
        )
    return seconds


def latency(bench: Bench) -> list[dict[str, Any]]:
    """W2 and W6, an entry each."""
    results = []
    for name in bench.presets:
        result = _alone(bench) if name == "W2" else _open_loop(bench)
        results.append({**result, "engine_args": dict(bench.engine_args)})  # each has its own
    return results


def _alone(bench: Bench) -> dict[str, Any]:
    """W2: (t512 - TTFT) / 511, and TTFT as the time of the same request with one token."""
    workload = closed("W2", bench.size())
    engine = bench.open([workload])
    try:
        first, whole = [], []
        for run in range(FIRST_TOKENS + 1):
            workload = closed("W2", bench.size(run))
            first.append(_timed(engine, _first_token_of(workload)))
        for run in range(bench.repeats + 1):
            workload = closed("W2", bench.size(FIRST_TOKENS + 1 + run))
            whole.append(_timed(engine, workload))
            _say(f"W2 {'warm-up' if run == 0 else f'run {run}'}: {whole[-1]:.3f} s")
    finally:
        engine.close()
    ttft = statistics.median(first[1:])
    gaps = max(1, workload.num_output_tokens - 1)
    each = [(seconds - ttft) / gaps for seconds in whole[1:]]
    floor = bench.floor(workload)
    return {
        "preset": "W2",
        "what": workload.what,
        "ttft_ms": ttft * 1e3,
        "ms_per_token": statistics.median(each) * 1e3,
        "runs_ms_per_token": [seconds * 1e3 for seconds in each],
        "runs_ttft_ms": [seconds * 1e3 for seconds in first[1:]],
        "floor": asdict(floor),
        "floor_ttft_ms": floor.prefill_s and floor.prefill_s * 1e3,
        "floor_ms_per_token": floor.decode_s and floor.decode_s * 1e3 / gaps,
    }


def _first_token_of(workload: Workload) -> Workload:
    """The same request, cut after one token."""
    (work,) = workload.work
    (short,) = uniform_work(1, 1, 1, 1)
    return Workload(workload.name, "", [type(work)(work.prompt_token_ids, short.params)], 1)


def _open_loop(bench: Bench) -> dict[str, Any]:
    """W6: what a closed loop completes, then 70 % of that from users who do not wait."""
    loop, seconds = OpenLoop(bench.size()), bench.options.seconds
    engine = bench.open([loop])
    assert isinstance(engine, VllmApi), "W6 runs on minivllm only"
    try:
        llm = engine.llm
        overlap = bool(llm.config.scheduler.async_scheduling)
        most = capacity(
            Station(llm.engine, overlap=overlap), loop, warm_up=seconds / 10, seconds=seconds / 3
        )
        _say(f"W6 capacity: {most:.1f} requests a second")
        engine.forget()
        station = Station(llm.engine, overlap=overlap)
        served = serve(station, loop.arrivals(LOAD * most, seconds))
    finally:
        engine.close()
    if not served:
        raise UserError(f"no request arrived within {seconds:g} s: raise --seconds")
    return {
        "preset": "W6",
        "what": f"open loop, 512 in, 128 out at {LOAD:.0%} of capacity, an 8k prompt every second",
        "capacity_requests_per_s": most,
        "seconds": seconds,
        **summary(served, station.steps),
    }


def startup(bench: Bench) -> list[dict[str, Any]]:
    """W7: a new process to its first token, once with empty compile caches, then with full ones."""
    args = bench.engine_args | dict(bench.options.engine_args)
    args.setdefault("max_model_len", min(4096, bench.shape.max_position))
    bench.engine_args = args
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in COMPILE_CACHES}
        for number in range(bench.repeats + 1):
            run = run_fresh(
                bench.options.engine, bench.model, args, [START_SHAPE], environment=caches
            )
            run = {name: run[name] for name in ("imported_s", "built_s", "first_s")}
            runs.append(run)
            _say(f"W7 {'warm' if number else 'cold'}: {format_seconds(run['first_s'])}")
    warm = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
    what = "a fresh process to its first token, imports counted"
    return [{"preset": "W7", "what": what, "cold": runs[0], "warm": warm, "runs": runs}]


def op_times(bench: Bench) -> list[dict[str, Any]]:
    """Each op alone: its time, and its share of what the device can do."""
    found = []
    dtype = getattr(torch, bench.dtype)
    for case in kernels.cases(bench.shape, bench.device, dtype):
        seconds = kernels.seconds_of(case.call, bench.device)
        by_bytes = case.num_bytes > 0
        ceiling = bench.ceiling.copy_bytes_per_s if by_bytes else bench.ceiling.matmul_flops_per_s
        amount = case.num_bytes or case.flops
        found.append(
            {
                "op": case.name,
                "us": seconds * 1e6,
                "unit": "B/s" if by_bytes else "FLOP/s",
                "achieved_per_s": amount / seconds,
                "floor_s": amount / ceiling if ceiling else None,
                "seconds": seconds,
            }
        )
    return found


def ladder(bench: Bench) -> list[dict[str, Any]]:
    """Every rung in a process of its own, on one request and on many; greedy tokens compared."""
    on_gpu = bench.device.type == "cuda"
    size, requests = bench.size(), 64 if on_gpu else 8
    prompt, output = size.of(128), size.of(128)
    warm = [(count, prompt, min(8, output)) for count in (1, requests)]
    shapes = [*warm, (1, prompt, output), (requests, prompt, output)]
    limits = {"max_num_seqs": requests, "max_model_len": 512}
    bench.engine_args |= limits | dict(bench.options.engine_args)
    if not on_gpu:
        _say("no GPU here: the rungs of Triton kernels and CUDA graphs are left out")
    found: list[dict[str, Any]] = []
    below: list[list[list[int]]] = []
    for rung in GPU_RUNGS if on_gpu else CPU_RUNGS:
        args = bench.engine_args | dict(rung.engine_args)
        result = run_fresh("minivllm", bench.model, args, shapes, environment=rung.environment)
        tokens = []
        for (count, _, _), run in zip(shapes[2:], result["runs"][2:], strict=True):
            work = uniform_work(count, prompt, output, 256)
            floor = bench.floor(Workload("ladder", "", work, count)).seconds
            tokens.append(run["token_ids"])
            found.append(
                {
                    "rung": rung.name,
                    "requests": count,
                    "seconds": run["seconds"],
                    "tokens_per_s": count * output / run["seconds"],
                    "floor_tokens_per_s": count * output / floor if floor else None,
                    "floor_s": floor,
                    "same_as_below": _equal(tokens[-1], below[len(tokens) - 1]) if below else None,
                }
            )
        below = tokens
        _say(f"{rung.name}: {found[-2]['tokens_per_s']:,.0f} and {found[-1]['tokens_per_s']:,.0f} "
             f"tokens/s")  # fmt: skip
    return found


def _equal(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of requests with the same tokens."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


COMMANDS: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "throughput": throughput,
    "latency": latency,
    "startup": startup,
    "kernels": op_times,
    "ladder": ladder,
}


# ── what is shown ────────────────────────────────────────────────────────────────────────────────


def run_bench(options: Options, command: Sequence[str]) -> dict[str, Any]:
    """Measure, print the table, and as the last line the JSON object, which is returned too.

    Args:
        options: what to measure.
        command: the command line, to be written down.

    Raises:
        UserError: this cannot be measured here; one sentence.
    """
    if options.plot is not None:
        check_plotting()
    bench = Bench(options)
    if options.what != "startup":  # which builds nothing in this process
        bench.measure_ceiling()
    results = COMMANDS[options.what](bench)
    if options.plot is not None:
        here = circumstances(command, bench.device)["machine"]["device"]
        plot_ladder(results, f"{bench.name}, {bench.dtype}, {here}", options.plot)
    record = plain(
        {
            "bench": options.what,
            "engine": options.engine,
            "model": bench.name,
            "dtype": bench.dtype,
            "scale": options.scale,
            "engine_args": bench.engine_args,
            "ceiling": asdict(bench.ceiling),
            "results": results,
            **circumstances(command, bench.device),
        }
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in _tables(results, bench):
        console.print(table)
    print(json.dumps(record, ensure_ascii=False))
    return record


def _tables(results: list[dict[str, Any]], bench: Bench) -> list[Table]:
    """One table for each kind of result among them."""
    title = f"{bench.name}, {bench.dtype}, {bench.options.engine}"
    if bench.options.scale != 1:
        title += f" (counts and lengths scaled to {bench.options.scale:g})"
    copy = rate(bench.ceiling.copy_bytes_per_s, "B/s")
    matmul = rate(bench.ceiling.matmul_flops_per_s, "FLOP/s")
    caption = f"ceiling measured: copy {copy}, matmul {matmul}\n{_pairs(bench.engine_args)}"
    groups: dict[Callable[[Any], dict[str, str]], list[dict[str, str]]] = {}
    for result in results:
        columns = _COLUMNS.get(result.get("preset", bench.options.what), _throughput_columns)
        groups.setdefault(columns, []).extend(
            [columns(result)] if columns is not _startup_columns else _startup_rows(result)
        )
    tables = []
    for rows in groups.values():
        table = Table(title=title, caption=caption, caption_justify="left")
        for i, name in enumerate(rows[0]):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row.values())
        tables.append(table)
    return tables


def _throughput_columns(result: dict[str, Any]) -> dict[str, str]:
    return {
        "workload": f"{result['preset']}: {result['what']}",
        "s": f"{result['seconds']:.3f}",
        "prompt tok/s": f"{result['prompt_tokens_per_s']:,.0f}",
        "output tok/s": f"{result['output_tokens_per_s']:,.0f}",
        "floor s": _number(result["floor_s"], ".3f"),
        "achieved/ceiling": share_of(result["floor_s"], result["seconds"]),
    }


def _alone_columns(result: dict[str, Any]) -> dict[str, str]:
    return {
        "workload": f"{result['preset']}: {result['what']}",
        "TTFT ms": f"{result['ttft_ms']:.2f}",
        "ms/token": f"{result['ms_per_token']:.3f}",
        "floor ms/token": _number(result["floor_ms_per_token"], ".3f"),
        "achieved/ceiling": share_of(result["floor_ms_per_token"], result["ms_per_token"]),
    }


def _open_loop_columns(result: dict[str, Any]) -> dict[str, str]:
    return {
        "workload": f"{result['preset']}: {result['what']}",
        "capacity req/s": f"{result['capacity_requests_per_s']:.1f}",
        "offered": str(result["offered"]),
        "completed": f"{result['completed_share']:.1%}",
        "ITL p50 · p99 ms": f"{result['itl_p50_ms']:.2f} · {result['itl_p99_ms']:.2f}",
        "TTFT p50 · p99 ms": f"{result['ttft_p50_ms']:.1f} · {result['ttft_p99_ms']:.1f}",
        "step p50 ms": f"{result['step_p50_ms']:.2f}",
    }


def _startup_columns(run: dict[str, Any]) -> dict[str, str]:
    return {
        "start": run["name"],
        "imports s": f"{run['imported_s']:.2f}",
        "engine built s": f"{run['built_s']:.2f}",
        "first token s": f"{run['first_s']:.2f}",
    }


def _startup_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """Both kinds of start; seconds since the process was asked for."""
    names = {"cold": "empty compile caches", "warm": "full compile caches (median)"}
    return [_startup_columns({"name": name, **result[key]}) for key, name in names.items()]


def _op_columns(result: dict[str, Any]) -> dict[str, str]:
    return {
        "op": result["op"],
        "µs": f"{result['us']:,.2f}",
        "achieved": rate(result["achieved_per_s"], result["unit"]),
        "achieved/ceiling": share_of(result["floor_s"], result["seconds"]),
    }


def _ladder_columns(result: dict[str, Any]) -> dict[str, str]:
    same = result["same_as_below"]
    return {
        "rung": result["rung"],
        "requests": str(result["requests"]),
        "output tok/s": f"{result['tokens_per_s']:,.1f}",
        "achieved/ceiling": share_of(result["floor_s"], result["seconds"]),
        "same tokens as below": "-" if same is None else f"{same:.0%} of requests",
    }


_COLUMNS: dict[str, Callable[[dict[str, Any]], dict[str, str]]] = {
    "W2": _alone_columns,
    "W6": _open_loop_columns,
    "W7": _startup_columns,
    "kernels": _op_columns,
    "ladder": _ladder_columns,
}


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
