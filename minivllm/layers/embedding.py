"""Token ids to vectors, and vectors back to one score per token of the vocabulary.

Mirrors vllm/model_executor/layers/vocab_parallel_embedding.py; left out: parallelism and padding of
the vocabulary. Chapter 3 reads this file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.base import MIB
from minivllm.layers.linear import blocked, linear

MAX_COPY_BYTES = 128 * MIB


class Embedding(nn.Module):
    """The table of token vectors. weight: [vocab_size, hidden_size], filled by a loader."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        empty = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._head = None  # the same table, laid out for `score`; None = use the table itself

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size]."""
        return F.embedding(token_ids, self.weight)

    def score(self, hidden: Tensor) -> Tensor:
        """The table as a (tied) head: [num_logits, hidden_size] -> [num_logits, vocab_size]."""
        return linear(hidden, self.weight if self._head is None else self._head)

    def finalize_head(self) -> None:
        """Call once, when a tied table is loaded: on a CPU, keep a copy of it laid out for `score`.

        Lookups need rows and products need tiles. Larger tables than MAX_COPY_BYTES stay alone:
        memory before speed.
        """
        if self.weight.numel() * self.weight.element_size() <= MAX_COPY_BYTES:
            copy = blocked(self.weight)
            self._head = copy if copy.is_mkldnn else None
