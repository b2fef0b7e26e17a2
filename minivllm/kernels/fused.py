"""The small ops around the matrix products, in Triton: each reads and writes its tensors once.

They are limited by memory, so fusing is all there is to win: residual + norm, and
split + head norm + RoPE + KV write, are one pass each instead of three and eight.

Same names, arguments and results as in `reference.py`. All arithmetic is fp32 in registers; where
the twin rounds to the model's dtype in between, the kernel rounds too.
Mirrors vllm/csrc: layernorm_kernels.cu, pos_encoding_kernels.cu, cache_kernels.cu and
activation_kernels.cu.
Chapter 3 reads this file.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SILU_BLOCK = 1024  # elements a program
ROPE_HEADS = 16  # heads a program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019). x: [..., hidden]."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual connection and the norm after it: (norm(x + residual), x + residual)."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    hidden = x.shape[-1]
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    _norm_kernel[(x.numel() // hidden,)](
        x,
        x if residual is None else residual.contiguous(),
        weight,
        out,
        total,
        eps,
        HAS_RESIDUAL=residual is not None,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )
    return out, total


@triton.jit
def _norm_kernel(
    x,  # [num_rows, HIDDEN]
    residual,  # [num_rows, HIDDEN], if HAS_RESIDUAL
    weight,  # [HIDDEN]
    out,  # [num_rows, HIDDEN]
    total,  # [num_rows, HIDDEN]: x + residual, if HAS_RESIDUAL
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: the row stays in registers between the sum of squares and the scaling."""
    i = tl.arange(0, BLOCK)
    valid = i < HIDDEN
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + i
    dtype = out.dtype.element_ty
    value = tl.load(x + offsets, mask=valid, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + offsets, mask=valid, other=0.0).to(tl.float32)
        value = value.to(dtype)
        tl.store(total + offsets, value, mask=valid)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    normed = (value * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + i, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + offsets, (normed * gain).to(dtype), mask=valid)


def silu_mul(gate_up: Tensor) -> Tensor:
    """The gated activation: [num_tokens, 2 * intermediate] -> silu(gate) * up."""
    gate_up = gate_up.contiguous()
    intermediate = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], intermediate)
    num_tokens = gate_up.numel() // (2 * intermediate)
    _silu_mul_kernel[(num_tokens, triton.cdiv(intermediate, SILU_BLOCK))](
        gate_up, out, INTERMEDIATE=intermediate, BLOCK=SILU_BLOCK
    )
    return out


@triton.jit
def _silu_mul_kernel(
    gate_up,  # [num_tokens, 2 * INTERMEDIATE]
    out,  # [num_tokens, INTERMEDIATE]
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = i < INTERMEDIATE
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + token * 2 * INTERMEDIATE + i, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * INTERMEDIATE + i, mask=valid, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + token * INTERMEDIATE + i, (silu * up.to(tl.float32)).to(dtype), mask=valid)


def rope_and_cache(
    qkv: Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    positions: Tensor,  # [num_tokens]
    cos_sin: Tensor,  # [max_position, head_dim] fp32: cosines, then sines, of the half dimension
    q_norm: Tensor | None,  # [head_dim], Qwen3's norm of each head; None = no norm
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], written here; contiguous
    v_cache: Tensor,
    slot_mapping: Tensor,  # [num_tokens]
) -> Tensor:
    """Split packed q, k, v; norm q and k per head; rotate both; write K and V to their slots.

    Returns q: [num_tokens, num_heads, head_dim]. RoPE pairs dimension i with i + head_dim / 2.
    """
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the KV cache is contiguous"
    qkv = qkv.contiguous()
    num_tokens = qkv.shape[0]
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    all_heads = qkv.shape[1] // head_dim
    q = qkv.new_empty(num_tokens, all_heads - 2 * num_kv_heads, head_dim)
    block_h = min(ROPE_HEADS, triton.next_power_of_2(all_heads))
    has_norm = q_norm is not None and k_norm is not None
    _rope_and_cache_kernel[(num_tokens, triton.cdiv(all_heads, block_h))](
        qkv,
        positions,
        cos_sin,
        q_norm if has_norm else qkv,
        k_norm if has_norm else qkv,
        q,
        k_cache,
        v_cache,
        slot_mapping,
        eps,
        HAS_NORM=has_norm,
        NUM_HEADS=q.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=block_h,
        HALF=triton.next_power_of_2(head_dim // 2),
    )
    return q


# One program takes BLOCK_H heads of one token as two tiles, the halves that RoPE pairs:
#
#          x1 [BLOCK_H, HALF]   x2 [BLOCK_H, HALF]
#    q0    0 1 2 ... d/2-1      d/2 ... d-1          -> norm, rotate -> q
#    q1
#    k0                                              -> norm, rotate -> k_cache[slot]
#    v0                                              ----------------> v_cache[slot]


@triton.jit
def _rope_and_cache_kernel(
    qkv,  # [num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS), HEAD_DIM]
    positions,  # [num_tokens]
    cos_sin,  # [max_position, HEAD_DIM] fp32
    q_norm,  # [HEAD_DIM], if HAS_NORM
    k_norm,
    q,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_cache,
    slot_mapping,  # [num_tokens]
    eps,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,  # HEAD_DIM / 2, padded to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    in_half = i < half
    valid = (is_q | is_k | is_v)[:, None] & in_half[None, :]

    # All loads come first: the compiler moves none before a store, and each waits for memory.
    slot = tl.load(slot_mapping + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    heads = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    offsets = head[:, None] * HEAD_DIM + i[None, :]
    dtype = qkv.dtype.element_ty
    x1 = tl.load(heads + offsets, mask=valid, other=0.0).to(tl.float32)
    x2 = tl.load(heads + offsets + half, mask=valid, other=0.0).to(tl.float32)
    if HAS_NORM:
        q1 = tl.load(q_norm + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
        q2 = tl.load(q_norm + half + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k1 = tl.load(k_norm + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k2 = tl.load(k_norm + half + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(cos_sin + position * HEAD_DIM + i, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + half + i, mask=in_half, other=0.0)[None, :]

    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    cache_row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset  # [BLOCK_H]
    cached = cache_row[:, None] * HEAD_DIM + i[None, :]
    v_mask = is_v[:, None] & in_half[None, :]
    tl.store(v_cache + cached, x1.to(v_cache.dtype.element_ty), mask=v_mask)
    tl.store(v_cache + cached + half, x2.to(v_cache.dtype.element_ty), mask=v_mask)

    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / HEAD_DIM + eps)[:, None]
        gain1 = tl.where(is_q[:, None], q1, k1)
        gain2 = tl.where(is_q[:, None], q2, k2)
        x1 = ((x1 * scale).to(dtype).to(tl.float32) * gain1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale).to(dtype).to(tl.float32) * gain2).to(dtype).to(tl.float32)
    y1 = (x1 * cos - x2 * sin).to(dtype)
    y2 = (x2 * cos + x1 * sin).to(dtype)

    rotated = q + token * (NUM_HEADS * HEAD_DIM) + offsets
    q_mask = is_q[:, None] & in_half[None, :]
    tl.store(rotated, y1, mask=q_mask)
    tl.store(rotated + half, y2, mask=q_mask)
    k_mask = is_k[:, None] & in_half[None, :]
    tl.store(k_cache + cached, y1.to(k_cache.dtype.element_ty), mask=k_mask)
    tl.store(k_cache + cached + half, y2.to(k_cache.dtype.element_ty), mask=k_mask)
