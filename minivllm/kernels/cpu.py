"""Two ops in which the plain version would be slow: what a device without Triton kernels runs.

Same names, arguments and results as in `reference.py`. What follows from the batch alone (the cache
rows that each row reads, its mask) is worked out once a step and shared by all layers. Rows with
one new token are computed together, padded to the longest of their group:

```
row      0 1 2   3 4         two groups, so that short rows do not pay for long ones
length   9 8 8   3 2
         # # #   # #
         # # #   # #         a padded place (o) reads the row's own last token again, masked:
         # # #   # o         never memory that another request left behind
         . . .
         # o o
```

Mirrors vllm/v1/attention/backends/cpu_attn.py. Chapter 5 names this file.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.batch import Batch
from minivllm.kernels.reference import rms_norm

MAX_PADDING = 1024  # padded tokens of a group; reading more costs as much as another group


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """As in `reference.py`: q and k are turned together, K and V written as rows of the cache."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    qkv = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    if q_norm is not None and k_norm is not None:
        q, k = qk.split([num_heads, num_kv_heads], dim=1)
        qk = torch.cat((rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)), dim=1)
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
    x = qk.float().unflatten(-1, (2, head_dim // 2))  # [num_tokens, heads, 2 halves, head_dim / 2]
    turned = x * cos[:, None]
    turned[:, :, 0].addcmul_(x[:, :, 1], sin, value=-1)
    turned[:, :, 1].addcmul_(x[:, :, 0], sin)
    q, k = turned.flatten(2).to(qkv.dtype).split([num_heads, num_kv_heads], dim=1)
    rows = _cache_rows(slot_mapping, num_kv_heads, block_size).flatten()
    k_cache.view(-1, head_dim).index_copy_(0, rows, k.reshape(-1, head_dim).to(k_cache.dtype))
    v_cache.view(-1, head_dim).index_copy_(0, rows, v.reshape(-1, head_dim).to(v_cache.dtype))
    return q


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """As in `reference.py`: decode rows in groups, chunks one by one through PyTorch's flash op."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    keys, values = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
    key = (num_kv_heads, block_size, sliding_window)
    if key not in batch.shared:
        batch.shared[key] = (list(_groups(batch, keys, *key)), list(_chunks(batch, *key)))
    groups, chunks = batch.shared[key]
    out = torch.empty_like(q)
    for group in groups:
        rows = slice(None) if group.rows is None else group.rows
        attended = _attend_group(q[rows], keys, values, group, scale)
        out[rows] = attended.view(-1, *q.shape[1:]).to(q.dtype)
    for chunk in chunks:
        shape = (1, num_kv_heads, -1, head_dim)
        attended = F.scaled_dot_product_attention(
            q[chunk.tokens].transpose(0, 1)[None],  # [1, num_heads, num_tokens, head_dim]
            keys.index_select(0, chunk.cache_rows).view(shape).to(q.dtype),
            values.index_select(0, chunk.cache_rows).view(shape).to(q.dtype),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[chunk.tokens] = attended[0].transpose(0, 1)
    return out.flatten(1)


class _Group(NamedTuple):
    """Rows with one new token, attended together."""

    rows: Tensor | None  # [num_rows] int64; None = every token of the batch, in order
    cache_rows: Tensor  # [num_rows * num_kv_heads * length] int64
    mask: Tensor  # [num_rows * num_kv_heads, 1, length] fp32: 0, or -inf at padded places
    keys: Tensor  # [num_rows * num_kv_heads * length, head_dim]: room for what a layer gathers,
    values: Tensor  # used by all in turn because fresh pages cost more than the copy itself


class _Chunk(NamedTuple):
    """A row with several new tokens."""

    tokens: slice
    cache_rows: Tensor  # [num_kv_heads * length] int64
    mask: Tensor | None  # [num_tokens, length] bool; None = plainly causal


def _attend_group(q: Tensor, keys: Tensor, values: Tensor, group: _Group, scale: float) -> Tensor:
    """Two batched products: one matrix for each row and KV head, its query heads side by side."""
    pairs, _, length = group.mask.shape
    k = torch.index_select(keys, 0, group.cache_rows, out=group.keys)
    v = torch.index_select(values, 0, group.cache_rows, out=group.values)
    k, v = k.view(pairs, length, -1).float(), v.view(pairs, length, -1).float()
    q = q.reshape(pairs, -1, q.shape[-1]).float()
    scores = torch.baddbmm(group.mask, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v)  # [pairs, query heads of a KV head, head_dim]


def _groups(
    batch: Batch, cache: Tensor, num_kv_heads: int, block_size: int, window: int | None
) -> Iterator[_Group]:
    """Decode rows, the longest first; a group ends when its padding would exceed MAX_PADDING."""
    lengths = batch.seq_lens[: batch.num_decode_rows].tolist()
    if not lengths:
        return
    visible = [min(length, window or length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda row: -visible[row])
    members: list[list[int]] = []
    padding = 0
    for row in order:
        padding += visible[members[-1][0]] - visible[row] if members else 0
        if not members or padding > MAX_PADDING:
            members.append([])
            padding = 0
        members[-1].append(row)
    alone = len(members) == 1 and batch.num_decode_rows == batch.num_rows
    for rows in [sorted(members[0])] if alone else members:
        longest = max(visible[row] for row in rows)
        index = torch.tensor(rows, device=batch.seq_lens.device)
        last = batch.seq_lens[index].long()[:, None] - 1
        first = last + 1 - last.new_tensor([visible[row] for row in rows])[:, None]
        # [num_rows, longest], beyond the end where padded
        places = first + torch.arange(longest, device=index.device)
        mask = torch.zeros_like(places, dtype=torch.float32).masked_fill_(places > last, -torch.inf)
        slots = _slots(batch.block_tables[index], places.minimum(last), block_size)
        cache_rows = _cache_rows(slots, num_kv_heads, block_size).transpose(1, 2).flatten()
        yield _Group(
            rows=None if alone else index,
            cache_rows=cache_rows,
            mask=mask.repeat_interleave(num_kv_heads, 0)[:, None],
            keys=cache.new_empty(cache_rows.shape[0], cache.shape[1]),
            values=cache.new_empty(cache_rows.shape[0], cache.shape[1]),
        )


def _chunks(
    batch: Batch, num_kv_heads: int, block_size: int, window: int | None
) -> Iterator[_Chunk]:
    """Rows with several new tokens, in the order of the batch."""
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    for row in range(batch.num_decode_rows, batch.num_rows):
        tokens, length = slice(starts[row], starts[row + 1]), lengths[row]
        new = tokens.stop - tokens.start
        first = max(0, length - new - window + 1) if window else 0
        k_pos = torch.arange(first, length, device=batch.positions.device)
        q_pos = k_pos[-new:, None]
        mask = None
        if new < length or (window and window < length):
            mask = k_pos <= q_pos
            if window:
                mask &= k_pos > q_pos - window
        slots = _slots(batch.block_tables[row, None], k_pos[None], block_size)
        yield _Chunk(tokens, _cache_rows(slots, num_kv_heads, block_size)[0].t().flatten(), mask)


def _slots(tables: Tensor, places: Tensor, block_size: int) -> Tensor:
    """Slots of positions: tables [num_rows, max_blocks], places [num_rows, n] -> [num_rows, n]."""
    block_ids = tables.long().gather(1, places // block_size)
    return block_ids * block_size + places % block_size


def _cache_rows(slots: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """Rows of a layer's cache, seen as [-1, head_dim]: [...] slots -> [..., num_kv_heads]."""
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=slots.device)
    # (block * num_kv_heads + head) * block_size + offset, where slot = block * block_size + offset
    rows = slots.add(slots // block_size, alpha=(num_kv_heads - 1) * block_size)
    return rows[..., None] + heads
