"""CUDA graphs of the decode step: hundreds of launches become one.

A step of one token a row does the same work at the same addresses every time, except for which rows
take part and how long they are. So it is recorded once for each size, and replayed:

```
 inputs   [ positions of n rows | their rows ]     the only thing that a step copies
             |
             v
 graph n  last tokens -> tokens, tables, slots -> decoder -> logits -> draw -> last tokens
```

With r rows the next larger size n is replayed; the n - r rows of padding are the null row, whose
table holds the null block. Rows that want more than a plain draw (penalties, bias, logprobs) and
steps with chunks of prompts run without a graph.

Mirrors vllm/v1/cudagraph_dispatcher.py and vllm/compilation/cuda_graph.py. Chapter 10 reads this.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from minivllm.kernels.batch import MIN_SHARED_WORK, Batch
from minivllm.models.decoder import Decoder
from minivllm.models.latency import MAX_ROWS, LatencyDecoder, why_not
from minivllm.runner.batch import Rows
from minivllm.runner.sampler import Sampler
from minivllm.sched.plan import RowPlan

logger = logging.getLogger("minivllm")
_START = attrgetter("start")

# Attention over short contexts wants other tiles, so every size is recorded for short ones and for
# any. Where few rows leave the card idle, it also splits the context, and how finely depends on its
# length: sizes up to FEW_ROWS are recorded for several lengths.
FEW_ROWS = 4
CONTEXT_STEP = 4  # each context bucket is this many times the one before
SHORTEST_CONTEXT = 320  # where attention changes its tiles
# After a shared prefix, what rows have of their own is recorded for these lengths and for any.
OWN_CONTEXTS = (64, 512)
# Fused matrix-vector kernels read each weight once a row: for large weights only one row pays.
LARGE_MODEL = 2_000_000_000  # parameters


def default_sizes(max_num_seqs: int) -> list[int]:
    """vLLM's: 1, 2, 4, every 8 up to 256; then every 16, and the largest that can occur."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def context_buckets(max_model_len: int) -> list[int]:
    """Context lengths to record few rows for: 320, 1280, … and the longest."""
    buckets, length = [], SHORTEST_CONTEXT
    while length < max_model_len:
        buckets.append(length)
        length *= CONTEXT_STEP
    return [*buckets, max_model_len]


def _latency_buckets(latency: LatencyDecoder, max_model_len: int) -> list[int]:
    """Context lengths to record one row for: few, since each number of parts is compiled anew."""
    keys, splits = latency.tiles.keys, latency.tiles.splits
    lengths = [num_parts * keys for num_parts in (3, 5, splits)]
    while lengths[-1] < max_model_len:
        lengths.append(2 * lengths[-1])
    return sorted({min(length, max_model_len) for length in lengths})


class DecodeGraphs:
    """Recorded decode steps by number of rows and context length.

    Args:
        model: the decoder.
        kv_cache: K and V of each layer; their addresses are recorded.
        rows: the runner's rows; likewise.
        sampler: the sampler; likewise.
        sizes: numbers of rows to record, ascending.
        max_model_len: longest context in tokens.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: list[tuple[Tensor, Tensor]],
        rows: Rows,
        sampler: Sampler,
        sizes: Sequence[int],
        max_model_len: int,
    ) -> None:
        self.model, self.kv_cache, self.rows, self.sampler = model, kv_cache, rows, sampler
        self.sizes = list(sizes)
        # Context lengths by size; a step takes the shortest that its rows do not exceed.
        shortest = min(SHORTEST_CONTEXT, max_model_len)
        self._contexts = {size: sorted({shortest, max_model_len}) for size in self.sizes}
        for size in [size for size in self.sizes if size <= FEW_ROWS]:
            self._contexts[size] = context_buckets(max_model_len)
        self._latency: LatencyDecoder | None = None
        self._latency_rows = 0  # up to so many it takes the decoder's place; it shares nothing
        if not (reason := why_not(model)):
            self._latency = LatencyDecoder(model)
            large = model.config.num_parameters() > LARGE_MODEL
            self._latency_rows = 1 if large else MAX_ROWS
            for size in [size for size in self.sizes if size <= self._latency_rows]:
                self._contexts[size] = _latency_buckets(self._latency, max_model_len)
        else:
            logger.info("One row runs like many: %s", reason)
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        largest = self.sizes[-1]
        integers = {"dtype": torch.int64, "device": rows.device}
        self._inputs = torch.zeros(2 * largest, **integers)  # type: ignore[call-overload]
        self._outputs = torch.zeros(largest, **integers)  # type: ignore[call-overload]
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=rows.device)
        self._index = torch.arange(largest, **integers)  # type: ignore[call-overload]

    def capture(self, *, progress: bool) -> None:
        """Record every size, the largest first, so that the others fit its memory."""
        keys = [
            (size, context, 0)
            for size in reversed(self.sizes)
            for context in reversed(self._contexts[size])
        ]
        for key in tqdm(keys, desc="Capturing CUDA graphs (decode)", disable=not progress):
            self._record(*key)

    @torch.inference_mode()
    def _record(self, size: int, context: int, shared: int) -> torch.cuda.CUDAGraph:
        """Run the step once for padding alone, which compiles its kernels, then record it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                self._inputs[:size] = 0
                self._inputs[size : 2 * size] = self.rows.null_row
                self._run(size, context, shared)
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool)
                try:
                    self._run(size, context, shared)
                finally:  # nothing else works on a device that still records
                    graph.capture_end()
        finally:  # the next step writes `_inputs`
            torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[size, context, shared] = graph
        return graph

    def _run(self, size: int, context: int, shared: int) -> None:
        """The decode step of `size` rows, reading `_inputs` and writing `_outputs`."""
        rows = self.rows
        positions, row_ids = self._inputs[:size], self._inputs[size : 2 * size]
        tables = rows.block_tables[row_ids]
        block_ids = tables.gather(1, (positions // rows.block_size)[:, None])[:, 0]
        batch = Batch(
            token_ids=rows.last_tokens[row_ids],
            positions=positions,
            slot_mapping=block_ids.long() * rows.block_size + positions % rows.block_size,
            query_start=self._query_start[: size + 1],
            seq_lens=(positions + 1).int(),
            block_tables=tables,
            logits_index=self._index[:size],
            num_decode_rows=size,
            max_query_len=1,
            max_seq_len=context,
            num_shared_tokens=shared,
        )
        if self._latency is not None and size <= self._latency_rows:
            logits = self._latency.forward_logits(batch, self.kv_cache)
        else:
            logits = self.model.compute_logits(self.model(batch, self.kv_cache))
        token_ids = self.sampler.draw_plain(logits, row_ids, positions + 1)
        rows.last_tokens[row_ids] = token_ids
        self._outputs[:size] = token_ids

    def covers(self, plan_rows: Sequence[RowPlan]) -> bool:
        """Whether a step of these rows can be replayed."""
        if len(plan_rows) > self.sizes[-1] or not self.sampler.draws_plainly(
            [planned.row for planned in plan_rows]
        ):
            return False
        info = self.rows.info
        return all(
            planned.num_tokens == 1 and planned.start >= len(info[planned.row].token_ids)  # type: ignore[union-attr]
            for planned in plan_rows
        )

    def launch(self, plan_rows: Sequence[RowPlan]) -> tuple[Tensor, list[RowPlan]]:
        """Replay a step. Returns the drawn token ids, [num_rows] int64 on the device, and the rows
        in their order: the longest first, so that no long one starts when the others are done.
        """
        ordered = sorted(plan_rows, key=_START, reverse=True)
        count = len(ordered)
        size = self.sizes[bisect_left(self.sizes, count)]
        inputs = np.full(2 * size, self.rows.null_row, dtype=np.int64)
        inputs[:size] = 0
        inputs[:count] = [planned.start for planned in ordered]
        inputs[size : size + count] = [planned.row for planned in ordered]
        longest = ordered[0].start + 1
        shared = self._shared_bucket(ordered) if size > self._latency_rows else 0
        contexts, any_length = self._contexts[size], self._contexts[size][-1]
        if shared:
            contexts = [*(min(shared + own, any_length) for own in OWN_CONTEXTS), any_length]
        key = (size, contexts[bisect_left(contexts, longest)], shared)
        # Shared prefixes are recorded when the first one of their length is met.
        graph = self._graphs.get(key) or self._record(*key)
        self._inputs[: 2 * size].copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        graph.replay()
        return self._outputs[:count], ordered

    def _shared_bucket(self, ordered: Sequence[RowPlan]) -> int:
        """The shared prefix to read apart, in tokens, a power of two; 0 if that does not pay."""
        shared = self.rows.num_shared_tokens(ordered)
        bucket = 1 << (shared.bit_length() - 1) if shared else 0
        return bucket if bucket * len(ordered) >= MIN_SHARED_WORK else 0
