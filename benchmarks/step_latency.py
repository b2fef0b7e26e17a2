"""The decode step of one row: plain decoder against `LatencyDecoder`, correctness first, then time.

    python benchmarks/step_latency.py [--models 0.6b 8b] [--contexts 128 300 600 2000]

For each model shape (random bf16 weights) it prints: the error ||out - fp32|| / ||fp32|| of hidden
state and logits of one step, of the plain decoder in bf16 and of the fast one, before and after a
CUDA graph's replay; milliseconds a step by context, each a median of graph replays, of the plain
step, of the fast one without early starts (PDL) and with them, by tiles; and microseconds of each
kernel alone, back to back over all layers, beside its bytes at the copy rate. The last line is one
JSON object. Needs a CUDA device; about three minutes, of which a good part compiles.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from minivllm.config import ModelConfig  # noqa: E402
from minivllm.kernels.batch import Batch  # noqa: E402
from minivllm.models.decoder import Decoder, bytes_read  # noqa: E402
from minivllm.models.latency import (  # noqa: E402
    LatencyDecoder,
    Tile,
    Tiles,
    choose_tiles,
    why_not,
)

COPY_TBS = 4.26  # measured copy rate of an H200; floors refer to it
BF16 = torch.bfloat16
BLOCK_SIZE, MAX_LEN = 16, 4096
SLACK = 1.5  # times the plain decoder's own bf16 error that the fast one's may be
GAP = 0.2  # of the logits' spread: how far the token's fp32 logit may lie below the largest
KINDS = ("qkv", "attention", "output", "gate_up", "down", "head")


def shape(**changes: object) -> ModelConfig:
    base: dict[str, object] = {
        "architecture": "qwen3",
        "vocab_size": 151936,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_position": MAX_LEN,
        "qk_norm": True,
    }
    return ModelConfig(**{**base, **changes})  # type: ignore[arg-type]


MODELS = {
    "0.6b": shape(
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        tie_word_embeddings=True,
    ),
    "8b": shape(hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32),
}

# What to change in the default tiles, by model: one column of the table each.
VARIANTS: dict[str, dict[str, dict[str, Tile | int]]] = {
    "0.6b": {
        "default": {},
        "splits 4": {"splits": 4},
        "keys 64": {"keys": 64, "splits": 16},
        "qkv 8x4, gate_up 8x4": {"qkv": Tile(8, 4, 1024), "gate_up": Tile(8, 4, 1024)},
        "qkv 2x1, gate_up 2x1": {"qkv": Tile(2, 1, 1024), "gate_up": Tile(2, 1, 1024)},
        "output 4x4, down 2x4": {"output": Tile(4, 4), "down": Tile(2, 4)},
        "output 8x8, down 4x8": {"output": Tile(8, 8), "down": Tile(4, 8)},
        "down in blocks of 1024": {"down": Tile(4, 4, 1024)},
        "head 16x4": {"head": Tile(16, 4, 1024)},
        "attention 2 warps": {"attention_warps": 2},
    },
    "8b": {
        "default": {},
        "qkv 4x4, gate_up 2x4": {"qkv": Tile(4, 4), "gate_up": Tile(2, 4)},
        "qkv 2x4, gate_up 4x4": {"qkv": Tile(2, 4), "gate_up": Tile(4, 4)},
        "qkv 8x8, gate_up 8x8 in 2048": {"qkv": Tile(8, 8, 2048), "gate_up": Tile(8, 8, 2048)},
        "output 16x8, down 2x8 whole": {"output": Tile(16, 8), "down": Tile(2, 8, 16384)},
        "output 4x4, down 8x8": {"output": Tile(4, 4), "down": Tile(8, 8)},
        "down 8x8 in 2048": {"down": Tile(8, 8, 2048)},
        "down 4x4 in 2048, head 4x2": {"down": Tile(4, 4, 2048), "head": Tile(4, 2)},
        "head 16x8": {"head": Tile(16, 8)},
    },
}


# ── model, batch, cache ──────────────────────────────────────────────────────────────────────────


def random_decoder(config: ModelConfig) -> Decoder:
    decoder = Decoder(config, dtype=BF16, device="cuda", max_model_len=MAX_LEN)
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(1.0, 0.1, generator=generator)
        else:
            std = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
            parameter.data.normal_(0.0, std, generator=generator)
    return decoder


def random_cache(config: ModelConfig, rows: int) -> list[tuple[Tensor, Tensor]]:
    """K and V of every layer, all filled; their blocks are shuffled by the batch's tables."""
    size = (rows * MAX_LEN // BLOCK_SIZE + 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return [
        (
            torch.randn(size, device="cuda", dtype=BF16),
            torch.randn(size, device="cuda", dtype=BF16),
        )
        for _ in range(config.num_layers)
    ]


def decode_batch(config: ModelConfig, rows: int, context: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    width = MAX_LEN // BLOCK_SIZE
    tables = torch.randperm(rows * width, generator=generator).view(rows, width) + 1
    last = torch.full((rows,), context - 1)
    block = tables[:, (context - 1) // BLOCK_SIZE]
    return Batch(
        token_ids=torch.randint(config.vocab_size, (rows,), generator=generator).cuda(),
        positions=last.cuda(),
        slot_mapping=(block * BLOCK_SIZE + (context - 1) % BLOCK_SIZE).cuda(),
        query_start=torch.arange(rows + 1, dtype=torch.int32).cuda(),
        seq_lens=(last + 1).int().cuda(),
        block_tables=tables.int().cuda(),
        logits_index=torch.arange(rows).cuda(),
        num_decode_rows=rows,
        max_query_len=1,
        max_seq_len=context,
    )


def tiles_of(config: ModelConfig, changes: dict[str, Tile | int]) -> Tiles:
    return choose_tiles(config, BF16, torch.device("cuda"))._replace(**changes)  # type: ignore[arg-type]


# ── graphs and clocks ────────────────────────────────────────────────────────────────────────────


def capture(step: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of one call, and what the call returned (written anew at each replay)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def replay_us(graph: torch.cuda.CUDAGraph, calls: int = 25) -> float:
    """Median microseconds of a replay."""
    times = []
    for i in range(calls + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def error(out: Tensor, expected: Tensor) -> float:
    out, expected = out.double(), expected.double()
    return ((out - expected).norm() / expected.norm()).item()


# ── what is measured ─────────────────────────────────────────────────────────────────────────────


class Bench:
    """One model: its decoder, a cache and the fp32 answers."""

    def __init__(self, name: str) -> None:
        self.name, self.config = name, MODELS[name]
        self.decoder = random_decoder(self.config)
        obstacle = why_not(self.decoder)
        assert obstacle is None, obstacle
        self.cache = random_cache(self.config, rows=4)
        self.failures: list[str] = []

    def reference(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden state and logits of the same weights in fp32, from the plain decoder."""
        wide = Decoder(self.config, dtype=torch.float32, device="cuda", max_model_len=MAX_LEN)
        for mine, theirs in zip(wide.parameters(), self.decoder.parameters(), strict=True):
            mine.data.copy_(theirs)
        cache = [(k.float(), v.float()) for k, v in self.cache]
        hidden = wide(batch, cache)
        return hidden, wide.compute_logits(hidden)

    def correctness(self, rows: int, context: int) -> dict[str, float]:
        """Errors of one step; each path writes the same slots, so the cache needs no copy."""
        batch = decode_batch(self.config, rows, context)
        hidden, logits = self.reference(batch)
        torch.cuda.empty_cache()
        plain = self.decoder(batch, self.cache)
        plain_logits = self.decoder.compute_logits(plain)
        found = {"plain": error(plain, hidden), "plain, logits": error(plain_logits, logits)}
        for pdl in (False, True):
            fast = LatencyDecoder(self.decoder, pdl=pdl)
            label = f"pdl {pdl}"
            ours = fast(batch, self.cache)
            found[label] = error(ours, hidden)
            found[f"{label}, logits"] = error(fast.compute_logits(ours), logits)
            found[f"{label}, fused logits"] = error(fast.forward_logits(batch, self.cache), logits)

            def both(fast: LatencyDecoder = fast) -> tuple[Tensor, Tensor]:
                tokens = fast.forward_greedy(batch, self.cache)
                return tokens, fast.forward_logits(batch, self.cache)

            graph, (tokens, replayed) = capture(both)
            for _ in range(5):
                replayed.fill_(float("nan"))
                tokens.zero_()
                graph.replay()
                torch.cuda.synchronize()
                found[f"{label}, replayed logits"] = error(replayed, logits)
                gap = (logits.amax(-1) - logits.gather(1, tokens[:, None]).squeeze(1)).max()
                found[f"{label}, gap"] = gap.item() / logits.std().item()
                if not torch.equal(tokens, replayed.argmax(-1)):
                    self.failures.append(f"{self.name} {label}: the token is not the argmax")
        for label, value in found.items():
            bound = GAP if "gap" in label else SLACK * max(found["plain"], found["plain, logits"])
            if not value <= bound:
                where = f"{self.name}, {rows} rows, context {context}, {label}"
                self.failures.append(f"{where}: {value:.1e} above {bound:.1e}")
        shown = "  ".join(f"{label} {value:.1e}" for label, value in found.items())
        print(f"  errors, {rows} rows, context {context}: {shown}", flush=True)
        return found

    def step_us(self, step: Callable[[Batch], Tensor], rows: int, context: int) -> float:
        """A graph's replay; the token must be the same each time."""
        batch = decode_batch(self.config, rows, context)
        graph, tokens = capture(lambda: step(batch))
        first = self._replayed(graph, tokens)
        micros = replay_us(graph)
        if not torch.equal(first, self._replayed(graph, tokens)):
            self.failures.append(f"{self.name}, context {context}: replays differ")
        return micros

    def _replayed(self, graph: torch.cuda.CUDAGraph, tokens: Tensor) -> Tensor:
        tokens.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        return tokens.clone()

    def plain_greedy(self, batch: Batch) -> Tensor:
        return self.decoder.compute_logits(self.decoder(batch, self.cache)).argmax(-1)

    def kernel_us(self, fast: LatencyDecoder, context: int) -> dict[str, float]:
        """Each kernel alone, over all layers back to back (PDL included), per launch."""
        batch = decode_batch(self.config, 1, context)
        layers = self.decoder.layers
        x = torch.randn(1, self.config.hidden_size, device="cuda", dtype=BF16)
        qkv = fast.project_qkv(layers[0], x)
        parts = fast.attend(layers[0], qkv, batch, self.cache[0])
        up = fast.gate_up(layers[0], x)
        calls: dict[str, Callable[[], list[object]]] = {
            "qkv": lambda: [fast.project_qkv(layer, x) for layer in layers],
            "attention": lambda: [
                fast.attend(layer, qkv, batch, pair)
                for layer, pair in zip(layers, self.cache, strict=True)
            ],
            "output": lambda: [fast.project_output(layer, parts, x) for layer in layers],
            "gate_up": lambda: [fast.gate_up(layer, x) for layer in layers],
            "down": lambda: [fast.project_down(layer, up, x) for layer in layers],
            "head": lambda: [fast.compute_logits(x)],
        }
        return {
            kind: replay_us(capture(torch.inference_mode()(call))[0], calls=9)
            / (1 if kind == "head" else len(layers))
            for kind, call in calls.items()
        }

    def kernel_floors(self, context: int) -> dict[str, float]:
        """Bytes at the copy rate, in microseconds."""
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        elements = {
            "qkv": c.hidden_size * (q + 2 * kv),
            "attention": 2 * kv * context,
            "output": c.hidden_size * q,
            "gate_up": 2 * c.hidden_size * c.intermediate_size,
            "down": c.hidden_size * c.intermediate_size,
            "head": c.hidden_size * c.vocab_size,
        }
        return {kind: 2 * count / COPY_TBS / 1e6 for kind, count in elements.items()}

    def run(self, contexts: list[int]) -> dict[str, object]:
        report: dict[str, object] = {}
        report["errors"] = {f"{r}x300": self.correctness(r, 300) for r in (1, 2)}
        report["errors"]["1x2000"] = self.correctness(1, 2000)  # type: ignore[index]
        steps: dict[str, dict[int, float]] = {}
        heads = "  ".join(f"{context:>8}" for context in contexts)
        print(f"  ms a step, one row, by context {'':20} {heads}", flush=True)
        floors = {
            context: bytes_read(self.config, [(1, context)], dtype="bfloat16") / COPY_TBS / 1e6
            for context in contexts
        }
        self._row(steps, "floor: bytes at the copy rate", contexts, floors.__getitem__)
        for rows in (1, 2, 4):
            self._row(
                steps,
                f"plain, {rows} rows",
                contexts,
                lambda c, r=rows: self.step_us(self.plain_greedy, r, c),
            )
        for label, fast, rows in self.fast_variants():

            def step(batch: Batch, fast: LatencyDecoder = fast) -> Tensor:
                return fast.forward_greedy(batch, self.cache)

            self._row(steps, label, contexts, lambda c, s=step, r=rows: self.step_us(s, r, c))
        whole = LatencyDecoder(self.decoder)
        self._row(
            steps,
            "default, logits written",
            contexts,
            lambda c: self.step_us(lambda b: whole.forward_logits(b, self.cache), 1, c),
        )
        report["step_us"] = steps
        floors_of = self.kernel_floors(300)
        report["kernel_floor_us"] = floors_of
        kernels: dict[str, dict[str, float]] = {}
        print(f"  µs a launch at context 300 {'':23} {'  '.join(f'{k:>9}' for k in KINDS)}")
        print(f"    {'floor':45} {'  '.join(f'{floors_of[k]:9.2f}' for k in KINDS)}", flush=True)
        for label, fast, rows in self.fast_variants():
            if rows == 1:
                kernels[label] = found = self.kernel_us(fast, 300)
                shown = "  ".join(f"{found[kind]:9.2f}" for kind in KINDS)
                print(f"    {label:45} {shown}", flush=True)
        report["kernel_us"] = kernels
        report["failures"] = self.failures
        return report

    def fast_variants(self) -> Iterator[tuple[str, LatencyDecoder, int]]:
        """(label, decoder, rows)."""
        yield "default, no PDL", LatencyDecoder(self.decoder, pdl=False), 1
        for label, changes in VARIANTS[self.name].items():
            tiles = tiles_of(self.config, changes)
            yield label, LatencyDecoder(self.decoder, tiles=tiles, pdl=True), 1
        for rows in (2, 4):
            yield f"default, {rows} rows", LatencyDecoder(self.decoder, pdl=True), rows

    def _row(
        self,
        steps: dict[str, dict[int, float]],
        label: str,
        contexts: list[int],
        micros: Callable[[int], float],
    ) -> None:
        steps[label] = {}
        for context in contexts:
            steps[label][context] = micros(context)
        shown = "  ".join(f"{steps[label][context] / 1e3:8.4f}" for context in contexts)
        print(f"    {label:45} {shown}", flush=True)


# ── compiling ahead ──────────────────────────────────────────────────────────────────────────────


def compile_ahead(names: list[str], contexts: list[int], workers: int) -> None:
    """Forked workers run each variant's step over one layer: Triton's disk cache is full after."""
    jobs = [
        (name, changes, pdl, rows)
        for name in names
        for changes, pdl, rows in (
            ({}, False, 1),
            ({}, False, 2),
            ({}, True, 2),
            ({}, True, 4),
            *((changes, True, 1) for changes in VARIANTS[name].values()),
        )
    ]
    children = []
    for worker in range(workers):
        child = os.fork()
        if child == 0:
            try:
                for name, changes, pdl, rows in jobs[worker::workers]:
                    _compile_one(name, changes, pdl, rows, contexts)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _compile_one(
    name: str, changes: dict[str, Tile | int], pdl: bool, rows: int, contexts: list[int]
) -> None:
    config = replace(MODELS[name], num_layers=1)
    decoder = Decoder(config, dtype=BF16, device="cuda", max_model_len=MAX_LEN)
    for parameter in decoder.parameters():
        parameter.data.zero_()
    fast = LatencyDecoder(decoder, tiles=tiles_of(config, changes), pdl=pdl)
    cache = random_cache(config, rows)
    for context in contexts:
        batch = decode_batch(config, rows, context)
        fast.forward_greedy(batch, cache)
        fast.compute_logits(fast(batch, cache))
        fast.forward_logits(batch, cache)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 300, 600, 2000])
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    arguments = parser.parse_args()
    if max(arguments.contexts) > MAX_LEN:
        parser.error(f"contexts go up to {MAX_LEN}")
    start = time.perf_counter()
    contexts = sorted({*arguments.contexts, 300, 2000})
    compile_ahead(arguments.models, contexts, arguments.workers)
    print(f"compiled ahead in {time.perf_counter() - start:.0f} s", flush=True)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    failures: list[str] = []
    for name in arguments.models:
        print(f"{name}, {time.perf_counter() - start:.0f} s", flush=True)
        bench = Bench(name)
        report[name] = bench.run(arguments.contexts)
        failures += bench.failures
        del bench
        torch.cuda.empty_cache()
    for failure in failures:
        print(f"FAIL {failure}")
    report["ok"] = not failures
    report["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(report))
    return 1 if failures else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
