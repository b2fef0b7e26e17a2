"""RMSNorm, and the table of angles by which RoPE turns queries and keys.

RoPE (Su et al. 2021) turns pair i of a head by position * theta^(-2i / head_dim): slow pairs tell
far from near, fast pairs tell neighbours apart. A model trained on short contexts reads longer ones
when slow pairs are slowed further; the kinds below differ in which pairs, and by how much:

```
            fast pairs                          slow pairs
default     |------------------- as trained --------------------|
linear      |------------------- / factor ----------------------|
llama3      |---- as trained ----|== blend ==|---- / factor ----|  by turns in the old context
yarn        |---- as trained ----|== blend ==|---- / factor ----|  by index; sharper attention too
dynamic     |---- almost as trained ------ ... ------ / more ---|  a larger theta
```

Mirrors vllm/model_executor/layers/rotary_embedding and transformers' modeling_rope_utils.py (whose
numbers it reproduces); left out: longrope, multimodal and partial rotation. Chapter 3 reads this
file.
"""

import math

import torch
from torch import Tensor, nn

from minivllm.base import ModelError
from minivllm.config import RopeConfig
from minivllm.kernels import ops


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the residual connection in front of it. weight: [hidden_size]."""

    def __init__(
        self, hidden_size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        empty = torch.empty(hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); without a residual x begins one."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


def rope_table(rope: RopeConfig, head_dim: int, max_len: int, original_max: int) -> Tensor:
    """Cosines, then sines, of every position: [max_len, head_dim] fp32, a half for each.

    Args:
        rope: kind and parameters, by the checkpoint's names.
        head_dim: size of a head; pair i is dimensions i and i + head_dim / 2.
        max_len: positions that the engine will use (max_model_len).
        original_max: the checkpoint's max_position_embeddings.

    "dynamic" depends on the sequence's length in other engines; here its base is fixed for max_len,
    so that a token never depends on its batch or chunk: transformers' numbers for a sequence of
    exactly max_len tokens, and the default ones when max_len <= original_max.

    Raises:
        ModelError: a parameter that the kind needs is missing or no positive number.
    """
    inv_freq, amplitude = _inverse_frequencies(rope, head_dim, max_len, original_max)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude


def _inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_len: int, original_max: int
) -> tuple[Tensor, float]:
    """Radians per position of each pair ([head_dim / 2] fp32), and a factor on cos and sin."""

    def need(name: str) -> float:
        value = rope.get(name)
        if type(value) not in (int, float) or value <= 0:
            raise ModelError(
                f"RoPE kind {rope.kind!r} needs a positive number for {name!r}, but the model's "
                f"config gives {value!r}: mend its rope_parameters"
            )
        return value

    theta = rope.theta
    if rope.kind == "dynamic" and max_len > original_max:
        factor = need("factor")
        stretch = factor * max_len / original_max - (factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    periods = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    inv_freq = 1.0 / periods
    if rope.kind == "linear":
        return inv_freq / need("factor"), 1.0
    trained = rope.get("original_max_position_embeddings") or original_max
    if rope.kind == "llama3":
        factor, low, high = need("factor"), need("low_freq_factor"), need("high_freq_factor")
        rotations = trained / (2 * math.pi / inv_freq)  # turns of each pair within the old context
        keep = ((rotations - low) / (high - low)).clamp(0, 1)
        return (1 - keep) * inv_freq / factor + keep * inv_freq, 1.0
    if rope.kind == "yarn":
        factor = rope.get("factor") or original_max / trained
        keep = 1 - _yarn_ramp(rope, head_dim, trained)
        return (1 - keep) / (factor * periods) + keep * inv_freq, _yarn_amplitude(rope, factor)
    return inv_freq, 1.0


def _yarn_ramp(rope: RopeConfig, head_dim: int, trained: int) -> Tensor:
    """0 for pairs that keep their speed, 1 for those slowed by the factor (Peng et al. 2023)."""

    def pair_with(rotations: float) -> float:  # the pair that turns so often in the old context
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.get("beta_fast") or 32), pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _yarn_amplitude(rope: RopeConfig, factor: float) -> float:
    """YaRN sharpens attention over a longer context by scaling q and k, that is cos and sin."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := rope.get("attention_factor")) is not None:
        return given
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
