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
        return linear(x, self.weight, self.bias)

    def finalize(self) -> None:
        """Call once, when the weight is loaded: on a CPU its memory is laid out for the product.

        Name and shape stay; the layout is oneDNN's. `weight.to_dense()` reads the values.
        """
        self.weight = nn.Parameter(blocked(self.weight), requires_grad=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, for a plain or a blocked weight."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def blocked(weight: Tensor) -> Tensor:
    """A copy of an fp32 CPU weight in the tiles that oneDNN reads; any other weight as it is.

    PyTorch's fp32 product on x86 is MKL's, which is 1.5 times (one row) to 6 times (eight rows)
    slower on an AMD Zen 4 than oneDNN's with a blocked weight.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.is_mkldnn:
        return weight
    if not torch.backends.mkldnn.is_available():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)
