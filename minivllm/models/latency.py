"""The decode step of one or two rows, over the weights of a `Decoder`: same answer, few launches.

With so few rows a step is a chain of small products, and what it waits for is launches, not bytes.
`LatencyDecoder` takes the decoder's place for such batches: five kernels a layer
(`kernels/matvec.py`) in place of eight, each loading its weights while the one before it still
runs. It owns nothing: no weight is copied. The plain decoder stays beside it, for every other batch
and as the specification.

A CUDA graph of such a step holds for a range of contexts, since the number of attention's parts is
fixed when it is captured: `context_bucket` names the range.

No file of vLLM does this. Chapter 10 reads this file.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from minivllm.base import cdiv
from minivllm.config import ModelConfig
from minivllm.kernels import ops
from minivllm.kernels.batch import Batch
from minivllm.layers.embedding import Embedding
from minivllm.layers.linear import Linear
from minivllm.models.decoder import Decoder, DecoderLayer

MAX_ROWS = 2  # with four, the plain decoder's matrix products are as fast
MAX_GROUP = 16  # query heads of a KV head; more would not fit attention's tile
PDL_CAPABILITY = (9, 0)  # Hopper: the first where a kernel may start before its predecessor's end


class Tile(NamedTuple):
    """What one program of a product takes: `rows` of W, `block_k` columns at a time."""

    rows: int
    warps: int
    block_k: int = 4096


class Tiles(NamedTuple):
    """How the step's kernels are cut. All numbers are powers of two, but `splits`."""

    qkv: Tile
    output: Tile
    gate_up: Tile
    down: Tile
    head: Tile
    keys: int = 128  # attention takes so many at a time
    attention_warps: int = 4
    splits: int = 8  # parts of a context, at most; the output product pays for each


def choose_tiles(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Tiles by shape; measured on an H200 for hidden sizes of 1,024 and 4,096.

    A program's part of W is loaded whole before it waits, so registers bound it: 64 elements a
    thread of each matrix where a program is short, up to 256 in the head, which is all bandwidth.
    """
    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    wide = dtype.itemsize // 2  # fp32 takes twice the registers, and no tensor core
    if device.type == "cpu":  # the interpreter: few programs, for a program costs milliseconds
        tile = Tile(rows=64, warps=1)
        return Tiles(tile, tile, tile, tile, Tile(rows=256, warps=1), keys=16)
    return Tiles(
        qkv=_tile(hidden, rows=4, per_thread=64 // wide),
        output=_tile(attended, rows=8, per_thread=128 // wide),
        gate_up=_tile(hidden, rows=4, per_thread=64 // wide),
        down=_tile(config.intermediate_size, rows=4, per_thread=128 // wide),
        head=_tile(hidden, rows=32 if hidden <= 1024 else 8, per_thread=256 // wide),
        keys=32 if wide > 1 else 128 if config.head_dim <= 128 else 64,
    )


def _tile(in_features: int, *, rows: int, per_thread: int) -> Tile:
    block_k = min(4096, _power_of_two(in_features))
    return Tile(rows, max(1, min(8, rows * block_k // (32 * per_thread))), block_k)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def why_not(decoder: Decoder) -> str | None:
    """What keeps a `LatencyDecoder` from taking this decoder's place; None if nothing does.

    Where it is None, every layer has exactly the parts, and every part the layout, that the kernels
    read. Also a Linear that something else stands in for (quantised, adapted) is a reason.
    """
    config, weight = decoder.config, decoder.embed_tokens.weight
    if obstacle := ops.why_not_triton(weight.device):
        return obstacle
    return _why_not_shape(config) or _why_not_parts(decoder)


def _why_not_shape(config: ModelConfig) -> str | None:
    if config.num_heads // config.num_kv_heads > MAX_GROUP:
        group = config.num_heads // config.num_kv_heads
        return f"{group} query heads share a KV head; the kernels take {MAX_GROUP}"
    if config.head_dim > 256:
        return f"head_dim is {config.head_dim}; the kernels take 256"
    return None


def _why_not_parts(decoder: Decoder) -> str | None:
    dtype = decoder.embed_tokens.weight.dtype
    linears = {"lm_head": decoder.lm_head} if decoder.lm_head is not None else {}
    for i, layer in enumerate(decoder.layers):
        linears |= {
            f"layers.{i}.self_attn.qkv_proj": layer.self_attn.qkv_proj,
            f"layers.{i}.self_attn.o_proj": layer.self_attn.o_proj,
            f"layers.{i}.mlp.gate_up_proj": layer.mlp.gate_up_proj,
            f"layers.{i}.mlp.down_proj": layer.mlp.down_proj,
        }
        if layer.self_attn.attention is not ops.attention:
            return "the attention op is one of your own"
    for name, module in linears.items():
        if type(module) is not Linear:
            return f"{name} is a {type(module).__name__}, no plain Linear"
        if module.weight.dtype != dtype or not module.weight.dtype.is_floating_point:
            return f"{name} has weights of dtype {module.weight.dtype}, the embedding {dtype}"
        if module.weight.is_mkldnn or not module.weight.is_contiguous():
            return f"the weight of {name} does not lie row by row"
    if type(decoder.embed_tokens) is not Embedding:
        return f"embed_tokens is a {type(decoder.embed_tokens).__name__}, no plain Embedding"
    if decoder.lm_head is not None and decoder.lm_head.bias is not None:
        return "lm_head has a bias"
    return None


class LatencyDecoder(nn.Module):
    """A `Decoder` for batches that `takes` accepts: same arguments, same results up to rounding.

    Args:
        decoder: a loaded decoder for which `why_not` is None; its weights are used in place.
        tiles: how the kernels are cut; None = by shape.
        pdl: let kernels start early (programmatic dependent launch); None = where the GPU can.

    With `pdl`, something launched in the ordinary way must have followed whatever wrote the KV
    cache and the batch. Each step starts with such a launch, the embedding.
    """

    def __init__(
        self, decoder: Decoder, *, tiles: Tiles | None = None, pdl: bool | None = None
    ) -> None:
        from minivllm.kernels import matvec  # here, not above: it fails where triton is absent

        super().__init__()
        weight = decoder.embed_tokens.weight
        device = weight.device
        if pdl is None:
            pdl = device.type == "cuda" and (
                torch.cuda.get_device_capability(device) >= PDL_CAPABILITY
            )
        self.config, self.decoder = decoder.config, decoder
        self.tiles = tiles or choose_tiles(decoder.config, weight.dtype, device)
        self.pdl = pdl
        self.matvec = matvec

    @staticmethod
    def takes(batch: Batch) -> bool:
        """Whether the batch is few rows of one new token each."""
        return batch.num_tokens == batch.num_rows <= MAX_ROWS

    def context_bucket(self, max_seq_len: int) -> int:
        """The largest `max_seq_len` for which a step launches the same as for this one.

        Up to `splits` tiles of keys a part has one tile, then the tiles of a part double.
        """
        num_tiles = cdiv(max_seq_len, self.tiles.keys)
        if num_tiles > self.tiles.splits:
            num_tiles = self.tiles.splits * _power_of_two(cdiv(num_tiles, self.tiles.splits))
        return num_tiles * self.tiles.keys

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """As `Decoder.forward`: final states [num_logits, hidden_size]; writes new K and V."""
        x = self._layers(batch, kv_cache)[batch.logits_index]
        return self.decoder.norm(x, None)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.compute_logits`, but always fp32, unrounded: [num_logits, vocab_size]."""
        return self._head(hidden, normed=True, index=None, greedy=False)

    @torch.inference_mode()
    def forward_logits(self, batch: Batch, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`forward` and `compute_logits` with the final norm inside the head: two launches less."""
        x = self._layers(batch, kv_cache)
        return self._head(x, normed=False, index=batch.logits_index, greedy=False)

    @torch.inference_mode()
    def forward_greedy(self, batch: Batch, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The tokens of the largest logits, [num_logits] int64; the logits are never written."""
        x = self._layers(batch, kv_cache)
        return self._head(x, normed=False, index=batch.logits_index, greedy=True)

    def _layers(self, batch: Batch, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The residual stream after the last layer: [num_rows, hidden_size]."""
        assert batch.num_tokens == batch.num_rows, "a row has one new token"
        x = self.decoder.embed_tokens(batch.token_ids)
        for layer, layer_cache in zip(self.decoder.layers, kv_cache, strict=True):
            parts = self.attend(layer, self.project_qkv(layer, x), batch, layer_cache)
            x = self.project_output(layer, parts, x)
            x = self.project_down(layer, self.gate_up(layer, x), x)
        return x

    # The five launches of a layer.

    def project_qkv(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """Norm and product: [num_rows, hidden_size] -> q, k, v of each row, packed."""
        norm, proj = layer.input_layernorm, layer.self_attn.qkv_proj
        return self.matvec.matvec(
            x,
            proj.weight,
            proj.bias,
            norm=norm.weight,
            eps=norm.eps,
            pdl=self.pdl,
            **self.tiles.qkv._asdict(),
        )

    def attend(
        self, layer: DecoderLayer, qkv: Tensor, batch: Batch, kv_cache: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Head norm, RoPE, KV write and attention: the parts that `project_output` merges."""
        attn, tiles = layer.self_attn, self.tiles
        context = min(batch.max_seq_len, attn.sliding_window or batch.max_seq_len)
        return self.matvec.rope_attention(
            qkv,
            batch,
            self.decoder.cos_sin,
            attn.q_norm and attn.q_norm.weight,
            attn.k_norm and attn.k_norm.weight,
            attn.eps,
            *kv_cache,
            attn.sliding_window,
            split_len=cdiv(cdiv(context, tiles.keys), tiles.splits) * tiles.keys,
            keys=tiles.keys,
            warps=tiles.attention_warps,
            pdl=self.pdl,
        )

    def project_output(
        self, layer: DecoderLayer, parts: tuple[Tensor, Tensor], residual: Tensor
    ) -> Tensor:
        """Merge, product and residual: [num_rows, hidden_size]."""
        proj, tile = layer.self_attn.o_proj, self.tiles.output
        return self.matvec.merge_matvec(
            *parts, proj.weight, proj.bias, residual, rows=tile.rows, warps=tile.warps, pdl=self.pdl
        )

    def gate_up(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """Norm, two products, silu(gate) * up: [num_rows, intermediate_size]."""
        norm, proj = layer.post_attention_layernorm, layer.mlp.gate_up_proj
        return self.matvec.matvec(
            x,
            proj.weight,
            proj.bias,
            norm=norm.weight,
            eps=norm.eps,
            gated=True,
            pdl=self.pdl,
            **self.tiles.gate_up._asdict(),
        )

    def project_down(self, layer: DecoderLayer, x: Tensor, residual: Tensor) -> Tensor:
        """Product and residual: [num_rows, hidden_size]."""
        proj = layer.mlp.down_proj
        return self.matvec.matvec(
            x,
            proj.weight,
            proj.bias,
            residual=residual,
            pdl=self.pdl,
            **self.tiles.down._asdict(),
        )

    def _head(self, x: Tensor, *, normed: bool, index: Tensor | None, greedy: bool) -> Tensor:
        norm, head = self.decoder.norm, self.decoder.lm_head or self.decoder.embed_tokens
        return self.matvec.head(
            x,
            head.weight,
            norm=None if normed else norm.weight,
            eps=norm.eps,
            index=index,
            greedy=greedy,
            pdl=self.pdl,
            **self.tiles.head._asdict(),
        )
