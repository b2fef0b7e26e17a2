"""Paged attention in Triton: one kernel for rows with one new token, one for chunks of a prompt.

Both read K and V through the block table and keep a running softmax, so no score matrix is ever
stored. They share the loop body `_attend_tile`. The query heads that share a KV head (GQA) lie in
one tile: K and V are read once for all of them.

Knows tensors only. Same name, arguments and result as `reference.attention`.
Mirrors vllm/v1/attention/ops/triton_unified_attention.py; left out: ALiBi, soft cap, sinks, FP8.
Sources: Dao et al. 2022 (running softmax), Dao et al. 2023 (split-KV), Kwon et al. 2023 (paging).
Chapter 5 reads this file.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.batch import Batch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # its bf16 products are wrong: use fp32 there
LOG2E = 1.4426950408889634  # the kernels use base 2: exp(x) = exp2(x * LOG2E)
SHORT_CONTEXT = 320  # tokens; up to here a decode program is one warp with small tiles
MAX_SPLITS = 64  # parts of a row; the merge holds them all in one tile
MIN_PART = 64  # tokens; a shorter part is all start and no work
PART_STEP = tl.constexpr(16)  # parts are multiples of this many tokens
# What a decode program takes to start, and what a merge takes, in tokens read meanwhile.
START_TOKENS = 128
MERGE_TOKENS = 256


def attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], contiguous
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of each row's new tokens over its paged context, themselves included.

    A query at position p sees keys (p - sliding_window, p], or [0, p] without a window.
    Returns [num_tokens, num_heads * head_dim].
    """
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the KV cache is contiguous"
    q = q.contiguous()
    out = torch.empty_like(q)
    if batch.num_decode_rows > 0:
        paged_decode(q, k_cache, v_cache, batch, scale, sliding_window, out)
    if batch.num_decode_rows < batch.num_rows:
        paged_prefill(q, k_cache, v_cache, batch, scale, sliding_window, out)
    return out.flatten(1)


def choose_num_splits(num_programs: int, context: int, *, num_sms: int) -> int:
    """Into how many parts each row's context is cut, each part a program of its own.

    Few programs leave processors idle; many mean more starts, and a merge. The least time wins.
    """
    if num_programs >= 4 * num_sms:
        return 1

    def tokens(num_splits: int) -> int:
        # One program alone does not use all the bandwidth of its processor.
        turns = max(2, triton.cdiv(num_programs * num_splits, num_sms))
        merge = MERGE_TOKENS if num_splits > 1 else 0
        return turns * (triton.cdiv(context, num_splits) + START_TOKENS) + merge

    most = max(1, min(MAX_SPLITS, context // MIN_PART))
    return min(range(1, most + 1), key=tokens)


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Processors, and bytes of shared memory that one program can take (1 KiB is the driver's)."""
    if device.type != "cuda":
        return 1, 227 << 10
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = properties.shared_memory_per_multiprocessor - 1024
    return properties.multi_processor_count, shared_bytes


def decode_tile(q: Tensor, group: int, context: int, num_splits: int) -> dict[str, int]:
    """Tile sizes of a decode; measured on an H200 (bf16, head_dim 128).

    BLOCK_M: query vectors; TILE: keys in a loop step; STAGES: steps in flight, as many as fit.
    """
    roomy = device_limits(q.device)[1] > 128 << 10
    if q.dtype == torch.float32:  # no tensor core has IEEE fp32: small tiles, or registers spill
        tile, warps, stages = 32, 4, 3
    elif num_splits > 1 and triton.cdiv(context, num_splits) <= 128:  # a step or two
        tile, warps, stages = 64, 4, 1
    elif num_splits == 1 and context <= SHORT_CONTEXT and group <= 16:  # many small programs
        tile, warps, stages = 32, 1, 4
    else:
        tile, warps, stages = (128 if roomy else 64), 4, (3 if num_splits == 1 else 4)
    return fitting_tile(q, group, 16, tile, warps, stages)


def prefill_tile(q: Tensor, group: int) -> dict[str, int]:
    """Tile sizes of a prefill, as in `decode_tile`."""
    roomy = device_limits(q.device)[1] > 128 << 10
    if q.dtype == torch.float32:
        return fitting_tile(q, group, 16, 32, 4, 3)
    return fitting_tile(q, group, 128 if roomy else 64, 64, 4 if q.shape[-1] <= 128 else 8, 3)


def fitting_tile(
    q: Tensor, group: int, block_m: int, tile: int, warps: int, stages: int
) -> dict[str, int]:
    """Fewer keys where heads are larger than 128; fewer stages where memory ends."""
    head_dim = triton.next_power_of_2(q.shape[-1])
    tile = max(16, min(tile, tile * 128 // head_dim))
    block_m = max(block_m, triton.next_power_of_2(group))
    free = device_limits(q.device)[1] - (8 << 10) - block_m * head_dim * q.element_size()
    # The step being computed shares its memory with the one that arrives last.
    fitting = 1 + free // (2 * tile * head_dim * q.element_size())
    return {"BLOCK_M": block_m, "TILE": tile, "STAGES": min(stages, fitting), "num_warps": warps}


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    sliding_window: int | None,
    out: Tensor,  # [num_tokens, num_heads, head_dim]: tokens [0, num_decode_rows) are written
    *,
    num_splits: int | None = None,
    tile: dict[str, int] | None = None,
) -> None:
    """Attention of the rows with one new token.

    Each row's context is cut into `num_splits` even parts, a program each (None: chosen by the
    number of programs); `tile`: sizes to use in place of `decode_tile`'s.
    """
    rows, (_, num_heads, head_dim), num_kv_heads = batch.num_decode_rows, q.shape, k_cache.shape[1]
    context = min(batch.max_seq_len, sliding_window or batch.max_seq_len)
    if num_splits is None:
        num_sms = device_limits(q.device)[0]
        num_splits = choose_num_splits(rows * num_kv_heads, context, num_sms=num_sms)
    group = num_heads // num_kv_heads
    part_out = part_lse = out
    if num_splits > 1:
        part_out = q.new_empty(rows, num_heads, num_splits, head_dim, dtype=torch.float32)
        part_lse = q.new_empty(rows, num_heads, num_splits, dtype=torch.float32)
    _decode_kernel[(num_kv_heads, rows, num_splits)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.seq_lens,
        out,
        part_out,
        part_lse,
        scale * LOG2E,
        batch.block_tables.stride(0),
        SPLIT=num_splits > 1,
        **shapes(q, k_cache, sliding_window),
        **(tile or decode_tile(q, group, context, num_splits)),
    )
    if num_splits > 1:
        merge_splits(part_out, part_lse, out)


def merge_splits(part_out: Tensor, part_lse: Tensor, out: Tensor) -> None:
    """Combine the parts of each (row, head) by their share of the softmax's denominator.

    part_out: [num_rows, num_heads, num_splits, head_dim] fp32. part_lse: [num_rows, num_heads,
    num_splits] fp32, log2 of the sum of exp2(scores); -inf marks an empty part, whose `part_out`
    is never read. Writes out[:num_rows]; a row of empty parts becomes 0.
    """
    rows, num_heads, num_splits, head_dim = part_out.shape
    _merge_kernel[(num_heads, rows)](
        part_out,
        part_lse,
        out,
        num_splits,
        HEAD_DIM=head_dim,
        D=triton.next_power_of_2(head_dim),
        SPLITS=triton.next_power_of_2(num_splits),
    )


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    sliding_window: int | None,
    out: Tensor,  # [num_tokens, num_heads, head_dim]: tokens [num_decode_rows, ...) are written
    *,
    tile: dict[str, int] | None = None,
) -> None:
    """Attention of the rows from `num_decode_rows` on: chunks of any length over their context.

    `tile`: sizes to use in place of `prefill_tile`'s.
    """
    num_kv_heads, first_row = k_cache.shape[1], batch.num_decode_rows
    group = q.shape[1] // num_kv_heads
    tile = tile or prefill_tile(q, group)
    # Row lengths are on the device. Each row has at most one partly filled block of queries.
    tokens = batch.num_tokens - first_row
    num_blocks = tokens // (tile["BLOCK_M"] // group) + batch.num_rows - first_row
    _prefill_kernel[(num_kv_heads, num_blocks)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.query_start,
        batch.seq_lens,
        out,
        scale * LOG2E,
        batch.block_tables.stride(0),
        first_row,
        batch.num_rows,
        **shapes(q, k_cache, sliding_window),
        **tile,
    )


def shapes(q: Tensor, k_cache: Tensor, sliding_window: int | None) -> dict[str, int | bool]:
    """What the kernels are compiled for."""
    return {
        "NUM_HEADS": q.shape[1],
        "NUM_KV_HEADS": k_cache.shape[1],
        "HEAD_DIM": q.shape[2],
        "D": max(16, triton.next_power_of_2(q.shape[2])),
        "BLOCK_SIZE": k_cache.shape[2],
        "WINDOW": sliding_window or 0,
        "UPCAST": INTERPRET,
    }


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────
# D is HEAD_DIM padded to a power of two. The padded part of every tile is 0, so it adds nothing.


@triton.jit
def _load_tile(cache, offsets, valid, WHOLE: tl.constexpr):
    """[TILE, D] of K or V, 0 in the padded part of D."""
    if WHOLE:
        tile = tl.load(cache + offsets)
    else:
        tile = tl.load(cache + offsets, mask=valid, other=0.0)
    return tile


@triton.jit
def _attend_tile(
    acc,  # [BLOCK_M, D] fp32: sum of exp2(score - top) * V over the keys so far
    top,  # [BLOCK_M] fp32: largest score so far
    total,  # [BLOCK_M] fp32: sum of exp2(score - top) over the keys so far
    q,  # [BLOCK_M, D]
    q_pos,  # [BLOCK_M] position of each query
    k_cache,
    v_cache,
    table,  # block ids of this row
    kv_head,
    start,  # keys [start, min(start + TILE, end))
    end,
    scale,
    MASKED: tl.constexpr,  # False: every query sees every key of the tile
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    t = start + tl.arange(0, TILE)  # positions of the keys
    d = tl.arange(0, D)
    # Past the end the last key is read again: it is finite, which an unused slot need not be.
    place = tl.minimum(t, end - 1) if MASKED else t
    block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
    slot = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE
    offsets = slot[:, None] * HEAD_DIM + d[None, :]  # [TILE, D]
    valid = (d < HEAD_DIM)[None, :]
    WHOLE: tl.constexpr = D == HEAD_DIM

    k = _load_tile(k_cache, offsets, valid, WHOLE)
    if UPCAST:
        k = k.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, TILE]
    if MASKED:
        seen = (t[None, :] <= q_pos[:, None]) & (t < end)[None, :]
        if WINDOW > 0:
            seen &= t[None, :] > q_pos[:, None] - WINDOW
        scores = tl.where(seen, scores, -1e30)  # -inf - -inf would be NaN
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    v = _load_tile(v_cache, offsets, valid, WHOLE)
    if UPCAST:
        v = v.to(tl.float32)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


# Decode. One program takes the `group` query heads of one KV head of one row over one part of the
# context; `group` is padded to 16 because tensor cores multiply nothing smaller.
#
#   row's context   0          part_len    2 * part_len   n
#                   |- part 0 --|-- part 1 --|-- part 2 --|          grid (kv_head, row, part)
#                    t t t t t                                       TILE keys a step
#        part_out, part_lse -> _merge_kernel -> out                  (one part: straight to out)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_cache,
    block_tables,  # [num_rows, table_stride] int32
    seq_lens,  # [num_rows] int32
    out,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    part_out,  # [num_rows, NUM_HEADS, num_splits, HEAD_DIM] fp32, if SPLIT
    part_lse,  # [num_rows, NUM_HEADS, num_splits] fp32, if SPLIT
    scale,
    table_stride,
    SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    seq_len = tl.load(seq_lens + row)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(seq_len - WINDOW, 0)
    end = seq_len
    if SPLIT:
        part_len = tl.cdiv(tl.cdiv(seq_len - begin, tl.num_programs(2)), PART_STEP) * PART_STEP
        begin += split * part_len
        end = tl.minimum(begin + part_len, seq_len)

    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    head = row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + g  # [BLOCK_M]; row = token here
    valid = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_tile = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=valid, other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    q_pos = seq_len - 1 + g * 0
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        acc, top, total = _attend_tile(
            acc,
            top,
            total,
            q_tile,
            q_pos,
            k_cache,
            v_cache,
            table,
            kv_head,
            start,
            end,
            scale,
            True,
            NUM_KV_HEADS,
            HEAD_DIM,
            D,
            BLOCK_SIZE,
            WINDOW,
            TILE,
            UPCAST,
        )
    empty = total == 0.0  # no key: a part beyond the row's end, or a row of length 0
    result = acc / tl.where(empty, 1.0, total)[:, None]
    if SPLIT:
        part = head * tl.num_programs(2) + split
        tl.store(part_out + part[:, None] * HEAD_DIM + d[None, :], result, mask=valid)
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(part_lse + part, lse, mask=g < GROUP)
    else:
        result = result.to(out.dtype.element_ty)
        tl.store(out + head[:, None] * HEAD_DIM + d[None, :], result, mask=valid)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    part_out,  # [num_rows, num_heads, num_splits, HEAD_DIM] fp32
    part_lse,  # [num_rows, num_heads, num_splits] fp32, base 2
    out,  # [num_tokens, num_heads, HEAD_DIM]
    num_splits,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    lse = tl.load(part_lse + head * num_splits + s, mask=s < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))  # [SPLITS]; empty parts: 0
    total = tl.sum(weight, 0)
    valid = (weight > 0)[:, None] & (d < HEAD_DIM)[None, :]
    offsets = (head * num_splits + s)[:, None] * HEAD_DIM + d[None, :]
    parts = tl.load(part_out + offsets, mask=valid, other=0.0)  # [SPLITS, D]
    merged = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + head * HEAD_DIM + d, merged.to(out.dtype.element_ty), mask=d < HEAD_DIM)


# Prefill. One program takes TOKENS consecutive new tokens of one row times the GROUP query heads of
# one KV head. Row r of its tile is token r // GROUP, head r % GROUP.
#
#            keys   0 ............ context ........ seq_len
#    TOKENS    q0   # # # # # # # #|# # #|\                  #  every query sees them: no mask
#    queries   q1   # # # # # # # #|# # #|# \                \  the diagonal: masked
#              q2   # # # # # # # #|# # #|# # \
#
# grid (kv_head, block of queries). The rows' lengths are known on the device only, so a block finds
# its row by bisection: row i starts at block query_start[i] // TOKENS + i, which leaves room for
# one partly filled block in each row before it; blocks left over return at once.


@triton.jit
def _find_row(query_start, block, first_row, num_rows, TOKENS: tl.constexpr):
    """The last row whose first block is at or before `block`."""
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first_token = tl.load(query_start + middle) - first_row  # rows before it have one token
        if first_token // TOKENS + middle - first_row <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["table_stride", "first_row", "num_rows"])
def _prefill_kernel(
    q,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_cache,
    block_tables,  # [num_rows, table_stride] int32
    query_start,  # [num_rows + 1] int32
    seq_lens,  # [num_rows] int32
    out,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    scale,
    table_stride,
    first_row,
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the long ones first: an even finish
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    row = _find_row(query_start, block, first_row, num_rows, TOKENS)
    row_start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - row_start
    seq_len = tl.load(seq_lens + row)
    block_in_row = block - ((row_start - first_row) // TOKENS + row - first_row)
    first = block_in_row * TOKENS  # of this block's tokens, counted from row_start
    if first >= query_len:
        return
    context = seq_len - query_len

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    token = first + r // GROUP  # [BLOCK_M]
    q_pos = context + token
    head = (row_start + token).to(tl.int64) * NUM_HEADS + kv_head * GROUP + r % GROUP
    in_tile = (r < TOKENS * GROUP) & (token < query_len)
    valid = in_tile[:, None] & (d < HEAD_DIM)[None, :]
    q_tile = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=valid, other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    end = tl.minimum(context + first + TOKENS, seq_len)
    if WINDOW > 0:  # its lower edge is a diagonal too: mask every tile
        diagonal = tl.maximum(context + first - WINDOW + 1, 0)
    else:
        diagonal = (context + first + 1) // TILE * TILE
        for start in tl.range(0, diagonal, TILE, num_stages=STAGES):
            acc, top, total = _attend_tile(
                acc,
                top,
                total,
                q_tile,
                q_pos,
                k_cache,
                v_cache,
                table,
                kv_head,
                start,
                end,
                scale,
                False,
                NUM_KV_HEADS,
                HEAD_DIM,
                D,
                BLOCK_SIZE,
                WINDOW,
                TILE,
                UPCAST,
            )
    MASKED_STAGES: tl.constexpr = STAGES if WINDOW > 0 else 1  # the diagonal is a step or two
    for start in tl.range(diagonal, end, TILE, num_stages=MASKED_STAGES):
        acc, top, total = _attend_tile(
            acc,
            top,
            total,
            q_tile,
            q_pos,
            k_cache,
            v_cache,
            table,
            kv_head,
            start,
            end,
            scale,
            True,
            NUM_KV_HEADS,
            HEAD_DIM,
            D,
            BLOCK_SIZE,
            WINDOW,
            TILE,
            UPCAST,
        )
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * HEAD_DIM + d[None, :], result, mask=valid)
