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
(a flat distribution under top_p), `_whole_row_kernel` searches the row itself, 8 thresholds a read.

Thresholds are logits, never divided by the temperature: it turns logits into masses and changes no
order. So half-precision logits need half the steps: their keys differ by whole multiples.

Same names, arguments and results as in `reference.py`, up to rounding: a draw or a top_p boundary
within about 1e-6 of the probability mass may fall on the neighbour.
Mirrors vllm/v1/sample/ops/topk_topp_sampler.py. Chapter 11 reads this file.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)  # the kernels use base 2: exp(x) = exp2(x * LOG2E)
CHUNK = 128  # logits under one maximum
CHUNKS_PER_PROGRAM = 32  # of the first pass
MAX_CANDIDATES = 4096  # what the fast path of a filtered row holds in registers
FEW_CANDIDATES = 512  # nearly always enough: top_k 50 leaves about 60
GATHER = 4096  # logits looked at in one step of collecting candidates
ROW_TILE = 8192  # logits in a step over a whole row; a quarter with WAYS thresholds
WAYS = tl.constexpr(8)  # thresholds that one read of a whole row tries
LOWEST_KEY = tl.constexpr(-2139095040)  # the sort key after -inf: such a token is never kept
# Sort keys of neighbouring values of a dtype differ by at least this much.
GRAIN = {torch.float32: 1, torch.float16: 1 << 13, torch.bfloat16: 1 << 16}


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
    kept: the kept set never depends on the order of equal logits.
    """
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    num_rows, vocab_size = logits.shape
    chunk_top, chunk_mass = chunk_statistics(logits, temperature)
    num_chunks = chunk_top.shape[1]
    out = logits.new_empty(num_rows, dtype=torch.int64)
    stride = logits.stride(0)
    chunk_ids = torch.empty_like(chunk_top, dtype=torch.int32)
    candidates = logits.new_empty(num_rows, MAX_CANDIDATES, dtype=torch.float32)
    token_ids = torch.empty_like(candidates, dtype=torch.int32)
    block = max(16, triton.next_power_of_2(num_chunks))
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
        BLOCK=block,
        CAPACITY=MAX_CANDIDATES,
        FEW=min(FEW_CANDIDATES, MAX_CANDIDATES),
        FITTING=fitting_chunks(num_chunks, MAX_CANDIDATES),
        GATHER=max(1, min(GATHER // CHUNK, block)),
        GRAIN=GRAIN[logits.dtype],
        num_warps=8,
        maxnreg=128,  # two programs a processor; only the rare large case would want more
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
            BLOCK=block,
            TILE=min(ROW_TILE, triton.next_power_of_2(vocab_size)),
            GRAIN=GRAIN[logits.dtype],
            num_warps=16,
        )
    return out


def chunk_statistics(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The first pass: largest logit of each chunk, and its mass in units of that one's.

    Both are [num_rows, num_chunks] fp32.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    chunk_top = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    chunk_mass = torch.empty_like(chunk_top)
    _chunk_kernel[(triton.cdiv(num_chunks, CHUNKS_PER_PROGRAM), num_rows)](
        logits,
        temperature,
        chunk_top,
        chunk_mass,
        logits.stride(0),
        VOCAB=vocab_size,
        CHUNK=CHUNK,
        CHUNKS=CHUNKS_PER_PROGRAM,
    )
    return chunk_top, chunk_mass


def fitting_chunks(num_chunks: int, capacity: int) -> int:
    """How many chunks' maxima may exceed a bound if about 3/4 of `capacity` logits shall do so.

    With m logits a chunk above the bound on average, and these scattered at random, a share
    exp(-m) of the chunks has none (Poisson). m > 3 could not be told from the few chunks left.
    """
    per_chunk = min(0.75 * capacity / num_chunks, 3.0)
    return max(1, int(num_chunks * (1 - math.exp(-per_chunk))))


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
def _log2_scale(temperature, row):
    """The c of mass = exp2((logit - best) * c); a greedy row has no masses, only finite numbers."""
    t = tl.load(temperature + row)
    return LOG2E / tl.where(t < 1e-5, 1.0, t)


@triton.jit
def _load(row_logits, i, valid):
    return tl.load(row_logits + i, mask=valid, other=float("-inf")).to(tl.float32)


@triton.jit
def _sort_key(x):
    """fp32 -> int32 in the same order; both zeros map to 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _highest_threshold(keys, weights, need, low, high, GRAIN: tl.constexpr):
    """The largest t in [low, high) with sum(weights[keys >= t]) >= need; low, if there is none."""
    while high - low > GRAIN:
        middle = (low + high) >> 1  # int64: no overflow
        if tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0), 0) >= need:
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
    chunk_top,  # [num_rows, num_chunks] fp32: largest logit of the chunk
    chunk_mass,  # [num_rows, num_chunks] fp32: sum of exp((logit - chunk_top) / temperature)
    stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    i = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]  # [CHUNKS, CHUNK]
    scale = _log2_scale(temperature, row)
    x = _load(logits + row * stride, i, i < VOCAB)
    top = tl.max(x, 1)
    finite_top = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.exp2((x - finite_top[:, None]) * scale), 1)
    num_chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    tl.store(chunk_top + row * num_chunks + chunk, top, mask=chunk < num_chunks)
    tl.store(chunk_mass + row * num_chunks + chunk, mass, mask=chunk < num_chunks)


@triton.jit
def _min_p_key(best, min_p, scale):
    """The lowest key that min_p allows."""
    floor = best + tl.log2(tl.where(min_p > 0, min_p, 1.0)) / scale
    key = _sort_key(floor).to(tl.int64)
    return tl.where(min_p > 0, tl.maximum(key, LOWEST_KEY), LOWEST_KEY)


@triton.jit
def _mass_bound(keys, tops, masses, best, scale, need, low, high, CHUNK: tl.constexpr):
    """A key above which the mass is at least `need`, from the chunks alone; low, if there is none.

    Of a chunk with maximum >= t at most CHUNK - 1 logits are below t, each lighter than t's mass.
    """
    while high - low > 65536:  # a bound need not be sharp
        middle = (low + high) >> 1
        key = middle.to(tl.int32)
        bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
        below = tl.exp2((bits.to(tl.float32, bitcast=True) - best) * scale) * (CHUNK - 1)
        surely = tl.maximum(tl.exp2((tops - best) * scale), masses - below)
        if tl.sum(tl.where(keys >= key, surely, 0.0).to(tl.float64), 0) >= need:
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
    x = _load(row_logits, i, i < VOCAB)
    return tl.min(tl.where((x == best) & (i < VOCAB), i, VOCAB - 1), 0)


@triton.jit
def _draw_any(
    row_logits, scale, tops, masses, best, draw, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """No filter: the chunk by its mass, then the token inside it."""
    chunk = tl.arange(0, tops.shape[0])
    masses64 = masses.to(tl.float64)
    cdf = tl.cumsum(masses64, 0)
    target = draw * tl.sum(masses64, 0)
    chosen = tl.minimum(_first_above(cdf, masses, target, chunk), (VOCAB - 1) // CHUNK)
    before = tl.sum(tl.where(chunk == chosen, cdf - masses64, 0.0), 0)
    i = chosen * CHUNK + tl.arange(0, CHUNK)
    mass = tl.exp2((_load(row_logits, i, i < VOCAB) - best) * scale)
    token = _first_above(before + tl.cumsum(mass.to(tl.float64), 0), mass, target, i)
    # The chunk's mass was rounded to fp32: the target may lie a hair behind its last token.
    return tl.minimum(token, tl.max(tl.where(mass > 0, i, 0), 0))


@triton.jit
def _draw_filtered(
    row_logits,
    scale,
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
    FEW: tl.constexpr,
    FITTING: tl.constexpr,
    GATHER: tl.constexpr,
    GRAIN: tl.constexpr,
):
    """A token of the kept set; -1 if the candidates do not fit, or are not all that is kept."""
    num_chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    chunk = tl.arange(0, tops.shape[0])
    has_k = (k > 0) & (k < VOCAB)
    only_p = (k <= 0) | (k >= VOCAB)
    only_p = only_p & (min_p <= 0) & (VOCAB > CAPACITY)

    # 1. A bound: every token that the filters keep, or that their totals count, reaches it.
    top_keys = _sort_key(tops)
    high = _sort_key(best).to(tl.int64) + 1
    bound = _min_p_key(best, min_p, scale)
    need = p.to(tl.float64) * tl.sum(masses.to(tl.float64), 0)
    if VOCAB > CAPACITY:
        ones = tl.where(chunk < num_chunks, 1, 0)
        lowest_top = tl.min(tl.where(chunk < num_chunks, top_keys, 2147483647), 0).to(tl.int64)
        if has_k & (k <= num_chunks):  # k chunks with a maximum as large are k tokens
            low = tl.maximum(bound, lowest_top)
            bound = _highest_threshold(top_keys, ones, k, low, high, GRAIN)
        if only_p:  # the sharper of two bounds; the second one is a guess, and looked at below
            low = tl.maximum(bound, LOWEST_KEY)
            by_mass = _mass_bound(
                top_keys, tops, masses, best, scale, need * (1 + 1e-6), low, high, CHUNK
            )
            low = tl.maximum(bound, lowest_top)
            by_count = _highest_threshold(top_keys, ones, FITTING, low, high, GRAIN)
            bound = tl.maximum(by_mass, by_count)

    # 2. The candidates, in the order of their ids.
    holds = (top_keys >= bound) & (chunk < num_chunks)
    chunk_slot = tl.cumsum(holds.to(tl.int32), 0) - 1
    num_holding = tl.sum(holds.to(tl.int32), 0)
    tl.store(chunk_ids + chunk_slot, chunk, mask=holds)
    tl.debug_barrier()  # the loop reads what other threads have stored
    count = 0
    step = 0
    while (step < num_holding) & (count <= CAPACITY):
        n = step + tl.arange(0, GATHER)
        ids = tl.load(chunk_ids + n, mask=n < num_holding, other=0)
        i = ids[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]  # [GATHER, CHUNK]
        valid = (i < VOCAB) & (n < num_holding)[:, None]
        x = tl.reshape(_load(row_logits, i, valid), [GATHER * CHUNK])
        i = tl.reshape(i, [GATHER * CHUNK])
        taken = _sort_key(x) >= bound
        slot = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(candidates + slot, x, mask=taken & (slot < CAPACITY))
        tl.store(token_ids + slot, i, mask=taken & (slot < CAPACITY))
        count += tl.sum(taken.to(tl.int32), 0)
        step += GATHER
    tl.debug_barrier()

    # 3. The exact thresholds among them, and the draw.
    token = -1
    if count <= FEW:
        token = _draw_candidate(
            candidates, token_ids, count, scale, best, draw, k, p, has_k, only_p, need, bound, high,
            FEW, GRAIN,
        )  # fmt: skip
    elif count <= CAPACITY:
        token = _draw_candidate(
            candidates, token_ids, count, scale, best, draw, k, p, has_k, only_p, need, bound, high,
            CAPACITY, GRAIN,
        )  # fmt: skip
    return token


@triton.jit
def _draw_candidate(
    candidates,
    token_ids,
    count,
    scale,
    best,
    draw,
    k,
    p,
    has_k,
    only_p,
    need,  # the mass that top_p wants, if only_p
    bound,  # candidates reach it
    high,
    SIZE: tl.constexpr,  # count, padded
    GRAIN: tl.constexpr,
):
    """A token among those kept of the candidates; -1 if their mass is less than top_p wants."""
    slot = tl.arange(0, SIZE)
    held = slot < count
    x = tl.load(candidates + slot, mask=held, other=float("-inf"))
    keys = _sort_key(x)
    threshold = bound
    if has_k:
        ones = tl.where(held, 1, 0)
        threshold = _highest_threshold(keys, ones, k, bound, high, GRAIN)
    mass = tl.where(held & (keys >= threshold), tl.exp2((x - best) * scale), 0.0).to(tl.float64)
    total = tl.sum(mass, 0)
    enough = (total >= need) | (only_p == 0)
    if p < 1:
        need = tl.where(only_p, need, p.to(tl.float64) * total)
        threshold = _highest_threshold(keys, mass, need, threshold, high, GRAIN)
        mass = tl.where(keys >= threshold, mass, 0.0)
    chosen = _first_above(tl.cumsum(mass, 0), mass, draw * tl.sum(mass, 0), slot)
    ids = tl.load(token_ids + slot, mask=held, other=0)
    return tl.where(enough, tl.sum(tl.where(slot == chosen, ids, 0), 0), -1)


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
    candidates,  # scratch [num_rows, CAPACITY]: logits, in the order of token ids
    token_ids,  # scratch [num_rows, CAPACITY]
    out,  # [num_rows] int64; -1: left to _whole_row_kernel
    stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,  # the number of chunks, padded
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    FITTING: tl.constexpr,  # chunks that may hold candidates of top_p
    GATHER: tl.constexpr,
    GRAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    scale = _log2_scale(temperature, row)
    k, p, floor = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    draw = tl.load(u + row).to(tl.float64)
    row_logits = logits + row * stride
    chunk = tl.arange(0, BLOCK)
    of_row = row * num_chunks + chunk
    tops = tl.load(chunk_top + of_row, mask=chunk < num_chunks, other=float("-inf"))
    masses = tl.load(chunk_mass + of_row, mask=chunk < num_chunks, other=0.0)
    best = tl.max(tops, 0)
    masses *= tl.exp2((tops - best) * scale)  # all in units of the best token's
    if tl.load(temperature + row) < 1e-5:
        token = _draw_greedy(row_logits, tops, best, VOCAB, CHUNK)
    elif ((k > 0) & (k < VOCAB)) | (p < 1) | (floor > 0):
        token = _draw_filtered(
            row_logits,
            scale,
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
            FEW,
            FITTING,
            GATHER,
            GRAIN,
        )
    else:
        token = _draw_any(row_logits, scale, tops, masses, best, draw, VOCAB, CHUNK)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _row_weights(
    row_logits,
    scale,
    best,
    thresholds,  # [WAYS] int32
    COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mass, or number, of the tokens whose key reaches each threshold: [WAYS] fp64."""
    total = tl.zeros([WAYS, TILE], tl.float32)  # added up at the end: a sum waits for all threads
    for start in tl.range(0, VOCAB, TILE, num_stages=4):
        i = start + tl.arange(0, TILE)
        x = _load(row_logits, i, i < VOCAB)
        weight = tl.exp2((x - best) * scale)
        if COUNT:
            weight = tl.where(i < VOCAB, 1.0, 0.0)
        reached = _sort_key(x)[None, :] >= thresholds[:, None]  # [WAYS, TILE]
        total += tl.where(reached, weight[None, :], 0.0)
    return tl.sum(total, 1).to(tl.float64)


@triton.jit
def _highest_threshold_in_row(
    row_logits,
    scale,
    best,
    need,
    low,
    high,
    COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    GRAIN: tl.constexpr,
):
    """`_highest_threshold` over a row too long for registers, 3 bits a read of it.

    ```
     low                            high      WAYS thresholds, evenly spaced from low on
      t0  t1  t2  t3  t4  t5  t6  t7 |        weights fall from left to right
      y   y   y   y   n   n   n   n           the last that is enough: low; the next one: high
    ```
    """
    way = tl.arange(0, WAYS)
    while high - low > GRAIN:
        gap = (high - low + WAYS - 1) // WAYS
        thresholds = (low + gap * way).to(tl.int32)
        weights = _row_weights(row_logits, scale, best, thresholds, COUNT, VOCAB, TILE // 4)
        last = tl.max(tl.where(weights >= need, way, 0), 0)
        low += gap * last
        high = tl.minimum(low + gap, high)
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
    GRAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) >= 0:
        return
    scale = _log2_scale(temperature, row)
    k, p, floor = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    row_logits = logits + row * stride
    chunk = tl.arange(0, BLOCK)
    num_chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    of_row = row * num_chunks + chunk
    best = tl.max(tl.load(chunk_top + of_row, mask=chunk < num_chunks, other=float("-inf")), 0)
    high = _sort_key(best).to(tl.int64) + 1
    threshold = _min_p_key(best, floor, scale)
    if (k > 0) & (k < VOCAB):
        need = k.to(tl.float64)
        threshold = _highest_threshold_in_row(
            row_logits, scale, best, need, threshold, high, True, VOCAB, TILE, GRAIN
        )
    total = _kept_total(row_logits, scale, best, threshold, VOCAB, TILE)
    if p < 1:
        need = p.to(tl.float64) * total
        threshold = _highest_threshold_in_row(
            row_logits, scale, best, need, threshold, high, False, VOCAB, TILE, GRAIN
        )
        total = _kept_total(row_logits, scale, best, threshold, VOCAB, TILE)
    target = tl.load(u + row).to(tl.float64) * total

    # The tile in which the CDF passes the target, then the token inside it.
    after = tl.full([], 0.0, tl.float64)
    start = 0
    while (start < VOCAB) & (after <= target):
        mass = _kept_mass(row_logits, scale, best, threshold, start, VOCAB, TILE)
        after += tl.sum(mass, 0).to(tl.float64)
        start += TILE
    start = tl.maximum(start - TILE, 0)  # NaN takes no step at all
    mass = _kept_mass(row_logits, scale, best, threshold, start, VOCAB, TILE)
    before = after - tl.sum(mass, 0).to(tl.float64)
    i = start + tl.arange(0, TILE)
    token = _first_above(before + tl.cumsum(mass.to(tl.float64), 0), mass, target, i)
    # The tile's sum was rounded to fp32: the target may lie a hair behind its last token.
    token = tl.minimum(token, tl.max(tl.where(mass > 0, i, 0), 0))
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _kept_mass(row_logits, scale, best, threshold, start, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Masses of the tokens [start, start + TILE); 0 below the threshold."""
    i = start + tl.arange(0, TILE)
    x = _load(row_logits, i, i < VOCAB)
    return tl.where(_sort_key(x) >= threshold, tl.exp2((x - best) * scale), 0.0)


@triton.jit
def _kept_total(row_logits, scale, best, threshold, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The sum of `_kept_mass`, tile by tile, as the draw adds it up."""
    total = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, VOCAB, TILE, num_stages=2):
        mass = _kept_mass(row_logits, scale, best, threshold, start, VOCAB, TILE)
        total += tl.sum(mass, 0).to(tl.float64)
    return total
