"""Self-attention: project, rotate and store, attend, project back.

The layer knows neither requests nor blocks: the batch says where keys and values go and which ones
each query sees. Mirrors vllm/model_executor/models/llama.py (LlamaAttention). Chapters 3 and 5 read
this file.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.kernels import ops
from minivllm.kernels.batch import Batch
from minivllm.layers.linear import Linear
from minivllm.layers.norm_rope import RMSNorm

AttentionOp = Callable[[Tensor, Tensor, Tensor, Batch, float, int | None], Tensor]


class Attention(nn.Module):
    """Multi-head attention with grouped KV heads over a paged cache; one layer's part.

    Args:
        config: the model's shape.
        layer: which layer this is (its sliding window depends on it).
        attention: the op that attends; `minivllm.kernels.reference.attention` is its specification.
        dtype: of the weights.
        device: where the weights live.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        attention: AttentionOp,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        head_dim, eps = config.head_dim, config.rms_norm_eps
        q_size = config.num_heads * head_dim
        qkv_size = q_size + 2 * config.num_kv_heads * head_dim
        self.qkv_proj = Linear(config.hidden_size, qkv_size, bias=config.qkv_bias, **place)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias, **place)
        self.q_norm = RMSNorm(head_dim, eps, **place) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, **place) if config.qk_norm else None
        self.attention = attention
        self.eps = eps
        self.scale = head_dim**-0.5
        self.sliding_window = config.layer_window(layer)

    def forward(
        self, x: Tensor, batch: Batch, cos_sin: Tensor, kv_cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """x: [num_tokens, hidden_size] -> the same shape. Writes the new tokens' K and V."""
        q = ops.rope_and_cache(
            self.qkv_proj(x),
            batch.positions,
            cos_sin,
            self.q_norm and self.q_norm.weight,
            self.k_norm and self.k_norm.weight,
            self.eps,
            *kv_cache,
            batch.slot_mapping,
        )  # [num_tokens, num_heads, head_dim]
        return self.o_proj(self.attention(q, *kv_cache, batch, self.scale, self.sliding_window))
