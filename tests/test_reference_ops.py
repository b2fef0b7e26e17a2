"""The plain ops against formulas written out, and the lean CPU versions against the plain ones."""

import math
import random

import pytest
import torch

from minivllm.base import cdiv
from minivllm.kernels import cpu, reference
from minivllm.kernels.batch import Batch


def ragged_batch(rows: list[tuple[int, int]], block_size: int, seed: int = 0) -> Batch:
    """Rows of (new tokens, context with them), decodes first; blocks shuffled, block 0 unused."""
    rows = sorted(rows, key=lambda row: row[0] != 1)
    blocks = [cdiv(context, block_size) for _, context in rows]
    ids = list(range(1, sum(blocks) + 1))
    random.Random(seed).shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in blocks]
    width = max(blocks)
    positions = [list(range(context - new, context)) for new, context in rows]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for table, row in zip(tables, positions, strict=True)
        for p in row
    ]
    starts = [sum(new for new, _ in rows[:i]) for i in range(len(rows) + 1)]
    return Batch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.tensor(sum(positions, [])),
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        block_tables=torch.tensor(
            [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
        ),
        logits_index=torch.tensor(starts[1:]) - 1,
        num_decode_rows=sum(new == 1 for new, _ in rows),
        max_query_len=max(new for new, _ in rows),
        max_seq_len=max(context for _, context in rows),
    )


def filled_cache(batch: Batch, num_kv_heads: int, block_size: int, head_dim: int, dtype):
    """Random K and V where the batch's rows have tokens, NaN everywhere else."""
    num_blocks = int(batch.block_tables.max()) + 1
    shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    for table, length in zip(batch.block_tables.tolist(), batch.seq_lens.tolist(), strict=True):
        for p in range(length):
            cache[:, table[p // block_size], :, p % block_size] = torch.randn(
                2, num_kv_heads, head_dim
            ).to(dtype)
    return cache[0], cache[1]


MIXES = {
    "one decode": [(1, 37)],
    "decodes": [(1, 37), (1, 1), (1, 16), (1, 17), (1, 40)],
    "one prompt": [(21, 21)],
    "chunks and decodes": [(5, 5), (1, 33), (7, 30), (1, 2), (2, 2), (3, 48)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 24])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_cpu_attention_equals_the_plain_one(mix, block_size, window):
    """Slots that no row owns hold NaN: reading one of them, masked or not, would show."""
    torch.manual_seed(1)
    batch = ragged_batch(MIXES[mix], block_size)
    for num_kv_heads, group in ((1, 16), (2, 3), (4, 1)):
        k_cache, v_cache = filled_cache(batch, num_kv_heads, block_size, 8, torch.float32)
        q = torch.randn(batch.num_tokens, num_kv_heads * group, 8)
        arguments = (q, k_cache, v_cache, batch, 0.3, window)
        expected = reference.attention(*arguments)
        assert not expected.isnan().any()
        torch.testing.assert_close(cpu.attention(*arguments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cpu_attention_in_half_precision(dtype):
    batch = ragged_batch(MIXES["chunks and decodes"], 16)
    k_cache, v_cache = filled_cache(batch, 2, 16, 8, dtype)
    q = torch.randn(batch.num_tokens, 6, 8).to(dtype)
    expected = reference.attention(q, k_cache, v_cache, batch, 0.3)
    found = cpu.attention(q, k_cache, v_cache, batch, 0.3)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_long_and_short_decode_rows_go_in_groups(monkeypatch):
    """With room for 20 padded tokens, 60-token rows and 3-token rows are computed apart."""
    monkeypatch.setattr(cpu, "MAX_PADDING", 20)
    rows = [(1, 60), (1, 3), (1, 58), (1, 4), (1, 59), (1, 31), (9, 9)]
    batch = ragged_batch(rows, 4)
    k_cache, v_cache = filled_cache(batch, 2, 4, 8, torch.float32)
    q = torch.randn(batch.num_tokens, 4, 8)
    found = cpu.attention(q, k_cache, v_cache, batch, 0.3)
    torch.testing.assert_close(
        found, reference.attention(q, k_cache, v_cache, batch, 0.3), atol=1e-5, rtol=1e-5
    )
    (groups, _), *others = batch.shared.values()
    assert [group.rows.tolist() for group in groups] == [[0, 4, 2], [5], [3, 1]] and not others


def test_plain_attention_equals_the_formula():
    """One row, one head, pair by pair."""
    batch = ragged_batch([(2, 5)], 3)
    k_cache, v_cache = filled_cache(batch, 1, 3, 4, torch.float32)
    table = batch.block_tables[0].tolist()
    keys = [k_cache[table[p // 3], 0, p % 3] for p in range(5)]
    values = [v_cache[table[p // 3], 0, p % 3] for p in range(5)]
    q = torch.randn(2, 1, 4)
    for window in (None, 2):
        found = reference.attention(q, k_cache, v_cache, batch, 0.5, window)
        for i, position in enumerate((3, 4)):
            seen = range(max(0, position - window + 1) if window else 0, position + 1)
            weights = [math.exp(0.5 * float(q[i, 0] @ keys[p])) for p in seen]
            expected = sum(w * values[p] for w, p in zip(weights, seen, strict=True)) / sum(weights)
            torch.testing.assert_close(found[i], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_rope_and_cache_equals_the_plain_one(norm, dtype):
    torch.manual_seed(2)
    batch = ragged_batch([(1, 9), (4, 11), (3, 3)], 5)
    num_heads, num_kv_heads, head_dim = 6, 2, 8
    qkv = torch.randn(batch.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    angles = torch.arange(32.0)[:, None] * torch.rand(head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weights = [torch.rand(head_dim).to(dtype) if norm else None for _ in range(2)]
    results = []
    for op in (reference.rope_and_cache, cpu.rope_and_cache):
        caches = [torch.full((9, num_kv_heads, 5, head_dim), -7.0).to(dtype) for _ in range(2)]
        q = op(qkv.clone(), batch.positions, cos_sin, *weights, 1e-6, *caches, batch.slot_mapping)
        assert q.dtype == dtype and q.shape == (batch.num_tokens, num_heads, head_dim)
        results.append((q, *caches))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for plain, lean in zip(*results, strict=True):
        torch.testing.assert_close(lean, plain, atol=tolerance, rtol=tolerance)
    slots = {(int(s) // 5, int(s) % 5) for s in batch.slot_mapping}
    for block in range(9):
        for offset in range(5):
            untouched = bool((results[1][1][block, :, offset] == -7).all())
            assert untouched == ((block, offset) not in slots)


def test_norms_and_activation_equal_the_formulas():
    x, y, weight = torch.randn(3, 10), torch.randn(3, 10), torch.rand(10)
    rms = ((x + y).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    normed, residual = reference.add_rms_norm(x, y, weight, 1e-5)
    torch.testing.assert_close(residual, x + y)
    torch.testing.assert_close(normed, (x + y) / rms * weight)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(reference.silu_mul(x), gate / (1 + (-gate).exp()) * up)


def naive_sample(logits, temperature, top_k, top_p, min_p, u) -> int:
    """One row of `sample`, token by token in Python."""
    if temperature < 1e-5:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    scaled = [value / temperature for value in logits]
    best = max(scaled)
    weight = {t: math.exp(v - best) for t, v in enumerate(scaled) if v > -math.inf}
    kept = {t for t in weight if min_p == 0 or weight[t] >= min_p}
    if 0 < top_k < len(kept):
        limit = sorted((scaled[t] for t in kept), reverse=True)[top_k - 1]
        kept = {t for t in kept if scaled[t] >= limit}
    if top_p < 1:
        total, mass = sum(weight[t] for t in kept), 0.0
        for token in sorted(kept, key=lambda t: -scaled[t]):
            mass += weight[token]
            if mass >= top_p * total:
                break
        kept = {t for t in kept if scaled[t] >= scaled[token]}
    aim, mass = u * sum(weight[t] for t in kept), 0.0
    for token in sorted(kept):
        mass += weight[token]
        if mass > aim:
            return token
    raise AssertionError("the kept mass is below u times itself")


@pytest.mark.parametrize("num_candidates", [1024, 4])
def test_sample_equals_the_naive_one(num_candidates, monkeypatch):
    """Mixed rows at once. With 4 candidates the threshold often lies beyond them: all is sorted."""
    monkeypatch.setattr(reference, "NUM_CANDIDATES", num_candidates)
    generator = random.Random(3)
    num_rows, vocab_size = 400, 60
    torch.manual_seed(3)
    logits = torch.randn(num_rows, vocab_size) * 3
    logits[::3] = (logits[::3] * 2).round() / 2  # ties
    logits[::7, 10:] = -torch.inf  # a mask
    choose = lambda values: [generator.choice(values) for _ in range(num_rows)]  # noqa: E731
    temperature = choose([0.0, 0.5, 1.0, 2.0])
    top_k, top_p = choose([0, 1, 3, 40, 60, 1000]), choose([1.0, 1.0, 0.001, 0.5, 0.9, 0.99])
    min_p, u = choose([0.0, 0.0, 0.1]), [generator.random() for _ in range(num_rows)]
    drawn = reference.sample(
        logits,
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor(u),
    )
    rows = zip(logits.tolist(), temperature, top_k, top_p, min_p, u, strict=True)
    assert drawn.tolist() == [naive_sample(*row) for row in rows]


def test_a_draw_does_not_depend_on_its_batch():
    """Alone, or beside a row whose nucleus needs the whole vocabulary sorted."""
    torch.manual_seed(4)
    logits = torch.cat((torch.randn(1, 5000) * 4, torch.zeros(1, 5000)))
    one = torch.ones(2)
    for u in torch.rand(50):
        arguments = (one, torch.tensor([0, 0]), torch.tensor([0.9, 0.95]), one * 0, one * u)
        together = reference.sample(logits, *arguments)
        alone = reference.sample(logits[:1], *[value[:1] for value in arguments])
        assert together[0] == alone[0]
        assert together[1] == int(u * 5000)  # ties at the threshold are kept: all of them


def test_greedy_rows_take_the_first_of_the_best():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 1.0]])
    zeros = torch.zeros(2)
    drawn = reference.sample(logits, zeros, zeros.long() + 2, zeros + 0.5, zeros, zeros + 0.9)
    assert drawn.tolist() == [1, 0]


def test_uniform_equals_splitmix64():
    def splitmix(x: int) -> int:
        mask = (1 << 64) - 1
        x &= mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    cases = [(seed, position) for seed in (0, 1, -5, 2**63 - 1) for position in (0, 1, 70_000)]
    seeds, positions = torch.tensor(cases).T
    expected = [
        ((splitmix(splitmix(seed + golden) + position * golden) >> 41) + 0.5) * 2.0**-23
        for seed, position in cases
    ]
    assert reference.uniform(seeds, positions).tolist() == expected
    assert all(0 < value < 1 for value in expected)
