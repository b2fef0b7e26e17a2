"""The Triton kernels against their twins in plain PyTorch.

Without a GPU they run in Triton's interpreter, which computes bf16 wrongly: fp32 and fp16 here, and
bf16 with real shapes in the tests marked `gpu`. Shapes are tiny: a program costs milliseconds.
"""

import importlib.util
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import HAS_GPU
from torch import Tensor

from minivllm.kernels import ops, reference
from minivllm.kernels.batch import Batch

pytest.importorskip("triton")
from minivllm.kernels import attention, cascade, fused, sampling  # noqa: E402  after the interpreter is on

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Relative error of the whole tensor; NaN never passes."""
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error.item() <= TOLERANCE[out.dtype], f"relative error {error.item():.1e}"


def draws(seed: int, device: torch.device, dtype: torch.dtype):
    """A function of a shape that draws normal numbers, always the same ones for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


# ── norm, activation, RoPE ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", [1, 96, 576])
def test_norms_equal_their_twins(hidden, dtype, device):
    draw = draws(hidden, device, dtype)
    x, residual, weight = draw(3, hidden), draw(3, hidden), draw(hidden)
    assert_close(fused.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    x_before = x.clone()
    normed, total = fused.add_rms_norm(x, residual, weight, 1e-5)
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(normed, expected[0])
    assert torch.equal(total, expected[1])
    assert torch.equal(x, x_before)


def test_norm_takes_any_leading_shape_and_strides(device):
    draw = draws(0, device, torch.float32)
    x, weight = draw(2, 3, 100)[..., ::2], draw(50)
    assert_close(fused.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("intermediate", [1, 100, 1500])  # the last takes two programs a token
def test_silu_mul_equals_its_twin(intermediate, dtype, device):
    gate_up = draws(1, device, dtype)(3, 2 * intermediate) * 4
    assert_close(fused.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "norm"),
    [(4, 2, 64, 16, True), (9, 3, 64, 1, False), (2, 1, 80, 24, True), (40, 2, 16, 8, True)],
)
def test_rope_and_cache_equals_its_twin(
    num_heads, num_kv_heads, head_dim, block_size, norm, dtype, device
):
    """q, and the whole cache bit by bit where nothing was to be written."""
    draw = draws(head_dim, device, dtype)
    num_tokens, num_blocks = 5, 40
    qkv = draw(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    q_norm, k_norm = (draw(head_dim), draw(head_dim)) if norm else (None, None)
    positions = torch.tensor([0, 1, 7, 30, 31], device=device)
    angles = draws(0, device, torch.float32)(32, head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens].to(device) + block_size
    caches = [
        torch.full((num_blocks, num_kv_heads, block_size, head_dim), NAN, dtype=dtype).to(device)
        for _ in range(4)
    ]
    args = (qkv, positions, cos_sin, q_norm, k_norm, 1e-6)
    q = fused.rope_and_cache(*args, caches[0], caches[1], slots)
    expected = reference.rope_and_cache(*args, caches[2], caches[3], slots)
    assert_close(q, expected)
    for cache, twin in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(cache.isnan(), twin.isnan())
        assert_close(cache.nan_to_num(), twin.nan_to_num())


def test_padded_tokens_write_the_null_block_only(device):
    """Padding of a CUDA graph points to slots of block 0; every other block stays as it was."""
    draw = draws(2, device, torch.float32)
    k_cache, v_cache = draw(4, 1, 8, 16), draw(4, 1, 8, 16)
    before = k_cache.clone(), v_cache.clone()
    slots = torch.tensor([0, 0, 3, 7], device=device)
    qkv, positions = draw(4, 4 * 16), torch.zeros(4, dtype=torch.int64, device=device)
    cos_sin = draw(1, 16)
    fused.rope_and_cache(qkv, positions, cos_sin, None, None, 1e-6, k_cache, v_cache, slots)
    assert torch.equal(k_cache[1:], before[0][1:])
    assert torch.equal(v_cache[1:], before[1][1:])
    assert not torch.equal(v_cache[0, :, 3], before[1][0, :, 3])


# ── attention ────────────────────────────────────────────────────────────────────────────────────


def ragged_batch(
    rng: random.Random, *, decode: int, chunks: int, block_size: int, max_len: int, device
) -> tuple[Batch, int]:
    """Rows of random lengths over shuffled blocks; block 0 is in no table. (batch, num_blocks)."""
    seq_lens = [rng.randint(1, max_len) for _ in range(decode + chunks)]
    query_lens = [1] * decode + [rng.randint(1, length) for length in seq_lens[decode:]]
    blocks_of = [-(-length // block_size) for length in seq_lens]
    ids = list(range(1, sum(blocks_of) + 3))  # two blocks too many
    rng.shuffle(ids)
    tables = torch.zeros(len(seq_lens), max(blocks_of) + 1, dtype=torch.int32)
    query_start = [0]
    for row, (count, query_len) in enumerate(zip(blocks_of, query_lens, strict=True)):
        tables[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
        query_start.append(query_start[-1] + query_len)
    unused = torch.zeros(query_start[-1], dtype=torch.int64)
    batch = Batch(
        token_ids=unused,
        positions=unused,
        slot_mapping=unused,
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        logits_index=unused[:0],
        num_decode_rows=decode,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return batch, sum(blocks_of) + 3


def poisoned_cache(draw, batch: Batch, num_blocks: int, num_kv_heads, block_size, head_dim):
    """A cache that is NaN wherever no row's context lies: other blocks, and the ends of blocks."""
    values = draw(num_blocks, num_kv_heads, block_size, head_dim)
    cache = torch.full_like(values, NAN)
    for row, length in enumerate(batch.seq_lens.tolist()):
        t = torch.arange(length, device=values.device)
        block, offset = batch.block_tables[row].long()[t // block_size], t % block_size
        cache[block, :, offset] = values[block, :, offset]
    return cache


def clean(cache: Tensor) -> Tensor:
    return cache.nan_to_num()  # the twin multiplies the ends of blocks by 0


CASES = [
    # decode rows, chunks, block size, heads, KV heads, head_dim, window
    (3, 0, 16, 4, 2, 64, None),
    (0, 3, 16, 4, 2, 64, None),
    (2, 2, 16, 9, 3, 64, None),
    (2, 2, 1, 4, 4, 32, None),
    (2, 2, 24, 8, 1, 16, 20),
    (1, 3, 8, 3, 1, 80, None),
    (2, 2, 32, 14, 2, 16, 1),
    (2, 1, 16, 5, 1, 96, 33),
    (1, 1, 128, 2, 1, 128, None),
    (2, 2, 7, 6, 3, 256, 50),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_its_twin(case, dtype, device):
    """Decodes and chunks mixed; NaN in every slot that no query may see."""
    decode, chunks, block_size, num_heads, num_kv_heads, head_dim, window = case
    rng = random.Random(str(case))
    batch, num_blocks = ragged_batch(
        rng, decode=decode, chunks=chunks, block_size=block_size, max_len=100, device=device
    )
    draw = draws(rng.randrange(1000), device, dtype)
    k_cache, v_cache = (
        poisoned_cache(draw, batch, num_blocks, num_kv_heads, block_size, head_dim)
        for _ in range(2)
    )
    q = draw(batch.num_tokens, num_heads, head_dim)
    scale = head_dim**-0.5
    out = attention.attention(q, k_cache, v_cache, batch, scale, window)
    expected = reference.attention(q, clean(k_cache), clean(v_cache), batch, scale, window)
    assert_close(out, expected)


def test_the_two_kernels_write_their_own_tokens_only(device):
    batch, num_blocks = ragged_batch(
        random.Random(5), decode=2, chunks=2, block_size=16, max_len=40, device=device
    )
    draw = draws(5, device, torch.float32)
    cache = poisoned_cache(draw, batch, num_blocks, 2, 16, 32)
    q = draw(batch.num_tokens, 4, 32)
    args = (q, cache, cache, batch, 0.2, None)
    expected = reference.attention(q, clean(cache), clean(cache), batch, 0.2).view_as(q)
    guard, tokens = 3, batch.num_tokens
    for kernel, first, last in (("decode", 0, 2), ("prefill", 2, tokens)):
        buffer = torch.full((guard + tokens + guard, 4, 32), -7.0, device=device)
        out = buffer[guard : guard + tokens]
        if kernel == "decode":
            attention.paged_decode(*args, out, num_splits=3)
        else:
            attention.paged_prefill(*args, out)
        assert_close(out[first:last], expected[first:last])
        buffer[guard + first : guard + last] = -7.0
        assert (buffer == -7.0).all()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_splits", [1, 2, 7, 12])
def test_decode_does_not_depend_on_the_number_of_splits(num_splits, window, device):
    """Rows much shorter than the longest have fewer parts; the others hold not a single key."""
    batch, num_blocks = ragged_batch(
        random.Random(9), decode=3, chunks=0, block_size=8, max_len=10, device=device
    )
    tables = torch.zeros(3, 13, dtype=torch.int32, device=device)
    tables[:, : batch.block_tables.shape[1]] = batch.block_tables
    tables[1] = torch.arange(num_blocks, num_blocks + 13, device=device)
    seq_lens = batch.seq_lens.clone()
    seq_lens[1] = 100
    batch = replace(batch, block_tables=tables, seq_lens=seq_lens, max_seq_len=100)
    draw = draws(3, device, torch.float32)
    cache = poisoned_cache(draw, batch, num_blocks + 13, 2, 8, 32)
    q = draw(3, 6, 32)
    out = torch.full_like(q, NAN)
    attention.paged_decode(q, cache, cache, batch, 0.2, window, out, num_splits=num_splits)
    expected = reference.attention(q, clean(cache), clean(cache), batch, 0.2, window)
    assert_close(out.flatten(1), expected)


def test_a_padded_row_of_length_zero_gives_zero(device):
    """CUDA graphs pad the rows: such a row must neither read its table nor poison the others."""
    batch, num_blocks = ragged_batch(
        random.Random(2), decode=2, chunks=0, block_size=8, max_len=30, device=device
    )
    draw = draws(4, device, torch.float32)
    cache = poisoned_cache(draw, batch, num_blocks, 1, 8, 16)
    seq_lens = torch.cat((batch.seq_lens[:1], torch.zeros_like(batch.seq_lens[:1])))
    batch = replace(batch, seq_lens=seq_lens, max_seq_len=30)
    q = draw(2, 2, 16)
    expected = reference.attention(q, clean(cache), clean(cache), batch, 0.25).view_as(q)
    for num_splits in (1, 4):
        out = torch.full_like(q, NAN)
        attention.paged_decode(q, cache, cache, batch, 0.25, None, out, num_splits=num_splits)
        assert_close(out, expected)
        assert (out[1] == 0).all()


def test_merging_parts_equals_one_softmax(device):
    """Any cut of the keys gives the same result; an empty part counts nothing and is not read."""
    draw = draws(6, device, torch.float32)
    scores, values = draw(2, 3, 40) * 8, draw(2, 3, 40, 20)
    expected = torch.einsum("rhk,rhkd->rhd", scores.softmax(-1), values)
    for cuts in ([0, 40], [0, 1, 40], [0, 13, 13, 39, 40], [0, 0, 40, 40]):
        parts, lses = [], []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            if begin == end:
                parts.append(torch.full((2, 3, 20), NAN, device=device))
                lses.append(torch.full((2, 3), float("-inf"), device=device))
                continue
            part = scores[..., begin:end]
            parts.append(torch.einsum("rhk,rhkd->rhd", part.softmax(-1), values[:, :, begin:end]))
            lses.append(part.logsumexp(-1) * attention.LOG2E)
        out = torch.full((2, 3, 20), NAN, device=device)
        attention.merge_splits(torch.stack(parts, 2), torch.stack(lses, 2), out)
        assert_close(out, expected)


def test_splits_fill_the_card_and_no_more():
    choose = attention.choose_num_splits
    for programs in (1, 8, 100, 528, 4096):
        for context in (1, 63, 128, 1000, 32768, 131072):
            num_splits = choose(programs, context, num_sms=132)
            assert 1 <= num_splits <= attention.MAX_SPLITS
            assert num_splits == 1 or context // num_splits >= attention.MIN_PART
            assert num_splits == 1 or programs < 4 * 132
    assert choose(8, 1024, num_sms=132) == 16  # one row: a program for nearly every processor
    assert choose(256 * 8, 1024, num_sms=132) == 1  # 256 rows fill the card as they are


# ── attention over a shared prefix ───────────────────────────────────────────────────────────────


def shared_batch(batch: Batch, shared: int, block_size: int, num_blocks: int) -> Batch:
    """The rows of `batch` behind `shared` tokens that its decode rows have in common.

    Chunks get blocks of their own. New blocks are num_blocks, num_blocks + 1, ...
    """
    per_row = shared // block_size
    owner = torch.zeros(batch.num_rows, 1, dtype=torch.int32)
    owner[batch.num_decode_rows :, 0] = torch.arange(1, batch.num_rows - batch.num_decode_rows + 1)
    head = num_blocks + owner * per_row + torch.arange(per_row, dtype=torch.int32)
    return replace(
        batch,
        block_tables=torch.cat((head.to(batch.block_tables), batch.block_tables), dim=1),
        seq_lens=batch.seq_lens + shared,
        max_seq_len=batch.max_seq_len + shared,
        num_shared_tokens=shared,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "shared", "num_slices"),
    [(4, 2, 32, 16, 64, 1), (6, 2, 64, 16, 144, 3), (5, 1, 80, 8, 48, 2), (2, 2, 16, 32, 96, 9)],
)
def test_reading_a_shared_prefix_once_equals_the_twin(
    heads, kv_heads, head_dim, block_size, shared, num_slices, dtype, device
):
    """Prefixes of whole tiles and of more, more slices than tiles, a last row that is padding."""
    rng = random.Random(heads)
    batch, num_blocks = ragged_batch(
        rng, decode=5, chunks=0, block_size=block_size, max_len=40, device=device
    )
    batch = shared_batch(batch, shared, block_size, num_blocks)
    draw = draws(heads, device, dtype)
    shape = (num_blocks + shared // block_size, kv_heads, block_size, head_dim)
    k_cache, v_cache = (poisoned_cache(draw, batch, *shape) for _ in range(2))
    q = draw(5, heads, head_dim)
    expected = reference.attention(q, clean(k_cache), clean(v_cache), batch, 0.2).view_as(q)
    batch.seq_lens[-1] = 1
    expected[-1] = 0
    buffer = torch.full((7, heads, head_dim), 7.0, dtype=dtype, device=device)
    tile = {"BLOCK_M": 16, "TILE": 32, "STAGES": 2, "num_warps": 4}
    cascade.paged_decode_shared(
        q, k_cache, v_cache, batch, 0.2, buffer[1:-1], num_slices=num_slices, tile=tile
    )
    assert_close(buffer[1:-1], expected)
    assert (buffer[[0, -1]] == 7.0).all()


def test_a_step_goes_through_the_shared_prefix_where_it_pays(monkeypatch, device):
    """Two decode rows share 64 tokens, a chunk does not; a window or a short prefix is plain."""
    batch, num_blocks = ragged_batch(
        random.Random(3), decode=2, chunks=1, block_size=16, max_len=30, device=device
    )
    batch = shared_batch(batch, 64, 16, num_blocks)
    draw = draws(8, device, torch.float32)
    cache = poisoned_cache(draw, batch, num_blocks + 8, 2, 16, 32)
    q = draw(batch.num_tokens, 4, 32)
    monkeypatch.setattr(cascade, "MIN_SHARED", 64)
    used = []
    decode = cascade.paged_decode_shared
    monkeypatch.setattr(
        cascade, "paged_decode_shared", lambda *args: (used.append(True), decode(*args))
    )
    for least, window, goes in ((128, None, True), (129, None, False), (128, 50, False)):
        monkeypatch.setattr(cascade, "MIN_SHARED_WORK", least)
        used.clear()
        out = cascade.attention(q, cache, cache, batch, 0.2, window)
        assert_close(out, reference.attention(q, clean(cache), clean(cache), batch, 0.2, window))
        assert bool(used) == goes


# ── sampling ─────────────────────────────────────────────────────────────────────────────────────


def test_uniform_equals_its_twin_bit_for_bit(device):
    generator = torch.Generator().manual_seed(0)
    top = 2**63 - 1
    seeds = torch.randint(-top - 1, top, (300,), generator=generator)
    seeds[:5] = torch.tensor([0, 1, -1, top, -top - 1])
    positions = torch.randint(0, 1 << 20, (300,), generator=generator)
    seeds, positions = seeds.to(device), positions.to(device)
    assert torch.equal(sampling.uniform(seeds, positions), reference.uniform(seeds, positions))


def sample_both(logits: Tensor, u: Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """(kernel, twin): one draw for each u. Scalars hold for every row."""
    rows, device = u.shape[0], u.device
    column = lambda value, dtype: torch.as_tensor(value, dtype=dtype, device=device).expand(rows)  # noqa: E731
    args = (
        logits.expand(rows, -1).contiguous(),
        column(temperature, torch.float32).contiguous(),
        column(top_k, torch.int64).contiguous(),
        column(top_p, torch.float32).contiguous(),
        column(min_p, torch.float32).contiguous(),
        u,
    )
    return sampling.sample(*args), reference.sample(*args)


def adversarial_logits(vocab_size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    noise = torch.randn(vocab_size, generator=generator)
    masked = noise.clone()
    masked[torch.randperm(vocab_size, generator=generator)[vocab_size // 10 :]] = -float("inf")
    spike = torch.full((vocab_size,), -60.0)
    spike[vocab_size - 1] = 60.0
    return {
        "noise": noise * 3,
        "ties": (noise * 2).round(),
        "zeros": torch.where(noise > 0, 0.0, -0.0),
        "flat": noise * 1e-3,
        "masked": masked,
        "spike": spike,
        "extremes": torch.where(noise > 0, 60.0, -60.0) + noise * 0.1,
    }


FILTERS = {
    "none": {},
    "k": {"top_k": 7},
    "k>vocab": {"top_k": 100_000},
    "p": {"top_p": 0.6},
    "tiny p": {"top_p": 1e-6},
    "min": {"min_p": 0.2},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
    "k,p": {"top_k": 20, "top_p": 0.5, "temperature": 2.0},
}


def make_small(monkeypatch) -> None:
    """Room for 32 candidates of which 8 are few, chunks of 16, 4 of them collected at a time."""
    sizes = {"MAX_CANDIDATES": 32, "FEW_CANDIDATES": 8, "CHUNK": 16, "GATHER": 64, "ROW_TILE": 128}
    for name, value in sizes.items():
        monkeypatch.setattr(sampling, name, value)


@pytest.mark.parametrize("capacity", [sampling.MAX_CANDIDATES, 32])
@pytest.mark.parametrize("name", adversarial_logits(300))
def test_draws_equal_the_twins(name, capacity, monkeypatch, device):
    """The same token for each of several u, under every filter: so the same kept set and order.

    With room for 32 candidates the kernel takes its other ways: bounds from chunks, whole rows.
    """
    if capacity == 32:
        make_small(monkeypatch)
    logits = adversarial_logits(300)[name].to(device)
    u = torch.tensor([1e-6, 0.37, 1 - 2**-24], device=device)
    for filters in FILTERS.values():
        drawn, expected = sample_both(logits, u, **filters)
        assert torch.equal(drawn, expected), (filters, drawn, expected)


def test_every_token_of_the_kept_set_is_drawn(device):
    """u at the middle of each kept token's share, in the order of ids: no more, no fewer tokens."""
    logits = adversarial_logits(300)["noise"].to(device)
    probs = logits.softmax(-1)
    for filters, kept in (
        ({"top_k": 12}, logits >= logits.topk(12).values[-1]),
        ({"min_p": 0.1}, probs >= 0.1 * probs.max()),
    ):
        share = torch.where(kept, probs, 0.0).double()
        share /= share.sum()
        middles = (share.cumsum(-1) - share / 2)[kept].float()
        drawn, expected = sample_both(logits, middles, **filters)
        assert torch.equal(drawn, kept.nonzero().squeeze(-1))
        assert torch.equal(drawn, expected)


@pytest.mark.parametrize("kept", [25, 32, 33])
def test_candidates_that_just_fit_or_just_do_not(kept, monkeypatch, device):
    """min_p keeps `kept` tokens all over the row; there is room for 32."""
    make_small(monkeypatch)
    ids = torch.linspace(0, 299, kept).long().to(device)
    logits = torch.full((300,), -1.0, device=device)  # exp(-1) = 0.37: under min_p, not nothing
    logits[ids] = 0.0
    u = (torch.tensor([0, 9, kept - 2, kept - 1], device=device) + 0.5) / kept
    drawn, expected = sample_both(logits, u, min_p=0.5)
    assert torch.equal(drawn, expected)
    assert torch.equal(drawn, ids[[0, 9, -2, -1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_end_the_search_at_their_own_steps(dtype, monkeypatch, device):
    """Their keys lie far apart, their ties are many: thresholds and kept sets as the twin's."""
    make_small(monkeypatch)
    logits = (adversarial_logits(300)["noise"] - 1).to(device, dtype)  # of both signs
    u = torch.tensor([0.02, 0.5, 0.98], device=device)
    for filters in ({"top_k": 9}, {"top_p": 0.7}, {"top_k": 60, "top_p": 0.9}, {"min_p": 0.3}):
        drawn, expected = sample_both(logits, u, temperature=0.8, **filters)
        assert torch.equal(drawn, expected), (filters, drawn, expected)


def test_the_nucleus_beside_many_candidates_is_found_by_the_count(monkeypatch, device):
    """A guess of how many logits fit: right for scattered ones, repaired by the whole row if not.

    1,000 tokens; with a capacity of 256 a nucleus of 60 fits, and one of 400 does not.
    """
    make_small(monkeypatch)
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 256)
    normal = torch.randn(1000, generator=torch.Generator().manual_seed(5)).to(device)
    u = torch.tensor([0.1, 0.9], device=device)
    for logits, top_p in ((normal * 3, 0.9), (normal * 3, 0.99), (normal * 0.1, 0.4)):
        for ordered in (logits, logits.sort().values):
            drawn, expected = sample_both(ordered, u, top_p=top_p)
            assert torch.equal(drawn, expected), (top_p, drawn, expected)


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 129, 1025, 5000])
def test_vocabularies_that_fill_no_tile(vocab_size, device):
    """Padded vocabularies are a view of wider logits: the padding is never drawn."""
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(1)).to(device)
    wide = torch.full((3, vocab_size + 9), 99.0, device=device)
    wide[:, :vocab_size] = logits
    one = torch.ones(3, device=device)
    args = (
        torch.tensor([0.0, 1.0, 1.0], device=device),
        torch.tensor([0, 0, 5], device=device),
        torch.tensor([1.0, 1.0, 0.9], device=device),
        one * 0,
        one * 0.999,
    )
    drawn = sampling.sample(wide[:, :vocab_size], *args)
    assert torch.equal(drawn, reference.sample(wide[:, :vocab_size], *args))


def test_greedy_takes_the_first_of_the_best_in_any_batch(device):
    logits = torch.zeros(2, 700, device=device)
    logits[0, [300, 301, 650]] = 5.0
    one = torch.ones(2, device=device)
    drawn = sampling.sample(
        logits, one * 0, torch.tensor([3, 0], device=device), one * 0.3, one * 0, one * 0.9
    )
    assert drawn.tolist() == [300, 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_rows_without_a_finite_logit_stay_in_the_vocabulary(device):
    """Our bug or the user's mask: whatever is drawn must be an id, not a memory fault later."""
    for value in (-float("inf"), NAN):
        logits = torch.full((4, 300), value, device=device)
        one = torch.ones(4, device=device)
        drawn = sampling.sample(
            logits,
            torch.tensor([0.0, 1.0, 1.0, 1.0], device=device),
            torch.tensor([0, 0, 5, 0], device=device),
            torch.tensor([1.0, 1.0, 1.0, 0.5], device=device),
            one * 0,
            one * 0.5,
        )
        assert ((drawn >= 0) & (drawn < 300)).all()


def test_sam_1_temperatures_from_zero_to_huge(device):
    logits = torch.tensor([60.0, -60.0, 59.9, 0.0], device=device)
    u = torch.tensor([0.01, 0.3, 0.6, 0.99], device=device)
    for temperature in (0.0, 1e-40, 9e-6, 1e-5):
        drawn, expected = sample_both(logits, u, temperature, top_p=0.3)
        assert drawn.tolist() == expected.tolist() == [0, 0, 0, 0]
    drawn, expected = sample_both(logits, u, 1.0)
    assert drawn.tolist() == expected.tolist() == [0, 0, 2, 2]
    drawn, expected = sample_both(logits, u, 1e6)  # as good as uniform
    assert drawn.tolist() == expected.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_sam_4_the_nucleus_keeps_the_token_that_crosses_p(order, device):
    """0.8 is no exact tie in floating point: the mass of {0, 1} is 0.8 within a rounding."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05])[order].log().to(device)
    u = (torch.arange(14, device=device) + 0.5) / 14  # on no boundary of the shares
    for top_p, kept in ((0.7, {0, 1}), (0.5 - 1e-6, {0}), (1e-4, {0}), (1.0, {0, 1, 2, 3})):
        drawn, expected = sample_both(logits, u, top_p=top_p)
        assert torch.equal(drawn, expected)
        assert {order[i] for i in drawn.tolist()} == kept
    drawn, _ = sample_both(logits, u, top_p=0.8)
    assert {order[i] for i in drawn.tolist()} in ({0, 1}, {0, 1, 2})


def test_sam_4_each_row_has_its_own_filters(device):
    """A mixed batch draws as each row alone; ties at the k-th value are all kept."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, -1.0], device=device)
    u = torch.full((6,), 0.97, device=device)
    top_k, top_p = [0, 1, 2, 3, 99, 0], [0.3, 1.0, 1.0, 0.9, 0.999, 1.0]
    drawn, expected = sample_both(logits, u, top_k=top_k, top_p=top_p)
    assert drawn.tolist() == expected.tolist() == [0, 0, 3, 3, 4, 4]
    for row in range(6):
        alone, _ = sample_both(logits, u[:1], top_k=top_k[row], top_p=top_p[row])
        assert alone.item() == drawn[row].item()


def test_draws_follow_the_distribution(device):
    """Chi-square of 400 draws over 6 tokens: 20.5 is exceeded once in 1,000 (5 degrees)."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -2.0, 1.5], device=device)
    seeds = torch.full((400,), 1234, device=device)
    u = sampling.uniform(seeds, torch.arange(400, device=device))
    drawn, _ = sample_both(logits, u, temperature=1.3)
    expected = (logits / 1.3).softmax(-1) * 400
    counts = torch.bincount(drawn, minlength=6)
    assert ((counts - expected) ** 2 / expected).sum().item() < 20.5


# ── the choice ───────────────────────────────────────────────────────────────────────────────────


def test_a_cpu_gets_the_torch_twins_and_the_reason(caplog):
    ops.choose.cache_clear()
    with caplog.at_level("INFO", logger="minivllm"):
        backend = ops.choose(torch.device("cpu"))
        ops.choose(torch.device("cpu"))
    assert backend.name == "torch"
    assert caplog.messages == [
        "Kernels on cpu: torch (device type cpu; the Triton kernels need an NVIDIA GPU)"
    ]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as on macOS and Windows: the import raises
import torch
from minivllm.kernels import batch, ops, reference
x = torch.randn(2, 8)
ops.add_rms_norm(x, x, torch.ones(8), 1e-6)
ops.rms_norm(x, torch.ones(8), 1e-6)
ops.silu_mul(x)
zero = torch.zeros(2, dtype=torch.int64)
cache = torch.zeros(2, 1, 4, 4)
q = ops.rope_and_cache(
    torch.randn(2, 12), zero, torch.randn(1, 4), None, None, 1e-6, cache, cache.clone(), zero + 4
)
rows = batch.Batch(
    zero, zero, zero + 4, torch.tensor([0, 1, 2]), torch.tensor([1, 1]),
    torch.tensor([[1], [1]]), zero, 2, 1, 1,
)
assert ops.attention(q, cache, cache, rows, 0.5).shape == (2, 4)
u = ops.uniform(zero, zero)
assert ops.sample(x, torch.ones(2), zero, torch.ones(2), torch.zeros(2), u).max() < 8
print(ops.choose(torch.device("cpu")).name)
"""


def test_everything_runs_without_triton():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch"


def test_importing_ops_does_not_import_triton():
    code = "import sys; import minivllm.kernels.ops; print('triton' in sys.modules)"
    with_torch = "import sys; import torch; print('triton' in sys.modules)"
    outputs = [
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout
        for c in (code, with_torch)
    ]
    assert outputs[0] == outputs[1], "ops imports triton, and torch alone does not"


# ── on a GPU: bf16 and real shapes ───────────────────────────────────────────────────────────────


def _gpu_checks():
    path = Path(__file__).parents[1] / "benchmarks" / "check_kernels_gpu.py"
    spec = importlib.util.spec_from_file_location("check_kernels_gpu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CHECKS


@pytest.mark.gpu
@pytest.mark.parametrize("check", _gpu_checks() if HAS_GPU else [], ids=lambda c: c.name)
def test_compiled_kernels_at_real_shapes(check):
    error = check.run()
    assert error <= check.bound, f"{error:.1e} > {check.bound:.1e}"
