"""From a plan to tensors: what the runner remembers of each row, and the flat batch of a step.

A row keeps its place from admission to the end, and the device keeps what changes with every token:
its block table, which only grows, and the token it sampled last. So a step sends only what is new,
and the next step can be launched before anybody on the host knows the last one's tokens.

```
 row 4   info         what the plan said when it took the row: prompt ids, parameters
         block table  [ 7 3 12 0 0 0 ... ]       on the device; a place past the end is never read
         last token   41                         on the device
 slot of position p = block_table[p // block_size] * block_size + p % block_size
```

Mirrors vllm/v1/worker/gpu_input_batch.py and block_table.py. Chapters 4 and 6 read this file.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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


class Step(NamedTuple):
    """A plan, ready to run."""

    batch: Batch
    sampling: list[RowPlan]  # rows that sample, in the order of the first logits
    sampling_rows: Tensor  # their rows, [num_sampling] int64 on the device
    prompts: list[tuple[RowPlan, int]]  # rows whose prompt is scored, and by how many logits


class Rows:
    """Everything that the runner keeps by row.

    Args:
        max_num_seqs: number of rows. One more is kept for padding: its table holds the null block.
        max_model_len: longest sequence in tokens.
        block_size: tokens of a block.
        device: where the batch is wanted.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size, self.device = block_size, device
        self.null_row = max_num_seqs
        self.info: list[NewRow | None] = [None] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs
        shape = (max_num_seqs + 1, cdiv(max_model_len, block_size))
        self._tables = np.zeros(shape, dtype=np.int32)
        # On a CPU, a view of the same memory.
        self.block_tables = torch.from_numpy(self._tables).to(device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Take in who left, who came, and the new blocks of everybody."""
        for row in plan.freed_rows:
            self.info[row], self._num_blocks[row] = None, 0
        for new in plan.new_rows:
            self.info[new.row], self._num_blocks[new.row] = new, 0
        width = self._tables.shape[1]
        places: list[int] = []
        block_ids: list[int] = []
        for planned in plan.rows:
            if planned.new_block_ids:
                known = self._num_blocks[planned.row]
                self._num_blocks[planned.row] = end = known + len(planned.new_block_ids)
                places += range(planned.row * width + known, planned.row * width + end)
                block_ids += planned.new_block_ids
        if places:
            self._tables.reshape(-1)[places] = block_ids
            if self.device.type != "cpu":
                at, ids = self.send([np.array(places), np.array(block_ids)])
                self.block_tables.view(-1).index_copy_(0, at, ids.int())

    def num_shared_tokens(self, rows: Sequence[RowPlan]) -> int:
        """Tokens that all of these rows begin with, in whole blocks: those they hold in common."""
        first, last = rows[0].row, rows[-1].row
        if len(rows) < 2 or self._tables[first, 0] != self._tables[last, 0]:
            return 0  # as a rule nothing is shared, and this is all it costs to know
        num_blocks = min([planned.start for planned in rows]) // self.block_size
        tables = self._tables[[planned.row for planned in rows], :num_blocks]
        different = (tables != tables[0]).any(axis=0)
        shared = int(different.argmax()) if different.any() else num_blocks
        return shared * self.block_size

    def build(self, plan: StepPlan) -> Step:
        """Lay the step's tokens end to end, rows with one token first."""
        rows = sorted(plan.rows, key=self._order)
        token_ids: list[int] = []
        num_sampled_last = 0  # rows, all in front, whose one token is the last that they sampled
        for planned in rows:
            known = self._info(planned).token_ids
            if planned.start < len(known):
                token_ids += known[planned.start : planned.start + planned.num_tokens]
            else:
                num_sampled_last += 1
                token_ids.append(0)
        starts = np.array([planned.start for planned in rows])
        counts = np.array([planned.num_tokens for planned in rows])
        row_ids = np.array([planned.row for planned in rows])
        query_start = np.concatenate(([0], counts.cumsum()))
        seq_lens = starts + counts
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
        slots = slot_mapping(self._tables, np.repeat(row_ids, counts), positions, self.block_size)
        sampling = [planned for planned in rows if planned.samples]
        logits_index, prompts = self._wanted_logits(rows, query_start)
        ids, pos, slot, start, lens, index, row_index, sampling_rows = self.send(
            [
                np.array(token_ids, dtype=np.int64),
                positions,
                slots,
                query_start,
                seq_lens,
                logits_index,
                row_ids,
                np.array([planned.row for planned in sampling], dtype=np.int64),
            ]
        )
        if num_sampled_last:
            ids[:num_sampled_last] = self.last_tokens[row_index[:num_sampled_last]]
        max_blocks = cdiv(int(seq_lens.max()), self.block_size)
        batch = Batch(
            token_ids=ids,
            positions=pos,
            slot_mapping=slot,
            query_start=start.int(),
            seq_lens=lens.int(),
            block_tables=self.block_tables[row_index, :max_blocks],
            logits_index=index,
            num_decode_rows=int((counts == 1).sum()),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
        )
        return Step(batch, sampling, sampling_rows, prompts)

    def _info(self, planned: RowPlan) -> NewRow:
        new = self.info[planned.row]
        assert new is not None and new.request_id == planned.request_id, (
            f"{planned} names a row that it never took"
        )
        return new

    def _order(self, planned: RowPlan) -> int:
        """Rows that feed on their last sampled token, other rows with one token, chunks."""
        if planned.num_tokens > 1:
            return 2
        return int(planned.start < len(self._info(planned).token_ids))

    def _wanted_logits(
        self, rows: list[RowPlan], query_start: np.ndarray
    ) -> tuple[np.ndarray, list[tuple[RowPlan, int]]]:
        """Indices of the tokens that sample, then of those that score a prompt's next token."""
        ends = query_start[1:] - 1
        index = [ends[i : i + 1] for i, planned in enumerate(rows) if planned.samples]
        prompts = []
        for i, planned in enumerate(rows):
            new = self._info(planned)
            if new.params.prompt_logprobs is None:
                continue
            # The token at position p scores the one at p + 1: the prompt's last scores none of it.
            count = min(planned.start + planned.num_tokens, new.num_prompt_tokens - 1)
            count -= planned.start
            if count > 0:
                prompts.append((planned, count))
                index.append(np.arange(query_start[i], query_start[i] + count))
        return np.concatenate(index or [ends[:0]]), prompts

    def send(self, arrays: Sequence[np.ndarray]) -> Sequence[Tensor]:
        """Integer arrays as int64 tensors on the device, in one copy that nobody waits for."""
        packed = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
        if self.device.type != "cpu":
            # Pinned memory comes from torch's pool, which reuses it only after the copy.
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        return packed.split([len(array) for array in arrays])
