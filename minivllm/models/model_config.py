"""config.json (transformers 4 and 5 style) or GGUF metadata -> one `ModelConfig`.

Both are read by hand: what is not understood is refused here, with the field's name, before any
memory is spent on it. Defaults for absent fields are transformers' own.

Mirrors vllm/transformers_utils/config.py and gguf_utils.py. Chapter 3 reads this file.
"""

import math
from pathlib import Path
from typing import Any

import torch

from minivllm.base import ModelError, did_you_mean
from minivllm.config import DTYPE_BYTES, ModelConfig, RopeConfig
from minivllm.models.checkpoint import read_json
from minivllm.models.gguf import GGUFFile, read_gguf
from minivllm.models.hub import ModelFiles
from minivllm.models.weights import check_weights

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
MAX_CONTEXT = 1 << 24  # tokens; a larger number is a broken file, and would size tables
MAX_LAYERS = 1 << 12  # likewise
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
_MISSING = object()


def read_model_config(files: ModelFiles) -> ModelConfig:
    """The shape of a model, checked against the headers of its weight files.

    Raises:
        ModelError: not a supported architecture, a field that is broken or not supported, or
            weights that do not fit the config.
    """
    if files.config.suffix.lower() == ".gguf":
        config = _from_gguf(read_gguf(files.config))
    else:
        generation = files.config.with_name("generation_config.json")
        config = config_from_json(
            read_json(files.config),
            read_json(generation) if generation.is_file() else {},
            source=files.name,
        )
    if files.kind != "dummy":
        check_weights(files, config)
    return config


def config_from_json(
    config: dict[str, Any], generation: dict[str, Any] | None = None, *, source: str = "the model"
) -> ModelConfig:
    """Read a parsed config.json; `generation` is generation_config.json, for more eos ids.

    Raises:
        ModelError: as `read_model_config`; `source` names the model in the message.
    """
    field = _Fields(config, source)
    architecture = _architecture(config, source)
    qwen = architecture in ("qwen2", "qwen3")
    if config.get("quantization_config"):
        raise ModelError(
            f"{source} has quantised weights (quantization_config), which are not supported: use "
            f"the unquantised model or a GGUF of it"
        )
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{source} has hidden_act {act!r}, but only 'silu' is supported")
    heads = field.integer("num_attention_heads")
    layers = _believable(field.integer("num_hidden_layers"), MAX_LAYERS, "layers", source)
    hidden_size = field.integer("hidden_size")
    kv_default = {"llama": heads, "mistral": 8}.get(architecture, 32)
    head_dim_default = 128 if architecture == "qwen3" else hidden_size // max(heads, 1)
    qkv_bias = architecture == "qwen2" or (
        architecture != "mistral" and field.boolean("attention_bias")
    )
    window, window_layers = _sliding_window(field, architecture, layers)
    max_position = field.integer("max_position_embeddings")
    max_position = _believable(max_position, MAX_CONTEXT, "tokens of context", source)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    return ModelConfig(
        architecture=architecture,
        vocab_size=field.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=field.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=field.integer("num_key_value_heads", kv_default, none=heads),
        head_dim=field.integer("head_dim", head_dim_default, none=head_dim_default),
        max_position=max_position,
        rms_norm_eps=field.number("rms_norm_eps", 1e-6),
        rope=_rope(field, max_position),
        tie_word_embeddings=field.boolean("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=qkv_bias and architecture != "qwen2",
        mlp_bias=architecture == "llama" and field.boolean("mlp_bias"),
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        sliding_layers=window_layers if qwen else (),
        eos_token_ids=tuple(dict.fromkeys(_ids(config) + _ids(generation or {}))),
        bos_token_id=field.integer("bos_token_id", None, none=None),
        dtype=dtype if dtype in DTYPE_BYTES else "float32",
    )


class _Fields:
    """Typed access to a parsed config; each mistake is a sentence that names the field."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def integer(self, name: str, default: Any = _MISSING, *, none: Any = _MISSING) -> Any:
        """`default` when the field is absent, `none` when it is null; without them an error."""
        value = self.config.get(name, default)
        if name not in self.config and default is not _MISSING:
            return default
        if value is None and none is not _MISSING:
            return none
        if value is _MISSING:
            raise ModelError(f"the config of {self.source} lacks {name!r}: fetch the model again")
        if type(value) is not int:
            raise self.wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(name, value, "a positive number")
        return float(value)

    def boolean(self, name: str) -> bool:
        """False when absent or null, as transformers has it for every switch that we read."""
        value = self.config.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def wrong(self, name: str, value: Any, wanted: str) -> ModelError:
        return ModelError(
            f"the config of {self.source} has {name} {str(value)[:40]!r}, but it must be {wanted}"
        )


def _architecture(config: dict[str, Any], source: str) -> str:
    """From `architectures`, or from `model_type` where an exporter left that out."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = [str(names)]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = config.get("model_type")
    if not names and model_type in ARCHITECTURES.values():
        return str(model_type)
    found = names[0][:60] if names else f"model_type {str(model_type)[:60]}"
    raise ModelError(
        f"{source} is a {found}{did_you_mean(found, ARCHITECTURES)}, which is not supported: use a "
        f"model of {', '.join(ARCHITECTURES)}"
    )


def _sliding_window(
    field: _Fields, architecture: str, layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """(window in tokens, which layers have it). Llama has none; Qwen only where switched on."""
    if architecture == "llama":
        return None, ()
    if architecture != "mistral" and not field.boolean("use_sliding_window"):
        return None, ()
    window = field.integer("sliding_window", 4096, none=None)
    if window is None:
        return None, ()
    if window < 1:
        raise field.wrong("sliding_window", window, "a positive integer or null")
    if architecture == "mistral":
        return window, ()
    types = field.config.get("layer_types")
    if types is None:
        first = field.integer("max_window_layers", 28)
        return window, tuple(layer >= first for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise field.wrong("layer_types", types, f"{layers} times {' or '.join(known)}")
    return window, tuple(t == "sliding_attention" for t in types)


def _rope(field: _Fields, max_position: int) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = field.config.get("rope_parameters") or field.config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise field.wrong("rope_parameters", given, "an object")
    given = dict(given)
    theta = given.pop("rope_theta", field.config.get("rope_theta", 10000.0))
    old_kind = given.pop("type", "default")
    kind = given.pop("rope_type", old_kind)
    partial = given.pop("partial_rotary_factor", field.config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1):
        raise field.wrong("partial_rotary_factor", partial, "1: partial rotation is not supported")
    if type(theta) not in (int, float) or not math.isfinite(theta) or theta <= 1:
        raise field.wrong("rope_theta", theta, "a number above 1")
    for name, value in given.items():
        if isinstance(value, dict | list) or isinstance(value, float) and not math.isfinite(value):
            raise field.wrong(f"rope parameter {name}", value, "one number for all layers")
    if kind in ("llama3", "yarn"):
        original = field.config.get("original_max_position_embeddings", max_position)
        given.setdefault("original_max_position_embeddings", original)
    if kind == "default":
        given = {}
    return RopeConfig(float(theta), str(kind), tuple(given.items()))


def _ids(config: dict[str, Any]) -> list[int]:
    """`eos_token_id` as a list: exporters write a number, a list or null."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [token for token in values if type(token) is int and token >= 0]


def _believable(number: int, limit: int, what: str, source: str | Path) -> int:
    if number > limit:
        raise ModelError(f"{source} claims {number:,} {what}: its config is broken")
    return number


def _from_gguf(file: GGUFFile) -> ModelConfig:
    """GGUF keys carry the architecture as a prefix: `llama.block_count`, ..."""
    architecture = file.get("general.architecture", str)
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {str(architecture)[:60]!r}, which is not supported: "
            f"use a GGUF of {', '.join(GGUF_ARCHITECTURES)}"
        )

    def integer(key: str, default: int | None = None) -> int:
        value = file.get(f"{architecture}.{key}", int, default)
        if value is None:
            raise ModelError(f"{file.path} lacks metadata '{architecture}.{key}': fetch it again")
        return value

    if integer("expert_count", 0):
        raise ModelError(
            f"{file.path} is a mixture of experts, which is not supported: use a dense model"
        )
    heads, hidden_size = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden_size // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := integer(key, head_dim)) != head_dim:
            raise ModelError(
                f"{file.path} has {architecture}.{key} {other}, but only the head "
                f"size {head_dim} is supported there"
            )
    embedding = file.tensors.get("token_embd.weight")
    max_position = _believable(
        integer("context_length"), MAX_CONTEXT, "tokens of context", file.path
    )
    eps = file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float, 1e-6)
    tokens = [file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot")]
    return ModelConfig(
        architecture=architecture,
        # The rows of the table, not the metadata: some exporters pad the one and not the other.
        vocab_size=embedding.shape[0] if embedding else integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer("feed_forward_length"),
        num_layers=_believable(integer("block_count"), MAX_LAYERS, "layers", file.path),
        num_heads=heads,
        num_kv_heads=integer("attention.head_count_kv", heads) or 0,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=eps,
        rope=_gguf_rope(file, architecture, head_dim, max_position),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or architecture == "qwen2",
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=integer("attention.sliding_window", 0) or None,
        eos_token_ids=tuple(dict.fromkeys(token for token in tokens if token is not None)),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        dtype="float32",  # what dequantised blocks are
    )


def _gguf_rope(file: GGUFFile, architecture: str, head_dim: int, max_position: int) -> RopeConfig:
    theta = file.get(f"{architecture}.rope.freq_base", (int, float), 10000.0)
    if not math.isfinite(theta) or theta <= 1:
        raise ModelError(f"{file.path} has RoPE base {theta!r}, but it must be a number above 1")
    prefix = f"{architecture}.rope.scaling."
    kind = file.get(prefix + "type", str, "none")
    factor = file.get(prefix + "factor", (int, float))
    if factor is None and (old := file.get(f"{architecture}.rope.scale_linear", (int, float))):
        kind, factor = "linear", old
    if "rope_freqs.weight" in file.tensors:
        return RopeConfig(float(theta), "llama3", _llama3_parameters(file, theta, head_dim))
    if kind == "none" or factor == 1:
        return RopeConfig(float(theta))
    parameters = {"factor": factor}
    if kind == "yarn":
        original = file.get(prefix + "original_context_length", int, max_position)
        parameters["original_max_position_embeddings"] = original
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (value := file.get(prefix + key, (int, float))) is not None:
                parameters[name] = value
    if factor is None or not all(math.isfinite(p) and p > 0 for p in parameters.values()):
        raise ModelError(f"{file.path} has RoPE scaling {kind!r} without usable numbers for it")
    return RopeConfig(float(theta), kind, tuple(parameters.items()))


def _llama3_parameters(
    file: GGUFFile, theta: float, head_dim: int
) -> tuple[tuple[str, float], ...]:
    """Recover llama3's scaling from the divisor of each pair that the exporter stored instead.

    All Llama 3.x models share three of the four numbers; the fourth is the largest divisor. They
    are accepted only when they give back every stored divisor.
    """
    entry = file.tensors["rope_freqs.weight"]
    if entry.shape != (head_dim // 2,):
        raise ModelError(
            f"{file.path}: rope_freqs.weight has shape {list(entry.shape)}, expected "
            f"[{head_dim // 2}]"
        )
    stored = torch.cat([piece for _, piece in entry.pieces()])
    factor = round(float(stored.max()), 4) if stored.isfinite().all() else 0.0
    low, high, original = LLAMA3_ROPE.values()
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    keep = ((original * inv_freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    if factor < 1 or not torch.allclose(
        stored.double(), 1 / ((1 - keep) / factor + keep), rtol=1e-3
    ):
        raise ModelError(
            f"{file.path} scales RoPE by factors that are not those of Llama 3: use "
            f"the safetensors model"
        )
    return tuple({"factor": factor, **LLAMA3_ROPE}.items())
