"""Checkpoint tensors -> the decoder's parameters, one piece of one tensor at a time.

Where each tensor goes is data: `expected_tensors` lists every name that a checkpoint of this shape
must hold, with the parameter and the rows that it fills.

```
q_proj [q, h] --+                             rows 0 .. q
k_proj [kv, h] -+--> qkv_proj [q + 2 kv, h]   rows q .. q + kv
v_proj [kv, h] -+                             rows q + kv ..
```

The file's header is compared with that list before anything is allocated: a missing, unknown or
wrongly shaped tensor is an error with its name, never a random or forgotten weight. Pieces are
dequantised, cast and copied into place, so that the weights exist once.

Mirrors vllm/model_executor/model_loader and the models' load_weights. Chapter 3 reads this file.
"""

import re
import time
from dataclasses import dataclass

import torch
from torch import nn

from minivllm.base import ModelError
from minivllm.config import ModelConfig
from minivllm.models.checkpoint import TensorEntry, read_json, read_safetensors
from minivllm.models.gguf import read_gguf
from minivllm.models.hub import ModelFiles

# Stored by some exporters though they follow from the config: no parameters.
REDUNDANT = re.compile(r".*rotary_emb\.inv_freq|rope_freqs\.weight|.*\.rope_freqs\.weight")
DUMMY_STD = 0.02  # what most models are initialised with: activations stay finite


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint tensor goes: `shape[0]` rows of a parameter, from row `row`."""

    parameter: str
    shape: tuple[int, ...]  # of the checkpoint tensor
    row: int = 0
    permuted_heads: int = 0  # > 0: the rows of each head are interleaved (GGUF, llama)


@dataclass(frozen=True)
class LoadStats:
    """What loading did."""

    num_tensors: int
    file_bytes: int
    seconds: float


def expected_tensors(config: ModelConfig, kind: str) -> dict[str, Slot]:
    """Every tensor of a checkpoint of this shape; kind "safetensors" or "gguf" sets the names."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    # llama.cpp stores q and k of its llama architecture for rotation of neighbouring pairs.
    permuted = kind == "gguf" and config.architecture == "llama"
    q_heads, kv_heads = (config.num_heads, config.num_kv_heads) if permuted else (0, 0)
    qkv_bias, o_bias, mlp_bias = config.qkv_bias, config.o_bias, config.mlp_bias
    matrices = (  # safetensors, GGUF, parameter, rows, columns, first row, permuted heads, bias?
        ("self_attn.q_proj", "attn_q", "self_attn.qkv_proj", q, h, 0, q_heads, qkv_bias),
        ("self_attn.k_proj", "attn_k", "self_attn.qkv_proj", kv, h, q, kv_heads, qkv_bias),
        ("self_attn.v_proj", "attn_v", "self_attn.qkv_proj", kv, h, q + kv, 0, qkv_bias),
        ("self_attn.o_proj", "attn_output", "self_attn.o_proj", h, q, 0, 0, o_bias),
        ("mlp.gate_proj", "ffn_gate", "mlp.gate_up_proj", i, h, 0, 0, mlp_bias),
        ("mlp.up_proj", "ffn_up", "mlp.gate_up_proj", i, h, i, 0, mlp_bias),
        ("mlp.down_proj", "ffn_down", "mlp.down_proj", h, i, 0, 0, mlp_bias),
    )
    norms = (
        ("input_layernorm", "attn_norm", h, True),
        ("post_attention_layernorm", "ffn_norm", h, True),
        ("self_attn.q_norm", "attn_q_norm", d, config.qk_norm),
        ("self_attn.k_norm", "attn_k_norm", d, config.qk_norm),
    )
    whole = (
        ("model.embed_tokens", "token_embd", "embed_tokens", (config.vocab_size, h), True),
        ("model.norm", "output_norm", "norm", (h,), True),
        ("lm_head", "output", "lm_head", (config.vocab_size, h), not config.tie_word_embeddings),
    )
    side = 0 if kind == "safetensors" else 1
    slots = {}
    for *names, parameter, shape, there in whole:
        if there:
            slots[f"{names[side]}.weight"] = Slot(f"{parameter}.weight", shape)
    for layer in range(config.num_layers):
        prefix, to = (f"model.layers.{layer}.", f"blk.{layer}.")[side], f"layers.{layer}."
        for *names, size, there in norms:
            if there:
                slots[f"{prefix}{names[side]}.weight"] = Slot(f"{to}{names[0]}.weight", (size,))
        for *names, parameter, rows, columns, row, heads, bias in matrices:
            stem, target = prefix + names[side], to + parameter
            slots[f"{stem}.weight"] = Slot(f"{target}.weight", (rows, columns), row, heads)
            if bias:
                slots[f"{stem}.bias"] = Slot(f"{target}.bias", (rows,), row, heads)
    return slots


def open_checkpoint(files: ModelFiles) -> dict[str, TensorEntry]:
    """The tensors of a model's weight files, by name; of sharded files only what the index assigns.

    Raises:
        ModelError: a file is broken, or the index names a tensor that its shard does not have.
    """
    if files.kind == "gguf":
        return read_gguf(files.weights[0]).tensors
    shards = {path.name: read_safetensors(path) for path in files.weights}
    if files.index is None:
        return next(iter(shards.values()))
    entries = {}
    for name, shard in read_json(files.index)["weight_map"].items():
        if name not in shards[shard]:
            raise ModelError(
                f"{shard} lacks tensor {name!r} that {files.index.name} assigns to "
                f"it: fetch the model again"
            )
        entries[name] = shards[shard][name]
    return entries


def check_weights(files: ModelFiles, config: ModelConfig) -> dict[str, tuple[TensorEntry, Slot]]:
    """Pair every tensor of the checkpoint with its place, reading headers only.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape than the config says.
    """
    entries = open_checkpoint(files)
    # A broken config may claim a billion layers: believe no more than there are tensors.
    if config.num_layers > len(entries):
        raise ModelError(
            f"{files.name} claims {config.num_layers:,} layers but holds "
            f"{len(entries):,} tensors: its files are broken"
        )
    slots = expected_tensors(config, files.kind)
    missing = [name for name in slots if name not in entries]
    if missing:
        raise ModelError(
            f"{files.name} lacks {_some(missing)}, which its config asks for: fetch "
            f"the model again, or mend config.json"
        )
    unknown = [name for name in entries if name not in slots and not REDUNDANT.fullmatch(name)]
    if config.tie_word_embeddings and "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")  # a copy of the embedding: the tie wins
    if unknown:
        raise ModelError(
            f"{files.name} holds {_some(unknown)}, which a {config.architecture} model of this "
            f"config has no place for: it is of another architecture, or its config.json is wrong"
        )
    for name, slot in slots.items():
        if entries[name].shape != slot.shape:
            raise ModelError(
                f"tensor {name!r} of {files.name} has shape {list(entries[name].shape)}, but its "
                f"config asks for {list(slot.shape)}: fetch the model again, or mend config.json"
            )
    return {name: (entries[name], slot) for name, slot in slots.items()}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"tensor{'s' * (len(names) > 1)} {', '.join(map(repr, names[:3]))}{more}"


@torch.no_grad()
def load_weights(
    model: nn.Module,
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
) -> LoadStats:
    """Fill a decoder's parameters from its checkpoint, then let it `finalize()` if it can.

    Args:
        model: a decoder with the parameter names of `models/decoder.py`, on `device` in `dtype`.
        files: what `resolve_model` found; kind "dummy" draws random weights instead.
        config: what `read_model_config` made of them.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ModelError: as `check_weights`, or the file broke while it was read.
    """
    start = time.perf_counter()
    for name, parameter in model.named_parameters():
        assert (parameter.dtype, parameter.device.type) == (dtype, torch.device(device).type), (
            f"{name} is {parameter.dtype} on {parameter.device}, expected {dtype} on {device}"
        )
    del parameter
    pairs = {}
    if files.kind == "dummy":
        _fill_random(model, device)
    else:
        pairs = check_weights(files, config)
        assert {slot.parameter for _, slot in pairs.values()} == {
            name for name, _ in model.named_parameters()
        }, "the decoder's parameters are those of its config"
    # Parameters are looked up one by one: `finalize` may repack them, and a reference that is kept
    # here would keep the original alive beside the copy.
    for entry, slot in pairs.values():
        _fill(model.get_parameter(slot.parameter), entry, slot)
    if hasattr(model, "finalize"):
        model.finalize()
    num_bytes = sum(entry.num_bytes for entry, _ in pairs.values())
    return LoadStats(len(pairs), num_bytes, time.perf_counter() - start)


def _fill(parameter: torch.Tensor, entry: TensorEntry, slot: Slot) -> None:
    target = parameter[slot.row : slot.row + slot.shape[0]]
    order = _stored_rows(slot) if slot.permuted_heads else None
    for row, piece in entry.pieces():
        if order is None:
            target[row : row + len(piece)].copy_(piece)
        else:
            rows = order[row : row + len(piece)].to(target.device)
            target[rows] = piece.to(target.device, target.dtype)


def _stored_rows(slot: Slot) -> torch.Tensor:
    """For each stored row of an interleaved q or k, the row where it belongs.

    A head of 6 rows is stored as 0 3 1 4 2 5: pair partners side by side instead of half a head
    apart. Rows are quantised one by one, so moving them loses nothing.
    """
    rows = torch.arange(slot.shape[0]).view(slot.permuted_heads, 2, -1)
    return rows.transpose(1, 2).flatten()


def _fill_random(model: nn.Module, device: torch.device | str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, DUMMY_STD, generator=generator)
