"""The decoder equals transformers: each architecture and RoPE kind, through a shuffled paged cache.

Models are random and tiny, fp32. A run goes through one chunk, or through ragged chunks that share
their steps with another sequence; block size is odd on purpose.
"""

import dataclasses
import random

import pytest
import torch
import transformers

from minivllm.base import ModelError, cdiv
from minivllm.config import ModelConfig, RopeConfig
from minivllm.kernels.batch import Batch
from minivllm.layers.norm_rope import rope_table
from minivllm.models.decoder import Decoder, bytes_read, flops

ORIGINAL = 32  # the context that tiny models were "trained" for
LENGTH = 61  # the sequence under test: goes well beyond it
TOLERANCE = 1e-4

ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
    "yarn-exact-borders": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.3,
    },
}

# name -> (transformers model type, config arguments beyond those of `hf_model`)
ARCHITECTURES = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": None}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": None}),
    "mistral-window-1": ("mistral", {"sliding_window": 1, "head_dim": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


def hf_model(kind: str, rope: str = "default", seed: int = 0, **changes):
    """A tiny random transformers model in fp32; norms and biases random too, so that none hides."""
    arguments = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": ORIGINAL if rope == "dynamic" else 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, **ROPES[rope]},
    }
    config = transformers.AutoConfig.for_model(kind, **{**arguments, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:  # far from uniform attention, so that a wrong mask or angle shows
                parameter.mul_(6.0)
    return model


def our_config(hf) -> ModelConfig:
    """The `ModelConfig` of a transformers config of one of the architectures above."""
    rope = dict(hf.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    layer_types = getattr(hf, "layer_types", None) or []
    return ModelConfig(
        architecture=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        max_position=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope=RopeConfig(theta, kind, tuple(rope.items())),
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=hf.model_type == "qwen2" or getattr(hf, "attention_bias", False),
        o_bias=hf.model_type != "qwen2" and getattr(hf, "attention_bias", False),
        mlp_bias=getattr(hf, "mlp_bias", False),
        qk_norm=hf.model_type == "qwen3",
        sliding_window=getattr(hf, "sliding_window", None),
        sliding_layers=tuple(t == "sliding_attention" for t in layer_types),
    )


def our_model(hf, max_model_len: int = LENGTH) -> Decoder:
    """A decoder with the weights of a transformers model: q, k, v and gate, up packed."""
    packs = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    theirs = {name.removeprefix("model."): value for name, value in hf.state_dict().items()}
    config = our_config(hf.config)
    model = Decoder(config, dtype=torch.float32, device="cpu", max_model_len=max_model_len)
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        parts = [theirs[f"{parent}.{p}.{kind}".lstrip(".")] for p in packs.get(leaf, (leaf,))]
        parameter.copy_(torch.cat(parts))
    return model


class PagedRun:
    """Sequences that share a paged cache with shuffled blocks, and keep each position's logits."""

    def __init__(self, model: Decoder, sequences: list[list[int]], block_size: int) -> None:
        config = model.config
        self.model, self.sequences, self.block_size = model, sequences, block_size
        blocks = [cdiv(len(sequence), block_size) for sequence in sequences]
        ids = list(range(1, sum(blocks) + 1))
        random.Random(0).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in blocks]
        shape = (sum(blocks) + 1, config.num_kv_heads, block_size, config.head_dim)
        # NaN, so that a key read before it is written or beyond its row shows
        self.cache = [
            (torch.full(shape, torch.nan), torch.full(shape, torch.nan))
            for _ in range(config.num_layers)
        ]
        self.done = [0] * len(sequences)
        self.logits = [[] for _ in sequences]

    def step(self, plan: dict[int, int]) -> None:
        """Compute the next tokens: sequence -> how many."""
        rows = sorted(plan.items(), key=lambda item: item[1] != 1)  # decodes first
        tokens, positions, slots, starts, lengths = [], [], [], [0], []
        for sequence, count in rows:
            span = range(self.done[sequence], self.done[sequence] + count)
            table = self.tables[sequence]
            tokens += [self.sequences[sequence][p] for p in span]
            positions += span
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size for p in span
            ]
            starts.append(starts[-1] + count)
            lengths.append(span.stop)
        width = max(len(table) for table in self.tables)
        batch = Batch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor(
                [self.tables[s] + [0] * (width - len(self.tables[s])) for s, _ in rows],
                dtype=torch.int32,
            ),
            logits_index=torch.arange(len(tokens)),
            num_decode_rows=sum(count == 1 for _, count in rows),
            max_query_len=max(count for _, count in rows),
            max_seq_len=max(lengths),
        )
        logits = self.model.compute_logits(self.model(batch, self.cache))
        for (sequence, count), part in zip(rows, logits.split([c for _, c in rows]), strict=True):
            self.done[sequence] += count
            self.logits[sequence] += part


@torch.inference_mode()
def check_equal(hf, block_size: int = 5) -> None:
    """Whole at once, then in ragged chunks beside another sequence: transformers' logits."""
    generator = random.Random(1)
    sequences = [[generator.randrange(97) for _ in range(n)] for n in (LENGTH, 23)]
    model = our_model(hf)
    expected = hf(torch.tensor([sequences[0]]), use_cache=False).logits[0]
    whole = PagedRun(model, sequences, block_size)
    whole.step({0: LENGTH})
    torch.testing.assert_close(torch.stack(whole.logits[0]), expected, atol=TOLERANCE, rtol=0)
    ragged = PagedRun(model, sequences, block_size)
    for plan in (
        {0: 3, 1: 6},
        {0: 1, 1: 9},
        {0: 20, 1: 1},
        {0: 1, 1: 1},
        {1: 3},
        {0: 7, 1: 2},
        {1: 1, 0: 28},
        {0: 1},
    ):
        ragged.step(plan)
    torch.testing.assert_close(torch.stack(ragged.logits[0]), expected, atol=TOLERANCE, rtol=0)
    if our_config(hf.config).rope.kind != "dynamic":  # theirs depends on the sequence's length
        other = hf(torch.tensor([sequences[1]]), use_cache=False).logits[0]
        torch.testing.assert_close(torch.stack(ragged.logits[1]), other, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_equals_transformers(name):
    kind, changes = ARCHITECTURES[name]
    check_equal(hf_model(kind, **changes))


@pytest.mark.parametrize("rope", [r for r in ROPES if r != "default"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_rope_kind_equals_transformers_beyond_the_original_context(kind, rope):
    """LENGTH is about twice the original context, so both sides of it are compared."""
    changes = {"sliding_window": None, "head_dim": None} if kind == "mistral" else {}
    check_equal(hf_model(kind, rope, **changes), block_size=16)


@pytest.mark.parametrize("rope", ROPES)
def test_rope_table_equals_transformers(rope):
    """The table itself, at the size of real models and up to 40,000 positions."""
    hf = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 500000.0, **ROPES[rope]}
        | ({"original_max_position_embeddings": 4096} if rope[:4] in ("llam", "yarn") else {}),
    )
    config = our_config(hf)
    max_len = 40_000
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf)
    cos, sin = embedding(torch.zeros(1), torch.arange(max_len)[None])
    table = rope_table(config.rope, 128, max_len, 8192)
    assert table.shape == (max_len, 128)
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], atol=1e-5, rtol=0)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], atol=1e-5, rtol=0)


def test_dynamic_rope_changes_nothing_within_the_original_context():
    dynamic = RopeConfig(kind="dynamic", parameters=(("factor", 2.0),))
    assert torch.equal(rope_table(dynamic, 16, 64, 64), rope_table(RopeConfig(), 16, 64, 64))
    assert not torch.equal(rope_table(dynamic, 16, 65, 64), rope_table(RopeConfig(), 16, 65, 64))


@pytest.mark.parametrize("value", [None, "8", 0, -1.0, True])
def test_rope_without_its_parameter_is_refused_in_a_sentence(value):
    rope = RopeConfig(kind="linear", parameters=(("factor", value),))
    with pytest.raises(ModelError, match="'linear' needs a positive number for 'factor'"):
        rope_table(rope, 16, 64, 64)


def test_only_asked_tokens_reach_the_head():
    model = our_model(hf_model("llama"))
    run = PagedRun(model, [[5, 6, 7, 8]], 5)
    run.step({0: 4})
    batch = Batch(
        token_ids=torch.tensor([5, 6, 7, 8]),
        positions=torch.arange(4),
        slot_mapping=run.tables[0][0] * 5 + torch.arange(4),
        query_start=torch.tensor([0, 4], dtype=torch.int32),
        seq_lens=torch.tensor([4], dtype=torch.int32),
        block_tables=torch.tensor([run.tables[0]], dtype=torch.int32),
        logits_index=torch.tensor([3, 1]),
        num_decode_rows=0,
        max_query_len=4,
        max_seq_len=4,
    )
    hidden = model(batch, run.cache)
    assert hidden.shape == (2, 64)
    expected = torch.stack([run.logits[0][3], run.logits[0][1]])
    torch.testing.assert_close(model.compute_logits(hidden), expected, atol=1e-5, rtol=0)


def test_parameters_are_those_that_the_config_counts():
    for kind, changes in ARCHITECTURES.values():
        model = our_model(hf_model(kind, **changes))
        counted = sum(p.numel() for p in model.parameters())
        assert counted == model.config.num_parameters()


def test_an_attention_op_of_ones_own_is_used():
    hf = hf_model("llama")
    calls = []

    def nothing(q, k_cache, v_cache, batch, scale, sliding_window):
        calls.append((scale, sliding_window))
        return torch.zeros(q.shape[0], q.shape[1] * q.shape[2])

    config = our_config(hf.config)
    model = Decoder(
        config, dtype=torch.float32, device="cpu", max_model_len=LENGTH, attention=nothing
    )
    model.load_state_dict(our_model(hf).state_dict())
    PagedRun(model, [[1, 2, 3]], 5).step({0: 3})
    assert calls == [(16**-0.5, None)] * 2


def test_price_equals_a_count_by_hand():
    """One layer: every pair counted one by one, windows included."""
    config = dataclasses.replace(
        our_config(hf_model("llama", num_hidden_layers=1).config), sliding_window=7
    )
    rows = [(1, 40), (5, 5), (10, 13)]
    pairs = sum(
        1
        for new, context in rows
        for query in range(context - new, context)
        for key in range(context)
        if query - 7 < key <= query
    )
    matrices = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 80
    expected = 2 * matrices * 16 + 3 * 2 * 97 * 64 + 4 * 4 * 16 * pairs
    assert flops(config, rows) == expected
    keys = 7 + 5 + 13  # the last row's first query still sees key 0
    weights = config.num_parameters() - (97 - 16) * 64
    assert bytes_read(config, rows, dtype="float16") == 2 * weights + keys * 2 * 32 * 2
