"""The flat batch: the one input of the data plane. Knows tokens, rows and blocks, never a request.

Rows of different lengths lie end to end; nothing is padded. Three rows, a decode and two chunks:

```
 row          0   1 1 1 1   2 2
 token_ids    a   b c d e   f g
 positions    9   0 1 2 3   6 7        query_start  0 1 5 7
 seq_lens    10   4         8          (tokens seen once this step is written)
```

Mirrors vllm/v1/attention/backend.py (CommonAttentionMetadata). Chapters 5 and 7 read this file.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

# Rows x shared tokens from which it pays to read a shared prefix apart: below, a second kernel
# costs more than it saves.
MIN_SHARED_WORK = 32768


@dataclass(frozen=True)
class Batch:
    """One step's tokens. All tensors live on the model's device; the integers are host values.

    Rows with exactly one new token come first: rows `[0, num_decode_rows)`.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset
    query_start: Tensor  # [num_rows + 1] int32
    seq_lens: Tensor  # [num_rows] int32: tokens of context, the new ones included
    block_tables: Tensor  # [num_rows, max_blocks] int32: block ids; past the end, never read
    logits_index: Tensor  # [num_logits] int64: which tokens reach the LM head
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    # Rows [0, num_decode_rows) begin with the same blocks, for so many tokens; a multiple of the
    # block size. A hint: any smaller multiple is as true.
    num_shared_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.token_ids.shape[0]

    @cached_property
    def shared(self) -> dict[Any, Any]:
        """What an op derives from the batch once, for every layer to use; empty at first."""
        return {}

    @property
    def num_rows(self) -> int:
        """Rows that take part in this step."""
        return self.seq_lens.shape[0]
