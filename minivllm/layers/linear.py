"""y = x W^T + b, the op in which a model spends its time.

The seam for quantised weights, adapters and shards is here, and outside the decoder: whatever is
called with x and returns y may stand in a Linear's place (`layer.mlp.down_proj = other`).

Mirrors vllm/model_executor/layers/linear.py; left out: parallelism and weight methods. Chapter 3
reads this file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """A dense layer. weight: [out_features, in_features], bias: [out_features] or None.

    Parameters are allocated, not initialised: a loader fills them. Packed layers (q, k, v or gate,
    up) are one Linear whose rows lie one part after the other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        empty = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.bias = (
            nn.Parameter(empty.new_empty(out_features), requires_grad=False) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        return F.linear(x, self.weight, self.bias)
