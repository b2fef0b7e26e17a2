"""From a plan to tensors: what the runner remembers of each row, and the flat batch of a step.

A row keeps its place from admission to the end. Its block table only grows, so a step sends what is
new and nothing else:

```
 row 4   tokens       [ 12 873 5 99 | 41 7 ]           prompt | output, as far as known
         block table  [ 7 3 12 0 0 0 ... ]             0 = not allocated
 slot of position p = block_table[p // block_size] * block_size + p % block_size
```

Mirrors vllm/v1/worker/gpu_input_batch.py and block_table.py. Chapters 4 and 6 read this file.
"""

import numpy as np
import torch

from minivllm.base import cdiv
from minivllm.kernels.batch import Batch
from minivllm.sched.plan import NewRow, RowPlan, StepPlan


def slot_mapping(
    block_tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """The KV slot of each token.

    block_tables: [num_rows, max_blocks] int32; rows, positions: [num_tokens]. Returns [num_tokens]
    int64.
    """
    blocks = block_tables[rows, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


class Rows:
    """Token ids and block table of every row. Host memory; `build` makes the device's batch."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.tokens: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.info: list[NewRow | None] = [None] * max_num_seqs
        self._tables = np.zeros((max_num_seqs, cdiv(max_model_len, block_size)), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs

    def free(self, row: int) -> None:
        """Forget a row."""
        self.info[row] = None
        self.tokens[row] = []
        self._num_blocks[row] = 0

    def add(self, new: NewRow) -> None:
        """A request takes a row; its blocks come with its first `RowPlan`."""
        self.info[new.row] = new
        self.tokens[new.row] = list(new.token_ids)
        self._num_blocks[new.row] = 0

    def build(self, plan: StepPlan) -> tuple[Batch, list[RowPlan], list[tuple[RowPlan, int]]]:
        """Grow the block tables and lay the step's tokens end to end, rows with one token first.

        Returns the batch; the rows that sample, in the order of the first logits; and the rows
        whose prompt's log-probabilities are wanted with how many prompt tokens of theirs follow.
        """
        rows = sorted(plan.rows, key=lambda planned: planned.num_tokens != 1)
        token_ids: list[int] = []
        for planned in rows:
            row, new_blocks = planned.row, planned.new_block_ids
            if new_blocks:
                known = self._num_blocks[row]
                self._tables[row, known : known + len(new_blocks)] = new_blocks
                self._num_blocks[row] = known + len(new_blocks)
            token_ids += self.tokens[row][planned.start : planned.start + planned.num_tokens]
        starts = np.array([planned.start for planned in rows])
        counts = np.array([planned.num_tokens for planned in rows])
        row_ids = np.array([planned.row for planned in rows])
        query_start = np.concatenate(([0], counts.cumsum()))
        seq_lens = starts + counts
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
        max_blocks = cdiv(int(seq_lens.max()), self.block_size)
        owners = np.repeat(row_ids, counts)
        slots = slot_mapping(self._tables, owners, positions, self.block_size)
        logits_index, sampling, prompts = self._wanted_logits(rows, query_start)
        return (
            Batch(
                token_ids=self._send(np.array(token_ids, dtype=np.int64)),
                positions=self._send(positions.astype(np.int64)),
                slot_mapping=self._send(slots),
                query_start=self._send(query_start.astype(np.int32)),
                seq_lens=self._send(seq_lens.astype(np.int32)),
                block_tables=self._send(self._tables[row_ids, :max_blocks]),
                logits_index=self._send(logits_index),
                num_decode_rows=int((counts == 1).sum()),
                max_query_len=int(counts.max()),
                max_seq_len=int(seq_lens.max()),
            ),
            sampling,
            prompts,
        )

    def _wanted_logits(
        self, rows: list[RowPlan], query_start: np.ndarray
    ) -> tuple[np.ndarray, list[RowPlan], list[tuple[RowPlan, int]]]:
        sampling = [planned for planned in rows if planned.samples]
        ends = query_start[1:] - 1
        index = [ends[i : i + 1] for i, planned in enumerate(rows) if planned.samples]
        prompts = []
        for i, planned in enumerate(rows):
            new = self.info[planned.row]
            assert new is not None, f"{planned} names a row that nobody took"
            # The token at position p scores the one at p + 1: the prompt's last scores none of it.
            count = min(planned.start + planned.num_tokens, new.num_prompt_tokens - 1)
            count -= planned.start
            if new.params.prompt_logprobs is not None and count > 0:
                prompts.append((planned, count))
                index.append(np.arange(query_start[i], query_start[i] + count))
        return np.concatenate(index or [ends[:0]]).astype(np.int64), sampling, prompts

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
