"""`TinyRandom`: a two-layer decoder with random weights, and an oracle that knows no paged cache.

The engine runs it like any model; `generate` and `logits` compute the same network a second time,
with a dense cache, one request at a time and none of the engine's code. What the two say must be
equal, whatever the batch, the blocks, the chunks or the preemptions:

    tiny = TinyRandom()
    engine = Engine(scheduler, tiny.runner(config, num_blocks=64), ...)
    ...
    assert output.outputs[0].token_ids == tiny.generate(prompt_ids, 20)

CPU, fp32. Chapter 3 reads this file.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from minivllm.base import UserError
from minivllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from minivllm.kernels import ops
from minivllm.layers.attention import AttentionOp
from minivllm.models.decoder import Decoder
from minivllm.runner.memory import allocate_kv_cache
from minivllm.runner.runner import ModelRunner
from minivllm.runner.sampler import Sampler

CPU = torch.device("cpu")
Cache = list[tuple[Tensor, Tensor]]  # K and V of each layer: [num_kv_heads, num_tokens, head_dim]


class TinyRandom:
    """A Llama (or, by overrides, Qwen2 or Qwen3) of two layers: 512 tokens, hidden size 64.

    Args:
        seed: of the weights; the global random state is neither read nor changed.
        attention: an attention op of one's own for the engine's side.
        overrides: fields of `ModelConfig`, e.g. `qk_norm=True` or `num_layers=3`.

    Raises:
        UserError: an override that the oracle does not know (RoPE kinds other than "default").
    """

    def __init__(
        self, *, seed: int = 0, attention: AttentionOp = ops.attention, **overrides: Any
    ) -> None:
        shape: dict[str, Any] = {
            "architecture": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
            "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position": 512,
        }  # fmt: skip
        self.config = ModelConfig(**{**shape, **overrides})
        if self.config.rope.kind != "default" or self.config.o_bias or self.config.mlp_bias:
            raise UserError("TinyRandom knows RoPE kind 'default' and no biases but those of qkv")
        self.weights = _random_weights(self.config, torch.Generator().manual_seed(seed))
        self.decoder = Decoder(
            self.config,
            dtype=torch.float32,
            device=CPU,
            max_model_len=self.config.max_position,
            attention=attention,
        )
        self.decoder.load_state_dict(_packed(self.weights, self.config))
        self.decoder.finalize()

    def runner(
        self,
        scheduler: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        sampler: type[Sampler] = Sampler,
    ) -> ModelRunner:
        """The real runner over this model. Several at once share weights and nothing else.

        Args:
            scheduler: as the scheduler's; the number of rows is read.
            num_blocks: of the KV cache, the null block included.
            block_size: tokens of a block.
            sampler: a sampler class of one's own.
        """
        vocab_size, max_model_len = self.config.vocab_size, self.config.max_position
        config = EngineConfig(
            "tiny", dtype="float32", device="cpu", max_model_len=max_model_len,
            cache=CacheConfig(block_size=block_size), scheduler=scheduler,
        )  # fmt: skip
        return ModelRunner(
            config,
            self.decoder,
            allocate_kv_cache(self.config, config, num_blocks, CPU),
            sampler(scheduler.max_num_seqs, vocab_size, vocab_size, CPU),
            CPU,
        )

    @torch.inference_mode()
    def generate(self, prompt_ids: list[int], n: int) -> list[int]:
        """The oracle's next n tokens, greedy."""
        cache, tokens, new = self._empty_cache(), [], prompt_ids
        for _ in range(n):
            new = [int(self._forward(new, cache)[-1].argmax())]
            tokens += new
        return tokens

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """The oracle's logits after each token: [len(token_ids), vocab_size] fp32."""
        return self._forward(token_ids, self._empty_cache())

    def save(self, folder: Path) -> Path:
        """Write a folder that `LLM(...)` loads; returns it. Id 1 ends a sequence.

        The tokenizer makes one token of each character.

        Raises:
            UserError: an override that a Llama's config.json has no name for.
        """
        c = self.config
        if c.architecture != "llama" or c.qkv_bias or c.qk_norm or c.sliding_window:
            raise UserError("only a Llama can be saved: leave the overrides of other models out")
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
            "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "head_dim": c.head_dim,
            "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
            "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
            "max_position_embeddings": c.max_position, "rms_norm_eps": c.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope.theta},
            "tie_word_embeddings": c.tie_word_embeddings, "eos_token_id": 1,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(self.weights, folder / "model.safetensors")
        character_tokenizer(c.vocab_size).save(str(folder / "tokenizer.json"))
        return folder

    def _empty_cache(self) -> Cache:
        empty = torch.empty(self.config.num_kv_heads, 0, self.config.head_dim)
        return [(empty, empty)] * self.config.num_layers

    def _forward(self, token_ids: list[int], cache: Cache) -> Tensor:
        """The network as in a textbook: [num_new, vocab_size]. Appends to the dense cache."""
        config, weights = self.config, self.weights
        x = weights["model.embed_tokens.weight"][token_ids]
        for i in range(config.num_layers):
            layer = {
                name.removeprefix(f"model.layers.{i}."): weight
                for name, weight in weights.items()
                if name.startswith(f"model.layers.{i}.")
            }
            x = x + self._attend(self._norm(x, layer["input_layernorm.weight"]), layer, cache, i)
            h = self._norm(x, layer["post_attention_layernorm.weight"])
            gate, up = (h @ layer[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        return self._norm(x, weights["model.norm.weight"]) @ weights[f"{head}.weight"].T

    def _attend(self, x: Tensor, layer: dict[str, Tensor], cache: Cache, i: int) -> Tensor:
        config, num_new = self.config, x.shape[0]
        past_k, past_v = cache[i]
        positions = torch.arange(past_k.shape[1], past_k.shape[1] + num_new)

        def heads(name: str) -> Tensor:  # [heads, num_new, head_dim]
            y = x @ layer[f"self_attn.{name}_proj.weight"].T
            y = y + layer.get(f"self_attn.{name}_proj.bias", 0)
            y = y.view(num_new, -1, config.head_dim).transpose(0, 1)
            norm = layer.get(f"self_attn.{name}_norm.weight")
            y = y if norm is None else self._norm(y, norm)
            return y if name == "v" else self._rotate(y, positions)

        q, k, v = heads("q"), heads("k"), heads("v")
        k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1)
        cache[i] = (k, v)
        group = config.num_heads // config.num_kv_heads
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(config.head_dim)
        ages = positions[:, None] - torch.arange(k.shape[1])
        hidden = (ages < 0) | (ages >= (config.layer_window(i) or k.shape[1]))
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = probs @ v.repeat_interleave(group, 0)  # [num_heads, num_new, head_dim]
        return mixed.transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * weight

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config.rope.theta ** (-torch.arange(half) / half)
        a, b = x.split(half, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def character_tokenizer(vocab_size: int) -> Tokenizer:
    """One token a character: printable ASCII first, then Cyrillic and what follows it."""
    chars = [chr(32 + i) if i < 95 else chr(0x400 + i) for i in range(vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}, chars[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _random_weights(config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """By the names of a checkpoint. Wide enough that no two tokens are nearly as likely."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / math.sqrt(columns)

    def vector(size: int, center: float) -> Tensor:
        return torch.randn(size, generator=generator) * 0.2 + center

    h, i, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    weights = {"model.embed_tokens.weight": matrix(config.vocab_size, h)}
    for layer in range(config.num_layers):
        parts = {
            "input_layernorm.weight": vector(h, 1),
            "post_attention_layernorm.weight": vector(h, 1),
            "self_attn.o_proj.weight": matrix(h, q),
            "mlp.gate_proj.weight": matrix(i, h),
            "mlp.up_proj.weight": matrix(i, h),
            "mlp.down_proj.weight": matrix(h, i),
        }
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            parts[f"self_attn.{name}_proj.weight"] = matrix(rows, h)
            if config.qkv_bias:
                parts[f"self_attn.{name}_proj.bias"] = vector(rows, 0)
        if config.qk_norm:
            parts |= {f"self_attn.{name}_norm.weight": vector(dim, 1) for name in "qk"}
        weights |= {f"model.layers.{layer}.{name}": part for name, part in parts.items()}
    weights["model.norm.weight"] = vector(h, 1)
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, h)
    return weights


def _packed(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The decoder's names: q, k, v and gate, up are one matrix each."""
    packed = {name.removeprefix("model."): weight for name, weight in weights.items()}
    for i in range(config.num_layers):
        for place, names, whole in (
            ("self_attn", ("q", "k", "v"), "qkv"),
            ("mlp", ("gate", "up"), "gate_up"),
        ):
            for kind in ("weight", "bias"):
                parts = [
                    packed.pop(f"layers.{i}.{place}.{name}_proj.{kind}")
                    for name in names
                    if f"layers.{i}.{place}.{name}_proj.{kind}" in packed
                ]
                if parts:
                    packed[f"layers.{i}.{place}.{whole}_proj.{kind}"] = torch.cat(parts)
    return packed
