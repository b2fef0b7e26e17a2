"""Token ids to vectors, and vectors back to one score per token of the vocabulary.

Mirrors vllm/model_executor/layers/vocab_parallel_embedding.py; left out: parallelism and padding of
the vocabulary. Chapter 3 reads this file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """The table of token vectors. weight: [vocab_size, hidden_size], filled by a loader."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        empty = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size]."""
        return F.embedding(token_ids, self.weight)

    def score(self, hidden: Tensor) -> Tensor:
        """The table as a (tied) head: [num_logits, hidden_size] -> [num_logits, vocab_size]."""
        return F.linear(hidden, self.weight)
