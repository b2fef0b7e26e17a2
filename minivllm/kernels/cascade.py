"""Decode over a shared prefix: the K and V that all rows begin with are read once for all of them.

Rows with one system prompt hold the same blocks at the head of their tables. Plain decode reads
those blocks once a row, though mostly from the L2 cache; here all rows' queries meet them in one
matrix product, as in a prefill. Each row's own tokens are then attended as ever, and merged.

```
            blocks     shared (num_shared_tokens)    own
 row 0      [ 7 3 9 ]  # # # # # # # # # # # # | # #       _prefix_kernel: rows x GROUP queries of
 row 1      [ 7 3 4 ]  # # # # # # # # # # # # | # # #     one KV head x one slice of the prefix
 row 2      [ 7 3 6 ]  # # # # # # # # # # # # | #         _own_kernel: one row's own tokens, then
                       `- slice 0 -´`- slice 1 -´            the slices' parts; writes the output
```

On sm90 the second kernel starts while the first still runs, and waits for it before it merges.

`attention` is `kernels/attention.py`'s, with this way of decoding where it pays; tested against the
same twin. Mirrors vllm/v1/attention/backends/flash_attn.py (cascade_attention, merge_attn_states).
Chapter 9 reads this file.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm.kernels import attention as paged
from minivllm.kernels.attention import LOG2E, _attend_tile
from minivllm.kernels.batch import MIN_SHARED_WORK, Batch

MIN_SHARED = 128  # tokens; the largest tile: a prefix is read in whole ones
MAX_SLICES = 8  # of the prefix; each is one more part for every row to merge


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
    if sliding_window is not None or not pays(batch, k_cache.shape[1], q.device):
        return paged.attention(q, k_cache, v_cache, batch, scale, sliding_window)
    q = q.contiguous()
    out = torch.empty_like(q)
    paged_decode_shared(q, k_cache, v_cache, batch, scale, out)
    if batch.num_decode_rows < batch.num_rows:
        paged.paged_prefill(q, k_cache, v_cache, batch, scale, None, out)
    return out.flatten(1)


def pays(batch: Batch, num_kv_heads: int, device: torch.device) -> bool:
    """Whether to read the shared prefix apart: it is long, and the rows fill the card unsplit."""
    shared = batch.num_shared_tokens
    if shared < MIN_SHARED or batch.num_decode_rows * shared < MIN_SHARED_WORK:
        return False
    programs, own = batch.num_decode_rows * num_kv_heads, batch.max_seq_len - shared
    return paged.choose_num_splits(programs, own, num_sms=paged.device_limits(device)[0]) == 1


def prefix_tile(q: Tensor, group: int) -> dict[str, int]:
    """Tile sizes of `_prefix_kernel`; measured on an H200 (bf16, head_dim 128)."""
    if q.dtype == torch.float32:
        return paged.fitting_tile(q, group, 16, 32, 4, 3)
    if paged.device_limits(q.device)[1] > 128 << 10:
        return paged.fitting_tile(q, group, 128, 128, 8, 3)
    return paged.fitting_tile(q, group, 64, 64, 4, 3)


def own_tile(q: Tensor, group: int, own: int) -> dict[str, int]:
    """Tile sizes of `_own_kernel` for at most `own` tokens a row: few tokens, small tiles."""
    if q.dtype != torch.float32 and own <= 64 and group <= 16:
        return paged.fitting_tile(q, group, 16, 16, 1, 3)
    return paged.decode_tile(q, group, own, 1)


def paged_decode_shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    out: Tensor,  # [num_tokens, num_heads, head_dim]: tokens [0, num_decode_rows) are written
    *,
    num_slices: int | None = None,
    tile: dict[str, int] | None = None,
    tile_own: dict[str, int] | None = None,
) -> None:
    """Attention of the rows with one new token, which share their first `num_shared_tokens`.

    The block tables of these rows begin with the same blocks; row 0's is read. A row that is no
    longer than the prefix is padding and becomes 0. num_slices: programs that share the prefix of
    the same queries (None: as many as fill the card); `tile`, `tile_own`: sizes to use instead of
    `prefix_tile`'s and `own_tile`'s.
    """
    rows, (_, num_heads, head_dim), num_kv_heads = batch.num_decode_rows, q.shape, k_cache.shape[1]
    group = num_heads // num_kv_heads
    tile = tile or prefix_tile(q, group)
    num_tiles = batch.num_shared_tokens // tile["TILE"]  # whole ones: no mask; the rest is own
    assert num_tiles > 0, "the shared prefix is shorter than a tile"
    prefix = num_tiles * tile["TILE"]
    blocks = triton.cdiv(rows * group, tile["BLOCK_M"])
    if num_slices is None:
        num_slices = paged.device_limits(q.device)[0] // (blocks * num_kv_heads)
    num_slices = max(1, min(num_slices, MAX_SLICES, num_tiles))
    part_out = q.new_empty(rows, num_heads, num_slices, head_dim)
    part_lse = q.new_empty(rows, num_heads, num_slices, dtype=torch.float32)
    shapes = paged.shapes(q, k_cache, None)
    early = starts_early(q.device)
    _prefix_kernel[(blocks, num_kv_heads, num_slices)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        part_out,
        part_lse,
        scale * LOG2E,
        rows,
        num_tiles,
        PDL=early,
        **shapes,
        **tile,
    )
    _own_kernel[(num_kv_heads, rows)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.seq_lens,
        part_out,
        part_lse,
        out,
        scale * LOG2E,
        batch.block_tables.stride(0),
        prefix,
        SLICES=num_slices,
        PDL=early,
        **shapes,
        **(tile_own or own_tile(q, group, batch.max_seq_len - prefix)),
        **({"launch_pdl": True} if early else {}),
    )


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start before the one ahead of it ends (sm90: dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _prefix_kernel(
    q,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_cache,
    block_tables,  # [num_rows, table_stride] int32; the first row's is read
    part_out,  # [rows, NUM_HEADS, num_slices, HEAD_DIM]
    part_lse,  # [rows, NUM_HEADS, num_slices] fp32, base 2
    scale,
    rows,
    num_tiles,  # of TILE keys: the prefix
    PDL: tl.constexpr,
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
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    num_slices = tl.num_programs(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = r // GROUP
    head = row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + r % GROUP
    d = tl.arange(0, D)
    valid = (row < rows)[:, None] & (d < HEAD_DIM)[None, :]
    q_tile = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=valid, other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    first = num_tiles * part // num_slices * TILE
    end = num_tiles * (part + 1) // num_slices * TILE
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        acc, top, total = _attend_tile(
            acc,
            top,
            total,
            q_tile,
            r,
            k_cache,
            v_cache,
            block_tables,
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
    result = (acc / total[:, None]).to(part_out.dtype.element_ty)
    place = head * num_slices + part
    tl.store(part_out + place[:, None] * HEAD_DIM + d[None, :], result, mask=valid)
    tl.store(part_lse + place, top + tl.log2(total), mask=row < rows)


@triton.jit(do_not_specialize=["table_stride", "prefix"])
def _own_kernel(
    q,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_cache,
    block_tables,  # [num_rows, table_stride] int32
    seq_lens,  # [num_rows] int32
    part_out,  # [rows, NUM_HEADS, SLICES, HEAD_DIM]
    part_lse,  # [rows, NUM_HEADS, SLICES] fp32, base 2
    out,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    scale,
    table_stride,
    prefix,  # tokens that _prefix_kernel attends
    SLICES: tl.constexpr,
    PDL: tl.constexpr,
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
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    seq_len = tl.load(seq_lens + row)
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    head = row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + g
    valid = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_tile = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=valid, other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    q_pos = seq_len - 1 + g * 0
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    for start in tl.range(prefix, seq_len, TILE, num_stages=STAGES):
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
            seq_len,
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
    if PDL:
        gdc_wait()  # what came before the prefix's kernel has ended long since
    for part in tl.static_range(SLICES):
        place = head * SLICES + part
        lse = tl.load(part_lse + place, mask=g < GROUP, other=-1e30)
        values = tl.load(part_out + place[:, None] * HEAD_DIM + d[None, :], mask=valid, other=0.0)
        new_top = tl.maximum(top, lse)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        acc = acc * shrink[:, None] + values.to(tl.float32) * weight[:, None]
        total = total * shrink + weight
        top = new_top
    result = tl.where(seq_len > prefix, acc / total[:, None], 0.0).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * HEAD_DIM + d[None, :], result, mask=valid)
