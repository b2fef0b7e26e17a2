"""Small model files for tests: transformers models as safetensors folders and as GGUF."""

import gguf
import numpy as np
import torch
from test_decoder import PagedRun

from minivllm.config import ModelConfig
from minivllm.models.decoder import Decoder
from minivllm.models.hub import resolve_model
from minivllm.models.model_config import read_model_config
from minivllm.models.weights import load_weights

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, stem = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's exporter does to q and k of its llama architecture: pairs side by side."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, hf, *, quant="F32", architecture=None, metadata=None, drop=(), extra=None):
    """A transformers model as one GGUF file, by the `gguf` package's own writer.

    `quant` is the type of matrices; vectors stay F32. `metadata` adds keys, or replaces them.
    """
    config = hf.config
    arch = architecture or config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        add_value(writer, key, value)
    tensors = {name: value.detach().numpy() for name, value in hf.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, value in tensors.items():
        if arch == "llama" and "self_attn.q_proj" in name:
            value = permute(value, config.num_attention_heads)
        if arch == "llama" and "self_attn.k_proj" in name:
            value = permute(value, config.num_key_value_heads)
        if name not in drop:
            add_tensor(writer, gguf_name(name), value, quant)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer, key, value):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
             str: writer.add_string, list: writer.add_array}  # fmt: skip
    kinds[type(value)](key, value)


def add_tensor(writer, name, value, quant):
    kind = gguf.GGMLQuantizationType[quant]
    if value.ndim == 1 or quant == "F32":
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)


def load(path, dtype=torch.float32) -> Decoder:
    """A decoder from files, through the whole loading path."""
    files = resolve_model(str(path))
    config: ModelConfig = read_model_config(files)
    model = Decoder(config, dtype=dtype, device="cpu", max_model_len=64)
    load_weights(model, files, config, dtype, "cpu")
    return model


def values(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's numbers, whatever layout `finalize` gave it."""
    return parameter.to_dense() if parameter.is_mkldnn else parameter


@torch.inference_mode()
def logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab_size], all tokens in one step."""
    run = PagedRun(model, [tokens], block_size=8)
    run.step({0: len(tokens)})
    return torch.stack(run.logits[0])
