"""Configuration: frozen, nested, strict, resolved once. Knows no torch and touches no device.

`EngineConfig.from_args(model, **flags)` takes vLLM's flat names, refuses unknown ones and names the
nearest. `resolve()` turns every "auto" into a value and returns a *new* config; nothing is written
into a config afterwards, so no number travels through it in secret.

Mirrors vllm/config (ModelConfig, CacheConfig, SchedulerConfig, EngineArgs); left out: parallelism,
LoRA, speculation, multimodality. Chapter 1 reads `ModelConfig`.
"""

import dataclasses
import logging
import math
import types
from dataclasses import dataclass, field
from typing import Any

from minivllm.base import ModelError, UserError, did_you_mean

logger = logging.getLogger("minivllm")

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its kind and the numbers of that kind.

    `parameters` keeps the checkpoint's own names (factor, low_freq_factor, beta_fast, …).
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """One of the kind's parameters, or `default`."""
        return dict(self.parameters).get(name, default)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Everything that memory and speed follow from.

    ```
    MHA   q q q q      GQA   q q q q      MQA   q q q q
          | | | |             \\|  \\|            \\\\ //
          k k k k              k    k               k
    ```
    """

    architecture: str  # "llama", "mistral", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # the context that the model was trained for, in tokens
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # keys a query may look back on, itself included
    sliding_layers: tuple[bool, ...] = ()  # which layers use it; () = all of them
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"  # the checkpoint's own

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_position"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"the model's {name} is {value!r}, but must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}: the config is broken"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd, but RoPE rotates pairs")
        if self.rope.kind not in ROPE_KINDS:
            raise ModelError(
                f"RoPE kind {self.rope.kind!r} is not supported: use a model with one of "
                f"{', '.join(ROPE_KINDS)}"
            )
        if not (isinstance(self.rms_norm_eps, float) and math.isfinite(self.rms_norm_eps)):
            raise ModelError(f"rms_norm_eps {self.rms_norm_eps!r} is not a finite number")

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of one layer in tokens, or None for full attention."""
        if self.sliding_layers and not self.sliding_layers[layer]:
            return None
        return self.sliding_window

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token occupies in the KV cache: K and V, all layers, KV heads only."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def num_parameters(self) -> int:
        """Parameters of the decoder; a tied head counts once."""
        h, i = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = h * (q + 2 * kv) + q * h + 3 * h * i + 2 * h
        layer += (q + 2 * kv) * self.qkv_bias + h * self.o_bias + (2 * i + h) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        heads = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return heads + self.num_layers * layer + h


def _check_type(name: str, value: object, kind: Any) -> None:
    """Refuse `block_size="16"` and `enforce_eager=1`: a bool is no number here, nor the reverse."""
    kinds = kind.__args__ if isinstance(kind, types.UnionType) else (kind,)
    kinds = tuple(getattr(k, "__origin__", k) for k in kinds)
    right = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        right = True
    if not right:
        raise UserError(f"{name} must be of type {getattr(kind, '__name__', kind)}, not {value!r}")


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache: how large, in what blocks, shared or not."""

    block_size: int = 16  # tokens of one block
    gpu_memory_utilization: float = 0.9  # share of the device that the engine may use
    reserved_memory_ratio: float = 0.0  # share of the device kept free on top of that
    kv_cache_memory_bytes: int | None = None  # takes the place of profiling
    num_gpu_blocks_override: int | None = None  # takes the place of both
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold, and in which order requests get it."""

    max_num_seqs: int = 256  # rows of a step
    max_num_batched_tokens: int = 2048  # token budget of a step
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # longest chunk of one prompt in a step; 0 = the budget
    scheduling_policy: str = "fcfs"  # or "priority": a smaller number goes first
    async_scheduling: bool | None = None  # plan a step while one runs; None = on a GPU
    cudagraph_capture_sizes: tuple[int, ...] | None = None  # rows; None = 1, 2, 4, 8, 16, 24, …


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from. Make it with `from_args`, complete it with `resolve`."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None  # None = what the model was trained for
    load_format: str = "auto"  # "auto", "safetensors", "gguf" or "dummy" (random weights)
    enforce_eager: bool = False  # no CUDA graphs
    max_logprobs: int = 20
    revision: str | None = None
    download_dir: str | None = None
    chat_template: str | None = None  # a file, or the template itself
    paranoid: bool = False  # check every invariant after each step
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @classmethod
    def from_args(cls, model: str, **flags: Any) -> "EngineConfig":
        """Build from flat vLLM-style names, e.g. `from_args("smollm2", block_size=32)`.

        Raises:
            UserError: a name is unknown (the nearest one is named) or a value is out of range.
        """
        sections: dict[str, Any] = {"cache": CacheConfig, "scheduler": SchedulerConfig}
        homes: dict[str, str | None] = {
            f.name: None for f in dataclasses.fields(cls) if f.name not in sections
        }
        for section, kind in sections.items():
            homes |= {f.name: section for f in dataclasses.fields(kind)}
        nested: dict[str | None, dict[str, Any]] = {
            None: {"model": model},
            **{s: {} for s in sections},
        }
        for name, value in flags.items():
            if name not in homes:
                raise UserError(f"unknown engine argument {name!r}{did_you_mean(name, homes)}")
            nested[homes[name]][name] = value
        config = cls(
            **nested[None],
            cache=CacheConfig(**nested["cache"]),
            scheduler=SchedulerConfig(**nested["scheduler"]),
        )
        config._validate()
        return config

    @classmethod
    def argument_names(cls) -> list[str]:
        """The flat names that `from_args` takes."""
        names = [f.name for f in dataclasses.fields(cls) if f.name not in ("cache", "scheduler")]
        for kind in (CacheConfig, SchedulerConfig):
            names += [f.name for f in dataclasses.fields(kind)]
        return names

    def _validate(self) -> None:
        for section in (self, self.cache, self.scheduler):
            for f in dataclasses.fields(section):
                _check_type(f.name, getattr(section, f.name), f.type)
        cache, sched = self.cache, self.scheduler
        choices: dict[str, tuple[str, tuple[str, ...]]] = {
            "dtype": (self.dtype, ("auto", *DTYPE_BYTES)),
            "load_format": (self.load_format, ("auto", "safetensors", "gguf", "dummy")),
            "scheduling_policy": (sched.scheduling_policy, ("fcfs", "priority")),
        }
        for name, (choice, known) in choices.items():
            if choice not in known:
                raise UserError(f"{name} must be one of {', '.join(known)}, not {choice!r}")
        positive = {
            "block_size": cache.block_size,
            "max_num_seqs": sched.max_num_seqs,
            "max_num_batched_tokens": sched.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
            "num_gpu_blocks_override": cache.num_gpu_blocks_override,
            "long_prefill_token_threshold": sched.long_prefill_token_threshold or None,
            "max_logprobs": self.max_logprobs or None,
        }
        for name, count in positive.items():
            if count is not None and count < 1:
                raise UserError(f"{name} must be a positive integer, not {count!r}")
        sizes = sched.cudagraph_capture_sizes
        if sizes is not None and (not sizes or sorted({*sizes}) != [*sizes] or sizes[0] < 1):
            raise UserError(f"cudagraph_capture_sizes must be positive and ascending, not {sizes}")
        for name, share in (
            ("gpu_memory_utilization", cache.gpu_memory_utilization),
            ("reserved_memory_ratio", cache.reserved_memory_ratio),
        ):
            if not 0 <= share <= 1:
                raise UserError(f"{name} is a share of the memory, 0 to 1, not {share!r}")
        if cache.reserved_memory_ratio >= cache.gpu_memory_utilization:
            raise UserError(
                f"reserved_memory_ratio {cache.reserved_memory_ratio:g} leaves nothing of "
                f"gpu_memory_utilization {cache.gpu_memory_utilization:g}: lower the first"
            )

    def resolve(self, model: ModelConfig, device: str, dtype: str) -> "EngineConfig":
        """Return a complete config: no "auto" and no None where the engine needs a number.

        Raises:
            UserError: the limits contradict each other or the model.
        """
        max_model_len = self.max_model_len or model.max_position
        if max_model_len > model.max_position and model.rope.kind == "default":
            raise UserError(
                f"max_model_len {max_model_len:,} exceeds the model's context of "
                f"{model.max_position:,} tokens: lower it, or use a model with RoPE scaling"
            )
        sched = self.scheduler
        if sched.max_num_batched_tokens < sched.max_num_seqs:
            logger.warning(
                "max_num_batched_tokens %d is below max_num_seqs %d: a step cannot serve every row",
                sched.max_num_batched_tokens,
                sched.max_num_seqs,
            )
        if not sched.enable_chunked_prefill and sched.max_num_batched_tokens < max_model_len:
            raise UserError(
                f"without chunked prefill a prompt must fit one step, but max_num_batched_tokens "
                f"is {sched.max_num_batched_tokens:,} and max_model_len is {max_model_len:,}: "
                f"raise the first, lower the second, or enable chunked prefill"
            )
        if sched.async_scheduling is None:
            sched = dataclasses.replace(sched, async_scheduling=device == "cuda")
        return dataclasses.replace(
            self, max_model_len=max_model_len, device=device, dtype=dtype, scheduler=sched
        )
