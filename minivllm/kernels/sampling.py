"""Sampling in Triton: draw a token a row from logits that are read once, or little more than once.

The inverse CDF on two levels. A first pass cuts each row into chunks of 128 logits and keeps of
each chunk its maximum and its mass. The second picks a chunk by its mass, then a token inside it.
One uniform number a row is enough, so a seed belongs to a request and not to a batch.

```
 logits      | chunk 0 | chunk 1 | chunk 2 | ... |        _chunk_kernel: one read of everything
 top, mass       3.1       7.9       0.2                  _draw_kernel: chunk maxima say where
 candidates            ^ ^ ^ ^                            the large logits are; read only those
```

top_k, top_p and min_p need the large logits only. The chunk maxima bound the threshold from below;
the logits above that bound are collected, and the exact threshold is found among them by bisection
on integer sort keys, which ends at the exact value, with ties together. When they are too many
(a flat distribution under top_p), `_whole_row_kernel` bisects over the row itself.

Same names, arguments and results as in `reference.py`, up to rounding: a draw or a top_p boundary
within about 1e-6 of the probability mass may fall on the neighbour.
Mirrors vllm/v1/sample/ops/topk_topp_sampler.py. Chapter 11 reads this file.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 128  # logits under one maximum
CHUNKS_PER_PROGRAM = 32  # of the first pass
MAX_CANDIDATES = 2048  # what the fast path of a filtered row holds in registers
ROW_TILE = 4096  # logits in a step over a whole row
LOWEST_KEY = tl.constexpr(-2139095040)  # the sort key after -inf: such a token is never kept


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in (0, 1) a row from (seed, position) alone: splitmix64, its top 23 bits.

    seeds, positions: [num_rows] int64. Returns [num_rows] fp32, never 0 and never 1.
    """
    out = torch.empty_like(seeds, dtype=torch.float32)
    num_rows = seeds.shape[0]
    _uniform_kernel[(triton.cdiv(num_rows, 256),)](
        seeds.contiguous(), positions.contiguous(), out, num_rows, BLOCK=256
    )
    return out


def sample(
    logits: Tensor,  # [num_rows, vocab_size] fp32, masks, bias and penalties applied
    temperature: Tensor,  # [num_rows] fp32; below 1e-5 = greedy
    top_k: Tensor,  # [num_rows] int64; 0 = off
    top_p: Tensor,  # [num_rows] fp32; 1 = off
    min_p: Tensor,  # [num_rows] fp32; 0 = off
    u: Tensor,  # [num_rows] fp32 in (0, 1)
) -> Tensor:
    """Draw one token a row by the inverse CDF, in the order of token ids. Returns [num_rows] int64.

    `min_p` keeps tokens of at least min_p times the best one's probability, `top_k` the k best,
    `top_p` the fewest best ones whose mass reaches p (of what top_k left). Ties at a threshold are
    kept: the kept set never depends on the order of equal logits.
    """
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    chunk_top = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    chunk_mass = torch.empty_like(chunk_top)
    out = logits.new_empty(num_rows, dtype=torch.int64)
    stride = logits.stride(0)
    _chunk_kernel[(triton.cdiv(num_chunks, CHUNKS_PER_PROGRAM), num_rows)](
        logits,
        temperature,
        chunk_top,
        chunk_mass,
        stride,
        VOCAB=vocab_size,
        CHUNK=CHUNK,
        CHUNKS=CHUNKS_PER_PROGRAM,
    )
    chunk_ids = torch.empty_like(chunk_top, dtype=torch.int32)
    candidates = logits.new_empty(num_rows, MAX_CANDIDATES, dtype=torch.float32)
    token_ids = torch.empty_like(candidates, dtype=torch.int32)
    _draw_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        u,
        chunk_top,
        chunk_mass,
        chunk_ids,
        candidates,
        token_ids,
        out,
        stride,
        VOCAB=vocab_size,
        CHUNK=CHUNK,
        BLOCK=max(16, triton.next_power_of_2(num_chunks)),
        CAPACITY=MAX_CANDIDATES,
        num_warps=8,
    )
    if vocab_size > MAX_CANDIDATES:
        _whole_row_kernel[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            u,
            chunk_top,
            out,
            stride,
            VOCAB=vocab_size,
            CHUNK=CHUNK,
            BLOCK=max(16, triton.next_power_of_2(num_chunks)),
            TILE=min(ROW_TILE, triton.next_power_of_2(vocab_size)),
            num_warps=8,
        )
    return out


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _mix(x):  # uint64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["num_rows"])
def _uniform_kernel(seeds, positions, out, num_rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + i, mask=i < num_rows, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + i, mask=i < num_rows, other=0).to(tl.uint64, bitcast=True)
    golden = tl.full([BLOCK], 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed + golden) + position * golden) >> 41
    value = (bits.to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23
    tl.store(out + i, value, mask=i < num_rows)


@triton.jit
def _divisor(temperature, row):
    t = tl.load(temperature + row)
    return tl.where(t < 1e-5, 1.0, t)


@triton.jit
def _load_scaled(row_logits, i, valid, divisor):
    """Logits over temperature, rounded as in the twin: equal quotients are ties there and here."""
    x = tl.load(row_logits + i, mask=valid, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, divisor + tl.zeros_like(x))


@triton.jit
def _sort_key(x):
    """fp32 -> int32 in the same order; both zeros map to 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _highest_threshold(keys, weights, need, low, high):
    """The largest t in [low, high) with sum(weights[keys >= t]) >= need; low, if there is none."""
    while high - low > 1:
        middle = (low + high) >> 1  # int64: no overflow
        if tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _first_above(cdf, p, target, i):
    """The smallest i with cdf > target among those of p > 0; 2^31 - 1 if there is none."""
    return tl.min(tl.where((cdf > target) & (p > 0), i, 2147483647), 0)


@triton.jit
def _chunk_kernel(
    logits,  # [num_rows, stride]
    temperature,  # [num_rows]
    chunk_top,  # [num_rows, num_chunks] fp32: largest logit / temperature of the chunk
    chunk_mass,  # [num_rows, num_chunks] fp32: sum of exp(logit / temperature - chunk_top)
    stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    i = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]  # [CHUNKS, CHUNK]
    scaled = _load_scaled(logits + row * stride, i, i < VOCAB, _divisor(temperature, row))
    top = tl.max(scaled, 1)
    mass = tl.sum(tl.exp(scaled - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
    num_chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    tl.store(chunk_top + row * num_chunks + chunk, top, mask=chunk < num_chunks)
    tl.store(chunk_mass + row * num_chunks + chunk, mass, mask=chunk < num_chunks)


@triton.jit
def _min_p_key(best, min_p):
    """The lowest key that min_p allows."""
    floor = _sort_key(best + tl.log(tl.where(min_p > 0, min_p, 1.0))).to(tl.int64)
    return tl.where(min_p > 0, tl.maximum(floor, LOWEST_KEY), LOWEST_KEY)


@triton.jit
def _mass_bound(keys, tops, masses, best, need, high, CHUNK: tl.constexpr):
    """A key above which the mass is at least `need`, from the chunks alone.

    Of a chunk with maximum >= t at most CHUNK - 1 logits are below t, each lighter than exp(t).
    """
    low = tl.full([], LOWEST_KEY, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        bits = tl.where(middle < 0, middle ^ 0x7FFFFFFF, middle).to(tl.int32)
        below = tl.exp(bits.to(tl.float32, bitcast=True) - best) * (CHUNK - 1)
        surely = tl.maximum(tl.exp(tops - best), masses - below)
        if tl.sum(tl.where(keys >= middle, surely, 0.0).to(tl.float64), 0) >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _draw_greedy(row_logits, tops, best, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """The first of the largest logits."""
    chunk = tl.arange(0, tops.shape[0])
    first = tl.min(tl.where(tops == best, chunk, (VOCAB - 1) // CHUNK), 0)
    i = first * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row_logits + i, mask=i < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where((x == best) & (i < VOCAB), i, VOCAB - 1), 0)


@triton.jit
def _draw_any(
    row_logits, divisor, tops, masses, best, draw, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """No filter: the chunk by its mass, then the token inside it."""
    chunk = tl.arange(0, tops.shape[0])
    masses64 = masses.to(tl.float64)
    cdf = tl.cumsum(masses64, 0)
    target = draw * tl.sum(masses64, 0)
    chosen = tl.minimum(_first_above(cdf, masses, target, chunk), (VOCAB - 1) // CHUNK)
    before = tl.sum(tl.where(chunk == chosen, cdf - masses64, 0.0), 0)
    i = chosen * CHUNK + tl.arange(0, CHUNK)
    mass = tl.exp(_load_scaled(row_logits, i, i < VOCAB, divisor) - best)
    token = _first_above(before + tl.cumsum(mass.to(tl.float64), 0), mass, target, i)
    # The chunk's mass was rounded to fp32: the target may lie a hair behind its last token.
    return tl.minimum(token, tl.max(tl.where(mass > 0, i, 0), 0))


@triton.jit
def _draw_filtered(
    row_logits,
    divisor,
    tops,
    masses,
    best,
    draw,
    k,
    p,
    min_p,
    chunk_ids,
    candidates,
    token_ids,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """A token of the kept set; -1 if the candidates do not fit."""
    num_chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    chunk = tl.arange(0, tops.shape[0])
    has_k = (k > 0) & (k < VOCAB)
    only_p = (k <= 0) | (k >= VOCAB)
    only_p = only_p & (min_p <= 0) & (VOCAB > CAPACITY)

    # 1. A bound: every token that the filters keep, or that their totals count, reaches it.
    top_keys = _sort_key(tops)
    high = _sort_key(best).to(tl.int64) + 1
    bound = _min_p_key(best, min_p)
    total = tl.sum(masses.to(tl.float64), 0)
    if VOCAB > CAPACITY:
        if has_k:  # k chunks with a maximum as large are k tokens; fewer chunks give no bound
            ones = tl.where(chunk < num_chunks, 1.0, 0.0)
            bound = _highest_threshold(top_keys, ones, k.to(tl.float32), bound, high)
        if only_p:
            need = (p.to(tl.float64) + 1e-6) * total
            bound = _mass_bound(top_keys, tops, masses, best, need, high, CHUNK)

    # 2. The candidates, in the order of their ids.
    holds = (top_keys >= bound) & (chunk < num_chunks)
    chunk_slot = tl.cumsum(holds.to(tl.int32), 0) - 1
    num_holding = tl.sum(holds.to(tl.int32), 0)
    tl.store(chunk_ids + chunk_slot, chunk, mask=holds)
    tl.debug_barrier()  # the loop reads what other threads have stored
    count = 0
    step = 0
    while (step < num_holding) & (count <= CAPACITY):
        n = step + tl.arange(0, 16)
        ids = tl.load(chunk_ids + n, mask=n < num_holding, other=0)
        i = ids[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]  # [16, CHUNK]
        valid = (i < VOCAB) & (n < num_holding)[:, None]
        i = tl.reshape(i, [16 * CHUNK])
        scaled = _load_scaled(row_logits, i, tl.reshape(valid, [16 * CHUNK]), divisor)
        taken = _sort_key(scaled) >= bound
        slot = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(candidates + slot, scaled, mask=taken & (slot < CAPACITY))
        tl.store(token_ids + slot, i, mask=taken & (slot < CAPACITY))
        count += tl.sum(taken.to(tl.int32), 0)
        step += 16
    tl.debug_barrier()

    # 3. The exact thresholds among them, and the draw.
    slot = tl.arange(0, CAPACITY)
    held = slot < count
    scaled = tl.load(candidates + slot, mask=held, other=float("-inf"))
    keys = _sort_key(scaled)
    threshold = bound
    if has_k:
        ones = tl.where(held, 1.0, 0.0)
        threshold = _highest_threshold(keys, ones, k.to(tl.float32), bound, high)
    mass = tl.where(keys >= threshold, tl.exp(scaled - best), 0.0).to(tl.float64)
    if p < 1:
        need = p.to(tl.float64) * tl.where(only_p, total, tl.sum(mass, 0))
        threshold = _highest_threshold(keys, mass, need, threshold, high)
        mass = tl.where(keys >= threshold, mass, 0.0)
    chosen = _first_above(tl.cumsum(mass, 0), mass, draw * tl.sum(mass, 0), slot)
    ids = tl.load(token_ids + slot, mask=held, other=0)
    return tl.where(count <= CAPACITY, tl.sum(tl.where(slot == chosen, ids, 0), 0), -1)


@triton.jit
def _draw_kernel(
    logits,  # [num_rows, stride]
    temperature,  # [num_rows]
    top_k,
    top_p,
    min_p,
    u,
    chunk_top,  # [num_rows, num_chunks]
    chunk_mass,
    chunk_ids,  # scratch [num_rows, num_chunks]: chunks that hold a candidate
    candidates,  # scratch [num_rows, CAPACITY]: logit / temperature, in the order of token ids
    token_ids,  # scratch [num_rows, CAPACITY]
    out,  # [num_rows] int64; -1: the candidates did not fit
    stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,  # the number of chunks, padded
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    divisor = _divisor(temperature, row)
    k, p, floor = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    draw = tl.load(u + row).to(tl.float64)
    row_logits = logits + row * stride
    chunk = tl.arange(0, BLOCK)
    of_row = row * num_chunks + chunk
    tops = tl.load(chunk_top + of_row, mask=chunk < num_chunks, other=float("-inf"))
    best = tl.max(tops, 0)
    masses = tl.load(chunk_mass + of_row, mask=chunk < num_chunks, other=0.0)
    masses *= tl.exp(tops - best)  # all in units of exp(best)
    if tl.load(temperature + row) < 1e-5:
        token = _draw_greedy(row_logits, tops, best, VOCAB, CHUNK)
    elif ((k > 0) & (k < VOCAB)) | (p < 1) | (floor > 0):
        token = _draw_filtered(
            row_logits,
            divisor,
            tops,
            masses,
            best,
            draw,
            k,
            p,
            floor,
            chunk_ids + row * num_chunks,
            candidates + row * CAPACITY,
            token_ids + row * CAPACITY,
            VOCAB,
            CHUNK,
            CAPACITY,
        )
    else:
        token = _draw_any(row_logits, divisor, tops, masses, best, draw, VOCAB, CHUNK)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _row_weight(
    row_logits,
    divisor,
    best,
    threshold,
    COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mass, or number, of the tokens whose key reaches the threshold."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, TILE):
        i = start + tl.arange(0, TILE)
        scaled = _load_scaled(row_logits, i, i < VOCAB, divisor)
        weight = tl.exp(scaled - best)
        if COUNT:
            weight = tl.where(i < VOCAB, 1.0, 0.0)
        kept = tl.where(_sort_key(scaled) >= threshold, weight, 0.0)
        total += tl.sum(kept.to(tl.float64), 0)
    return total


@triton.jit
def _highest_threshold_in_row(
    row_logits,
    divisor,
    best,
    need,
    low,
    high,
    COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """`_highest_threshold` over a row too long for registers: 32 reads of it, from the L2 cache."""
    while high - low > 1:
        middle = (low + high) >> 1
        if _row_weight(row_logits, divisor, best, middle, COUNT, VOCAB, TILE) >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _whole_row_kernel(
    logits,  # [num_rows, stride]
    temperature,  # [num_rows]
    top_k,
    top_p,
    min_p,
    u,
    chunk_top,  # [num_rows, num_chunks]
    out,  # [num_rows] int64; written where it is -1
    stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) >= 0:
        return
    divisor = _divisor(temperature, row)
    k, p, floor = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    row_logits = logits + row * stride
    chunk = tl.arange(0, BLOCK)
    num_chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    of_row = row * num_chunks + chunk
    best = tl.max(tl.load(chunk_top + of_row, mask=chunk < num_chunks, other=float("-inf")), 0)
    high = _sort_key(best).to(tl.int64) + 1
    threshold = _min_p_key(best, floor)
    if (k > 0) & (k < VOCAB):
        need = k.to(tl.float64)
        threshold = _highest_threshold_in_row(
            row_logits, divisor, best, need, threshold, high, True, VOCAB, TILE
        )
    total = _row_weight(row_logits, divisor, best, threshold, False, VOCAB, TILE)
    if p < 1:
        need = p.to(tl.float64) * total
        threshold = _highest_threshold_in_row(
            row_logits, divisor, best, need, threshold, high, False, VOCAB, TILE
        )
        total = _row_weight(row_logits, divisor, best, threshold, False, VOCAB, TILE)
    target = tl.load(u + row).to(tl.float64) * total
    token = tl.full([], 2147483647, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, TILE):
        i = start + tl.arange(0, TILE)
        scaled = _load_scaled(row_logits, i, i < VOCAB, divisor)
        mass = tl.where(_sort_key(scaled) >= threshold, tl.exp(scaled - best), 0.0).to(tl.float64)
        token = tl.minimum(token, _first_above(before + tl.cumsum(mass, 0), mass, target, i))
        before += tl.sum(mass, 0)
    tl.store(out + row, tl.minimum(token, VOCAB - 1).to(tl.int64))
