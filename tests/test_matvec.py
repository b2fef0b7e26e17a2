"""The low-latency decode step equals the plain decoder's step, through the same paged cache.

Models are random and tiny; the kernels run in Triton's interpreter where there is no GPU, so fp32
and fp16. Every slot that no query may look at is NaN; the caches are compared bit for bit outside
the new tokens' slots.
"""

import dataclasses
import random

import pytest
import torch
from torch import Tensor, nn

from minivllm.base import cdiv
from minivllm.config import ModelConfig
from minivllm.kernels import reference
from minivllm.kernels.batch import Batch
from minivllm.layers.linear import Linear
from minivllm.models import latency
from minivllm.models.decoder import Decoder
from minivllm.models.latency import LatencyDecoder, Tile, Tiles

pytest.importorskip("triton")

MAX_LEN = 96
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
PLAIN = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=MAX_LEN,
)
QWEN3 = dataclasses.replace(PLAIN, qk_norm=True, tie_word_embeddings=True, num_kv_heads=1)


def random_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Norms near 1, biases and products of order 1, so that none of them hides."""
    decoder = Decoder(config, dtype=dtype, device=device, max_model_len=MAX_LEN)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.3 * value
        elif parameter.dim() == 2 and "embed" not in name:
            value *= 1.5 * parameter.shape[1] ** -0.5
        parameter.data.copy_(value)
    return decoder


def decode_batch(
    config: ModelConfig, seq_lens: list[int], block_size: int, dtype: torch.dtype, device
) -> tuple[Batch, list[tuple[Tensor, Tensor]]]:
    """Rows over shuffled blocks, their past filled, everything else NaN."""
    generator = torch.Generator().manual_seed(sum(seq_lens))
    blocks = [cdiv(length, block_size) for length in seq_lens]
    ids = list(range(1, sum(blocks) + 3))  # two blocks that nobody owns; block 0 is in no table
    random.Random(block_size).shuffle(ids)
    tables = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
    shape = (sum(blocks) + 3, config.num_kv_heads, block_size, config.head_dim)
    cache = []
    for _ in range(config.num_layers):
        pair = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for row, length in enumerate(seq_lens):
            p = torch.arange(length - 1)
            at = tables[row, p // block_size].long(), slice(None), p % block_size
            for tensor in pair:
                tensor[at] = torch.randn(
                    length - 1, config.num_kv_heads, config.head_dim, generator=generator
                )
        cache.append(tuple(tensor.to(device, dtype) for tensor in pair))
    lengths = torch.tensor(seq_lens)
    last = lengths - 1
    block = tables[torch.arange(len(seq_lens)), last // block_size].long()
    batch = Batch(
        token_ids=torch.randint(config.vocab_size, (len(seq_lens),), generator=generator),
        positions=last,
        slot_mapping=block * block_size + last % block_size,
        query_start=torch.arange(len(seq_lens) + 1, dtype=torch.int32),
        seq_lens=lengths.int(),
        block_tables=tables,
        logits_index=torch.arange(len(seq_lens)),
        num_decode_rows=len(seq_lens),
        max_query_len=1,
        max_seq_len=max(seq_lens),
    )
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return dataclasses.replace(batch, **moved), cache


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error.item() <= TOLERANCE[dtype], f"relative error {error.item():.1e}"


def check_step(
    config: ModelConfig,
    seq_lens: list[int],
    device: torch.device,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
) -> None:
    """Hidden states, logits, tokens and caches of one step, both ways."""
    decoder = random_decoder(config, dtype, device)
    fast = LatencyDecoder(decoder, tiles=tiles)
    batch, cache = decode_batch(config, seq_lens, block_size, dtype, device)
    assert LatencyDecoder.takes(batch)
    twin = [tuple(tensor.clone() for tensor in pair) for pair in cache]
    before = [tuple(tensor.clone() for tensor in pair) for pair in cache]
    hidden, expected = fast(batch, cache), decoder(batch, twin)
    assert_close(hidden, expected, dtype)
    logits = fast.compute_logits(hidden)
    assert_close(logits, decoder.compute_logits(expected).float(), dtype)
    assert_close(fast.forward_logits(batch, cache), logits, dtype)
    assert torch.equal(fast.forward_greedy(batch, cache), logits.argmax(-1))
    block, offset = batch.slot_mapping // block_size, batch.slot_mapping % block_size
    for ours, theirs, old in zip(cache, twin, before, strict=True):
        for mine, his, was in zip(ours, theirs, old, strict=True):
            assert_close(mine[block, :, offset], his[block, :, offset], dtype)
            mine[block, :, offset] = was[block, :, offset]
            assert torch.equal(mine.nan_to_num(99.0), was.nan_to_num(99.0))


# name -> (config, block size)
SHAPES = {
    "llama": (PLAIN, 16),
    "qwen3": (QWEN3, 5),
    "mha, blocks of 1": (dataclasses.replace(PLAIN, num_kv_heads=4), 1),
    "16 heads a KV head": (dataclasses.replace(PLAIN, num_heads=16, num_kv_heads=1), 16),
    "three heads": (dataclasses.replace(QWEN3, num_heads=3), 24),
    "head_dim 80": (dataclasses.replace(PLAIN, head_dim=80, num_heads=2, num_layers=1), 16),
    "head_dim 256": (dataclasses.replace(QWEN3, head_dim=256, num_heads=2, num_layers=1), 64),
    "biases": (dataclasses.replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True), 16),
    "window": (dataclasses.replace(PLAIN, sliding_window=9), 16),
    "window of 1": (dataclasses.replace(PLAIN, sliding_window=1), 4),
    "window in one layer": (
        dataclasses.replace(PLAIN, sliding_window=21, sliding_layers=(False, True)),
        8,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_the_decoders_step(name, device):
    config, block_size = SHAPES[name]
    check_step(config, [37], device, block_size=block_size)
    check_step(config, [3, 50], device, block_size=block_size)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("seq_lens", [[1], [2], [16], [17], [33], [70], [1, 70], [70, 49]])
def test_every_context_gives_the_decoders_step(seq_lens, splits, device):
    """Parts of 1 to 5 tiles of 16 keys, and parts that are empty because another row is longer."""
    tile = Tile(rows=64, warps=4)
    tiles = Tiles(tile, tile, tile, tile, tile, keys=16, splits=splits)
    config = dataclasses.replace(QWEN3, num_layers=1, num_kv_heads=2)
    check_step(config, seq_lens, device, tiles=tiles)


@pytest.mark.parametrize(("rows", "block_k"), [(4, 16), (32, 32), (64, 4096)])
def test_tiles_change_nothing(rows, block_k, device):
    """Several blocks of columns, whole and cut; rows that do not divide the output."""
    tile = Tile(rows=rows, warps=4, block_k=block_k)
    tiles = Tiles(tile, tile, tile, tile, tile, keys=32)
    config = dataclasses.replace(PLAIN, num_layers=1, hidden_size=40, mlp_bias=True)
    check_step(config, [20], device, tiles=tiles)


def test_fp16(device):
    check_step(QWEN3, [50, 19], device, dtype=torch.float16)


def test_only_the_rows_that_sample_reach_the_head(device):
    decoder = random_decoder(PLAIN, torch.float32, device)
    batch, cache = decode_batch(PLAIN, [9, 12], 16, torch.float32, device)
    fast = LatencyDecoder(decoder)
    both = fast(batch, cache)
    tokens = fast.forward_greedy(batch, cache)
    one = dataclasses.replace(batch, logits_index=torch.tensor([1], device=device))
    torch.testing.assert_close(fast(one, cache), both[1:])
    assert torch.equal(fast.forward_greedy(one, cache), tokens[1:])
    swapped = dataclasses.replace(batch, logits_index=torch.tensor([1, 0], device=device))
    assert torch.equal(fast.forward_greedy(swapped, cache), tokens.flip(0))


def test_of_equal_logits_the_first_wins(device):
    decoder = random_decoder(QWEN3, torch.float32, device)
    table = decoder.embed_tokens.weight
    table.data[60:] = table.data[:37]  # in another program's rows
    tile = Tile(rows=16, warps=4)
    fast = LatencyDecoder(decoder, tiles=Tiles(tile, tile, tile, tile, tile, keys=16))
    for length in range(1, 5):
        batch, cache = decode_batch(QWEN3, [length], 16, torch.float32, device)
        logits = fast.forward_logits(batch, cache)
        assert fast.forward_greedy(batch, cache).item() == logits.argmax(-1).item()


def test_a_padded_row_touches_the_null_block_only(device):
    """What a CUDA graph's padding looks like: length 0, position 0, slot 0."""
    decoder = random_decoder(PLAIN, torch.float32, device)
    batch, cache = decode_batch(PLAIN, [30, 1], 16, torch.float32, device)
    batch.seq_lens[1], batch.block_tables[1], batch.slot_mapping[1] = 0, 0, 0
    before = [tuple(tensor.clone() for tensor in pair) for pair in cache]
    hidden = LatencyDecoder(decoder)(batch, cache)
    assert hidden.isfinite().all()
    slots = batch.slot_mapping.tolist()
    for ours, old in zip(cache, before, strict=True):
        for mine, was in zip(ours, old, strict=True):
            mine[slots[0] // 16, :, slots[0] % 16] = was[slots[0] // 16, :, slots[0] % 16]
            assert torch.equal(mine[1:].nan_to_num(99.0), was[1:].nan_to_num(99.0))


def test_a_bucket_is_the_range_of_one_launch_plan(device):
    """The same split at both ends of a bucket, another one beyond it."""
    decoder = random_decoder(PLAIN, torch.float32, device)
    fast = LatencyDecoder(decoder)
    keys, splits = fast.tiles.keys, fast.tiles.splits

    def plan(context: int) -> tuple[int, int]:
        split_len = cdiv(cdiv(fast.context_bucket(context), keys), splits) * keys
        return cdiv(fast.context_bucket(context), split_len), split_len

    for context in range(1, 12 * keys * splits):
        bucket = fast.context_bucket(context)
        assert bucket >= context
        assert fast.context_bucket(bucket) == bucket
        assert plan(context)[0] <= splits
    assert fast.context_bucket(1) == keys
    assert fast.context_bucket(splits * keys + 1) == 2 * splits * keys
    batch, cache = decode_batch(PLAIN, [30], 16, torch.float32, device)
    wide = dataclasses.replace(batch, max_seq_len=fast.context_bucket(70))
    torch.testing.assert_close(fast(wide, cache), fast(batch, cache))


def test_batches_that_it_takes(device):
    for lengths, taken in (([5], True), ([5, 6], True), ([5, 6, 7], False)):
        batch, _ = decode_batch(PLAIN, lengths, 16, torch.float32, device)
        assert LatencyDecoder.takes(batch) is taken
    chunk = dataclasses.replace(batch, seq_lens=batch.seq_lens[:2])  # three tokens, two rows
    assert not LatencyDecoder.takes(chunk)


class Negated(nn.Module):
    """Stands in for a Linear, as an adapter does."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return -self.base(x)


def test_what_it_cannot_do_is_refused_with_the_reason(monkeypatch):
    place = {"dtype": torch.float32, "device": "cpu", "max_model_len": 8}
    assert "device type cpu" in latency.why_not(Decoder(PLAIN, **place))
    monkeypatch.setattr(latency.ops, "why_not_triton", lambda device: None)
    assert latency.why_not(Decoder(PLAIN, **place)) is None
    assert "attention op" in latency.why_not(Decoder(PLAIN, attention=reference.attention, **place))
    wide = dataclasses.replace(PLAIN, num_heads=17, num_kv_heads=1)
    assert "17 query heads" in latency.why_not(Decoder(wide, **place))
    wide = dataclasses.replace(PLAIN, head_dim=258)
    assert "head_dim is 258" in latency.why_not(Decoder(wide, **place))
    decoder = Decoder(PLAIN, **place)
    decoder.layers[1].mlp.down_proj = Negated(decoder.layers[1].mlp.down_proj)
    assert "layers.1.mlp.down_proj is a Negated" in latency.why_not(decoder)
    decoder = Decoder(PLAIN, **place)
    decoder.layers[0].self_attn.qkv_proj.weight.data = torch.empty(48, 128).t()
    assert "layers.0.self_attn.qkv_proj" in latency.why_not(decoder)
    decoder = Decoder(PLAIN, **place)
    decoder.lm_head = Linear(48, 97, bias=True, dtype=torch.float32, device="cpu")
    assert "lm_head has a bias" in latency.why_not(decoder)
