"""One decoder for Llama, SmolLM2, Mistral, Qwen2 and Qwen3, and what a step of it costs.

```
ids -> embedding -> [ norm -> attention -> + -> norm -> MLP -> + ] x num_layers -> norm -> head
                    |                      ^ |                 ^
                    +------ residual ------+ +---- residual ---+
```

The architectures differ in eight switches of `ModelConfig`: biases (qkv, o, MLP), qk-norm, tied
embeddings, sliding window, RoPE kind, explicit head_dim. It has never seen a request: its input is
a `Batch`. Quantisation, adapters and shards take its Linears' places (`layers/linear.py`).

Mirrors vllm/model_executor/models/llama.py, qwen2.py and qwen3.py. Chapter 3 reads this file.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minivllm.config import DTYPE_BYTES, ModelConfig
from minivllm.kernels import ops
from minivllm.kernels.batch import Batch
from minivllm.layers.attention import Attention, AttentionOp
from minivllm.layers.embedding import Embedding
from minivllm.layers.linear import Linear
from minivllm.layers.norm_rope import RMSNorm, rope_table


class MLP(nn.Module):
    """The gated feed-forward part: down(silu(gate(x)) * up(x)). Gate and up are packed."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        place = {"bias": config.mlp_bias, "dtype": dtype, "device": device}
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, **place)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size] -> the same shape."""
        return self.down_proj(ops.silu_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

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
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps, **place)
        self.self_attn = Attention(config, layer, attention=attention, **place)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, **place)
        self.mlp = MLP(config, **place)

    def forward(
        self,
        x: Tensor,  # [num_tokens, hidden_size], what the layer before adds to the residual
        residual: Tensor | None,
        batch: Batch,
        cos_sin: Tensor,  # [max_model_len, head_dim]
        kv_cache: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """One layer. Returns its own addition, and the residual stream without it."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, batch, cos_sin, kv_cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """A decoder-only transformer over a paged KV cache.

    Parameters are allocated and not initialised; `models/weights.py` fills them by name:
    `embed_tokens`, `layers.{i}.{input,post_attention}_layernorm`,
    `layers.{i}.self_attn.{qkv_proj,q_norm,k_norm,o_proj}`,
    `layers.{i}.mlp.{gate_up_proj,down_proj}`, `norm`, `lm_head` (absent when tied), each with
    `.weight` and where the model has one `.bias`.

    Args:
        config: the model's shape.
        dtype: of weights and activations.
        device: where they live.
        max_model_len: longest sequence in tokens; sizes the RoPE table.
        attention: the op that attends, to put one of your own in its place.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int,
        attention: AttentionOp = ops.attention,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **place)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, attention=attention, **place)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, **place)
        table = rope_table(config.rope, config.head_dim, max_model_len, config.max_position)
        self.register_buffer("cos_sin", table.to(device), persistent=False)

    def finalize(self) -> None:
        """Call once, after loading and before the first step: weights take their fastest layout."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize()
        if self.lm_head is None:
            self.embed_tokens.finalize_head()

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run the step's tokens; write their K and V into the cache, one pair a layer.

        Returns the final states of the tokens that sample: [num_logits, hidden_size], in the order
        of `batch.logits_index`. The others are needed for their K and V only.
        """
        x, residual = self.embed_tokens(batch.token_ids), None
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            x, residual = layer(x, residual, batch, self.cos_sin, layer_cache)
        x, residual = x[batch.logits_index], residual[batch.logits_index]
        return self.norm(x, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_logits, hidden_size] -> a score for each token: [num_logits, vocab_size]."""
        head = self.lm_head or self.embed_tokens.score
        return head(hidden)


def flops(config: ModelConfig, rows: Iterable[tuple[int, int]]) -> int:
    """Floating-point operations of a step: 2 for each multiply-add of the matrix products.

    Args:
        config: the model's shape.
        rows: (new tokens, context in tokens once they are written) of each row; each samples once.

    Norms, RoPE and softmax are left out: below one percent.
    """
    matrices = config.num_layers * _layer_matrix_elements(config)
    total, windows = 0, _layers_by_window(config)
    for num_new, context in rows:
        total += 2 * matrices * num_new + 2 * config.vocab_size * config.hidden_size
        for window, num_layers in windows.items():
            pairs = num_layers * _visible_pairs(num_new, context, window)
            total += 4 * config.num_heads * config.head_dim * pairs  # q·k, and probabilities·v
    return total


def bytes_read(
    config: ModelConfig, rows: Iterable[tuple[int, int]], *, dtype: str, kv_dtype: str | None = None
) -> int:
    """Bytes that a step must at least read: every weight once, and each row's visible K and V once.

    Args:
        config: the model's shape.
        rows: (new tokens, context in tokens once they are written) of each row.
        dtype: of the weights, e.g. "bfloat16".
        kv_dtype: of the KV cache; None = dtype.

    Of an embedding table that is no head, only the new tokens' rows are read.
    """
    rows = list(rows)
    elements = config.num_parameters()
    if not config.tie_word_embeddings:
        num_new = sum(new for new, _ in rows)
        elements -= (config.vocab_size - min(num_new, config.vocab_size)) * config.hidden_size
    kv_bytes = config.kv_bytes_per_token(kv_dtype or dtype) // config.num_layers
    visible = sum(
        num_layers * min(context, (window or context) + num_new - 1)
        for window, num_layers in _layers_by_window(config).items()
        for num_new, context in rows
    )
    return elements * DTYPE_BYTES[dtype] + visible * kv_bytes


def _layers_by_window(config: ModelConfig) -> Counter[int | None]:
    """Sliding window in tokens (None = full attention) -> how many layers have it."""
    return Counter(config.layer_window(layer) for layer in range(config.num_layers))


def _layer_matrix_elements(config: ModelConfig) -> int:
    h, i = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return h * (q + 2 * kv) + q * h + 3 * h * i


def _visible_pairs(num_new: int, context: int, window: int | None) -> int:
    """(query, key) pairs that a row's mask lets through: the last num_new rows of a triangle."""

    def triangle(n: int) -> int:  # pairs of the first n queries
        if window is None or n <= window:
            return n * (n + 1) // 2
        return window * (window + 1) // 2 + (n - window) * window

    return triangle(context) - triangle(context - num_new)
