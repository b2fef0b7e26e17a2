"""The decode step of one or two rows in Triton: five launches a layer, each weight read once.

At batch 1 a layer's weights take 8 µs to read on an H200 and its operations, launched one by one,
20 µs to start. So everything small is fused into the products around it, and a kernel starts while
the one before it still runs (programmatic dependent launch, sm90): it loads its weights first, and
only then waits for the activations.

```
 x --+--> norm, qkv product ------> head norm, RoPE, KV write, ----> merge, output product --+
     |                              attention in parts                                      |
     +-------------------------------------- residual --------------------------------------+--> y
 y --+--> norm, gate and up products, SiLU * mul ---> down product --+
     +------------------------- residual ----------------------------+--> next layer's x

 kernel n        |launch next| load weights | wait for n-1 | load x, multiply, store |
 kernel n+1                  |launch next| load weights | wait for n .............. | load x, ...
```

A product for one row is no work for tensor cores: a program multiplies a few rows of W by x and
sums. Only attention's tile uses them. Whoever launches with `pdl=True` promises that weights, KV
cache and batch were written before the last ordinary launch (the embedding, say): they are read
before the wait.

All accumulation is fp32; what is stored between kernels has the model's dtype. Tested against
`Decoder.forward`. No file of vLLM does this. Chapter 10 reads this file.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm.kernels.batch import Batch

LOG2E = 1.4426950408889634  # exp(x) = exp2(x * LOG2E)
NO_SCORE = tl.constexpr(-1e30)  # below every score; -inf - -inf would be NaN


def matvec(
    x: Tensor,  # [num_rows, in_features], contiguous
    weight: Tensor,  # [out_features, in_features]; twice as many rows if gated: gate's, then up's
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,  # [in_features]: x is normed first
    eps: float = 0.0,
    residual: Tensor | None = None,  # [num_rows, out_features], added at the end
    gated: bool = False,
    rows: int,
    warps: int,
    block_k: int,
    pdl: bool = False,
) -> Tensor:
    """[norm(x)] W^T + b, then [+ residual] or [silu(gate) * up]: [num_rows, out_features].

    `rows` of W a program, `block_k` columns at a time (both powers of two): what the first block
    holds is loaded before the wait.
    """
    out_features = weight.shape[0] // (1 + gated)
    out = x.new_empty(x.shape[0], out_features)
    options = _options(x, weight, bias, rows=rows, warps=warps, block_k=block_k, pdl=pdl)
    _matvec_kernel[(triton.cdiv(out_features, rows),)](
        x,
        weight,
        x if bias is None else bias,
        x if norm is None else norm,
        x if residual is None else residual,
        x,
        out,
        x,
        eps,
        M=x.shape[0],
        N=out_features,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        HAS_INDEX=False,
        ARGMAX=False,
        **options,
    )
    return out


def head(
    x: Tensor,  # [num_rows, hidden_size], contiguous
    weight: Tensor,  # [vocab_size, hidden_size]
    *,
    norm: Tensor | None,  # [hidden_size]: the final norm; None = x is normed already
    eps: float,
    index: Tensor | None,  # [num_logits] int64: which rows of x; None = all
    greedy: bool,
    rows: int,
    warps: int,
    block_k: int,
    pdl: bool = False,
) -> Tensor:
    """Final norm and LM head: logits [num_logits, vocab_size] fp32.

    With `greedy`, the token of the largest logit instead, the lowest id among equals: [num_logits]
    int64. The logits are never written then.
    """
    num_logits = x.shape[0] if index is None else index.shape[0]
    vocab_size = weight.shape[0]
    programs = triton.cdiv(vocab_size, rows)
    width = programs if greedy else vocab_size
    out = x.new_empty(num_logits, width, dtype=torch.float32)
    ids = torch.empty_like(out, dtype=torch.int32) if greedy else out
    options = _options(x, weight, None, rows=rows, warps=warps, block_k=block_k, pdl=pdl)
    _matvec_kernel[(programs,)](
        x,
        weight,
        x,
        x if norm is None else norm,
        x,
        x if index is None else index,
        out,
        ids,
        eps,
        M=num_logits,
        N=vocab_size,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=False,
        GATED=False,
        HAS_INDEX=index is not None,
        ARGMAX=greedy,
        **options,
    )
    if not greedy:
        return out
    tokens = x.new_empty(num_logits, dtype=torch.int64)
    _first_best_kernel[(num_logits,)](
        out,
        ids,
        tokens,
        NUM_PARTS=programs,
        VOCAB=vocab_size,
        BLOCK=triton.next_power_of_2(programs),
        num_warps=16,
        **_launch(pdl),
    )
    return tokens


def rope_attention(
    qkv: Tensor,  # [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], contiguous
    batch: Batch,  # rows of one new token each
    cos_sin: Tensor,  # [max_position, head_dim] fp32: cosines, then sines, of the half dimension
    q_norm: Tensor | None,  # [head_dim]; None = no norm
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], written here; contiguous
    v_cache: Tensor,
    sliding_window: int | None,
    *,
    split_len: int,
    keys: int,
    warps: int,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate q and k, write K and V to their slots, attend: in parts of `split_len` keys.

    `keys` of them at a time, a power of two of which `split_len` is a multiple; the number of parts
    follows from `batch.max_seq_len`. Returns for `merge_matvec` the parts' outputs [num_rows,
    num_splits, num_heads, head_dim] and, fp32, log2 of their softmax denominators [num_rows,
    num_splits, num_heads]; an empty part is 0 with a very small logarithm.
    """
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the KV cache is contiguous"
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    num_rows = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    context = min(batch.max_seq_len, sliding_window or batch.max_seq_len)
    num_splits = triton.cdiv(context, split_len)
    part_out = qkv.new_empty(num_rows, num_splits, num_heads, head_dim)
    part_lse = qkv.new_empty(num_rows, num_splits, num_heads, dtype=torch.float32)
    has_norm = q_norm is not None and k_norm is not None
    _rope_attention_kernel[(num_kv_heads, num_splits, num_rows)](
        qkv,
        batch.positions,
        batch.seq_lens,
        batch.slot_mapping,
        batch.block_tables,
        cos_sin,
        q_norm if has_norm else qkv,
        k_norm if has_norm else qkv,
        k_cache,
        v_cache,
        part_out,
        part_lse,
        eps,
        head_dim**-0.5 * LOG2E,
        batch.block_tables.stride(0),
        batch.block_tables.shape[1],
        HAS_NORM=has_norm,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window or 0,
        SPLIT_LEN=split_len,
        KEYS=keys,
        num_warps=warps,
        **_launch(pdl),
    )
    return part_out, part_lse


def merge_matvec(
    part_out: Tensor,  # [num_rows, num_splits, num_heads, head_dim]
    part_lse: Tensor,  # [num_rows, num_splits, num_heads] fp32
    weight: Tensor,  # [hidden_size, num_heads * head_dim]
    bias: Tensor | None,
    residual: Tensor,  # [num_rows, hidden_size]
    *,
    rows: int,
    warps: int,
    pdl: bool = False,
) -> Tensor:
    """Merge the parts of attention, project them, add the residual: [num_rows, hidden_size].

    Each program merges all heads for itself: cheaper than a launch for it, while parts are few.
    """
    num_rows, num_splits, num_heads, head_dim = part_out.shape
    hidden_size = weight.shape[0]
    out = torch.empty_like(residual)
    _merge_matvec_kernel[(triton.cdiv(hidden_size, rows),)](
        part_out,
        part_lse,
        weight,
        residual if bias is None else bias,
        residual,
        out,
        M=num_rows,
        N=hidden_size,
        SPLITS=num_splits,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(num_heads),
        D=triton.next_power_of_2(head_dim),
        HAS_BIAS=bias is not None,
        ROWS=rows,
        num_warps=warps,
        **_launch(pdl),
    )
    return out


def _launch(pdl: bool) -> dict[str, Any]:
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def _options(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rows: int,
    warps: int,
    block_k: int,
    pdl: bool,
) -> dict[str, Any]:
    assert x.is_contiguous() and weight.is_contiguous(), "rows lie end to end"
    return {
        "K": x.shape[1],
        "HAS_BIAS": bias is not None,
        "ROWS": rows,
        "BLOCK_K": min(block_k, triton.next_power_of_2(x.shape[1])),
        "num_warps": warps,
        **_launch(pdl),
    }


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────
# With PDL a kernel may run before its predecessor has ended. Hence three rules: nothing that a
# kernel of this step writes is read before the wait; such reads bypass L1 (".cg"), which may hold
# an older line; and every program waits, on every path, or the one after it could overtake two.


@triton.jit
def _load_rows(weight, n, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """[ROWS, BLOCK_K] of a weight [N, K]; columns past K are 0."""
    offsets = n.to(tl.int64)[:, None] * K + k[None, :]
    if WHOLE:
        tile = tl.load(weight + offsets)
    else:
        tile = tl.load(weight + offsets, mask=(k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _load_vector(x, k, K: tl.constexpr, WHOLE: tl.constexpr, FRESH: tl.constexpr):
    """[BLOCK_K] fp32; 0 past K. FRESH: written by a kernel of this step."""
    CACHE: tl.constexpr = ".cg" if FRESH else ""
    if WHOLE:
        values = tl.load(x + k, cache_modifier=CACHE)
    else:
        values = tl.load(x + k, mask=k < K, other=0.0, cache_modifier=CACHE)
    return values.to(tl.float32)


@triton.jit
def _matvec_kernel(
    x,  # [num_rows, K]
    weight,  # [N, K], or [2 * N, K] if GATED
    bias,  # [N] or [2 * N], if HAS_BIAS
    norm,  # [K], if HAS_NORM
    residual,  # [M, N], if HAS_RESIDUAL
    index,  # [M] int64, if HAS_INDEX: rows of x
    out,  # [M, N]; if ARGMAX [M, num_programs] fp32: each program's largest
    ids,  # [M, num_programs] int32, if ARGMAX: where that was
    eps,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    ARGMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS rows of W (of gate and of up), every row of x."""
    program = tl.program_id(0)
    n = program * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(n, N - 1)  # rows past the end repeat the last and are not stored
    k = tl.arange(0, BLOCK_K)
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    if PDL:
        gdc_launch_dependents()
    w = _load_rows(weight, inside, k, K, WHOLE)
    if GATED:
        w_up = _load_rows(weight, inside + N, k, K, WHOLE)
    if HAS_NORM:
        gain = _load_vector(norm, k, K, WHOLE, False)
    if PDL:
        gdc_wait()
    for m in tl.static_range(M):
        row = m
        if HAS_INDEX:
            row = tl.load(index + m)
        if HAS_RESIDUAL:
            addend = tl.load(residual + m * N + inside, cache_modifier=".cg").to(tl.float32)
        value = _load_vector(x + row * K, k, K, WHOLE, True)
        square = value * value
        if HAS_NORM:
            value *= gain
        products = w.to(tl.float32) * value[None, :]  # [ROWS, BLOCK_K]
        if GATED:
            up_products = w_up.to(tl.float32) * value[None, :]
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):
            later = start + k
            value = _load_vector(x + row * K, later, K, WHOLE, True)
            square += value * value
            if HAS_NORM:
                value *= _load_vector(norm, later, K, WHOLE, False)
            products += _load_rows(weight, inside, later, K, WHOLE).to(tl.float32) * value[None, :]
            if GATED:
                w_later = _load_rows(weight, inside + N, later, K, WHOLE)
                up_products += w_later.to(tl.float32) * value[None, :]
        # The norm's factor is one number a row: applied to the sums, the two reductions overlap.
        scale = 1.0
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
        y = tl.sum(products, 1) * scale  # [ROWS]
        if HAS_BIAS:
            y += tl.load(bias + inside).to(tl.float32)
        if GATED:
            up = tl.sum(up_products, 1) * scale
            if HAS_BIAS:
                up += tl.load(bias + N + inside).to(tl.float32)
            y = y / (1.0 + tl.exp(-y)) * up
        if HAS_RESIDUAL:
            y += addend
        if ARGMAX:
            y = tl.where(n < N, y, float("-inf"))
            best = tl.max(y, 0)
            place = m * tl.num_programs(0) + program
            tl.store(out + place, best)
            tl.store(ids + place, tl.min(tl.where(y == best, n, N - 1), 0))
        else:
            tl.store(out + m * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _first_best_kernel(
    best,  # [num_rows, NUM_PARTS] fp32
    ids,  # [num_rows, NUM_PARTS] int32
    tokens,  # [num_rows] int64
    NUM_PARTS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = row * NUM_PARTS + tl.arange(0, BLOCK)
    valid = tl.arange(0, BLOCK) < NUM_PARTS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(best + part, mask=valid, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(ids + part, mask=valid, other=VOCAB - 1, cache_modifier=".cg")
    first = tl.min(tl.where(value == tl.max(value, 0), token, VOCAB - 1), 0)
    tl.store(tokens + row, first.to(tl.int64))


# Attention. A program takes the query heads of one KV head of one row, padded to BLOCK_M because
# tensor cores multiply no smaller tile, and SPLIT_LEN keys of its past. The new token's own key and
# value are not in the cache yet: part 0 begins its running softmax with them.
#
#   past      | part 0 | part 1 | part 2 |   new token     grid (kv_head, part, row)
#             begin    + SPLIT_LEN       old = seq_len - 1


@triton.jit
def _load_halves(
    cache_k,
    cache_v,
    table,
    table_width,
    kv_head,
    t,  # [KEYS] positions
    end,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """K as the two halves that RoPE pairs, [KEYS, HALF] each, and V [KEYS, 2 * HALF]; else 0."""
    e = tl.arange(0, HALF)
    d = tl.arange(0, 2 * HALF)
    # Not masked by `end`, whose load it would wait for: what lies past it is some block's id too.
    block = tl.load(table + tl.minimum(t // BLOCK_SIZE, table_width - 1)).to(tl.int64)
    slot = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + t % BLOCK_SIZE
    start = slot[:, None] * HEAD_DIM
    valid = (t < end)[:, None] & (e < HEAD_DIM // 2)[None, :]
    k1 = tl.load(cache_k + start + e[None, :], mask=valid, other=0.0)
    k2 = tl.load(cache_k + start + (HEAD_DIM // 2 + e)[None, :], mask=valid, other=0.0)
    valid = (t < end)[:, None] & (d < HEAD_DIM)[None, :]
    v = tl.load(cache_v + start + d[None, :], mask=valid, other=0.0)
    return k1, k2, v


@triton.jit
def _attend(acc, top, total, q1, q2, k1, k2, v, t, end):
    """One step of the running softmax over a tile of keys; q carries scale and base."""
    scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")  # [BLOCK_M, KEYS]
    seen = (t < end)[None, :]
    scores = tl.where(seen, scores, NO_SCORE)
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _norm_rotate(
    x1, x2, gain1, gain2, cos, sin, eps, HAS_NORM: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Heads [BLOCK_M, HALF] x 2, fp32: norm each, turn each pair."""
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / HEAD_DIM + eps)[:, None]
        x1 = x1 * scale * gain1[None, :]
        x2 = x2 * scale * gain2[None, :]
    return x1 * cos[None, :] - x2 * sin[None, :], x2 * cos[None, :] + x1 * sin[None, :]


@triton.jit(do_not_specialize=["table_stride", "table_width"])
def _rope_attention_kernel(
    qkv,  # [num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    positions,  # [num_rows] int64
    seq_lens,  # [num_rows] int32, the new token included
    slot_mapping,  # [num_rows] int64
    block_tables,  # [num_rows, table_stride] int32
    cos_sin,  # [max_position, HEAD_DIM] fp32
    q_norm,  # [HEAD_DIM], if HAS_NORM
    k_norm,
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_cache,
    part_out,  # [num_rows, num_splits, NUM_HEADS, HEAD_DIM]
    part_lse,  # [num_rows, num_splits, NUM_HEADS] fp32
    eps,
    scale,
    table_stride,
    table_width,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # HEAD_DIM / 2, padded to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    r = tl.arange(0, BLOCK_M)
    e = tl.arange(0, HALF)
    d = tl.arange(0, 2 * HALF)
    in_half = e < half

    # 1. Whatever older steps have written: the first keys and values, angles, places.
    seq_len = tl.load(seq_lens + row)
    begin = split * SPLIT_LEN
    if WINDOW > 0:
        begin += tl.maximum(seq_len - WINDOW, 0)
    end = tl.minimum(begin + SPLIT_LEN, seq_len - 1)
    table = block_tables + row.to(tl.int64) * table_stride
    t = begin + tl.arange(0, KEYS)
    k1, k2, v = _load_halves(
        k_cache,
        v_cache,
        table,
        table_width,
        kv_head,
        t,
        end,
        NUM_KV_HEADS,
        HEAD_DIM,
        HALF,
        BLOCK_SIZE,
    )
    slot = tl.load(slot_mapping + row)
    angles = cos_sin + tl.load(positions + row) * HEAD_DIM
    cos = tl.load(angles + e, mask=in_half, other=0.0)
    sin = tl.load(angles + half + e, mask=in_half, other=0.0)
    q_gain1 = cos  # placeholders where there is no norm
    q_gain2 = cos
    k_gain1 = cos
    k_gain2 = cos
    if HAS_NORM:
        q_gain1 = tl.load(q_norm + e, mask=in_half, other=0.0).to(tl.float32)
        q_gain2 = tl.load(q_norm + half + e, mask=in_half, other=0.0).to(tl.float32)
        k_gain1 = tl.load(k_norm + e, mask=in_half, other=0.0).to(tl.float32)
        k_gain2 = tl.load(k_norm + half + e, mask=in_half, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    # 2. The new token. Its key stands in every line of a tile, so that no sum crosses lines.
    heads = qkv + row * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    query = kv_head * GROUP + r
    own = NUM_HEADS + kv_head + r * 0
    valid = (r < GROUP)[:, None] & in_half[None, :]
    place = query[:, None] * HEAD_DIM + e[None, :]
    x1 = tl.load(heads + place, mask=valid, other=0.0, cache_modifier=".cg").to(tl.float32)
    x2 = tl.load(heads + half + place, mask=valid, other=0.0, cache_modifier=".cg").to(tl.float32)
    valid = (r < BLOCK_M)[:, None] & in_half[None, :]
    place = own[:, None] * HEAD_DIM + e[None, :]
    y1 = tl.load(heads + place, mask=valid, other=0.0, cache_modifier=".cg").to(tl.float32)
    y2 = tl.load(heads + half + place, mask=valid, other=0.0, cache_modifier=".cg").to(tl.float32)
    new_v = tl.load(
        heads + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + d,
        mask=d < HEAD_DIM,
        other=0.0,
        cache_modifier=".cg",
    )
    x1, x2 = _norm_rotate(x1, x2, q_gain1, q_gain2, cos, sin, eps, HAS_NORM, HEAD_DIM)
    y1, y2 = _norm_rotate(y1, y2, k_gain1, k_gain2, cos, sin, eps, HAS_NORM, HEAD_DIM)
    x1 *= scale
    x2 *= scale

    # 3. Attention: the new token first, in part 0 only.
    mine = split == 0
    top = tl.where(mine, tl.sum(x1 * y1 + x2 * y2, 1), NO_SCORE)
    total = tl.where(mine, 1.0, 0.0) + tl.zeros([BLOCK_M], tl.float32)
    acc = tl.where(mine, new_v.to(tl.float32), 0.0)[None, :]
    acc += tl.zeros([BLOCK_M, 2 * HALF], tl.float32)
    q1 = x1.to(k1.dtype)
    q2 = x2.to(k1.dtype)
    acc, top, total = _attend(acc, top, total, q1, q2, k1, k2, v, t, end)
    if SPLIT_LEN > KEYS:
        for start in tl.range(begin + KEYS, end, KEYS, num_stages=2):
            t = start + tl.arange(0, KEYS)
            k1, k2, v = _load_halves(
                k_cache,
                v_cache,
                table,
                table_width,
                kv_head,
                t,
                end,
                NUM_KV_HEADS,
                HEAD_DIM,
                HALF,
                BLOCK_SIZE,
            )
            acc, top, total = _attend(acc, top, total, q1, q2, k1, k2, v, t, end)
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)[:, None]
    part = (row * tl.num_programs(1) + split) * NUM_HEADS + query
    valid = (r < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    place = part[:, None] * HEAD_DIM + d[None, :]
    tl.store(part_out + place, result.to(part_out.dtype.element_ty), mask=valid)
    lse = tl.where(empty, NO_SCORE, top + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(part_lse + part, lse, mask=r < GROUP)

    # 4. The new token's K and V, for the steps to come.
    cached = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    cached = cached * HEAD_DIM
    writes = ((r == 0) & mine)[:, None] & in_half[None, :]
    place = cached + (r * 0)[:, None] + e[None, :]
    tl.store(k_cache + place, y1.to(k_cache.dtype.element_ty), mask=writes)
    tl.store(k_cache + half + place, y2.to(k_cache.dtype.element_ty), mask=writes)
    tl.store(v_cache + cached + d, new_v.to(v_cache.dtype.element_ty), mask=mine & (d < HEAD_DIM))


@triton.jit
def _merge_matvec_kernel(
    part_out,  # [M, SPLITS, NUM_HEADS, HEAD_DIM]
    part_lse,  # [M, SPLITS, NUM_HEADS] fp32, base 2
    weight,  # [N, NUM_HEADS * HEAD_DIM]
    bias,  # [N], if HAS_BIAS
    residual,  # [M, N]
    out,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # NUM_HEADS, padded to a power of two
    D: tl.constexpr,  # HEAD_DIM, padded
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(n, N - 1)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    K: tl.constexpr = NUM_HEADS * HEAD_DIM
    WHOLE: tl.constexpr = HEADS * D == K
    if PDL:
        gdc_launch_dependents()
    k = tl.arange(0, HEADS * D)  # the column of W, if nothing is padded
    if WHOLE:
        w = _load_rows(weight, inside, k, K, True)
    else:
        offsets = inside.to(tl.int64)[:, None] * K + (k // D * HEAD_DIM + k % D)[None, :]
        held = (k // D < NUM_HEADS) & (k % D < HEAD_DIM)
        w = tl.load(weight + offsets, mask=held[None, :], other=0.0)
    if PDL:
        gdc_wait()
    valid = (h < NUM_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    for m in tl.static_range(M):
        addend = tl.load(residual + m * N + inside, cache_modifier=".cg").to(tl.float32)
        lse = ()
        parts = ()
        for s in tl.static_range(SPLITS):  # all loads first: none waits for a result of another
            head = (m * SPLITS + s) * NUM_HEADS + h
            one = tl.load(part_lse + head, mask=h < NUM_HEADS, other=0.0, cache_modifier=".cg")
            lse = lse + (one,)
            place = head[:, None] * HEAD_DIM + d[None, :]
            part = tl.load(part_out + place, mask=valid, other=0.0, cache_modifier=".cg")
            parts = parts + (part,)
        top = lse[0]  # part 0 is never empty
        for s in tl.static_range(1, SPLITS):
            top = tl.maximum(top, lse[s])
        total = tl.zeros([HEADS], tl.float32)
        merged = tl.zeros([HEADS, D], tl.float32)
        for s in tl.static_range(SPLITS):
            share = tl.exp2(lse[s] - top)
            merged += parts[s].to(tl.float32) * share[:, None]
            total += share
        x = tl.reshape(merged / total[:, None], [HEADS * D])
        y = tl.sum(w.to(tl.float32) * x[None, :], 1)
        if HAS_BIAS:
            y += tl.load(bias + inside).to(tl.float32)
        tl.store(out + m * N + n, (y + addend).to(out.dtype.element_ty), mask=n < N)
