"""Every op of the model in plain PyTorch: the specification of all faster versions.

A Triton kernel, or the lean version in `cpu.py`, has the name, the arguments and the result of its
twin here, and may differ from it by rounding only. Accumulation is in fp32 whatever the dtype.

Chapters 3 (norm, RoPE, SiLU), 5 (attention) and 11 (sampling) read this file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.batch import Batch

NUM_CANDIDATES = 1024  # best tokens among which `sample` looks first


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019). x: [..., hidden]."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual connection and the norm after it: (norm(x + residual), x + residual)."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """The gated activation: [num_tokens, 2 * intermediate] -> silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_and_cache(
    qkv: Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    positions: Tensor,  # [num_tokens]
    cos_sin: Tensor,  # [max_position, head_dim] fp32: cosines, then sines, of the half dimension
    q_norm: Tensor | None,  # [head_dim], Qwen3's norm of each head; None = no norm
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], written here
    v_cache: Tensor,
    slot_mapping: Tensor,  # [num_tokens]
) -> Tensor:
    """Split packed q, k, v; norm q and k per head; rotate both; write K and V to their slots.

    Returns q: [num_tokens, num_heads, head_dim]. RoPE pairs dimension i with i + head_dim / 2.
    """
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    qkv = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = _rotate(k, cos, sin).to(k_cache.dtype)
    v_cache[block, :, offset] = v.to(v_cache.dtype)
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of each row's new tokens over its paged context, themselves included.

    A query at position p sees keys (p - sliding_window, p], or [0, p] without a window.
    Returns [num_tokens, num_heads * head_dim].
    """
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        table = batch.block_tables[row, : -(-length // block_size)].long()
        # [num_kv_heads, length, head_dim]
        k = k_cache[table].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :length]
        v = v_cache[table].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :length]
        q_pos = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        k_pos = torch.arange(length, device=q.device)[None, :]
        mask = k_pos <= q_pos
        if sliding_window is not None:
            mask &= k_pos > q_pos - sliding_window
        scores = torch.einsum(
            "thgd,hsd->hgts", q[begin:end].float().unflatten(1, (num_kv_heads, group)), k.float()
        )
        probs = (scores * scale).masked_fill(~mask, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hgts,hsd->thgd", probs, v.float()).flatten(1, 2).to(q.dtype)
    return out.flatten(1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in (0, 1) a row from (seed, position) alone: splitmix64, its top 23 bits.

    seeds, positions: [num_rows] int64. Returns [num_rows] fp32, never 0 and never 1.
    """

    def shift(x: Tensor, bits: int) -> Tensor:  # logical, on int64
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    def mix(x: Tensor) -> Tensor:
        x = (x ^ shift(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed number
        x = (x ^ shift(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
        return x ^ shift(x, 31)

    golden = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    bits = shift(mix(mix(seeds + golden) + positions * golden), 41)
    return (bits.float() + 0.5) * 2.0**-23


def sample(
    logits: Tensor,  # [num_rows, vocab_size], masks, bias and penalties applied
    temperature: Tensor,  # [num_rows] fp32; below 1e-5 = greedy
    top_k: Tensor,  # [num_rows] int64; 0 = off
    top_p: Tensor,  # [num_rows] fp32; 1 = off
    min_p: Tensor,  # [num_rows] fp32; 0 = off
    u: Tensor,  # [num_rows] fp32 in (0, 1)
) -> Tensor:
    """Draw one token a row by the inverse CDF, in the order of token ids. Returns [num_rows] int64.

    `min_p` keeps tokens of at least min_p times the best one's probability, `top_k` the k best,
    `top_p` the fewest best ones whose mass reaches p (of what top_k left). Ties at a threshold are
    kept: the kept set never depends on the order of equal logits. A temperature turns logits into
    masses; thresholds are logits as they came, so it changes no order and makes no ties.
    """
    greedy = temperature < 1e-5
    best_token = logits.argmax(-1)
    if greedy.all():
        return best_token
    logits = logits.float()
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    best = logits.amax(-1, keepdim=True)
    mass = logits.sub(best).div_(divisor).exp_()  # in units of the best token's
    if (min_p > 0).any():
        floor = best + min_p.log()[:, None] * divisor  # -inf for a min_p of 0: no limit
        mass.masked_fill_(logits < floor, 0.0)
    limited = ~greedy & ((top_k > 0) | (top_p < 1))
    if limited.any():
        part, part_mass = logits[limited], mass[limited]
        threshold = _threshold(part, part_mass, top_k[limited], top_p[limited])
        mass[limited] = part_mass.masked_fill_(part < threshold, 0.0)
    cdf = mass.double().cumsum(-1)
    drawn = torch.searchsorted(cdf, u.double()[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    drawn.clamp_(max=logits.shape[-1] - 1)  # a row without a finite logit still gives an id
    return torch.where(greedy, best_token, drawn)


def _threshold(logits: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit that top_k and then top_p keep: [num_rows, 1].

    mass: [num_rows, vocab_size] fp32, 0 for tokens that min_p has ruled out.

    Sorting a whole vocabulary is the dearest step of sampling, and seldom needed: the threshold
    lies among the first thousand. Where it does not, all is sorted, with the same numbers.
    """
    vocab_size = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)[:, None]
    largest_k = int(torch.where(k < vocab_size, k, 0).max())
    for size in (min(vocab_size, max(NUM_CANDIDATES, 2 * largest_k)), vocab_size):
        ordered, index = logits.topk(size)  # descending
        kth = ordered.gather(-1, (k - 1).clamp(max=size - 1))
        kth = torch.where(k <= size, kth, float("-inf"))
        reached = mass.gather(-1, index).masked_fill(ordered < kth, 0.0).double().cumsum(-1)
        total = mass.masked_fill(logits < kth, 0.0).double().sum(-1, keepdim=True)
        aim = top_p[:, None].double() * total
        last = ordered[:, -1:]
        enough = (k == vocab_size) & (reached[:, -1:] >= aim)
        found = (last < kth) | (last == float("-inf")) | enough
        if size == vocab_size or found.all():
            break
    crossing = (reached < aim).sum(-1, keepdim=True).clamp(max=size - 1)
    pth = torch.where(top_p[:, None] < 1, ordered.gather(-1, crossing), float("-inf"))
    return torch.maximum(kth, pth)
